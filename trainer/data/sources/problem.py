"""A problem, and what a source of problems is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Problem:
    """One entry of the data."""

    messages: tuple[tuple[str, str], ...]
    """(role, text), oldest first."""
    metadata: dict[str, object]
    """What a reward needs, as JSON."""
    data_source: str
    """Name of the source."""

    @property
    def counted_under(self) -> str:
        """What its rewards are counted under: the name of its source, or what its row says itself."""
        said = self.metadata.get("data_source")
        return said if isinstance(said, str) else self.data_source

    @property
    def for_agents(self) -> dict[str, object]:
        """What agents are told of it: they see no other field of where a problem is from, and what its row
        says itself stands, unless it is null."""
        said = self.metadata.get("data_source")
        return {**self.metadata, "data_source": self.data_source if said is None else said}


class Source(Protocol):
    """Endless problems by index; the same index is always the same problem."""

    @property
    def name(self) -> str:
        """What its problems are counted under."""
        ...

    @property
    def identity(self) -> str:
        """The same text only where every index is the same problem."""
        ...

    def problem(self, index: int) -> Problem:
        """The problem of an index, from zero. Raises ConfigInvalid where the data cannot be read."""
        ...


@runtime_checkable
class Finite(Protocol):
    """A source that knows when its problems repeat."""

    @property
    def size(self) -> int:
        """Problems in one pass."""
        ...
