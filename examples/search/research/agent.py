"""The research agent: `penstock rollout --generate research.agent:research`.

One attempt at a question:

    turn ── an answer ──────────────────────────► scored: F1, and whether the searches found the answer
     ▲  ├── cut off by a budget or the context ─► reward 0, no gradient
     │  ├── too many or repeated searches ──────► stopped: reward 0, and the reason is counted
     │  └── searches ─► all at once ─► refined, if a second model is configured
     └────────────────────── the results ◄──┘
                             or an error message: the attempt continues, and carries no gradient

The policy should learn from its own mistakes: it gets an error message and continues, within its turns. It
learns nothing from failures of the tools. An attempt with a tool error is masked (`penstock.untrained`) but
scored, so that its siblings are compared with it. Alternatively, it fails and is repeated, as configured.

An attempt's figures are metrics of its outcome, so each step records their means: `outcome_metrics`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache

import numpy as np

from penstock.client import Failed, FinishReason, Outcome, Task, Trajectory
from penstock.wire.agent_marks import write_untrained
from research import settings as settings_module
from research.grammar import TOOL_FAILED, Actions, Call, grammar, show
from research.refine import RefineFailed, Refiner
from research.retrieval_client import Found, RetrievalClient, RetrievalFailed
from research.scoring import exact, f1, words
from research.settings import AgentSettings, RewardSettings, Settings

TOOL_ERROR = "TOOL_ERROR"


class Stop(StrEnum):
    """Why the agent stopped an attempt."""

    TURNS = "turns"
    """No answer within the allowed turns."""
    PARALLEL = "parallel"
    """Too many searches in one turn."""
    CALLS = "calls"
    """Too many searches in the attempt."""
    REPEATED = "repeated"
    """A search for the same words again."""


@dataclass(eq=False)
class Episode:
    """What has happened so far in an attempt."""

    question: str
    answers: tuple[str, ...]
    gold: frozenset[int]
    """Chunks that contain an answer."""
    turns: int = 0
    calls: int = 0
    repeats: int = 0
    bad_calls: int = 0
    """The policy's malformed calls."""
    idle_turns: int = 0
    """Turns that neither searched nor answered."""
    retrieval_errors: int = 0
    refine_errors: int = 0
    found: bool = False
    """Whether a search found a chunk with an answer."""
    overlong: bool = False
    stopped: Stop | None = None
    answer: str | None = None
    searched: set[frozenset[str]] = field(default_factory=set[frozenset[str]])
    """The set of words of each search."""

    @property
    def tool_errors(self) -> int:
        """Errors not caused by the policy."""
        return self.retrieval_errors + self.refine_errors

    def reward(self, weights: RewardSettings) -> float:
        """The reward of the attempt."""
        if self.stopped is not None or self.overlong:
            return 0.0
        right = f1(self.answer, self.answers) if self.answer is not None else 0.0
        return weights.f1 * right + weights.found * self.found

    def metrics(self) -> dict[str, float]:
        """All figures, zeros included, so that their means over attempts are shares."""
        answer = self.answer or ""
        return {
            "f1": f1(answer, self.answers),
            "exact": float(exact(answer, self.answers)),
            "found": float(self.found),
            "answered": float(self.answer is not None),
            "turns": self.turns,
            "idle_turns": self.idle_turns,
            "calls": self.calls,
            "repeats": self.repeats,
            "bad_calls": self.bad_calls,
            "retrieval_errors": self.retrieval_errors,
            "refine_errors": self.refine_errors,
            "tool_errors": self.tool_errors,
            "overlong": float(self.overlong),
            **{f"stopped_{reason}": float(self.stopped is reason) for reason in Stop},
        }


class Researcher:
    """Runs attempts with the given tools."""

    def __init__(
        self, settings: Settings, retrieval: RetrievalClient, refiner: Refiner | None
    ) -> None:
        self._settings = settings
        self._retrieval, self._refiner = retrieval, refiner
        self._grammar = grammar(settings.agent.calls)

    async def attempt(self, task: Task, trajectory: Trajectory) -> Outcome | Failed:
        """Runs one attempt, from the question to its outcome."""
        limits = self._settings.agent
        episode = Episode(
            str(task.metadata["question"]),
            tuple(task.metadata["answers"]),
            frozenset(int(chunk) for chunk in task.metadata["gold"]),
        )
        opening = self._grammar.opening(episode.question)
        turn = await trajectory.turn(opening, tools=self._grammar.tools)
        while True:
            episode.turns += 1
            if turn.finish_reason is FinishReason.LENGTH:
                episode.overlong = True
                break
            actions = self._grammar.read(turn)
            if actions.answer is not None:
                episode.answer = actions.answer
                break
            episode.stopped = account(episode, actions, limits)
            if episode.stopped is not None:
                break
            said = await self._search(episode, actions.calls)
            if episode.tool_errors and limits.on_tool_error == "fail":
                return Failed(TOOL_ERROR, "a search or a refinement could not be made")
            turn = await trajectory.turn(self._grammar.reply(actions.calls, said))
        return await self._judge(episode, trajectory)

    async def _search(self, episode: Episode, calls: Sequence[Call]) -> list[str]:
        """The reply to each call. All queries go into one request, and all results are refined at once."""
        queries = [call.query for call in calls if call.query]
        try:
            found = (
                await self._retrieval.search(queries, self._settings.retrieval.count)
                if queries
                else []
            )
        except RetrievalFailed:
            episode.retrieval_errors += 1
            return [call.error or TOOL_FAILED for call in calls]
        episode.found |= any(each.chunk_id in episode.gold for hits in found for each in hits)
        shown = iter(await asyncio.gather(*(self._show(episode, hits) for hits in _once(found))))
        return [next(shown) if call.query else call.error for call in calls]

    async def _show(self, episode: Episode, found: Sequence[Found]) -> str:
        """Results as shown to the policy; the original chunks if the refiner fails."""
        if self._refiner is None or not found:
            return show(found)
        try:
            return await self._refiner.refine(episode.question, found)
        except RefineFailed:
            episode.refine_errors += 1
            return show(found)

    async def _judge(self, episode: Episode, trajectory: Trajectory) -> Outcome:
        masked = (
            episode.overlong and self._settings.agent.mask_overlong
        ) or episode.tool_errors > 0
        metadata: dict[str, object] = {"answer": episode.answer or ""}
        if masked:
            record = await trajectory.get()
            count = sum(len(segment.token_ids) for segment in record.segments)
            metadata |= write_untrained(np.ones(count, np.bool_))
        metrics = {**episode.metrics(), "masked": float(masked)}
        return Outcome(episode.reward(self._settings.reward), metrics, metadata)


def account(episode: Episode, actions: Actions, limits: AgentSettings) -> Stop | None:
    """Counts a turn's searches; returns the first limit that they exceed, or None."""
    queries = [frozenset(words(call.query)) for call in actions.calls if call.query]
    episode.calls += len(actions.calls)
    episode.bad_calls += len(actions.calls) - len(queries)
    episode.idle_turns += not actions.calls
    for query in queries:
        episode.repeats += query in episode.searched
        episode.searched.add(query)
    if len(actions.calls) > limits.max_parallel:
        return Stop.PARALLEL
    if episode.calls > limits.max_calls:
        return Stop.CALLS
    if episode.repeats > limits.max_repeats:
        return Stop.REPEATED
    # In the last turn a search is of no use: no turn is left to read its results.
    return Stop.TURNS if episode.turns >= limits.max_turns else None


def _once(found: Sequence[Sequence[Found]]) -> list[list[Found]]:
    """Removes repeated chunks; each stays with the first query that found it."""
    seen: set[int] = set()
    kept: list[list[Found]] = []
    for hits in found:
        kept.append([each for each in hits if each.chunk_id not in seen])
        seen.update(each.chunk_id for each in hits)
    return kept


@cache
def _researcher() -> Researcher:
    """The worker's researcher, created at its first attempt; its connections stay open until exit."""
    settings = settings_module.from_environment()
    return Researcher(
        settings,
        RetrievalClient(
            settings.retrieval.servers,
            settings.retrieval.method,
            settings.retrieval.balance,
            timeout_seconds=settings.retrieval.timeout_seconds,
            patience_seconds=settings.retrieval.patience_seconds,
        ),
        Refiner(settings.refine) if settings.refine.servers else None,
    )


async def research(task: Task, trajectory: Trajectory) -> Outcome | Failed:
    """The entry point for `penstock rollout --generate`."""
    return await _researcher().attempt(task, trajectory)
