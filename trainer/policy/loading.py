"""Loads Hugging Face models and tokenizers from a folder or a hub. No other module does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

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

from penstock.common.models import missing_folder
from penstock.machine.processor import computes_bfloat16
from penstock.trainer.config.trainer import ModelConfig
from penstock.trainer.core.errors import ConfigInvalid
from penstock.trainer.policy.token_model import CausalModel, TokenModel

# What transformers raises for an unusable folder. The last four: weights whose shapes contradict the
# configuration, truncated files, contradictory fields, code that needs a package that is not installed.
CANNOT_LOAD = (
    OSError,
    ValueError,
    RuntimeError,
    SafetensorError,
    StrictDataclassError,
    ImportError,
)


class SavedTokenizer(Protocol):
    """The method of transformers' tokenizers that is used here."""

    def save_pretrained(self, folder: Path) -> None: ...


def compute_dtype(model: ModelConfig, device: torch.device) -> torch.dtype:
    """Return the dtype of the forward pass; "auto" is bfloat16 if the device has instructions for it."""
    chosen = model.dtype == "auto" and computes_bfloat16(device.type)
    return torch.bfloat16 if chosen or model.dtype == "bfloat16" else torch.float32


def load_model(path: str) -> tuple[CausalModel, SavedTokenizer]:
    """Load the model in float32 into the host's memory, and its tokenizer. Raises ConfigInvalid."""
    # Progress bars would garble the live table.
    transformers_logging.disable_progress_bar()
    load_config(path)
    try:
        model = cast("Any", AutoModelForCausalLM).from_pretrained(path, dtype=torch.float32)
    except CANNOT_LOAD as error:
        raise cannot_load(path, error) from error
    return model, load_tokenizer(path)


def load_config(path: str) -> PretrainedConfig:
    """Load a model's configuration. Raises ConfigInvalid, including for a quantized model."""
    try:
        config = cast("Any", AutoConfig).from_pretrained(path)
    except CANNOT_LOAD as error:
        raise cannot_load(path, error) from error
    if (quantized := getattr(config, "quantization_config", None)) is not None:
        kind = getattr(quantized, "quant_method", None)
        if isinstance(quantized, Mapping):
            kind = cast("Any", quantized).get("quant_method")
        raise ConfigInvalid(
            f"model.path: {path!r} is quantized ({kind or 'unknown method'}): "
            "use the model that it was quantized from"
        )
    return config


def load_tokenizer(path: str) -> SavedTokenizer:
    """Load the tokenizer alone. Raises ConfigInvalid."""
    try:
        return cast("Any", AutoTokenizer).from_pretrained(path)
    except Exception as error:
        # The underlying library has no narrower type for an unreadable file.
        raise cannot_load(path, error) from error


def load_decoder(path: str) -> Callable[[Sequence[int]], str]:
    """Load what turns tokens into text, special ones included. Raises ConfigInvalid."""
    return cast("Any", load_tokenizer(path)).decode


def save_tokenizer(tokenizer: SavedTokenizer, folder: Path) -> None:
    """Write the tokenizer to a model folder. Raises OSError."""
    try:
        tokenizer.save_pretrained(folder)
    except OSError:
        raise
    except Exception as error:
        # The underlying library has no narrower type for a full disk either.
        raise OSError(str(error)) from error


def cannot_load(path: str, error: Exception) -> ConfigInvalid:
    return ConfigInvalid(f"model.path: {missing_folder(path) or f'cannot load {path!r}: {error}'}")


def block_names(model: CausalModel) -> frozenset[str]:
    """Return the names of the model's layer classes, which must not be split."""
    return frozenset(cast("set[str] | None", getattr(model, "_no_split_modules", None)) or ())


def as_saved(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert a transformers model's parameters to the tensors of its checkpoint."""
    return cast("Any", core_model_loading).revert_weight_conversion(model, tensors)


def outline(
    path: str, device: torch.device, buffers: Mapping[str, Tensor] | None = None
) -> TokenModel:
    """Create the model without its weights, for `TokenModel.score`.

    `buffers` are the loaded model's, by name: some are not computed but come with the weights, such as the
    biases of experts.
    """
    from accelerate import init_empty_weights

    config = cast("Any", AutoConfig).from_pretrained(path)
    with torch.device(device), init_empty_weights(include_buffers=False):
        model = cast("Any", AutoModelForCausalLM).from_config(config, dtype=torch.float32)
    # Until this call, tied names have separate parameters.
    model.tie_weights()
    for name, buffer in model.named_buffers():
        if buffers is not None and name in buffers:
            buffer.copy_(buffers[name])
    return frozen(model, autocast=False, device=device)


def frozen(model: CausalModel, *, autocast: bool, device: torch.device | None = None) -> TokenModel:
    """Wrap a model for inference only; `device` is where it computes, if its parameters are elsewhere."""
    tokens = TokenModel(model, autocast=autocast, device=device)
    cast("nn.Module", model).eval().requires_grad_(False)
    return tokens
