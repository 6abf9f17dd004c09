"""Models of Hugging Face: read from a folder or a hub, as `token_model` computes with them.

The one module of the trainer that imports transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    core_model_loading,
)
from transformers.utils import logging as transformers_logging

from penstock.common.arithmetic import computes_bfloat16
from penstock.common.models import missing_folder
from penstock.trainer.config.trainer import ModelConfig
from penstock.trainer.core.errors import ConfigInvalid
from penstock.trainer.policy.token_model import CausalModel, TokenModel

CANNOT_LOAD = (
    OSError,
    ValueError,
    # Weights of other shapes than the configuration says; files that are cut off; a configuration whose
    # fields contradict each other; code that needs what is not installed.
    RuntimeError,
    SafetensorError,
    StrictDataclassError,
    ImportError,
)
"""What transformers raises over a folder that it cannot use."""


class SavedTokenizer(Protocol):
    """The part of transformers' tokenizer that is used here."""

    def save_pretrained(self, folder: Path) -> None: ...


class _Loader(Protocol):
    def from_pretrained(self, path: str, **options: object) -> object: ...


class _Maker(Protocol):
    def from_config(self, config: object, **options: object) -> object: ...


class _Saving(Protocol):
    def revert_weight_conversion(
        self, model: nn.Module, state_dict: dict[str, Tensor]
    ) -> dict[str, Tensor]: ...


class _Tied(Protocol):
    def tie_weights(self) -> None: ...


def compute_dtype(model: ModelConfig, device: torch.device) -> torch.dtype:
    """Of the forward pass: what the configuration says, or what the device has instructions for."""
    in_bfloat16 = (
        computes_bfloat16(device.type) if model.dtype == "auto" else model.dtype == "bfloat16"
    )
    return torch.bfloat16 if in_bfloat16 else torch.float32


def load_model(path: str) -> tuple[CausalModel, SavedTokenizer]:
    """The model in float32, in the host's memory, and its tokenizer. Raises ConfigInvalid."""
    # Its bars would run through the live table.
    transformers_logging.disable_progress_bar()
    load_config(path)
    try:
        model = cast("_Loader", AutoModelForCausalLM).from_pretrained(path, dtype=torch.float32)
    except CANNOT_LOAD as error:
        raise cannot_load(path, error) from error
    return cast("CausalModel", model), load_tokenizer(path)


def load_config(path: str) -> PretrainedConfig:
    """What a model is. Raises ConfigInvalid, also for one that is not trained as it is saved."""
    try:
        config = cast("_Loader", AutoConfig).from_pretrained(path)
    except CANNOT_LOAD as error:
        raise cannot_load(path, error) from error
    if (quantized := getattr(config, "quantization_config", None)) is not None:
        kind = (
            cast("Mapping[str, object]", quantized).get("quant_method")
            if isinstance(quantized, Mapping)
            else getattr(quantized, "quant_method", None)
        )
        raise ConfigInvalid(
            f"model.path: {path!r} is quantized ({kind or 'in some way'}): "
            "name the model that it was made from"
        )
    return cast("PretrainedConfig", config)


def load_tokenizer(path: str) -> SavedTokenizer:
    """The tokenizer alone. Raises ConfigInvalid."""
    try:
        return cast("SavedTokenizer", cast("_Loader", AutoTokenizer).from_pretrained(path))
    except Exception as error:
        # The library below has no narrower type for a file that it cannot read.
        raise cannot_load(path, error) from error


def save_tokenizer(tokenizer: SavedTokenizer, folder: Path) -> None:
    """Writes it beside a model. Raises OSError."""
    try:
        tokenizer.save_pretrained(folder)
    except OSError:
        raise
    except Exception as error:
        # That library says of a disk that is full, too, by no narrower type.
        raise OSError(str(error)) from error


def cannot_load(path: str, error: Exception) -> ConfigInvalid:
    """What to say of a model that a library cannot load."""
    return ConfigInvalid(f"model.path: {missing_folder(path) or f'cannot load {path!r}: {error}'}")


def block_names(model: CausalModel) -> frozenset[str]:
    """Names of the classes of its layers, which other code must take as a whole."""
    return frozenset(cast("set[str] | None", getattr(model, "_no_split_modules", None)) or ())


def as_saved(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What parameters of a model of transformers are in its checkpoint."""
    return cast("_Saving", core_model_loading).revert_weight_conversion(model, tensors)


def outline(
    path: str, device: torch.device, buffers: Mapping[str, Tensor] | None = None
) -> TokenModel:
    """The model without its weights, for `TokenModel.score`. `buffers` are those of the loaded model, by
    name: most are computed, and some come with its weights, as the biases of experts do."""
    from accelerate import init_empty_weights

    config = cast("_Loader", AutoConfig).from_pretrained(path)
    with torch.device(device), init_empty_weights(include_buffers=False):
        model = cast("_Maker", AutoModelForCausalLM).from_config(config, dtype=torch.float32)
    # Each name has been given a parameter of its own.
    cast("_Tied", model).tie_weights()
    for name, buffer in cast("nn.Module", model).named_buffers():
        if buffers is not None and name in buffers:
            buffer.copy_(buffers[name])
    return frozen(cast("CausalModel", model), autocast=False, device=device)


def frozen(model: CausalModel, *, autocast: bool, device: torch.device | None = None) -> TokenModel:
    """A model that nothing trains; it computes on `device`, if not where its parameters are."""
    tokens = TokenModel(model, autocast=autocast, device=device)
    cast("nn.Module", model).eval().requires_grad_(False)
    return tokens
