"""The log that agents write for `history`: each answered close, and the tokens the agent had seen
before it.
"""

from __future__ import annotations

from pathlib import Path

from penstock.client import Trajectory
from penstock.client.outcome import Closed, Failed, Outcome, write_outcome
from tests.faults.history import Answer, Run, read_outcome, write_answer


def seen_by(trajectory: Trajectory) -> tuple[Run, ...]:
    """The policy's tokens as its agent received them."""
    return tuple(
        Run(
            tuple(int(token) for token in segment.token_ids),
            segment.weight_version,
            tuple(float(logprob) for logprob in segment.logprobs),
        )
        for turn in trajectory.turns
        for segment in turn.segments
    )


def answered(trajectory: Trajectory, outcome: Outcome | Failed, closed: Closed) -> Answer:
    """A close together with the server's answer."""
    return Answer(
        trajectory.trajectory_id,
        trajectory.group_id,
        read_outcome(write_outcome(outcome)),
        closed.group_completed,
        closed.retried,
        seen_by(trajectory),
    )


def write_down(trajectory: Trajectory, path: Path) -> None:
    """Make every close of this trajectory write a line to `path`, after the answer and before it
    returns.
    """
    close = trajectory.close

    async def written(outcome: Outcome | Failed) -> Closed:
        closed = await close(outcome)
        with path.open("a") as file:
            file.write(write_answer(answered(trajectory, outcome, closed)))
        return closed

    trajectory.close = written  # type: ignore[method-assign]
