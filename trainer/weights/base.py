"""What the trainer knows of the version that one server keeps as the base of differences.

The server holds a base once it samples a version that the trainer keeps too. It may lose the base, reject a
switch or refuse a difference; the next version then goes whole. A server that refused several differences
in a row keeps no base, and is sent no more of them.
"""

from __future__ import annotations

from dataclasses import dataclass

# A server that keeps no base refuses every difference; two refusals can be chance.
REFUSALS_IN_A_ROW = 3


@dataclass(eq=False, slots=True)
class Base:
    """The base that one server holds, and how often it is renewed."""

    anchor_every: int
    """At least every this many versions, one is sent whole."""
    version: int | None = None
    """The version that the server holds; None if that is unknown."""
    _deltas_since_anchor: int = 0
    _refused_in_a_row: int = 0

    @property
    def is_refused(self) -> bool:
        return self._refused_in_a_row >= REFUSALS_IN_A_ROW

    @property
    def may_exist(self) -> bool:
        return not self.is_refused and self.anchor_every != 1

    @property
    def anchor_is_due(self) -> bool:
        return self._deltas_since_anchor + 1 >= self.anchor_every

    def sent(self, *, delta: bool) -> None:
        """The server has staged a version."""
        self._deltas_since_anchor = self._deltas_since_anchor + 1 if delta else 0
        if delta:
            self._refused_in_a_row = 0

    def refused(self) -> None:
        """The server refused a difference."""
        self.version = None
        self._refused_in_a_row += 1
