"""What an agent tells the trainer in the metadata of an outcome.

| key | value | meaning |
|---|---|---|
| `penstock.untrained` | `[[begin, end], ...]` | these tokens, by position, carry no gradient |
| `penstock.unwanted` | a text | the trajectory's group is of no use, for this reason |
| `penstock.status` | a text | why the answer ended, where its function says so |
| `penstock.metadata` | `"whole"` | what else is there is all that its function wrote; nothing is missing |

The last span may be of one number, `[begin]`: it goes as far as the trajectory does. That is for a turn
that its agent gave up, of which the server may have, or get, more than the agent knows.

Everything else in the metadata is for people and for rewards. Of a trajectory with a mark that cannot be
read a trainer trains nothing: it might be what it was told not to.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from google.protobuf import struct_pb2
    from numpy.typing import NDArray

# Of every key that is for the trainer.
OWN_PREFIX = "penstock."
UNTRAINED = OWN_PREFIX + "untrained"
UNWANTED = OWN_PREFIX + "unwanted"
STATUS = OWN_PREFIX + "status"
METADATA = OWN_PREFIX + "metadata"
_WHOLE = "whole"


class MarkInvalid(ValueError):
    """A mark that cannot be read, or that speaks of tokens that are not there."""


def write_untrained(
    untrained: NDArray[np.bool_], *, grows: bool = False
) -> dict[str, list[list[int]]]:
    """Metadata for tokens that carry no gradient, shape [n]; empty where there are none. With `grows` those
    that may still follow carry none either."""
    edges = np.flatnonzero(np.diff(untrained, prepend=False, append=grows)).tolist()
    spans = [edges[i : i + 2] for i in range(0, len(edges), 2)]
    return {UNTRAINED: spans} if spans else {}


def read_untrained(metadata: struct_pb2.Struct, count: int) -> NDArray[np.bool_] | None:
    """Which of a trajectory's `count` tokens the agent takes out of the loss; None for none of them.

    Raises MarkInvalid.
    """
    if UNTRAINED not in metadata.fields:
        return None
    value = metadata.fields[UNTRAINED]
    if value.WhichOneof("kind") != "list_value":
        raise MarkInvalid(f"{UNTRAINED} is a list of [begin, end]")
    bounds: list[int] = []
    last = len(value.list_value.values) - 1
    for index, span in enumerate(value.list_value.values):
        ends = [end.number_value for end in span.list_value.values]
        whole = all(end.is_integer() for end in ends)
        if whole and len(ends) == 1 and index == last and ends[0] >= 0:
            # It may begin where nothing came.
            ends = [min(ends[0], count), count]
        elif not whole or len(ends) != 2 or ends[0] >= ends[1]:
            raise MarkInvalid(f"{UNTRAINED} holds {ends}, which is no [begin, end]")
        bounds += [int(end) for end in ends]
    if bounds and (min(bounds) < 0 or max(bounds) > count):
        raise MarkInvalid(f"{UNTRAINED} goes to {max(bounds)}; the trajectory has {count} tokens")
    if any(first > second for first, second in pairwise(bounds)):
        raise MarkInvalid(f"the spans of {UNTRAINED} overlap, or are out of order")
    untrained = np.zeros(count, np.bool_)
    for begin, end in zip(bounds[::2], bounds[1::2], strict=True):
        untrained[begin:end] = True
    return untrained


def write_unwanted(reason: str) -> Mapping[str, str]:
    """Metadata for a trajectory whose whole group is of no use."""
    return {UNWANTED: reason}


def read_unwanted(metadata: struct_pb2.Struct) -> str:
    """Why a trajectory's group is of no use; empty where nobody said so."""
    return metadata.fields[UNWANTED].string_value if UNWANTED in metadata.fields else ""


def write_status(status: str) -> Mapping[str, str]:
    """Metadata for a trajectory of which its function says why the answer ended."""
    return {STATUS: status}


def read_status(metadata: struct_pb2.Struct) -> str:
    """Why its function says that the answer ended; empty where it says nothing."""
    return metadata.fields[STATUS].string_value if STATUS in metadata.fields else ""


def write_metadata_whole() -> Mapping[str, str]:
    """Metadata for a trajectory with all that its function wrote into its sample's."""
    return {METADATA: _WHOLE}


def metadata_is_whole(metadata: struct_pb2.Struct) -> bool:
    """Whether nothing is missing of it."""
    return METADATA in metadata.fields and metadata.fields[METADATA].string_value == _WHOLE
