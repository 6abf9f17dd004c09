"""Maps Hugging Face's names and tensors to megatron-core's and back, bit for bit.

    file -> join -> cut -> parameter of a rank          and          parameters -> mend -> split -> upload

Both directions use one table. An entry is one whole parameter of megatron-core, as it would be without
tensor parallelism. It defines how the parameter is cut over the ranks of tensor parallelism:

    WHOLE      the same on every rank
    ROWS       along its first dimension, which Megatron calls column-parallel
    COLUMNS    along its second dimension
    QKV        queries, keys and values, grouped by the heads that share a key, then cut as ROWS
    GATED      gate above up, each of them cut along its first dimension
    VOCABULARY padded with rows of zeros until it can be cut as ROWS

Nothing here communicates or imports megatron-core.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import Tensor

SUPPORTED = ("llama", "qwen2", "qwen3")
"""The values of `model_type` for which these names apply."""
EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
LAYER = "decoder.layers."


class Cut(Enum):
    WHOLE = auto()
    ROWS = auto()
    COLUMNS = auto()
    QKV = auto()
    GATED = auto()
    VOCABULARY = auto()


@dataclass(frozen=True, slots=True)
class Shape:
    """The properties of a model that determine the table."""

    layers: int
    heads: int
    groups: int
    """Number of heads of keys and values."""
    head_dim: int
    vocabulary: int
    tied: bool
    """Whether the output layer shares the embedding's weights."""
    qk_norm: bool
    qkv_bias: bool


@dataclass(frozen=True, slots=True)
class Entry:
    """One parameter of megatron-core and the tensors that form it."""

    own: str
    """Its name in megatron-core, with the layer counted over all stages."""
    hf: tuple[str, ...]
    """Names of the Hugging Face tensors that form the parameter, in order."""
    cut: Cut

    def join(self, tensors: Sequence[Tensor], shape: Shape) -> Tensor:
        """Join the tensors of `hf`, in order, into the whole parameter."""
        if self.cut is Cut.QKV:
            grouped = [t.reshape(shape.groups, -1, *t.shape[1:]) for t in tensors]
            return torch.cat(grouped, dim=1).flatten(0, 1)
        return torch.cat(list(tensors)) if len(tensors) > 1 else tensors[0]

    def split(self, whole: Tensor, shape: Shape) -> list[Tensor]:
        """Split the whole parameter into the tensors of `hf`; the inverse of `join`."""
        if self.cut is Cut.QKV:
            per_group = shape.heads // shape.groups * shape.head_dim
            grouped = whole.reshape(shape.groups, -1, *whole.shape[1:])
            sizes = [per_group, shape.head_dim, shape.head_dim]
            return [part.flatten(0, 1) for part in torch.split(grouped, sizes, dim=1)]
        if self.cut is Cut.GATED:
            return list(whole.chunk(2))
        return [whole]

    def take(self, whole: Tensor, rank: int, ranks: int) -> Tensor:
        """Return the part that a rank of tensor parallelism holds."""
        match self.cut:
            case Cut.WHOLE:
                return whole
            case Cut.COLUMNS:
                return whole.chunk(ranks, dim=1)[rank]
            case Cut.GATED:
                return torch.cat([half.chunk(ranks)[rank] for half in whole.chunk(2)])
            case Cut.VOCABULARY:
                missing = -len(whole) % ranks
                padding = whole.new_zeros(missing, *whole.shape[1:])
                return torch.cat([whole, padding]).chunk(ranks)[rank]
            case Cut.ROWS | Cut.QKV:
                return whole.chunk(ranks)[rank]

    def mend(self, parts: Sequence[Tensor], shape: Shape) -> Tensor:
        """Put the parts of all ranks, in order, together; the inverse of `take`."""
        match self.cut:
            case Cut.WHOLE:
                return parts[0]
            case Cut.COLUMNS:
                return torch.cat(list(parts), dim=1)
            case Cut.GATED:
                halves = [part.chunk(2) for part in parts]
                return torch.cat([half[place] for place in (0, 1) for half in halves])
            case Cut.VOCABULARY:
                return torch.cat(list(parts))[: shape.vocabulary]
            case Cut.ROWS | Cut.QKV:
                return torch.cat(list(parts))


def entries(shape: Shape) -> Iterator[Entry]:
    """Yield every parameter of a model, in the order in which its tensors are uploaded."""
    yield Entry(EMBEDDING, ("model.embed_tokens.weight",), Cut.VOCABULARY)
    for layer in range(shape.layers):
        yield from _layer_entries(shape, f"{LAYER}{layer}.", f"model.layers.{layer}.")
    yield Entry("decoder.final_layernorm.weight", ("model.norm.weight",), Cut.WHOLE)
    if not shape.tied:
        yield Entry(OUTPUT, ("lm_head.weight",), Cut.VOCABULARY)


def held_entries(shape: Shape, stage: int, stages: int) -> Iterator[Entry]:
    """Yield every parameter that a pipeline stage holds: those that it uploads, and on the last stage its
    copy of a tied embedding."""
    for entry in entries(shape):
        if stage_of(entry, shape, stages) == stage:
            yield entry
    if shape.tied and 0 < stage == stages - 1:
        yield Entry(OUTPUT, ("model.embed_tokens.weight",), Cut.VOCABULARY)


def _layer_entries(shape: Shape, own: str, hf: str) -> Iterator[Entry]:
    attention, projections = f"{hf}self_attn.", ("q_proj", "k_proj", "v_proj")
    for kind in ("weight", "bias") if shape.qkv_bias else ("weight",):
        joined = tuple(f"{attention}{name}.{kind}" for name in projections)
        yield Entry(f"{own}self_attention.linear_qkv.{kind}", joined, Cut.QKV)
    output = (f"{attention}o_proj.weight",)
    yield Entry(f"{own}self_attention.linear_proj.weight", output, Cut.COLUMNS)
    for name in ("q", "k") if shape.qk_norm else ():
        norm = (f"{attention}{name}_norm.weight",)
        yield Entry(f"{own}self_attention.{name}_layernorm.weight", norm, Cut.WHOLE)
    gated = (f"{hf}mlp.gate_proj.weight", f"{hf}mlp.up_proj.weight")
    yield Entry(f"{own}mlp.linear_fc1.weight", gated, Cut.GATED)
    yield Entry(f"{own}mlp.linear_fc2.weight", (f"{hf}mlp.down_proj.weight",), Cut.COLUMNS)
    for own_norm, hf_norm in (
        ("input_layernorm", "input_layernorm"),
        ("pre_mlp_layernorm", "post_attention_layernorm"),
    ):
        yield Entry(f"{own}{own_norm}.weight", (f"{hf}{hf_norm}.weight",), Cut.WHOLE)


def stage_of(entry: Entry, shape: Shape, stages: int) -> int:
    """Return the stage that uploads this parameter."""
    if entry.own.startswith(LAYER):
        return int(entry.own.split(".")[2]) // (shape.layers // stages)
    return 0 if entry.own == EMBEDDING else stages - 1


def local_name(entry: Entry, shape: Shape, stages: int) -> str:
    """Return the parameter's name on its stage, where layers are counted from zero."""
    if not entry.own.startswith(LAYER):
        return entry.own
    layer, _, rest = entry.own.removeprefix(LAYER).partition(".")
    return f"{LAYER}{int(layer) % (shape.layers // stages)}.{rest}"
