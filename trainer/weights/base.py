"""What the trainer knows of the version that one server keeps as the base of differences.

UNKNOWN -> HELD      the server samples a version that the trainer keeps too
HELD -> UNKNOWN      it may have lost it, rejected a switch or refused a difference; the next one goes whole
any -> REFUSED       several differences in a row were refused: the server keeps no base
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

# A server that keeps no base refuses every difference; two refusals can be chance.
REFUSALS_IN_A_ROW = 3


class BaseState(enum.Enum):
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
        return self.state is not BaseState.REFUSED and self._anchor_every != 1

    @property
    def anchor_is_due(self) -> bool:
        return self._deltas_since_anchor + 1 >= self._anchor_every

    def is_at(self, weight_version: int) -> bool:
        return self.state is BaseState.HELD and self._version == weight_version

    def hold(self, weight_version: int) -> None:
        self._move(BaseState.HELD)
        self._version = weight_version

    def forget(self) -> None:
        if self.state is BaseState.HELD:
            self._move(BaseState.UNKNOWN)

    def sent(self, *, delta: bool) -> None:
        """The server has staged a version."""
        self._deltas_since_anchor = self._deltas_since_anchor + 1 if delta else 0
        if delta:
            self._refused_in_a_row = 0

    def refused(self) -> None:
        """The server refused a difference."""
        self.forget()
        self._refused_in_a_row += 1
        if self._refused_in_a_row == REFUSALS_IN_A_ROW:
            self._move(BaseState.REFUSED)

    def _move(self, state: BaseState) -> None:
        if state not in _TRANSITIONS[self.state]:
            raise RuntimeError(f"a base cannot become {state.value} from {self.state.value}")
        self.state = state
