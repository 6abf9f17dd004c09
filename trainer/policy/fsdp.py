"""The default policy: a Hugging Face causal language model and AdamW.

On several ranks, each holds a shard of the model (`sharding`) and computes its share of each update's
micro-batches. All end up with the same figures. A single process holds the whole model, because
`fully_shard` would only add its hooks. `backend` has the order of a step. Suffixes as in `batching`.

The reference is a separate copy of the model as it was loaded, which no checkpoint contains. With an
adapter it is the model with the adapter disabled.

A checkpoint has the same files for any number of ranks, and any number can resume from it. Rank 0 gathers
and writes it tensor by tensor, and each rank reads its shard. Only the random states are per rank.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from safetensors.torch import (
    load_file,  # pyright: ignore[reportUnknownVariableType]
    save_file,  # pyright: ignore[reportUnknownVariableType]
)
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

from penstock.trainer.algorithms.batches import StepCounts
from penstock.trainer.algorithms.objective import Figures
from penstock.trainer.batching.batching import MicroBatch
from penstock.trainer.config.algorithm import AlgorithmConfig
from penstock.trainer.config.trainer import ModelConfig, TrainConfig
from penstock.trainer.core.errors import CheckpointUnusable
from penstock.trainer.policy.adapter import CONFIG_FILE, Adapter
from penstock.trainer.policy.backend import (
    DEFAULT_ALGORITHM,
    BackendPolicy,
    Part,
    PreparedUpdate,
    as_os_error,
)
from penstock.trainer.policy.checkpoint_names import CheckpointNames
from penstock.trainer.policy.loading import (
    block_names,
    compute_dtype,
    frozen,
    load_model,
    outline,
    save_tokenizer,
)
from penstock.trainer.policy.optimizer_state import adamw, load_optimizer, optimizer_tensors
from penstock.trainer.policy.random_states import seed_all
from penstock.trainer.policy.sharding import Sharding, overwrite
from penstock.trainer.policy.token_model import CausalModel, TokenModel
from penstock.v1 import weights_pb2

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

OPTIMIZER_FILE = "optimizer.safetensors"


class FsdpPolicy(BackendPolicy):
    """A model with float32 master weights, and its optimizer."""

    kind = "fsdp"

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
        super().__init__(train, algorithm, total_steps=total_steps, seed=seed)
        self._sharding = sharding = Sharding(
            cpu_offload=model.cpu_offload, reduce_each_micro_batch=train.reduce_each_micro_batch
        )
        self._device = sharding.device
        loaded, self._tokenizer = load_model(model.path)
        self._dtype = compute_dtype(model, sharding.device)
        autocast = self._dtype is torch.bfloat16
        blocks = block_names(loaded)
        self._outline: TokenModel | None = None
        if not sharding.is_whole:
            buffers = dict(cast("nn.Module", loaded).named_buffers())
            self._outline = outline(model.path, sharding.device, buffers)
        self._reference: TokenModel | None = None
        if self._objective.needs_reference and model.lora is None:
            own = copy.deepcopy(loaded)
            self._reference = frozen(own, autocast=autocast, device=sharding.device)
            sharding.place(self._reference.module, blocks)
        if self._objective.critic is not None:
            own = copy.deepcopy(loaded)
            self._critic = self._make_critic(own, self._objective.critic, model)
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
        self._optimizer = adamw(self._module, train, train.learning_rate)
        if sharding.rank:
            seed_all(seed + sharding.rank)

    @property
    def data_ranks(self) -> int:
        return self._sharding.size

    def data_rank(self, rank: int) -> int:
        return rank

    def adapter(self) -> weights_pb2.LoraAdapter | None:
        return None if self._adapter is None else self._adapter.message()

    def supports_trees(self) -> bool:
        return self._tokens.supports_trees()

    def _drops_out(self) -> bool:
        return self._tokens.drops_out

    def _compute(self, update: PreparedUpdate, figures: Figures) -> tuple[Figures, float]:
        for number, part in enumerate(update.parts, start=1):
            self._sharding.accumulate(self._module, last=number == len(update.parts))
            figures += self._accumulate(part, update.counts)
        parameters = self._module.parameters()
        clipped = nn.utils.clip_grad_norm_(parameters, self._train.max_grad_norm)
        return figures, float(self._sharding.whole(clipped))

    def _accumulate(self, part: Part, counts: StepCounts) -> Figures:
        if part.batch.is_empty:
            # An empty micro-batch still runs through the model, because the other ranks wait for this one.
            torch.autograd.backward(self._tokens.evaluate(part.batch).logprobs_N.sum())
            return Figures()
        entropies = self._objective.has_entropy_bonus
        output = self._tokens.evaluate(part.batch, entropy_gradient=entropies)
        loss, figures = self._evaluate(part, counts, output)
        torch.autograd.backward(loss)
        return figures

    def _apply(self, rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()  # pyright: ignore[reportUnknownMemberType]

    def _release_gradients(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def _reference_outputs(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        if self._reference is not None:
            return [self._reference.logprobs(batch) for batch in batches]
        if self._adapter is None:
            raise RuntimeError("the objective needs no reference")
        with self._adapter.switched_off():
            return self._outputs(batches)

    def _outputs(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        return [self._tokens.logprobs(batch) for batch in batches]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        # named_parameters omits the second name of a tied tensor, and buffers are not weights.
        own = self._adapter.weights() if self._adapter else self._module.named_parameters()
        for name, parameter in own:
            whole = self._sharding.whole(parameter.detach())
            yield from self._names.of(name, whole) if self._names else ((name, whole),)

    def score(self, tensors: Mapping[str, Tensor], token_ids: Sequence[int]) -> NDArray[np.float32]:
        if self._adapter is not None:
            tensors = self._adapter.own_names(tensors)
        if self._names is not None:
            tensors = self._names.parameters(tensors)
        return (self._outline or self._tokens).score(tensors, token_ids).cpu().numpy()

    def save_model(self, folder: Path) -> None:
        state = None if self._sharding.is_whole else self._gather_state()
        if self._sharding.rank == 0:
            with as_os_error():
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
        """Returns the state of a model folder, whole and in host memory; empty on all ranks but rank 0."""
        distinct: dict[int, tuple[str, Tensor]] = {}
        for name, tensor in self._module.state_dict(keep_vars=True).items():
            # PEFT writes only the adapter. A tied tensor is written under its first name.
            if self._adapter is None or tensor.requires_grad:
                distinct.setdefault(id(tensor), (name, tensor))
        return self._sharding.gather(distinct.values())

    def _save_state(self, folder: Path) -> None:
        tensors = optimizer_tensors(self._module, self._optimizer, self._sharding)
        if self._sharding.rank == 0:
            with as_os_error():
                save_file(tensors, folder / OPTIMIZER_FILE)

    def _load_state(self, folder: Path) -> None:
        self._load_weights(folder)
        tensors = load_file(folder / OPTIMIZER_FILE)
        load_optimizer(self._module, self._optimizer, tensors, folder)

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
