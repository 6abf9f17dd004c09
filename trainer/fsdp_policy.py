"""The default policy: a Hugging Face causal language model and AdamW.

Of all weights, or of an adapter alone. The one module of the trainer that imports transformers. On one
process the model is held whole: `fully_shard` would add its hooks and shard nothing. Suffixes as in
`batching`; V is the vocabulary.
"""
# ruff: noqa: N806 - a name ends with its dimensions.

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import (
    load_file,  # pyright: ignore[reportUnknownVariableType]
    save_file,  # pyright: ignore[reportUnknownVariableType]
)
from torch import Tensor, nn
from torch.func import functional_call
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from penstock.trainer.adapter import CONFIG_FILE, Adapter
from penstock.trainer.batching import MicroBatch
from penstock.trainer.config import ModelConfig, TrainConfig
from penstock.trainer.errors import CheckpointUnusable, ConfigInvalid
from penstock.trainer.loss import policy_loss, token_logprobs, token_mean
from penstock.trainer.policy import StepResult
from penstock.trainer.random_states import (
    compute_reproducibly,
    load_random_states,
    save_random_states,
    seed_all,
)
from penstock.v1 import weights_pb2

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

log = logging.getLogger(__name__)

OPTIMIZER_FILE = "optimizer.safetensors"
PROGRESS_FILE = "optimizer.json"
# Between positions of one tree and the same sequences one by one; rounding alone stays far below.
TREE_TOLERANCE = 1e-3


class _Output(Protocol):
    logits: Tensor


class _CausalModel(Protocol):
    """The part of transformers' PreTrainedModel that is used here."""

    def __call__(
        self,
        *,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor,
        use_cache: bool,
    ) -> _Output: ...
    def get_output_embeddings(self) -> nn.Module: ...
    def gradient_checkpointing_enable(self) -> None: ...
    def enable_input_require_grads(self) -> None: ...
    def save_pretrained(self, folder: Path) -> None: ...


class _Tokenizer(Protocol):
    def save_pretrained(self, folder: Path) -> None: ...


class _Loader(Protocol):
    def from_pretrained(self, path: str, **options: object) -> object: ...


class FsdpPolicy:
    """A model with float32 master weights, and its optimizer."""

    def __init__(
        self, model: ModelConfig, train: TrainConfig, *, total_steps: int, seed: int
    ) -> None:
        seed_all(seed)
        compute_reproducibly()
        self._model, self._tokenizer = _load(model.path)
        head = self._model.get_output_embeddings()
        head.register_forward_pre_hook(self._select_positions)
        if model.gradient_checkpointing:
            self._model.gradient_checkpointing_enable()
            if model.lora is not None:
                # Otherwise nothing that is recomputed seems to need a gradient.
                self._model.enable_input_require_grads()
        self._adapter: Adapter | None = None
        if model.lora is not None:
            self._adapter = Adapter(cast("nn.Module", self._model), model.lora)
            self._model = cast("_CausalModel", self._adapter.model)
        self._module = cast("nn.Module", self._model)
        self._module.train()
        self._autocast = model.dtype == "bfloat16"
        self._train = train
        self._total_steps = total_steps
        self._steps = 0
        self._device = next(self._module.parameters()).device
        self._optimizer = _optimizer(self._module, train)
        self._sources_M: Tensor | None = None

    def adapter(self) -> weights_pb2.LoraAdapter | None:
        """What is uploaded of it; see `policy.Policy`."""
        return None if self._adapter is None else self._adapter.message()

    def supports_trees(self) -> bool:
        """Whether the model computes a prefix tree as it computes its sequences one by one.

        It does unless its attention ignores the mask it is given, or its layers carry a state from
        position to position.
        """
        ids = torch.tensor([[1, 2, 3, 4, 5, 6, 7]], device=self._device)
        ancestors = [[0, 1, 2, 3], [0, 1, 4, 5, 6]]
        mask = torch.zeros(1, 1, 7, 7, dtype=torch.bool, device=self._device)
        for path in ancestors:
            for place, node in enumerate(path):
                mask[0, 0, node, path[: place + 1]] = True
        depths = torch.tensor([[0, 1, 2, 3, 2, 3, 4]], device=self._device)
        everything = torch.arange(7, device=self._device)
        with torch.no_grad(), self._without_dropout():
            tree = self._logits(ids, depths, mask, everything)
            for path in ancestors:
                alone = self._logits(
                    ids[:, path], everything[None, : len(path)], None, everything[: len(path)]
                )
                if float((tree[path] - alone).abs().max()) > TREE_TOLERANCE:
                    return False
        return True

    @contextlib.contextmanager
    def _without_dropout(self) -> Generator[None]:
        self._module.eval()
        try:
            yield
        finally:
            self._module.train()

    def step(self, batches: Sequence[MicroBatch], token_count: int) -> StepResult:
        """One optimizer step; see `policy.Policy`."""
        if not batches:
            return StepResult(applied=False)
        loss = difference = largest = 0.0
        clipped = trained = 0
        for batch in batches:
            part = self._accumulate(batch, token_count)
            loss += part.loss
            difference += part.difference_sum
            largest = max(largest, part.difference_max)
            clipped += part.clipped
            trained += len(batch.predictions_N)
        norm = float(nn.utils.clip_grad_norm_(self._module.parameters(), self._train.max_grad_norm))
        rate = learning_rate(self._steps, self._train, self._total_steps)
        applied = math.isfinite(norm) and norm > 0.0
        if applied:
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()  # pyright: ignore[reportUnknownMemberType]
            self._steps += 1
        self._optimizer.zero_grad(set_to_none=True)
        return StepResult(
            applied=applied,
            loss=loss,
            grad_norm=norm,
            learning_rate=rate,
            clip_fraction=clipped / trained,
            logprob_diff_mean=difference / trained,
            logprob_diff_max=largest,
        )

    def logprobs(self, batch: MicroBatch) -> Tensor:
        """Log-probability of each trained token under the current weights, float32, shape [N]."""
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._autocast):
            mask = batch.attention_mask_B1TT
            logits_MV = self._logits(
                batch.token_ids_BT.to(self._device),
                batch.positions_BT.to(self._device),
                None if mask is None else mask.to(self._device),
                batch.sources_M.to(self._device),
            )
        logprobs_M = token_logprobs(
            logits_MV, batch.targets_M.to(self._device), batch.temperatures_M.to(self._device)
        )
        return logprobs_M[batch.predictions_N.to(self._device)]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of an upload; see `policy.Policy`."""
        if self._adapter is not None:
            yield from self._adapter.weights()
            return
        # named_parameters leaves out the second name of a tied tensor, and buffers are not weights.
        for name, parameter in self._module.named_parameters():
            yield name, parameter.detach()

    def score(self, tensors: Mapping[str, Tensor], token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Scores a sequence under given weights; see `policy.Policy`."""
        if self._adapter is not None:
            tensors = self._adapter.own_names(tensors)
        whole = {n: tensor.to(self._device, torch.float32) for n, tensor in tensors.items()}
        ids_1T = torch.tensor([list(token_ids)], device=self._device)
        self._sources_M = torch.arange(len(token_ids) - 1, device=self._device)
        # Without dropout, as it is sampled.
        with torch.no_grad(), self._without_dropout():
            output = cast(
                "_Output",
                functional_call(
                    self._module, whole, kwargs={"input_ids": ids_1T, "use_cache": False}
                ),
            )
        logprobs = torch.log_softmax(output.logits.squeeze(0).float(), dim=-1)
        return logprobs.gather(1, ids_1T[0, 1:, None]).squeeze(1).cpu().numpy()

    def save_model(self, folder: Path) -> None:
        """Writes a model folder; see `policy.Policy`."""
        with _as_os_error():
            self._model.save_pretrained(folder)
            self._tokenizer.save_pretrained(folder)

    def save(self, folder: Path) -> None:
        """Writes a checkpoint; see `policy.Policy`."""
        self.save_model(folder)
        tensors: dict[str, Tensor] = {}
        for name, parameter in self._module.named_parameters():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                tensors[f"{key}/{name}"] = cast("Tensor", value).detach().cpu().contiguous()
        with _as_os_error():
            save_file(tensors, folder / OPTIMIZER_FILE)
            save_random_states(folder)
        progress = {"optimizer_steps": self._steps, "threads": torch.get_num_threads()}
        (folder / PROGRESS_FILE).write_text(json.dumps(progress))

    def load(self, folder: Path) -> None:
        """Restores a checkpoint; see `policy.Policy`."""
        try:
            self._load_weights(folder)
            tensors = load_file(folder / OPTIMIZER_FILE)
            progress = cast(
                "dict[str, int]", json.loads((folder / PROGRESS_FILE).read_text(encoding="utf-8"))
            )
            self._steps = progress["optimizer_steps"]
            if progress["threads"] != (threads := torch.get_num_threads()):
                log.warning(
                    "%s was computed with %d threads, this run goes on with %d: "
                    "sums may be rounded otherwise",
                    folder,
                    progress["threads"],
                    threads,
                )
            self._load_optimizer(folder, tensors)
            # Last: what was loaded before may have drawn from them.
            load_random_states(folder)
        except (
            ConfigInvalid,
            OSError,
            RuntimeError,
            SafetensorError,
            ValueError,
            KeyError,
        ) as error:
            raise CheckpointUnusable(f"{folder}: {error}") from error

    def _load_optimizer(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        parameters = dict(self._module.named_parameters())
        self._optimizer.state.clear()
        for key, value in tensors.items():
            kind, _, name = key.partition("/")
            if name not in parameters:
                raise CheckpointUnusable(f"{folder}: the model has no parameter {name!r}")
            self._optimizer.state[parameters[name]][kind] = value.to(self._device)

    def _load_weights(self, folder: Path) -> None:
        if self._adapter is not None:
            self._adapter.load(folder)
            return
        if (folder / CONFIG_FILE).exists():
            raise CheckpointUnusable(f"{folder} is of a run with model.lora")
        saved, _ = _load(str(folder))
        self._module.load_state_dict(cast("nn.Module", saved).state_dict())

    def _logits(
        self,
        token_ids_BT: Tensor,  # noqa: N803
        positions_BT: Tensor,  # noqa: N803
        mask_B1TT: Tensor | None,  # noqa: N803
        sources_M: Tensor,  # noqa: N803
    ) -> Tensor:
        """Logits that follow the flat positions `sources_M`, shape [M, V]."""
        self._sources_M = sources_M
        output = self._model(
            input_ids=token_ids_BT,
            attention_mask=mask_B1TT,
            position_ids=positions_BT,
            use_cache=False,
        )
        return output.logits.squeeze(0)

    def _select_positions(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Before the output layer: keeps only the positions that predict a trained token.

        A hook, so that what a model does to its logits afterwards (scaling, soft caps) still
        happens.
        """
        if self._sources_M is None:
            return inputs
        hidden_BTH = inputs[0]
        return (hidden_BTH.flatten(0, 1)[self._sources_M].unsqueeze(0),)

    def _accumulate(self, batch: MicroBatch, token_count: int) -> _Part:
        logprobs_N = self.logprobs(batch)
        behaviour_N = batch.behaviour_logprobs_N.to(self._device)
        result = policy_loss(
            logprobs_N,
            behaviour_N,
            batch.advantages_N.to(self._device),
            clip_low=self._train.clip_low,
            clip_high=self._train.clip_high,
        )
        loss = token_mean(result.loss_N, token_count)
        torch.autograd.backward(loss)
        difference_N = (logprobs_N.detach() - behaviour_N).abs()
        return _Part(
            float(loss.detach()),
            float(difference_N.sum()),
            float(difference_N.max()),
            int(result.clipped_N.sum()),
        )


class _Part:
    """What one micro-batch adds to the step's figures."""

    def __init__(
        self, loss: float, difference_sum: float, difference_max: float, clipped: int
    ) -> None:
        self.loss = loss
        self.difference_sum = difference_sum
        self.difference_max = difference_max
        self.clipped = clipped


def learning_rate(step: int, train: TrainConfig, total_steps: int) -> float:
    """Learning rate of the optimizer step after `step` others: linear warm-up, then the
    schedule."""
    if step < train.warmup_steps:
        return train.learning_rate * (step + 1) / train.warmup_steps
    if train.schedule == "constant":
        return train.learning_rate
    rest = max(1, total_steps - train.warmup_steps)
    done = min(1.0, (step - train.warmup_steps) / rest)
    return train.learning_rate * 0.5 * (1.0 + math.cos(math.pi * done))


def _load(path: str) -> tuple[_CausalModel, _Tokenizer]:
    # Its bars would run through the live table.
    transformers_logging.disable_progress_bar()
    try:
        model = cast("_Loader", AutoModelForCausalLM).from_pretrained(path, dtype=torch.float32)
        tokenizer = cast("_Loader", AutoTokenizer).from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigInvalid(f"model.path: cannot load {path!r}: {error}") from error
    return cast("_CausalModel", model), cast("_Tokenizer", tokenizer)


@contextlib.contextmanager
def _as_os_error() -> Generator[None]:
    """Safetensors has an error of its own for a disk that is full."""
    try:
        yield
    except SafetensorError as error:
        raise OSError(str(error)) from error


def _optimizer(module: nn.Module, train: TrainConfig) -> torch.optim.AdamW:
    matrices = [p for p in module.parameters() if p.requires_grad and p.ndim >= 2]
    vectors = [p for p in module.parameters() if p.requires_grad and p.ndim < 2]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": train.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=train.learning_rate,
        betas=train.betas,
        eps=train.epsilon,
        fused=True,
    )
