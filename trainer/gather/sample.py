"""One sample of a step for the terminal: the prompt, what the policy wrote, and its reward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from penstock.trainer.core.aio import ComputeThread
from penstock.v1 import trajectory_pb2
from penstock.wire import codec

PROMPT_LINES = 6
"""The last ones of a context are shown, because it ends with the question."""
ANSWER_LINES = 10
LINE_CHARACTERS = 160

Decode = Callable[[Sequence[int]], str]


class Samples:
    """Shows a sample of the first step and of every `every_steps`-th; of none if that is zero."""

    def __init__(self, model: str, every_steps: int, compute: ComputeThread) -> None:
        self._model, self._every, self._compute = model, every_steps, compute
        self._decode: Decode | None = None

    async def of(self, step: int, groups: Sequence[trajectory_pb2.TrajectoryGroup]) -> str:
        """The sample, or an empty text if none is due. Raises ConfigInvalid without a tokenizer."""
        if not self._every or (step != 1 and step % self._every):
            return ""
        return await self._compute.run(self._render, step, groups)

    def _render(self, step: int, groups: Sequence[trajectory_pb2.TrajectoryGroup]) -> str:
        if self._decode is None:
            from penstock.trainer.policy.loading import load_decoder

            self._decode = load_decoder(self._model)
        return render(step, groups, self._decode)


def render(step: int, groups: Sequence[trajectory_pb2.TrajectoryGroup], decode: Decode) -> str:
    """The first attempt of the groups that has a reward, with special tokens, as the policy saw it."""
    attempts = [t for group in groups for t in group.trajectories if not t.parent_trajectory_id]
    for attempt in attempts:
        if attempt.outcome.HasField("reward"):
            metrics = ", ".join(f"{k} {v:g}" for k, v in sorted(attempt.outcome.metrics.items()))
            parts = f" ({metrics})" if metrics else ""
            title = (
                f"a sample of step {step}, of {len(attempts)}: "
                f"reward {attempt.outcome.reward:.3f}{parts}"
            )
            return "\n".join((title, *_lines(attempt, decode)))
    return ""


def _lines(attempt: trajectory_pb2.Trajectory, decode: Decode) -> Iterator[str]:
    for author, segments in groupby(attempt.segments, lambda segment: segment.author):
        tokens = [token for segment in segments for token in codec.token_ids(segment).tolist()]
        lines = decode(tokens).strip("\n").split("\n")
        own = author == trajectory_pb2.AUTHOR_POLICY
        most = ANSWER_LINES if own else PROMPT_LINES
        if len(lines) > most:
            cut = f"… ({len(lines) - most} lines)"
            lines = [*lines[:most], cut] if own else [cut, *lines[-most:]]
        for line in lines:
            yield f"  {'>' if own else '|'} {_plain(line)}"


def _plain(line: str) -> str:
    """A policy may write escape sequences, which a terminal would obey."""
    shown = "".join(c if c.isprintable() else "�" for c in line.expandtabs(4))
    return shown if len(shown) <= LINE_CHARACTERS else f"{shown[:LINE_CHARACTERS]}…"
