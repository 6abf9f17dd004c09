"""A trajectory encoded for its group and for the group's journal record. `group_bytes` encodes
it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.server.journal.protocol import Part


class LeftOut(NamedTuple):
    """A segment whose arrays the short form of a trajectory omits."""

    segment: int
    """Index of the segment."""
    token_position: int
    """Number of the trajectory's tokens before it."""
    token_count: int


@dataclass(frozen=True, slots=True)
class EncodedTrajectory:
    """A Trajectory message, in pieces that no longer change."""

    parts: Sequence[Part]
    byte_count: int
    short: Sequence[Part]
    """The same message without the arrays of some segments."""
    short_byte_count: int
    left_out: Sequence[LeftOut]
    """The segments whose arrays `short` omits."""
