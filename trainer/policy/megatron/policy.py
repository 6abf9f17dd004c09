"""The policy at scale: a megatron-core model with tensor, pipeline and data parallelism.

Supports Llama, Qwen2 and Qwen3 in Hugging Face's format, with AdamW driven by megatron-core. The losses,
the plan, the learning rate and the order of a step are those of `fsdp`, by way of `backend`. Only rank 0
has the tokenizer. Suffixes as in `batching`.

The critic is the same as in `fsdp`: a second model, computed by transformers and sharded over all ranks.
The ranks of a copy divide its micro-batches among them, and all of them get the value of each token.

This differs from the default backend: with `bfloat16` the weights that compute are bfloat16 too. The
optimizer keeps float32 ones, which are uploaded and saved. Each copy of the model has a separate
optimizer, because megatron-core's distributed one needs Transformer Engine or apex to save and load.
"""
# ruff: noqa: N806 - a name ends with its dimensions.

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from huggingface_hub import save_torch_state_dict
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from torch import Tensor, distributed, nn

from penstock.trainer.algorithms.objective import Figures
from penstock.trainer.batching.batching import EMPTY, MicroBatch
from penstock.trainer.batching.planning import StepPlan
from penstock.trainer.config.algorithm import AlgorithmConfig
from penstock.trainer.config.trainer import MegatronBackend, ModelConfig, TrainConfig
from penstock.trainer.core.errors import ConfigInvalid
from penstock.trainer.policy.backend import (
    DEFAULT_ALGORITHM,
    BackendPolicy,
    PreparedUpdate,
    as_os_error,
)
from penstock.trainer.policy.critic import Critic
from penstock.trainer.policy.loading import (
    SavedTokenizer,
    compute_dtype,
    load_model,
    load_tokenizer,
    outline,
    save_tokenizer,
)
from penstock.trainer.policy.megatron.checkpoint import load_state, save_state
from penstock.trainer.policy.megatron.description import describe, model_folder
from penstock.trainer.policy.megatron.layout import join_layout
from penstock.trainer.policy.megatron.model import StageModel, transformer_config
from penstock.trainer.policy.megatron.schedule import compute_gradients, compute_logprobs
from penstock.trainer.policy.megatron.weights import gather_weights, load_weights
from penstock.trainer.policy.sharding import Sharding
from penstock.trainer.policy.token_model import TokenModel
from penstock.v1 import weights_pb2

if TYPE_CHECKING:
    from numpy.typing import NDArray

GENERATION_FILE = "generation_config.json"


class MegatronPolicy(BackendPolicy):
    """This rank's shard of a model and of its optimizer."""

    kind = "megatron"
    # Each dtype has other optimizer tensors.
    needs_same_dtype = True

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
        super().__init__(train, algorithm, total_steps=total_steps, seed=seed)
        self._layout = join_layout(backend, seed)
        self._device = self._layout.device
        self._speaks = self._layout.is_last_stage and self._layout.tensor == 0
        self._sharding = Sharding()
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
        if self._objective.critic is not None:
            own, _ = load_model(str(self._folder))
            self._critic = self._make_critic(own, self._objective.critic, model)

    @property
    def data_ranks(self) -> int:
        """Number of copies of the model."""
        return self._layout.data_ranks

    def data_rank(self, rank: int) -> int:
        """Return which copy the rank holds a shard of."""
        return rank // self._layout.tensor_ranks % self._layout.data_ranks

    def adapter(self) -> weights_pb2.LoraAdapter | None:
        return None

    def supports_trees(self) -> bool:
        """The policy's own attention supports masks and explicit positions; a critic's may not."""
        return self._critic is None or self._critic.supports_trees()

    def _reference_outputs(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        if self._reference is None:
            raise RuntimeError("the objective needs no reference")
        return self._logprobs(self._reference, self._reference.module, batches)

    def _outputs(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        return self._logprobs(self._stage, self._parallel, batches)

    def _values(self, critic: Critic, plan: StepPlan) -> Tensor:
        """Return the critic's value of every token of the step, on every rank; float64, on the CPU."""
        found_N = np.zeros(len(plan.rewards.sequences_N))
        for update in plan.updates:
            for batch in self._share(update.batches):
                found_N[batch.tokens_N.numpy()] = critic.values(batch).double().cpu().numpy()
        return torch.from_numpy(self._sharding.sum(found_N))  # pyright: ignore[reportUnknownMemberType]

    def _share(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Return this rank's share of its copy's micro-batches, padded with empty ones.

        Each micro-batch belongs to one rank, and all ranks of a copy get the same number.
        """
        most = -(-len(batches) // self._layout.members)
        own = list(batches[self._layout.member :: self._layout.members])
        return own + [EMPTY] * (most - len(own))

    def _compute(self, update: PreparedUpdate, figures: Figures) -> tuple[Figures, float]:
        """Gradients are summed over all copies. Losses are evaluated on the last stage only."""
        self._parallel.zero_grad_buffer()
        self._optimizer.zero_grad()
        figures += compute_gradients(
            self._stage,
            self._parallel,
            # Empty micro-batches only keep ranks in step, which is not needed here.
            [
                (part.batch, partial(self._evaluate, part, update.counts))
                for part in update.parts
                if not part.batch.is_empty
            ],
            entropy_gradient=self._objective.has_entropy_bonus,
        )
        finalize_model_grads([self._parallel])
        self._optimizer.prepare_grads()
        return figures, float(self._optimizer.clip_grad_norm(self._train.max_grad_norm))

    def _logprobs(
        self, stage: StageModel, module: nn.Module, batches: Sequence[MicroBatch]
    ) -> list[Tensor]:
        """Compute the log-probabilities of each micro-batch on the last stage; zeros on the others."""
        found = iter(compute_logprobs(stage, module, [b for b in batches if not b.is_empty]))
        nothing = torch.zeros(0, device=self._layout.device)
        if not self._layout.is_last_stage:
            return [nothing.new_zeros(len(batch.tokens_N)) for batch in batches]
        return [nothing if batch.is_empty else next(found) for batch in batches]

    def _apply(self, rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = rate
            # megatron-core leaves this multiplication to its own scheduler.
            group["weight_decay"] = self._train.weight_decay * group["wd_mult"]
            # A loaded checkpoint brings the values that it was written with.
            group["betas"], group["eps"] = self._train.betas, self._train.epsilon
        self._optimizer.step_with_ready_grads()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor of an upload on rank 0, none on other ranks."""
        return gather_weights(self._stage.gpt, self._description.shape, self._layout)

    def score(self, tensors: Mapping[str, Tensor], token_ids: Sequence[int]) -> NDArray[np.float32]:
        if self._outline is None:
            # On the CPU, whose memory can hold a model that does not fit on one device.
            self._outline = outline(str(self._folder), torch.device("cpu"))
        return self._outline.score(tensors, token_ids).numpy()

    def save_model(self, folder: Path) -> None:
        # Copied, because some tensors are slices of another.
        tensors = {name: tensor.to("cpu", copy=True) for name, tensor in self.weights()}
        if self._tokenizer is not None:
            folder.mkdir(exist_ok=True)
            with as_os_error():
                save_torch_state_dict(tensors, folder)
            self._description.save(folder)
            if (self._folder / GENERATION_FILE).exists():
                shutil.copy(self._folder / GENERATION_FILE, folder)
            save_tokenizer(self._tokenizer, folder)
        self._sharding.wait()

    def _save_state(self, folder: Path) -> None:
        save_state(folder, self._stage.gpt, self._optimizer if self._steps else None)

    def _load_state(self, folder: Path) -> None:
        load_state(folder, self._stage.gpt, self._optimizer if self._steps else None)

    def _make_stage(self, model: ModelConfig) -> StageModel:
        config = transformer_config(self._description, model, self._layout)
        return StageModel(self._description, config, self._layout)


def _make_optimizer(module: DistributedDataParallel, dtype: torch.dtype, train: TrainConfig) -> Any:
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
    (optimizer,) = cast("Any", made).chained_optimizers
    return optimizer
