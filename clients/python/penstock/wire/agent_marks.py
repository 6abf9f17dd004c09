"""Marks: what an agent tells the trainer through the metadata of an outcome.

| key | value | meaning |
|---|---|---|
| `penstock.untrained` | `[[begin, end], ...]` | these tokens, by position, carry no gradient |
| `penstock.unwanted` | a text | the trajectory's group is of no use, for this reason |
| `penstock.status` | a text | why the answer ended, according to its function |
| `penstock.metadata` | `"whole"` | the rest of the metadata is complete: all that its function wrote |

The last span may have one number, `[begin]`: it extends to the end of the trajectory. An agent uses it for
a turn that it gave up. The server may have more tokens of that turn than the agent knows, or still get
them.

Everything else in the metadata is for people and for reward functions. The trainer skips a trajectory
whose marks cannot be read: it might train on tokens that the agent excluded.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from google.protobuf import struct_pb2
    from numpy.typing import NDArray

# Prefix of all keys that are meant for the trainer.
OWN_PREFIX = "penstock."
UNTRAINED = OWN_PREFIX + "untrained"
UNWANTED = OWN_PREFIX + "unwanted"
STATUS = OWN_PREFIX + "status"
METADATA = OWN_PREFIX + "metadata"
WHOLE = "whole"


class MarkInvalid(ValueError):
    """A mark cannot be read, or refers to tokens that do not exist."""


def write_untrained(
    untrained: NDArray[np.bool_], *, grows: bool = False
) -> dict[str, list[list[int]]]:
    """Metadata for the tokens that carry no gradient, shape [n]; empty if all carry one. With `grows`,
    tokens that may still follow carry none either."""
    edges = np.flatnonzero(np.diff(untrained, prepend=False, append=grows)).tolist()
    spans = [edges[i : i + 2] for i in range(0, len(edges), 2)]
    return {UNTRAINED: spans} if spans else {}


def read_untrained(metadata: struct_pb2.Struct, count: int) -> NDArray[np.bool_] | None:
    """Which of a trajectory's `count` tokens the agent excludes from the loss; None if it excludes none.

    Raises MarkInvalid.
    """
    if UNTRAINED not in metadata.fields:
        return None
    value = metadata.fields[UNTRAINED]
    if value.WhichOneof("kind") != "list_value":
        raise MarkInvalid(f"{UNTRAINED} must be a list of [begin, end]")
    bounds: list[int] = []
    last = len(value.list_value.values) - 1
    for index, span in enumerate(value.list_value.values):
        ends = [end.number_value for end in span.list_value.values]
        whole = all(end.is_integer() for end in ends)
        if whole and len(ends) == 1 and index == last and ends[0] >= 0:
            # The span may begin at or after the trajectory's end.
            ends = [min(ends[0], count), count]
        elif not whole or len(ends) != 2 or ends[0] >= ends[1]:
            raise MarkInvalid(f"{UNTRAINED} holds {ends}, which is not [begin, end]")
        bounds += [int(end) for end in ends]
    if bounds and (min(bounds) < 0 or max(bounds) > count):
        raise MarkInvalid(f"{UNTRAINED} ends at {max(bounds)}; the trajectory has {count} tokens")
    if any(first > second for first, second in pairwise(bounds)):
        raise MarkInvalid(f"the spans of {UNTRAINED} overlap, or are out of order")
    untrained = np.zeros(count, np.bool_)
    for begin, end in zip(bounds[::2], bounds[1::2], strict=True):
        untrained[begin:end] = True
    return untrained


def read_unwanted(metadata: struct_pb2.Struct) -> str:
    """Why a trajectory's group is of no use; empty without such a mark."""
    return metadata.fields[UNWANTED].string_value if UNWANTED in metadata.fields else ""


def read_status(metadata: struct_pb2.Struct) -> str:
    """Why the answer ended, as given by the trajectory's function; empty if it gave no reason."""
    return metadata.fields[STATUS].string_value if STATUS in metadata.fields else ""


def metadata_is_whole(metadata: struct_pb2.Struct) -> bool:
    return METADATA in metadata.fields and metadata.fields[METADATA].string_value == WHOLE
