"""Describes a Hugging Face model for megatron-core, and checks whether the backend supports it.

Unsupported models are refused before anything is loaded, with the reason. Nothing here imports
megatron-core.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import torch
from transformers import PretrainedConfig

from penstock.trainer.config.trainer import MegatronBackend
from penstock.trainer.core.errors import ConfigInvalid
from penstock.trainer.policy.loading import SavedTokenizer, cannot_load, load_config
from penstock.trainer.policy.megatron.names import SUPPORTED, Shape

# Kinds of rotary embedding whose angles are a fixed frequency times the position.
FIXED_ROPE = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class Description:
    """A model's shape and its Hugging Face configuration."""

    shape: Shape
    config: PretrainedConfig

    def save(self, folder: Path) -> None:
        """Write the configuration to a model folder whose weights are float32."""
        written = copy.deepcopy(self.config)
        written.dtype = torch.float32
        cast("SavedTokenizer", written).save_pretrained(folder)


def describe(path: str, backend: MegatronBackend) -> Description:
    """Read a model's configuration. Raises ConfigInvalid, with the reason, if it is not supported."""
    config = load_config(path)
    facts = cast("Facts", config)
    if facts.model_type not in SUPPORTED:
        kinds = ", ".join(SUPPORTED)
        raise ConfigInvalid(
            f"model.path: {path!r} is of kind {facts.model_type!r}; backend megatron supports {kinds}"
        )
    heads = facts.num_attention_heads
    shape = Shape(
        layers=facts.num_hidden_layers,
        heads=heads,
        groups=facts.num_key_value_heads or heads,
        head_dim=head_dim(config),
        vocabulary=facts.vocab_size,
        tied=facts.tie_word_embeddings,
        qk_norm=facts.model_type == "qwen3",
        qkv_bias=facts.model_type == "qwen2",
    )
    _check(path, config, shape, backend)
    return Description(shape, config)


def head_dim(config: PretrainedConfig) -> int:
    """Return the size of one attention head."""
    facts = cast("Facts", config)
    own = cast("int | None", getattr(config, "head_dim", None))
    return own or facts.hidden_size // facts.num_attention_heads


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


def _check(path: str, config: PretrainedConfig, shape: Shape, backend: MegatronBackend) -> None:
    """Raise ConfigInvalid unless this layout can compute the model exactly as transformers does."""
    facts = cast("Facts", config)
    rope = str(facts.rope_parameters.get("rope_type", "default"))
    refusals = (
        (facts.hidden_act != "silu", f"activation {facts.hidden_act!r}"),
        (facts.attention_dropout != 0.0, f"attention dropout of {facts.attention_dropout}"),
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
        (backend.tensor_parallel, "tensor_parallel", facts.intermediate_size, "rows of its MLP"),
        (backend.pipeline_parallel, "pipeline_parallel", shape.layers, "layers"),
    ):
        if count % size:
            raise ConfigInvalid(
                f"model.backend.{name}: {path!r} has {count} {what}, which is not divisible by {size}"
            )
    # Ranks have equal numbers of vocabulary tokens, except that the last may have fewer. None may
    # be empty.
    size = backend.tensor_parallel
    if -(-facts.vocab_size // size) * (size - 1) >= facts.vocab_size:
        raise ConfigInvalid(
            f"model.backend.tensor_parallel: {path!r} has a vocabulary of {facts.vocab_size} tokens, "
            f"too few for {size} ranks"
        )


def model_folder(path: str) -> Path:
    """Return the folder with the model's files, downloaded if `path` is a name on a hub.

    Raises ConfigInvalid.
    """
    if Path(path).is_dir():
        return Path(path)
    import huggingface_hub

    download = cast(
        "_Download",
        huggingface_hub.snapshot_download,  # pyright: ignore[reportUnknownMemberType]
    )
    try:
        return Path(download(path, allow_patterns=["*.safetensors", "*.json"]))
    except (OSError, ValueError) as error:
        raise cannot_load(path, error) from error


class _Download(Protocol):
    def __call__(self, path: str, *, allow_patterns: list[str]) -> str: ...
