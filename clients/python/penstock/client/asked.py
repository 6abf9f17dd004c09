"""A trajectory for a task that was not leased. It starts with the task's prompt, and no trainer
receives it."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.client.calls import Calls, TurnRequest
from penstock.client.conversation import Observation, Tool
from penstock.client.sampling import SamplingOptions
from penstock.client.tasks import Task
from penstock.client.trajectory import Trajectory
from penstock.v1 import rollout_service_pb2


class AskedTrajectory(Trajectory):
    """Behaves like a leased trajectory toward functions of (task, trajectory). The server knows no
    task for it."""

    def __init__(self, calls: Calls, trajectory_id: str, task: Task, sample_index: int) -> None:
        super().__init__(
            calls, trajectory_id, task=task, sample_index=sample_index, resume_aborted=True
        )
        self._asked = task
        self._leased = False

    def _write_turn(
        self,
        observation: Observation | None,
        tools: Sequence[Tool],
        options: rollout_service_pb2.StreamOptions,
        sampling: SamplingOptions,
    ) -> TurnRequest:
        if observation is None and not self.turns:
            observation, tools = self._asked.prompt, tools or self._asked.tools
        return super()._write_turn(observation, tools, options, sampling)
