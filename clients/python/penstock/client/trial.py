"""Calls a reward on a text, without a server: what `penstock reward try` and `penstock check` do."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from penstock.client.calls import Calls, Patience
from penstock.client.outcome import Failed, Outcome
from penstock.client.scoring import AttemptFailed, as_outcome, as_outcomes, call, is_group_reward
from penstock.client.trajectory import Trajectory
from penstock.client.turns import FinishReason, Turn

if TYPE_CHECKING:
    import grpc

    from penstock.client.scoring import Agent
    from penstock.client.tasks import Task


class NeedsServer(AttemptFailed):
    """The function makes a call to the server, so it cannot be tried without one."""


class _NoServer(Calls):
    def __init__(self) -> None:
        super().__init__("127.0.0.1:1", Patience())

    @cached_property
    def _channel(self) -> grpc.aio.Channel:
        raise NeedsServer("the reward calls the server, which a trial does not have")


async def try_reward(
    reward: Agent, task: Task, text: str, *, whole_group: bool = False
) -> Outcome | Failed:
    """The reward of an attempt of one turn with this text. Raises RewardInvalid, NeedsServer, and
    whatever the function raises."""
    trajectory = Trajectory(_NoServer(), "trial", task=task)
    trajectory.turns.append(Turn(0, (), FinishReason.STOP, text))
    if whole_group or is_group_reward(reward):
        return as_outcomes(await call(reward, task, [trajectory]), 1)[0]
    return as_outcome(await call(reward, task, trajectory))


def described(outcome: Outcome | Failed) -> dict[str, Any]:
    """An outcome as JSON."""
    if isinstance(outcome, Failed):
        return {"failed": outcome.reason, "message": outcome.message}
    return {"reward": outcome.reward, "metrics": dict(outcome.metrics)}
