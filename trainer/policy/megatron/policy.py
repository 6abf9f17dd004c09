"""The policy at scale: a megatron-core model with tensor, pipeline and data parallelism.

Supports Llama, Qwen2 and Qwen3 in Hugging Face's format, with AdamW driven by megatron-core. Each
rank creates one policy, and `ranked_policy` describes how its methods are called. Only rank 0 has
the tokenizer. The losses, the plan, the learning rate and the order of a step are those of
`fsdp_policy`. For the suffixes of tensor names see `batching`.

    ranks -> layout: tensor x pipeline x data parallel
    step     the reference's log-probabilities and the critic's values -> advantages that depend on them ->
               the proximal policy's log-probabilities -> per update: gradients of this copy's
               micro-batches, summed over copies, clipped, applied; then the critic's update
    weights  gathered parameter by parameter to rank 0
    save     rank 0 writes a model folder; all ranks write megatron-core's distributed format and their
               random states

The critic is the same as in `fsdp_policy`: a second model, computed by transformers and sharded
over all ranks. The ranks of a copy divide its micro-batches among them, and all of them get the
value of each token.

This differs from the default backend: with `bfloat16` the weights that compute are bfloat16 too.
The optimizer keeps float32 ones, which are uploaded and saved. Each copy of the model has a
separate optimizer, because megatron-core's distributed one needs Transformer Engine or apex to save
and load.
"""
# ruff: noqa: N803, N806 - a name ends with its dimensions.

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import torch
from huggingface_hub import save_torch_state_dict
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from safetensors import SafetensorError
from torch import Tensor, distributed, nn

from penstock.trainer.algorithms.batches import Sequences, StepCounts
from penstock.trainer.algorithms.objective import Figures, Objective, PolicyOutput
from penstock.trainer.batching.batching import EMPTY, MicroBatch
from penstock.trainer.batching.planning import StepPlan, Update, by_place, complete
from penstock.trainer.config.algorithm import AlgorithmConfig
from penstock.trainer.config.trainer import MegatronBackend, ModelConfig, TrainConfig
from penstock.trainer.core.errors import CheckpointUnusable, ConfigInvalid
from penstock.trainer.policy.critic import Critic, Lesson
from penstock.trainer.policy.fsdp import DEFAULT_ALGORITHM, learning_rate
from penstock.trainer.policy.loading import (
    SavedTokenizer,
    block_names,
    compute_dtype,
    load_model,
    load_tokenizer,
    outline,
    save_tokenizer,
)
from penstock.trainer.policy.megatron.checkpoint import ShardedOptimizer, load_state, save_state
from penstock.trainer.policy.megatron.description import describe, model_folder
from penstock.trainer.policy.megatron.layout import join_layout
from penstock.trainer.policy.megatron.model import StageModel, transformer_config
from penstock.trainer.policy.megatron.schedule import Loss, compute_gradients, compute_logprobs
from penstock.trainer.policy.megatron.weights import gather_weights, load_weights
from penstock.trainer.policy.optimizer_progress import load_progress, save_progress
from penstock.trainer.policy.protocol import StepResult, describe_step
from penstock.trainer.policy.random_states import (
    compute_reproducibly,
    load_random_states,
    save_random_states,
    seed_all,
)
from penstock.trainer.policy.sharding import Sharding
from penstock.trainer.policy.token_model import TokenModel, TokenOutput
from penstock.v1 import weights_pb2

if TYPE_CHECKING:
    from numpy.typing import NDArray

BACKEND = "megatron"
GENERATION_FILE = "generation_config.json"


class _Optimizer(ShardedOptimizer, Protocol):
    """The methods of megatron-core's optimizers that are used here."""

    param_groups: list[dict[str, Any]]

    def zero_grad(self) -> None: ...
    def prepare_grads(self) -> bool: ...
    def clip_grad_norm(self, clip_grad: float) -> float: ...
    def step_with_ready_grads(self) -> bool: ...


class MegatronPolicy:
    """This rank's shard of a model and of its optimizer."""

    def __init__(
        self,
        model: ModelConfig,
        train: TrainConfig,
        *,
        total_steps: int,
        seed: int,
        algorithm: AlgorithmConfig = DEFAULT_ALGORITHM,
    ) -> None:
        """Raises ConfigInvalid if the backend is not megatron or does not support the model."""
        backend = model.backend
        if not isinstance(backend, MegatronBackend):
            raise ConfigInvalid(f"model.backend: {backend.kind} is not megatron")
        seed_all(seed)
        compute_reproducibly()
        self._objective = Objective(algorithm)
        self._layout = join_layout(backend, seed)
        self._ranks = Sharding()
        self._folder = model_folder(model.path)
        self._description = describe(model.path, backend)
        self._tokenizer: SavedTokenizer | None = None
        self._outline: TokenModel | None = None
        if distributed.get_rank() == 0:
            self._tokenizer = load_tokenizer(model.path)
        self._stage = self._make_stage(model)
        shape = self._description.shape
        self._reference: StageModel | None = None
        if self._objective.needs_reference:
            self._reference = self._make_stage(model)
            self._reference.module.requires_grad_(False)
            load_weights(self._reference.gpt, shape, self._layout, self._folder)
        self._parallel = DistributedDataParallel(
            self._stage.config,
            DistributedDataParallelConfig(grad_reduce_in_fp32=True),
            self._stage.module,
        )
        self._dtype = dtype = compute_dtype(model, self._layout.device)
        self._optimizer = _make_optimizer(self._parallel, dtype, train)
        # After the optimizer: otherwise its float32 copies would be taken from rounded weights.
        load_weights(self._stage.gpt, shape, self._layout, self._folder)
        self._critic: Critic | None = None
        if self._objective.critic is not None:
            own, _ = load_model(str(self._folder))
            if model.gradient_checkpointing:
                own.gradient_checkpointing_enable()
            self._critic = Critic(
                *(own, self._objective.critic, train, self._ranks),
                blocks=block_names(own),
                autocast=dtype is torch.bfloat16,
            )
        self._train = train
        self._total_steps = total_steps
        self._steps = 0

    @property
    def data_ranks(self) -> int:
        """Number of copies of the model; see `ranked_policy.RankPolicy`."""
        return self._layout.data_ranks

    def data_rank(self, rank: int) -> int:
        """Return which copy the rank holds a shard of; see `ranked_policy.RankPolicy`."""
        return rank // self._layout.tensor_ranks % self._layout.data_ranks

    def adapter(self) -> weights_pb2.LoraAdapter | None:
        """Return None: all weights are trained."""
        return None

    def supports_trees(self) -> bool:
        """The policy's own attention supports masks and explicit positions; a critic's may not."""
        return self._critic is None or self._critic.supports_trees()

    def step(self, plan: StepPlan) -> StepResult:
        """Apply this rank's share of a step's updates; see `policy.Policy`."""
        figures, norms = Figures(), list[float]()
        rate, applied, critic_losses = 0.0, False, list[float]()
        plan, prepared, lessons = self._prepare(plan)
        for number, (losses, update) in enumerate(prepared):
            figures += self._accumulate(losses, update)
            self._optimizer.prepare_grads()
            norm = float(self._optimizer.clip_grad_norm(self._train.max_grad_norm))
            rate = learning_rate(self._steps, self._train, self._total_steps)
            if math.isfinite(norm) and norm > 0.0:
                self._set_rates(rate)
                self._optimizer.step_with_ready_grads()
                self._steps += 1
                applied = True
            norms.append(norm)
            if self._critic is not None:
                critic_losses.append(self._critic.learn(lessons[number], update.counts))
        # Ranks that compute the same figures count once.
        figures = self._ranks.sum_figures(figures if self._layout.speaks else Figures())
        return describe_step(
            plan,
            figures,
            norms,
            applied=applied,
            learning_rate=rate,
            critic_losses=critic_losses,
            explained_variance=self._objective.explained_variance,
        )

    def _prepare(
        self, plan: StepPlan
    ) -> tuple[StepPlan, list[tuple[list[Loss], Update]], list[list[Lesson]]]:
        """Compute what the updates need from weights other than the current ones.

        Returns the plan with its advantages, the losses of each update's micro-batches, and the
        critic's lessons for each update on this rank. Losses are evaluated on the last stage only.
        """
        if not plan.updates:
            return plan, [], []
        references: list[Tensor] = []
        known: Tensor | None = None
        if self._reference is not None:
            batches = [batch for update in plan.updates for batch in update.batches]
            references = self._logprobs(self._reference, self._reference.module, batches)
            known = by_place(plan, references)
        value_N = None if self._critic is None else self._values(self._critic, plan)
        if self._objective.advantages_wait:
            values: list[Tensor] = []
            if value_N is not None:
                values = [value_N[b.tokens_N] for update in plan.updates for b in update.batches]
            plan = complete(
                plan,
                self._objective,
                references=references,
                values=values,
                sum_over_ranks=self._sum,
            )
        prepared: list[tuple[list[Loss], Update]] = []
        for number, update in enumerate(plan.updates):
            proximal: list[Tensor] = []
            # The first update starts from the proximal policy's weights.
            if number > 0 and self._objective.needs_proximal:
                proximal = self._logprobs(self._stage, self._parallel, update.batches)
            losses = [
                self._loss(
                    batch,
                    update.counts,
                    proximal[index] if proximal else None,
                    None if known is None else known[batch.tokens_N.to(known.device)],
                )
                for index, batch in enumerate(update.batches)
            ]
            prepared.append((losses, update))
        lessons: list[list[Lesson]] = []
        if value_N is not None:
            lessons = self._lessons(plan, value_N)
        return plan, prepared, lessons

    def _values(self, critic: Critic, plan: StepPlan) -> Tensor:
        """Return the critic's value of every token of the step, on every rank; float64, on the CPU."""
        found_N = np.zeros(len(plan.rewards.sequences_N))
        for update in plan.updates:
            for batch in self._share(update.batches):
                found_N[batch.tokens_N.numpy()] = critic.values(batch).double().cpu().numpy()
        return torch.from_numpy(self._ranks.sum(found_N))  # pyright: ignore[reportUnknownMemberType]

    def _lessons(self, plan: StepPlan, value_N: Tensor) -> list[list[Lesson]]:
        """Build the lessons for this rank's share of each update's micro-batches."""
        target_N = torch.from_numpy(self._objective.value_targets(plan.rewards))  # pyright: ignore[reportUnknownMemberType]
        device = self._layout.device
        return [
            [
                Lesson(
                    batch,
                    value_N[batch.tokens_N].float().to(device),
                    target_N[batch.tokens_N].to(device),
                )
                for batch in self._share(update.batches)
            ]
            for update in plan.updates
        ]

    def _share(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Return this rank's share of its copy's micro-batches, padded with empty ones.

        Each micro-batch belongs to one rank, and all ranks of a copy get the same number.
        """
        most = -(-len(batches) // self._layout.members)
        own = list(batches[self._layout.member :: self._layout.members])
        return own + [EMPTY] * (most - len(own))

    def _loss(
        self,
        batch: MicroBatch,
        counts: StepCounts,
        proximal_N: Tensor | None,
        reference_N: Tensor | None,
    ) -> Loss:
        device = self._layout.device
        sequences = Sequences(batch.sequences.index_N.to(device), batch.sequences.count)

        def evaluate(output: TokenOutput) -> tuple[Tensor, Figures]:
            return self._objective.evaluate(
                PolicyOutput(
                    logprobs_N=output.logprobs_N,
                    entropies_N=output.entropies_N,
                    behaviour_logprobs_N=batch.behaviour_logprobs_N.to(device),
                    proximal_logprobs_N=proximal_N,
                    reference_logprobs_N=reference_N,
                    advantages_N=batch.advantages_N.to(device),
                    sequences=sequences,
                ),
                counts,
            )

        return evaluate

    def _accumulate(self, losses: Sequence[Loss], update: Update) -> Figures:
        """Compute an update's gradients, summed over all copies; return this rank's figures."""
        self._parallel.zero_grad_buffer()
        self._optimizer.zero_grad()
        pairs = zip(update.batches, losses, strict=True)
        figures = compute_gradients(
            self._stage,
            self._parallel,
            # Empty micro-batches only keep ranks in step, which is not needed here.
            [(batch, loss) for batch, loss in pairs if len(batch.tokens_N)],
            entropy_gradient=self._objective.has_entropy_bonus,
        )
        finalize_model_grads([self._parallel])
        return figures

    def _logprobs(
        self, stage: StageModel, module: nn.Module, batches: Sequence[MicroBatch]
    ) -> list[Tensor]:
        """Compute the log-probabilities of each micro-batch on the last stage; zeros on the others."""
        found = iter(compute_logprobs(stage, module, [b for b in batches if len(b.tokens_N)]))
        nothing = torch.zeros(0, device=self._layout.device)
        if not self._layout.is_last_stage:
            return [nothing.new_zeros(len(batch.tokens_N)) for batch in batches]
        return [next(found) if len(batch.tokens_N) else nothing for batch in batches]

    def logprobs(self, batch: MicroBatch) -> Tensor:
        """Compute each trained token's log-probability under the current weights, float32, shape
        [N].

        Only the last stage returns them; earlier stages return zeros.
        """
        return self._logprobs(self._stage, self._parallel, [batch])[0]

    def _sum(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        return self._ranks.sum(values if self._layout.speaks else values * 0.0)

    def _set_rates(self, rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = rate
            # megatron-core leaves this multiplication to its own scheduler.
            group["weight_decay"] = self._train.weight_decay * group["wd_mult"]
            # A loaded checkpoint brings the values that it was written with.
            group["betas"], group["eps"] = self._train.betas, self._train.epsilon

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor of an upload on rank 0, none on other ranks; see `policy.Policy`."""
        return gather_weights(self._stage.gpt, self._description.shape, self._layout)

    def score(self, tensors: Mapping[str, Tensor], token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Score a sequence under the given weights with transformers; see `policy.Policy`."""
        if self._outline is None:
            # On the CPU, whose memory can hold a model that does not fit on one device.
            self._outline = outline(str(self._folder), torch.device("cpu"))
        return self._outline.score(tensors, token_ids).numpy()

    def save_model(self, folder: Path) -> None:
        """Write a model folder; see `policy.Policy`."""
        # Copied, because some tensors are slices of another.
        tensors = {name: tensor.to("cpu", copy=True) for name, tensor in self.weights()}
        if self._tokenizer is not None:
            folder.mkdir(exist_ok=True)
            try:
                save_torch_state_dict(tensors, folder)
            except SafetensorError as error:
                raise OSError(str(error)) from error
            self._description.save(folder)
            if (self._folder / GENERATION_FILE).exists():
                shutil.copy(self._folder / GENERATION_FILE, folder)
            save_tokenizer(self._tokenizer, folder)
        self._ranks.wait()

    def save(self, folder: Path) -> None:
        """Write a checkpoint; see `policy.Policy`."""
        self.save_model(folder)
        save_state(folder, self._stage.gpt, self._optimizer if self._steps else None)
        try:
            if self._critic is not None:
                # Saving the critic gathers tensors. No rank may start that before all have written.
                self._ranks.wait()
                self._critic.save(folder)
            save_random_states(folder, distributed.get_rank())
        except SafetensorError as error:
            raise OSError(str(error)) from error
        if distributed.get_rank() == 0:
            ranks = distributed.get_world_size()
            save_progress(folder, self._steps, backend=BACKEND, ranks=ranks, dtype=self._dtype)
        self._ranks.wait()

    def load(self, folder: Path) -> None:
        """Restore a checkpoint written by any number of ranks; see `policy.Policy`."""
        try:
            ranks = distributed.get_world_size()
            # The dtype must match, because each dtype has other optimizer tensors.
            self._steps = load_progress(
                folder, backend=BACKEND, ranks=ranks, dtype=self._dtype, same_dtype=True
            )
            load_state(folder, self._stage.gpt, self._optimizer if self._steps else None)
            if self._critic is not None:
                self._critic.load(folder)
            # Last, because loading the rest may draw random numbers.
            load_random_states(folder, distributed.get_rank())
        except (OSError, RuntimeError, SafetensorError, ValueError, KeyError) as error:
            raise CheckpointUnusable(f"{folder}: {error}") from error

    def _make_stage(self, model: ModelConfig) -> StageModel:
        config = transformer_config(self._description, model, self._layout)
        return StageModel(self._description, config, self._layout)


def _make_optimizer(
    module: DistributedDataParallel, dtype: torch.dtype, train: TrainConfig
) -> _Optimizer:
    """Create AdamW, with weight decay for matrices and none for vectors."""
    config = OptimizerConfig(
        optimizer="adam",
        lr=train.learning_rate,
        weight_decay=train.weight_decay,
        adam_beta1=train.betas[0],
        adam_beta2=train.betas[1],
        adam_eps=train.epsilon,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        clip_grad=train.max_grad_norm,
        use_distributed_optimizer=False,
    )
    made = get_megatron_optimizer(config, [module], use_gloo_process_groups=False)
    # One optimizer per kind of parameters; without experts there is one kind.
    (optimizer,) = cast("_Chain", made).chained_optimizers
    return optimizer


class _Chain(Protocol):
    chained_optimizers: list[_Optimizer]
