"""Statistics of a worker, and the log line that reports them periodically."""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass, field, replace

from penstock.client.outcome import Failed, Outcome

logger = logging.getLogger("penstock.rollout")

STOPPED = "WORKER_STOPPED"
"""Reason of attempts that a worker gives back when it is stopped."""


@dataclass
class Statistics:
    scored_count: int = 0
    failed_count: int = 0
    lost_count: int = 0
    """Attempts that went to another agent or whose server was lost."""
    token_count: int = 0
    """Policy tokens of ended attempts."""
    reward_sum: float = 0.0
    failures: Counter[str] = field(default_factory=Counter[str])

    @property
    def ended_count(self) -> int:
        return self.scored_count + self.failed_count + self.lost_count

    def add(self, outcome: Outcome | Failed | None, token_count: int) -> None:
        """Counts an ended attempt; `outcome` is None if it was lost."""
        self.token_count += token_count
        if outcome is None:
            self.lost_count += 1
        elif isinstance(outcome, Failed):
            self.failed_count += 1
            self.failures[outcome.reason] += 1
        else:
            self.scored_count += 1
            self.reward_sum += outcome.reward


class Reporter:
    """Logs a line on progress since the previous one, at most once per `shortest_seconds`."""

    def __init__(self, statistics: Statistics, shortest_seconds: float) -> None:
        self._statistics = statistics
        self._shortest_seconds = shortest_seconds
        self._before = Statistics()
        self._reported_at = time.monotonic()

    def report(self, running_count: int, *, last: bool = False) -> None:
        """Logs the line, unless the previous one is recent or no attempt has ended since."""
        now, done, before = time.monotonic(), self._statistics, self._before
        seconds = max(now - self._reported_at, 1e-9)
        ended = done.ended_count - before.ended_count
        if not ended or (seconds < self._shortest_seconds and not last):
            return
        scored = done.scored_count - before.scored_count
        reward = "no reward"
        if scored:
            mean = (done.reward_sum - before.reward_sum) / scored
            reward = f"reward {mean:.3f} over the last {scored}"
        # The server gives these to other workers, so nothing is wrong with them.
        stopped = done.failures[STOPPED]
        common = [(reason, n) for reason, n in done.failures.most_common(5) if reason != STOPPED]
        failures = ", ".join(f"{reason} {n}" for reason, n in common[:4])
        logger.info(
            "%d attempts ended: %s, %d failed%s, %d lost%s; "
            "%.1f attempts/s, %.0f tokens/s, %d in flight",
            done.ended_count,
            reward,
            done.failed_count - stopped,
            f" ({failures})" if failures else "",
            done.lost_count,
            f", {stopped} given back" if stopped else "",
            ended / seconds,
            (done.token_count - before.token_count) / seconds,
            running_count,
        )
        self._before, self._reported_at = replace(done), now
