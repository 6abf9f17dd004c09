"""What is measured: the sets of prompts, each with its schedule and its evaluation under way."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from penstock.trainer.config.data import DataConfig
from penstock.trainer.config.evaluation import EvaluationConfig
from penstock.trainer.data.sources.factory import open_source
from penstock.trainer.data.sources.problem import Finite, Problem, Source
from penstock.trainer.data.tasks import describe_problem
from penstock.trainer.evaluation.prompts import SEED, Asked, Prompts, Schedule
from penstock.v1 import task_service_pb2, trajectory_pb2


@dataclass(slots=True, eq=False)
class Measurement:
    """One evaluation under way."""

    prompts: Prompts
    step: int
    weight_version: int
    skipped: int
    time_start: float
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a group arrives."""
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when no server will sample its version any more."""
    data_sources: dict[str, str] = field(default_factory=dict[str, str])
    """Data source by task id."""
    hold_start: float | None = None
    """When the switch began to wait for it."""


class EvaluationSet:
    """One `[[evaluation]]` table: its prompts, its schedule, and its evaluation under way, if any."""

    def __init__(
        self, config: EvaluationConfig, data: DataConfig, last_step: int | None = None
    ) -> None:
        """`data` holds the training defaults; `last_step` is the step of the last recorded
        evaluation. Raises ConfigInvalid if the data cannot be read."""
        self.config = config
        self.source: Source = open_source(config, SEED, f"evaluation.{config.name}")
        size = self.source.size if isinstance(self.source, Finite) else config.prompts
        self.prompt_count = min(config.prompts, size)
        self.sampling = config.sampling_over(data)
        self.system_prompt = config.system_prompt_over(data)
        self.schedule = Schedule(
            every=config.every_versions,
            at_start=config.at_start,
            at_end=config.at_end,
            last_step=last_step,
        )
        self.current: Measurement | None = None
        self.task: asyncio.Task[None] | None = None
        self.seconds: float | None = None
        """Duration of the last evaluation; None until one has ended."""

    def build_task(self, asked: Asked, problem: Problem) -> task_service_pb2.Task:
        task = describe_problem(problem, self.system_prompt, self.sampling)
        task.task_id, task.index = asked.task_id, asked.index
        task.purpose = trajectory_pb2.PURPOSE_EVAL
        task.group_size = self.config.samples_per_prompt
        return task
