"""What the trainer knows of the version that one server keeps as the base of differences.

UNKNOWN -> HELD      the server samples a version that the trainer keeps too
HELD -> UNKNOWN      the server may have lost it, rejected a switch or refused a difference
any -> REFUSED       several differences in a row were refused: the server keeps no base
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

# A server that keeps no base refuses every difference; two refusals can be chance.
REFUSALS_IN_A_ROW = 3


class BaseState(enum.Enum):
    """Whether the next version can be sent as a difference."""

    UNKNOWN = "unknown"
    HELD = "held"
    REFUSED = "refused"


_TRANSITIONS: Mapping[BaseState, frozenset[BaseState]] = {
    BaseState.UNKNOWN: frozenset(BaseState),
    BaseState.HELD: frozenset(BaseState),
    BaseState.REFUSED: frozenset({BaseState.REFUSED}),
}


class Base:
    """The base that one server holds, and how often it is renewed."""

    def __init__(self, anchor_every: int) -> None:
        """At least every `anchor_every`-th version is sent whole."""
        self._anchor_every = anchor_every
        self.state = BaseState.UNKNOWN
        self._version = 0
        """The version that the server holds, while the state is HELD."""
        self._deltas_since_anchor = 0
        self._refused_in_a_row = 0

    @property
    def may_exist(self) -> bool:
        """Whether the server may ever hold a base from which differences are sent."""
        return self.state is not BaseState.REFUSED and self._anchor_every != 1

    @property
    def anchor_is_due(self) -> bool:
        """Whether enough differences were sent for the next version to go whole."""
        return self._deltas_since_anchor + 1 >= self._anchor_every

    def is_at(self, weight_version: int) -> bool:
        """Return whether the server holds this version."""
        return self.state is BaseState.HELD and self._version == weight_version

    def hold(self, weight_version: int) -> None:
        """Note that the server samples a version from which differences can be sent."""
        self._move(BaseState.HELD)
        self._version = weight_version

    def forget(self) -> None:
        """Assume nothing: the next version is sent whole."""
        if self.state is BaseState.HELD:
            self._move(BaseState.UNKNOWN)

    def sent(self, *, delta: bool) -> None:
        """Note that the server has staged a version."""
        self._deltas_since_anchor = self._deltas_since_anchor + 1 if delta else 0
        if delta:
            self._refused_in_a_row = 0

    def refused(self) -> None:
        """Note that the server refused a difference. Several in a row move to REFUSED."""
        self.forget()
        self._refused_in_a_row += 1
        if self._refused_in_a_row == REFUSALS_IN_A_ROW:
            self._move(BaseState.REFUSED)

    def _move(self, state: BaseState) -> None:
        if state not in _TRANSITIONS[self.state]:
            raise RuntimeError(f"a base cannot become {state.value} from {self.state.value}")
        self.state = state
