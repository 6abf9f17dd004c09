"""The default policy: a Hugging Face causal language model and AdamW.

It trains all weights, or an adapter alone. On several ranks, each rank holds a shard of the model
(`sharding`) and computes its share of each update's micro-batches. All ranks end up with the same
figures. A single process holds the whole model, because `fully_shard` would only add its hooks.
Suffixes as in `batching`.

Order of a step: log-probabilities of the reference and values of the critic, if the objective uses
them -> advantages, if they depend on these -> log-probabilities of the proximal policy, if a later
update needs them -> per update: forward and backward of each micro-batch, gradient clipping, the
optimizer; then the same for the critic. A gradient that is zero or not finite changes no weights,
but the update still ends.

The reference is the model as it was loaded. It is a separate copy, which no checkpoint contains,
because it can be loaded again. With an adapter it is the model with the adapter disabled.

A checkpoint has the same files for any number of ranks, and any number can resume from it. Rank 0
gathers and writes it tensor by tensor, and each rank reads its shard. Only the random states are
per rank.
"""
# ruff: noqa: N806, N815 - a name ends with its dimensions.

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import (
    load_file,  # pyright: ignore[reportUnknownVariableType]
    save_file,  # pyright: ignore[reportUnknownVariableType]
)
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

from penstock.trainer.algorithms.batches import Sequences, StepCounts
from penstock.trainer.algorithms.objective import Figures, Objective, PolicyOutput
from penstock.trainer.batching.batching import MicroBatch
from penstock.trainer.batching.planning import StepPlan, by_place, complete
from penstock.trainer.config.algorithm import AlgorithmConfig
from penstock.trainer.config.trainer import ModelConfig, TrainConfig
from penstock.trainer.core.errors import CheckpointUnusable, ConfigInvalid
from penstock.trainer.policy.adapter import CONFIG_FILE, Adapter
from penstock.trainer.policy.checkpoint_names import CheckpointNames
from penstock.trainer.policy.critic import Critic, Lesson
from penstock.trainer.policy.loading import (
    block_names,
    compute_dtype,
    frozen,
    load_model,
    outline,
    save_tokenizer,
)
from penstock.trainer.policy.optimizer_progress import load_progress, save_progress
from penstock.trainer.policy.optimizer_state import adamw, load_optimizer, optimizer_tensors
from penstock.trainer.policy.protocol import StepResult, describe_step
from penstock.trainer.policy.random_states import (
    compute_reproducibly,
    load_random_states,
    save_random_states,
    seed_all,
)
from penstock.trainer.policy.sharding import Sharding, overwrite
from penstock.trainer.policy.token_model import CausalModel, TokenModel
from penstock.v1 import weights_pb2

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

OPTIMIZER_FILE = "optimizer.safetensors"
BACKEND = "fsdp"
DEFAULT_ALGORITHM = AlgorithmConfig()


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A micro-batch, and what the reference, critic and proximal policy computed for its tokens;
    None if not needed."""

    batch: MicroBatch
    proximal_N: Tensor | None
    reference_N: Tensor | None
    lesson: Lesson | None


class FsdpPolicy:
    """A model with float32 master weights, and its optimizer."""

    def __init__(
        self,
        model: ModelConfig,
        train: TrainConfig,
        *,
        total_steps: int,
        seed: int,
        algorithm: AlgorithmConfig = DEFAULT_ALGORITHM,
    ) -> None:
        """Raises ConfigInvalid if the model or the algorithm cannot be loaded."""
        # Random initialization must be identical on every rank, because each then keeps a shard of
        # it.
        seed_all(seed)
        compute_reproducibly()
        self._objective = Objective(algorithm)
        sharding = Sharding(
            cpu_offload=model.cpu_offload, reduce_each_micro_batch=train.reduce_each_micro_batch
        )
        self._sharding = sharding
        loaded, self._tokenizer = load_model(model.path)
        self._dtype = compute_dtype(model, sharding.device)
        autocast = self._dtype is torch.bfloat16
        blocks = block_names(loaded)
        self._outline: TokenModel | None = None
        if not sharding.is_whole:
            self._outline = outline(
                model.path, sharding.device, dict(cast("nn.Module", loaded).named_buffers())
            )
        self._reference: TokenModel | None = None
        if self._objective.needs_reference and model.lora is None:
            self._reference = frozen(
                copy.deepcopy(loaded), autocast=autocast, device=sharding.device
            )
            sharding.place(self._reference.module, blocks)
        self._critic: Critic | None = None
        if self._objective.critic is not None:
            own = copy.deepcopy(loaded)
            if model.gradient_checkpointing:
                own.gradient_checkpointing_enable()
            self._critic = Critic(
                own, self._objective.critic, train, sharding, blocks=blocks, autocast=autocast
            )
        self._names: CheckpointNames | None = None
        if model.lora is None:
            self._names = CheckpointNames(cast("nn.Module", loaded), model.path)
        self._tokens = TokenModel(loaded, autocast=autocast, device=sharding.device)
        if model.gradient_checkpointing:
            loaded.gradient_checkpointing_enable()
            if model.lora is not None:
                # Without it, recomputed activations appear not to need a gradient.
                loaded.enable_input_require_grads()
        self._adapter: Adapter | None = None
        if model.lora is not None:
            self._adapter = Adapter(self._tokens.module, model.lora)
            self._tokens.model = cast("CausalModel", self._adapter.model)
        self._module = self._tokens.module
        self._module.train()
        sharding.place(self._module, blocks)
        self._train = train
        self._total_steps = total_steps
        self._steps = 0
        self._device = sharding.device
        self._optimizer = adamw(self._module, train, train.learning_rate)
        if sharding.rank:
            seed_all(seed + sharding.rank)

    @property
    def data_ranks(self) -> int:
        """Every rank computes its own micro-batches; see `ranked_policy.RankPolicy`."""
        return self._sharding.size

    def data_rank(self, rank: int) -> int:
        """Every rank computes different data; see `ranked_policy.RankPolicy`."""
        return rank

    def adapter(self) -> weights_pb2.LoraAdapter | None:
        """Describes the uploaded adapter; see `policy.Policy`."""
        return None if self._adapter is None else self._adapter.message()

    def supports_trees(self) -> bool:
        """Whether the model computes a prefix tree with the same results as separate sequences."""
        return self._tokens.supports_trees()

    def step(self, plan: StepPlan) -> StepResult:
        """Runs the updates of one step; see `policy.Policy`."""
        figures = Figures()
        norms: list[float] = []
        rate, applied, critic_losses = 0.0, False, list[float]()
        plan, prepared = self._prepare(plan)
        for parts, counts in prepared:
            for number, part in enumerate(parts, start=1):
                self._sharding.accumulate(self._module, last=number == len(parts))
                figures += self._accumulate(part, counts)
            parameters = self._module.parameters()
            clipped = nn.utils.clip_grad_norm_(parameters, self._train.max_grad_norm)
            norm = float(self._sharding.whole(clipped))
            rate = learning_rate(self._steps, self._train, self._total_steps)
            if math.isfinite(norm) and norm > 0.0:
                self._update(rate)
                applied = True
            self._optimizer.zero_grad(set_to_none=True)
            norms.append(norm)
            if self._critic is not None:
                lessons = [part.lesson for part in parts if part.lesson is not None]
                critic_losses.append(self._critic.learn(lessons, counts))
        figures = self._sharding.sum_figures(figures)
        return describe_step(
            plan,
            figures,
            norms,
            applied=applied,
            learning_rate=rate,
            critic_losses=critic_losses,
            explained_variance=self._objective.explained_variance,
        )

    def _update(self, rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()  # pyright: ignore[reportUnknownMemberType]
        self._steps += 1

    def _prepare(self, plan: StepPlan) -> tuple[StepPlan, list[tuple[list[_Prepared], StepCounts]]]:
        """Returns the plan with its advantages, and what each update needs from weights other than
        the current ones."""
        if not plan.updates:
            return plan, []
        batches = [batch for update in plan.updates for batch in update.batches]
        reference_N: Tensor | None = None
        value_N: Tensor | None = None
        references: list[Tensor] = []
        values: list[Tensor] = []
        if self._objective.needs_reference:
            references = [self._reference_logprobs(batch) for batch in batches]
            reference_N = by_place(plan, references)
        if self._critic is not None:
            values = [self._critic.values(batch) for batch in batches]
            value_N = by_place(plan, values)
        if self._objective.advantages_wait:
            plan = complete(
                plan,
                self._objective,
                references=references,
                values=values,
                sum_over_ranks=self._sharding.sum,
            )
        targets_N = torch.from_numpy(  # pyright: ignore[reportUnknownMemberType]
            self._objective.value_targets(plan.rewards)
        )
        prepared: list[tuple[list[_Prepared], StepCounts]] = []
        for number, update in enumerate(plan.updates):
            # The first update computes with the proximal policy's weights. Its own
            # log-probabilities are therefore the proximal ones, unless dropout is active.
            computed = number == 0 and not self._tokens.drops_out
            ahead = self._objective.needs_proximal and not computed
            parts: list[_Prepared] = []
            for batch in update.batches:
                own = batch.tokens_N.to(self._device)
                lesson = None
                if value_N is not None:
                    targets = targets_N[batch.tokens_N].to(self._device)
                    lesson = Lesson(batch, value_N[own], targets)
                proximal_N = self.logprobs(batch) if ahead else None
                own_reference_N = None if reference_N is None else reference_N[own]
                parts.append(_Prepared(batch, proximal_N, own_reference_N, lesson))
            prepared.append((parts, update.counts))
        return plan, prepared

    def _reference_logprobs(self, batch: MicroBatch) -> Tensor:
        if self._reference is not None:
            return self._reference.logprobs(batch)
        if self._adapter is None:
            raise RuntimeError("the objective needs no reference")
        with self._adapter.switched_off():
            return self._tokens.logprobs(batch)

    def logprobs(self, batch: MicroBatch) -> Tensor:
        """Returns the log-probability of each trained token under the current weights, float32,
        shape [N]."""
        return self._tokens.logprobs(batch)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields every tensor of an upload; see `policy.Policy`."""
        # named_parameters omits the second name of a tied tensor, and buffers are not weights.
        own = self._adapter.weights() if self._adapter else self._module.named_parameters()
        for name, parameter in own:
            whole = self._sharding.whole(parameter.detach())
            yield from self._names.of(name, whole) if self._names else ((name, whole),)

    def score(self, tensors: Mapping[str, Tensor], token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Scores a sequence under given weights; see `policy.Policy`."""
        if self._adapter is not None:
            tensors = self._adapter.own_names(tensors)
        if self._names is not None:
            tensors = self._names.parameters(tensors)
        return (self._outline or self._tokens).score(tensors, token_ids).cpu().numpy()

    def save_model(self, folder: Path) -> None:
        """Writes a model folder; see `policy.Policy`."""
        state = None if self._sharding.is_whole else self._gather_state()
        if self._sharding.rank == 0:
            with _as_os_error():
                self._write_model(folder, state)
                save_tokenizer(self._tokenizer, folder)
        self._sharding.wait()

    def _write_model(self, folder: Path, state: dict[str, Tensor] | None) -> None:
        model = self._tokens.model
        if self._adapter is not None:
            model.save_pretrained(folder, state_dict=state)
            return
        # Default sampling settings are not the trainer's and stay as they were. transformers
        # accepts settings on reading that it refuses to write, such as a temperature together with
        # do_sample = false.
        own = model.generation_config
        model.generation_config = GenerationConfig()
        try:
            model.save_pretrained(folder, state_dict=state)
        finally:
            model.generation_config = own
        own.to_json_file(  # pyright: ignore[reportUnknownMemberType]
            folder / GENERATION_CONFIG_NAME
        )

    def _gather_state(self) -> dict[str, Tensor]:
        """Returns the state of a model folder, whole and in host memory; empty on all ranks but
        rank 0."""
        state: dict[str, Tensor] = {}
        seen: set[int] = set()
        for name, tensor in self._module.state_dict(keep_vars=True).items():
            if self._adapter is not None and not tensor.requires_grad:
                continue  # PEFT writes only the adapter.
            if id(tensor) in seen:
                continue  # The second name of a tied tensor.
            seen.add(id(tensor))
            whole = self._sharding.whole(tensor.detach())
            if self._sharding.rank == 0:
                state[name] = whole.cpu()
        return state

    def save(self, folder: Path) -> None:
        """Writes a checkpoint; see `policy.Policy`."""
        self.save_model(folder)
        rank, whole = self._sharding.rank, self._sharding.whole
        tensors = optimizer_tensors(self._module, self._optimizer, whole, keep=rank == 0)
        with _as_os_error():
            if rank == 0:
                save_file(tensors, folder / OPTIMIZER_FILE)
            if self._critic is not None:
                # Gathering the critic's tensors must not begin before all ranks have written
                # theirs.
                self._sharding.wait()
                self._critic.save(folder)
            save_random_states(folder, rank)
        if rank == 0:
            ranks = self._sharding.size
            save_progress(folder, self._steps, backend=BACKEND, ranks=ranks, dtype=self._dtype)
        self._sharding.wait()

    def load(self, folder: Path) -> None:
        """Restores a checkpoint; see `policy.Policy`."""
        try:
            ranks = self._sharding.size
            self._steps = load_progress(folder, backend=BACKEND, ranks=ranks, dtype=self._dtype)
            self._load_weights(folder)
            tensors = load_file(folder / OPTIMIZER_FILE)
            load_optimizer(self._module, self._optimizer, tensors, folder)
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

    def _load_weights(self, folder: Path) -> None:
        if self._adapter is not None:
            self._adapter.load(folder)
            return
        if (folder / CONFIG_FILE).exists():
            raise CheckpointUnusable(f"{folder} belongs to a run with model.lora")
        saved, _ = load_model(str(folder))
        tensors = dict(cast("nn.Module", saved).named_parameters())
        for name, parameter in self._module.named_parameters():
            overwrite(parameter, tensors[name])

    def _accumulate(self, part: _Prepared, counts: StepCounts) -> Figures:
        """Runs the forward and backward pass of a micro-batch."""
        batch, device = part.batch, self._device
        if batch.is_empty:
            # An empty micro-batch still runs through the model, because the other ranks wait for
            # this one.
            torch.autograd.backward(self._tokens.evaluate(batch).logprobs_N.sum())
            return Figures()
        output = self._tokens.evaluate(batch, entropy_gradient=self._objective.has_entropy_bonus)
        sequences = Sequences(batch.sequences.index_N.to(device), batch.sequences.count)
        loss, figures = self._objective.evaluate(
            PolicyOutput(
                logprobs_N=output.logprobs_N,
                entropies_N=output.entropies_N,
                behaviour_logprobs_N=batch.behaviour_logprobs_N.to(device),
                proximal_logprobs_N=part.proximal_N,
                reference_logprobs_N=part.reference_N,
                advantages_N=batch.advantages_N.to(device),
                sequences=sequences,
            ),
            counts,
        )
        torch.autograd.backward(loss)
        return figures


def learning_rate(step: int, train: TrainConfig, total_steps: int) -> float:
    """Returns the learning rate of the update that follows `step` applied updates: linear warm-up,
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
def _as_os_error() -> Generator[None]:
    """Maps the separate error that safetensors raises, for example for a full disk, to OSError."""
    try:
        yield
    except SafetensorError as error:
        raise OSError(str(error)) from error
