"""A trajectory as it goes into its group, and into the record of it; `group_bytes` makes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.server.journal.records import Part


class LeftOut(NamedTuple):
    """A segment whose arrays the short form of a trajectory does not have."""

    segment: int
    """Its index."""
    token_position: int
    """Tokens of the trajectory before it."""
    token_count: int


@dataclass(frozen=True, slots=True)
class EncodedTrajectory:
    """A Trajectory, in pieces that nobody changes any more."""

    parts: Sequence[Part]
    byte_count: int
    short: Sequence[Part]
    """The same without the arrays of some segments."""
    short_byte_count: int
    left_out: Sequence[LeftOut]
    """Those."""
