"""The half of a step that needs no server: computes it, records it in the ledger, and saves it.

The compute thread does it, so the streams and uploads continue meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.common.failpoints import hit
from penstock.trainer.algorithms.objective import Objective
from penstock.trainer.batching.batching import TrainingGroup
from penstock.trainer.batching.planning import plan_step
from penstock.trainer.config.trainer import TrainerConfig
from penstock.trainer.core.aio import ComputeThread
from penstock.trainer.core.figures import as_json
from penstock.trainer.metrics.step_record import StepRecord
from penstock.trainer.policy.protocol import Policy, StepResult
from penstock.trainer.state.ending import Ending
from penstock.trainer.state.ledger import Ledger, StepEntry
from penstock.trainer.weights.probe import Probe

Collect = Callable[[int, int, Mapping[str, object], Ending], Callable[[], object]]
"""Collects what a checkpoint contains: for a step, a weight version, the step's figures, which are empty
once they are written, and how close the run is to its target. Returns a function that saves it in the
compute thread."""


@dataclass(eq=False, repr=False)
class Learner:
    """The policy, the ledger and the checkpoints of one run."""

    config: TrainerConfig
    policy: Policy
    compute: ComputeThread
    ledger: Ledger
    probe: Probe
    collect: Collect
    stopping: asyncio.Event
    """Set when the run is asked to stop after the current step."""
    saved_step: int
    """The step of the newest checkpoint; at first, the last step that the policy contains."""
    share_prefixes: bool
    ending: Ending = field(default_factory=Ending)

    def __post_init__(self) -> None:
        self._objective = Objective(self.config.algorithm)

    async def train(self, groups: Sequence[TrainingGroup]) -> StepResult:
        self.probe.choose(groups)
        return await self.compute.run(self._compute_step, groups)

    def _compute_step(self, groups: Sequence[TrainingGroup]) -> StepResult:
        plan = plan_step(
            groups,
            self._objective,
            token_budget=self.config.train.micro_batch_tokens,
            share_prefixes=self.share_prefixes,
            update_count=self.config.train.updates_per_step,
            ranks=self.policy.data_ranks,
        )
        return self.policy.step(plan)

    def score(self, rewards: Sequence[float]) -> float | None:
        """Add the rewards of a step that the policy contains. Return the mean that counts for the target;
        None without a target, or before there are enough rewards."""
        if self.config.run.target is None:
            return None
        self.ending = self.ending.after(rewards, self.config.run.target)
        return self.ending.mean

    def is_last(self, step: int) -> bool:
        """Whether the run ends after this step, which the policy contains."""
        target = self.config.run.target
        reached = target is not None and self.ending.reached(target)
        return reached or step >= self.config.run.steps

    def is_repeated(self, step: int) -> bool:
        """Whether the ledger has the step already, from a trainer that was killed."""
        return step in self.ledger.ahead

    def differs(self, entry: StepEntry) -> bool:
        """Whether the step was done before with a different result."""
        return self.ledger.ahead.get(entry.step, entry) != entry

    async def note(self, entry: StepEntry) -> None:
        """Write the step's line in the ledger. Raises StorageFailed."""
        await self.compute.run(self.ledger.write, entry)
        hit("train.noted")

    async def save_if_due(
        self, step: int, weight_version: int, unconcluded: StepRecord | None
    ) -> bool:
        """Save a checkpoint every `every_steps` steps and at the end. Returns whether it did.

        `unconcluded` is the step's record if it is not written yet.
        """
        last = self.is_last(step) or self.stopping.is_set()
        every = self.config.checkpoint.every_steps
        if not every or step == self.saved_step or (step % every and not last):
            return False
        # Collected here, while nothing changes; the compute thread writes it.
        figures = {} if unconcluded is None else as_json(unconcluded.line())
        await self.compute.run(self.collect(step, weight_version, figures, self.ending))
        self.saved_step = step
        return True
