"""Describes a Hugging Face model for megatron-core, and refuses an unsupported one before anything is
loaded.

Nothing here imports megatron-core.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from penstock.trainer.config.trainer import MegatronBackend
from penstock.trainer.core.errors import ConfigInvalid
from penstock.trainer.policy.loading import cannot_load, load_config
from penstock.trainer.policy.megatron.names import SUPPORTED, Shape

# Kinds of rotary embedding whose angles are a fixed frequency times the position.
FIXED_ROPE = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class Description:
    """A model's shape and its Hugging Face configuration."""

    shape: Shape
    config: Facts

    def save(self, folder: Path) -> None:
        """Write the configuration to a model folder whose weights are float32."""
        written = cast("Any", copy.deepcopy(self.config))
        written.dtype = torch.float32
        written.save_pretrained(folder)


def describe(path: str, backend: MegatronBackend) -> Description:
    """Read a model's configuration. Raises ConfigInvalid, with the reason, if it is not supported."""
    config = cast("Facts", load_config(path))
    if config.model_type not in SUPPORTED:
        kinds = ", ".join(SUPPORTED)
        raise ConfigInvalid(
            f"model.path: {path!r} is of kind {config.model_type!r}; backend megatron supports {kinds}"
        )
    heads = config.num_attention_heads
    shape = Shape(
        layers=config.num_hidden_layers,
        heads=heads,
        groups=config.num_key_value_heads or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocabulary=config.vocab_size,
        tied=config.tie_word_embeddings,
        qk_norm=config.model_type == "qwen3",
        qkv_bias=config.model_type == "qwen2",
    )
    _check(path, config, shape, backend)
    return Description(shape, config)


class Facts(Protocol):
    """The configuration fields that are read, for each kind in `SUPPORTED`."""

    model_type: str
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    tie_word_embeddings: bool
    rms_norm_eps: float
    hidden_act: str
    attention_dropout: float
    rope_parameters: dict[str, object]
    max_position_embeddings: int


def _check(path: str, config: Facts, shape: Shape, backend: MegatronBackend) -> None:
    """Raise ConfigInvalid unless this layout can compute the model exactly as transformers does."""
    rope = str(config.rope_parameters.get("rope_type", "default"))
    refusals = (
        (config.hidden_act != "silu", f"activation {config.hidden_act!r}"),
        (config.attention_dropout != 0.0, f"attention dropout of {config.attention_dropout}"),
        (rope not in FIXED_ROPE, f"rotary embedding of kind {rope!r}"),
        (bool(getattr(config, "attention_bias", False)), "a bias in its attention's output"),
        (bool(getattr(config, "mlp_bias", False)), "a bias in its MLP"),
        (bool(getattr(config, "use_sliding_window", False)), "a sliding window"),
    )
    if found := [words for refused, words in refusals if refused]:
        raise ConfigInvalid(
            f"model.path: {path!r} has {found[0]}, which backend megatron does not support"
        )
    for size, name, count, what in (
        (backend.tensor_parallel, "tensor_parallel", shape.groups, "heads of keys and values"),
        (backend.tensor_parallel, "tensor_parallel", config.intermediate_size, "rows of its MLP"),
        (backend.pipeline_parallel, "pipeline_parallel", shape.layers, "layers"),
    ):
        if count % size:
            raise ConfigInvalid(
                f"model.backend.{name}: {path!r} has {count} {what}, which is not divisible by {size}"
            )
    # Ranks have equal numbers of vocabulary tokens; the last may have fewer, but not none.
    size = backend.tensor_parallel
    if -(-config.vocab_size // size) * (size - 1) >= config.vocab_size:
        raise ConfigInvalid(
            f"model.backend.tensor_parallel: {path!r} has a vocabulary of {config.vocab_size} tokens, "
            f"too few for {size} ranks"
        )


def model_folder(path: str) -> Path:
    """Return the folder with the model's files, downloaded if `path` is a hub's name. Raises
    ConfigInvalid."""
    if Path(path).is_dir():
        return Path(path)
    import huggingface_hub

    download = cast("Any", huggingface_hub).snapshot_download
    try:
        return Path(download(path, allow_patterns=["*.safetensors", "*.json"]))
    except (OSError, ValueError) as error:
        raise cannot_load(path, error) from error
