"""What the backends share: the order of a step, and of writing and reading a checkpoint.

Order of a step: log-probabilities of the reference and values of the critic, if the objective uses them ->
advantages, if they depend on these -> log-probabilities of the proximal policy, if a later update needs
them -> per update: forward and backward of each micro-batch, gradient clipping, the optimizer; then the
same for the critic. A gradient that is zero or not finite changes no weights, but the update still ends.

All ranks take the same steps in the same order. Suffixes as in `batching`.
"""
# ruff: noqa: N803, N806, N815 - a name ends with its dimensions.

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch
from safetensors import SafetensorError
from torch import Tensor

from penstock.trainer.algorithms.batches import Sequences, StepCounts
from penstock.trainer.algorithms.objective import Figures, Objective, PolicyOutput
from penstock.trainer.batching.batching import MicroBatch
from penstock.trainer.batching.planning import StepPlan, by_place, complete
from penstock.trainer.config.algorithm import AlgorithmConfig, CriticConfig
from penstock.trainer.config.trainer import ModelConfig, TrainConfig
from penstock.trainer.core.errors import CheckpointUnusable, ConfigInvalid
from penstock.trainer.policy.critic import Critic, Lesson
from penstock.trainer.policy.loading import block_names
from penstock.trainer.policy.optimizer_state import load_progress, save_progress
from penstock.trainer.policy.protocol import StepResult, describe_step
from penstock.trainer.policy.random_states import (
    compute_reproducibly,
    load_random_states,
    save_random_states,
    seed_all,
)
from penstock.trainer.policy.sharding import Sharding
from penstock.trainer.policy.token_model import CausalModel, TokenOutput

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

DEFAULT_ALGORITHM = AlgorithmConfig()


@dataclass(frozen=True, slots=True)
class Part:
    """A micro-batch, and its log-probabilities under other weights; None if not needed."""

    batch: MicroBatch
    proximal_N: Tensor | None
    reference_N: Tensor | None


@dataclass(frozen=True, slots=True)
class PreparedUpdate:
    """One update, and what it needs from weights other than the current ones."""

    parts: list[Part]
    counts: StepCounts
    lessons: list[Lesson]
    """This rank's lessons for the critic; empty without a critic."""


class BackendPolicy(ABC):
    """One rank's part of a model, of its optimizer, and of its critic."""

    kind: ClassVar[str]
    """`model.backend.kind`; no backend reads another one's checkpoints."""
    needs_same_dtype: ClassVar[bool] = False
    """Whether a checkpoint cannot be loaded if it was computed in another dtype."""
    _speaks: bool = True
    """False on ranks whose figures another rank computes too."""
    _critic: Critic | None = None
    _dtype: torch.dtype
    _device: torch.device
    _sharding: Sharding
    """All ranks. The critic is sharded over them, whatever shards the policy."""

    def __init__(
        self, train: TrainConfig, algorithm: AlgorithmConfig, *, total_steps: int, seed: int
    ) -> None:
        # Random initialization must be identical on every rank, because each then keeps a shard of it.
        seed_all(seed)
        compute_reproducibly()
        self._objective = Objective(algorithm)
        self._train = train
        self._total_steps = total_steps
        self._steps = 0

    def _make_critic(self, own: CausalModel, config: CriticConfig, model: ModelConfig) -> Critic:
        if model.gradient_checkpointing:
            own.gradient_checkpointing_enable()
        return Critic(
            *(own, config, self._train, self._sharding),
            blocks=block_names(own),
            autocast=self._dtype is torch.bfloat16,
        )

    def step(self, plan: StepPlan) -> StepResult:
        figures, norms = Figures(), list[float]()
        rate, applied, critic_losses = 0.0, False, list[float]()
        plan, updates = self._prepare(plan)
        for update in updates:
            figures, norm = self._compute(update, figures)
            rate = learning_rate(self._steps, self._train, self._total_steps)
            if math.isfinite(norm) and norm > 0.0:
                self._apply(rate)
                self._steps += 1
                applied = True
            self._release_gradients()
            norms.append(norm)
            if self._critic is not None:
                critic_losses.append(self._critic.learn(update.lessons, update.counts))
        # Ranks that compute the same figures count once.
        figures = self._sharding.sum_figures(figures if self._speaks else Figures())
        return describe_step(
            plan,
            figures,
            norms,
            applied=applied,
            learning_rate=rate,
            critic_losses=critic_losses,
            explained_variance=self._objective.explained_variance,
        )

    def _prepare(self, plan: StepPlan) -> tuple[StepPlan, list[PreparedUpdate]]:
        if not plan.updates:
            return plan, []
        batches = [batch for update in plan.updates for batch in update.batches]
        references: list[Tensor] = []
        reference_N: Tensor | None = None
        if self._objective.needs_reference:
            references = self._reference_outputs(batches)
            reference_N = by_place(plan, references)
        value_N = None if self._critic is None else self._values(self._critic, plan)
        if self._objective.advantages_wait:
            plan = complete(
                plan,
                self._objective,
                references=references,
                values=[] if value_N is None else [_own(value_N, batch) for batch in batches],
                sum_over_ranks=self._sum,
            )
        targets_N = torch.from_numpy(self._objective.value_targets(plan.rewards))  # pyright: ignore[reportUnknownMemberType]
        prepared: list[PreparedUpdate] = []
        for number, update in enumerate(plan.updates):
            # The first update computes with the proximal policy's weights. Its own
            # log-probabilities are therefore the proximal ones, unless dropout is active.
            computed = number == 0 and not self._drops_out()
            ahead = self._objective.needs_proximal and not computed
            proximal = self._outputs(update.batches) if ahead else None
            parts = [
                Part(
                    batch,
                    None if proximal is None else proximal[index],
                    None if reference_N is None else _own(reference_N, batch),
                )
                for index, batch in enumerate(update.batches)
            ]
            lessons: list[Lesson] = []
            if value_N is not None:
                lessons = [
                    Lesson(
                        batch,
                        _own(value_N, batch).float().to(self._device),
                        _own(targets_N, batch).to(self._device),
                    )
                    for batch in self._share(update.batches)
                ]
            prepared.append(PreparedUpdate(parts, update.counts, lessons))
        return plan, prepared

    def _evaluate(
        self, part: Part, counts: StepCounts, output: TokenOutput
    ) -> tuple[Tensor, Figures]:
        """Return what a micro-batch adds to the loss, and its figures."""
        batch, device = part.batch, self._device
        return self._objective.evaluate(
            PolicyOutput(
                logprobs_N=output.logprobs_N,
                entropies_N=output.entropies_N,
                behaviour_logprobs_N=batch.behaviour_logprobs_N.to(device),
                proximal_logprobs_N=part.proximal_N,
                reference_logprobs_N=part.reference_N,
                advantages_N=batch.advantages_N.to(device),
                sequences=Sequences(batch.sequences.index_N.to(device), batch.sequences.count),
            ),
            counts,
        )

    def _sum(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        return self._sharding.sum(values if self._speaks else values * 0.0)

    def save(self, folder: Path) -> None:
        rank = self._sharding.rank
        self.save_model(folder)
        self._save_state(folder)
        with as_os_error():
            if self._critic is not None:
                # Saving the critic gathers tensors. No rank may start that before all have written.
                self._sharding.wait()
                self._critic.save(folder)
            save_random_states(folder, rank)
        if rank == 0:
            ranks = self._sharding.size
            save_progress(folder, self._steps, backend=self.kind, ranks=ranks, dtype=self._dtype)
        self._sharding.wait()

    def load(self, folder: Path) -> None:
        """Restore a checkpoint written by any number of ranks; see `protocol.Policy`."""
        try:
            self._steps = load_progress(
                folder,
                backend=self.kind,
                ranks=self._sharding.size,
                dtype=self._dtype,
                same_dtype=self.needs_same_dtype,
            )
            self._load_state(folder)
            if self._critic is not None:
                self._critic.load(folder)
            # Last, because loading the rest may draw random numbers.
            load_random_states(folder, self._sharding.rank)
        except (
            ConfigInvalid,
            OSError,
            RuntimeError,
            SafetensorError,
            ValueError,
            KeyError,
        ) as error:
            raise CheckpointUnusable(f"{folder}: {error}") from error

    @abstractmethod
    def save_model(self, folder: Path) -> None: ...

    @abstractmethod
    def _save_state(self, folder: Path) -> None:
        """Write the optimizer's state, and weights that are not in the model folder. Raises OSError."""

    @abstractmethod
    def _load_state(self, folder: Path) -> None:
        """Read what `save_model` and `_save_state` wrote."""

    @abstractmethod
    def _outputs(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return each micro-batch's log-probabilities under the current weights; float32, shape [N]."""

    @abstractmethod
    def _reference_outputs(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return the same under the reference."""

    @abstractmethod
    def _compute(self, update: PreparedUpdate, figures: Figures) -> tuple[Figures, float]:
        """Compute an update's clipped gradient. Return the figures with the update's added, and the
        norm of the whole gradient before clipping."""

    @abstractmethod
    def _apply(self, rate: float) -> None:
        """Run the optimizer with this learning rate."""

    def _release_gradients(self) -> None:  # noqa: B027 - a backend may reuse their memory.
        """Free the gradients of an update."""

    def _drops_out(self) -> bool:
        """Whether dropout makes the policy's output differ between two passes."""
        return False

    def _share(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Return the micro-batches that this rank computes with the critic."""
        return list(batches)

    def _values(self, critic: Critic, plan: StepPlan) -> Tensor:
        """Return the critic's value of every token of this rank's micro-batches, shape [N]."""
        batches = [batch for update in plan.updates for batch in update.batches]
        return by_place(plan, [critic.values(batch) for batch in batches])


def _own(value_N: Tensor, batch: MicroBatch) -> Tensor:
    return value_N[batch.tokens_N.to(value_N.device)]


def learning_rate(step: int, train: TrainConfig, total_steps: int) -> float:
    """Return the learning rate of the update that follows `step` applied updates: linear warm-up,
    then the schedule. A cosine schedule reaches zero after as many updates as all steps have."""
    warmup = train.warmup_steps * train.updates_per_step
    if step < warmup:
        return train.learning_rate * (step + 1) / warmup
    if train.schedule == "constant":
        return train.learning_rate
    rest = max(1, total_steps * train.updates_per_step - warmup)
    done = min(1.0, (step - warmup) / rest)
    return train.learning_rate * 0.5 * (1.0 + math.cos(math.pi * done))


@contextlib.contextmanager
def as_os_error() -> Generator[None]:
    """Map the separate error that safetensors raises, for example for a full disk, to OSError."""
    try:
        yield
    except SafetensorError as error:
        raise OSError(str(error)) from error
