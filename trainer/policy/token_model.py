"""A causal language model that computes the probabilities of selected tokens only.

Suffixes as in `batching`; V is the vocabulary, H the hidden size.
"""
# ruff: noqa: N803, N806, N815 - a name ends with its dimensions.

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from penstock.trainer.batching.batching import MAX_TREE_TOKENS, MicroBatch
from penstock.trainer.core.errors import ConfigInvalid

if TYPE_CHECKING:
    from transformers import GenerationConfig

# Allowed difference between a tree and its sequences one by one; rounding stays far below.
TREE_TOLERANCE = 1e-3
# Rows whose entropy is computed at a time. On a CPU the temporary memory stays in the cache, which
# halves the time. On other devices only the amount of memory matters.
ENTROPY_ROWS_CPU = 4
ENTROPY_ROWS = 1024
# Bounds log-probabilities in products: below it a probability is zero in float32.
LEAST_LOGPROB = -1e4
# Configuration fields that limit how far back a layer attends, with the part of a layer type's name
# that selects the layers they apply to.
BOUNDS = {"sliding_window": "sliding", "attention_chunk_size": "chunked"}


class Output(Protocol):
    """The attributes of transformers' output that are used here."""

    logits: Tensor


class SavedConfig(Protocol):
    """The methods of transformers' PreTrainedConfig that are used here."""

    def get_text_config(self) -> SavedConfig: ...
    def to_dict(self) -> dict[str, object]: ...


class CausalModel(Protocol):
    """The methods of transformers' PreTrainedModel that are used here."""

    generation_config: GenerationConfig

    @property
    def config(self) -> SavedConfig: ...
    def __call__(
        self,
        *,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor,
        use_cache: bool,
    ) -> Output: ...
    def get_output_embeddings(self) -> nn.Module: ...
    def set_output_embeddings(self, new_embeddings: nn.Module) -> None: ...
    def gradient_checkpointing_enable(self) -> None: ...
    def enable_input_require_grads(self) -> None: ...
    def save_pretrained(self, folder: Path, *, state_dict: Mapping[str, Tensor] | None) -> None: ...


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """Log-probability and entropy of a micro-batch's trained tokens at their temperatures; float32, [N]."""

    logprobs_N: Tensor
    entropies_N: Tensor


class TokenModel:
    """A model whose output layer runs only at the requested positions."""

    def __init__(
        self, model: CausalModel, *, autocast: bool, device: torch.device | None = None
    ) -> None:
        """`autocast` computes in bfloat16 with float32 weights. `device` is where the model computes, if
        its parameters are kept elsewhere, like those of an offloaded model."""
        self._autocast = autocast
        self._device = device
        self._sources_M: Tensor | None = None
        self._longest = same_angles_within(model.config.get_text_config())
        model.get_output_embeddings().register_forward_pre_hook(self._select_positions)
        self.model = model
        """The model to call; an adapter may wrap it."""

    @property
    def module(self) -> nn.Module:
        return cast("nn.Module", self.model)

    @property
    def device(self) -> torch.device:
        return self._device or next(self.module.parameters()).device

    @property
    def drops_out(self) -> bool:
        """Whether training uses dropout, the model's own or an adapter's."""
        told = self.model.config.get_text_config().to_dict()
        own = (rate for name, rate in told.items() if "drop" in name)
        layers = (m.p for m in self.module.modules() if isinstance(m, nn.Dropout))
        return any(isinstance(rate, float) and rate > 0.0 for rate in (*own, *layers))

    @contextlib.contextmanager
    def without_dropout(self) -> Generator[None]:
        was_training = self.module.training
        self.module.eval()
        try:
            yield
        finally:
            self.module.train(was_training)

    def evaluate(self, batch: MicroBatch, *, entropy_gradient: bool = False) -> TokenOutput:
        """The entropies have a gradient only if `entropy_gradient`."""
        logits_MV = self._predict(batch)
        logprobs_M = token_logprobs(logits_MV, batch.targets_M.to(logits_MV.device))
        if entropy_gradient:
            entropies_M = entropies(logits_MV)
        else:
            with torch.no_grad():
                rows = ENTROPY_ROWS_CPU if logits_MV.device.type == "cpu" else ENTROPY_ROWS
                entropies_M = torch.cat([entropies(part) for part in torch.split(logits_MV, rows)])
        predictions_N = batch.predictions_N.to(logits_MV.device)
        return TokenOutput(logprobs_M[predictions_N], entropies_M[predictions_N])

    def logprobs(self, batch: MicroBatch) -> Tensor:
        """Compute each trained token's log-probability, float32, shape [N]; no gradient or dropout."""
        with torch.no_grad(), self.without_dropout():
            logits_MV = self._predict(batch)
            logprobs_M = token_logprobs(logits_MV, batch.targets_M.to(logits_MV.device))
        return logprobs_M[batch.predictions_N.to(logits_MV.device)]

    def _predict(self, batch: MicroBatch) -> Tensor:
        """Compute the logits of each distinct prediction at its temperature, float32, shape [M, V]."""
        logits_MV = self.outputs(batch)
        return at_temperatures(logits_MV, batch.temperatures_M.to(logits_MV.device))

    def outputs(self, batch: MicroBatch) -> Tensor:
        """Compute the output layer at each distinct prediction, shape [M, V].

        Raises ConfigInvalid if a sequence is too long for the model's rotary embedding.
        """
        device = self.device
        longest = int(batch.positions_BT.max()) + 1
        if self._longest is not None and longest > self._longest:
            raise ConfigInvalid(
                f"a sequence has {longest} tokens: beyond {self._longest} this model's rotary embedding "
                "changes with the longest sequence of a micro-batch; limit the engine's context "
                "(max_model_len) to that length"
            )
        mask = batch.attention_mask()
        with torch.autocast(device.type, torch.bfloat16, enabled=self._autocast):
            return self.logits(
                batch.token_ids_BT.to(device),
                batch.positions_BT.to(device),
                None if mask is None else mask.to(device),
                batch.sources_M.to(device),
            )

    def logits(
        self,
        token_ids_BT: Tensor,
        positions_BT: Tensor,
        mask_B1TT: Tensor | None,
        sources_M: Tensor,
    ) -> Tensor:
        """Compute the logits at the flat positions `sources_M`, shape [M, V]."""
        with self.selecting(sources_M):
            output = self.model(
                input_ids=token_ids_BT,
                attention_mask=mask_B1TT,
                position_ids=positions_BT,
                use_cache=False,
            )
        return output.logits.squeeze(0)

    def score(self, tensors: Mapping[str, Tensor], token_ids: Sequence[int]) -> Tensor:
        """Compute each token's log-probability but the first's, float32, shape [n - 1], with `tensors` in
        place of the parameters of these names. No gradient, no dropout, no autocast."""
        device = self.device
        whole = {n: tensor.to(device, torch.float32) for n, tensor in tensors.items()}
        ids_1T = torch.tensor([list(token_ids)], device=device)
        scored_M = torch.arange(len(token_ids) - 1, device=device)
        with torch.no_grad(), self.without_dropout(), self.selecting(scored_M):
            told = {"input_ids": ids_1T, "use_cache": False}
            output = cast("Output", functional_call(self.module, whole, kwargs=told))
        logprobs = torch.log_softmax(output.logits.squeeze(0).float(), dim=-1)
        return logprobs.gather(1, ids_1T[0, 1:, None]).squeeze(1)

    @contextlib.contextmanager
    def selecting(self, sources_M: Tensor) -> Generator[None]:
        """Run the output layer at these flat positions only."""
        self._sources_M = sources_M
        try:
            yield
        finally:
            self._sources_M = None

    def supports_trees(self) -> bool:
        """Return whether the model computes a prefix tree exactly like its sequences one by one.

        It does not if its attention ignores the given mask, if layers carry a state from position to
        position, or if layers attend to fewer positions than a tree has: these would use the tree's mask
        in place of their own.
        """
        if attends_within(MAX_TREE_TOKENS, self.model.config.get_text_config()):
            return False
        device = self.device
        ids = torch.tensor([[1, 2, 3, 4, 5, 6, 7]], device=device)
        ancestors = [[0, 1, 2, 3], [0, 1, 4, 5, 6]]
        mask = torch.zeros(1, 1, 7, 7, dtype=torch.bool, device=device)
        for path in ancestors:
            for place, node in enumerate(path):
                mask[0, 0, node, path[: place + 1]] = True
        depths = torch.tensor([[0, 1, 2, 3, 2, 3, 4]], device=device)
        everything = torch.arange(7, device=device)
        with torch.no_grad(), self.without_dropout():
            tree = self.logits(ids, depths, mask, everything)
            for path in ancestors:
                alone = self.logits(
                    ids[:, path], everything[None, : len(path)], None, everything[: len(path)]
                )
                if float((tree[path] - alone).abs().max()) > TREE_TOLERANCE:
                    return False
        return True

    def _select_positions(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Keep only the positions that predict a trained token. A hook before the output layer, so that
        later processing of the logits (scaling, soft caps) still happens."""
        if self._sources_M is None:
            return inputs
        hidden_BTH = inputs[0]
        return (hidden_BTH.flatten(0, 1)[self._sources_M].unsqueeze(0),)


def attends_within(length: int, config: object) -> bool:
    """Return whether a layer attends to fewer than `length` positions, because of a window or a chunk."""
    windowed = bool(getattr(config, "use_sliding_window", True))
    used = {"sliding_window": windowed, "attention_chunk_size": True}
    kinds = cast("Sequence[str] | None", getattr(config, "layer_types", None))
    if kinds is not None:
        used = {bound: any(kind in one for one in kinds) for bound, kind in BOUNDS.items()}
    bounds = [cast("int | None", getattr(config, bound, None)) for bound in used if used[bound]]
    return any(bound is not None and bound < length for bound in bounds)


def same_angles_within(config: SavedConfig) -> int | None:
    """Return the longest sequence for which rotary angles do not depend on the sequence's length; None if
    they never do."""
    told = config.to_dict()
    parameters = cast("dict[str, object]", told.get("rope_parameters") or {})
    # Each kind of layer may have separate parameters, or all share one set.
    each = [cast("dict[str, object]", one) for one in parameters.values() if isinstance(one, dict)]
    bounds: list[int] = []
    for rope in each or [parameters]:
        kind = str(rope.get("rope_type", "default"))
        if kind == "longrope" or "dynamic" in kind:
            name = "original_max_position_embeddings"
            bound = rope.get(name) or told.get(name) or told["max_position_embeddings"]
            bounds.append(cast("int", bound))
    return min(bounds, default=None)


def at_temperatures(logits_MV: Tensor, temperatures_M: Tensor) -> Tensor:
    """Divide logits by each row's temperature; float32."""
    logits_MV = logits_MV.float()
    if bool((temperatures_M != 1.0).any()):
        logits_MV = logits_MV / temperatures_M.unsqueeze(-1)
    return logits_MV


def token_logprobs(logits_MV: Tensor, targets_M: Tensor) -> Tensor:
    """Compute log softmax(logits) at each target, shape [M]."""
    return -cross_entropy(logits_MV, targets_M, reduction="none")


def entropies(logits_MV: Tensor) -> Tensor:
    """Compute the entropy of softmax(logits) for each row, in nats, shape [M]."""
    logprobs_MV = torch.log_softmax(logits_MV, dim=-1)
    return -(logprobs_MV.exp() * logprobs_MV.clamp(min=LEAST_LOGPROB)).sum(-1)
