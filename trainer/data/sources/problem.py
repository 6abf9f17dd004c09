"""A problem, and the interface of a source: it returns problem number i of an endless sequence.

Every source returns the same problem for the same number, at any time, in any order and in any process. A
checkpoint therefore keeps only numbers: the first one that was never submitted, and the earlier ones that
are not trained yet. It also keeps the source's `identity`, because a run resumes only with the same data.

If data cannot be read, a row has no prompt, or a library is missing, the run does not start: ConfigInvalid
names the row. If an iterator fails later, the run ends with an error that names the entry. Submitted tasks
are not lost, and a resumed run continues at that entry.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class ProblemTool:
    """A function that the policy may call."""

    name: str
    description: str
    parameters: dict[str, object]
    """JSON Schema of the arguments."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One entry of the data."""

    messages: tuple[tuple[str, str], ...]
    """(role, text), oldest first."""
    metadata: dict[str, object]
    """Values that a reward needs, as JSON."""
    data_source: str
    """Name of the source."""
    tools: tuple[ProblemTool, ...] = ()
    text_prompt: bool = False
    """Whether the entry has the prompt as a text."""

    @property
    def counted_under(self) -> str:
        """Name under which its rewards are counted: the row's own `data_source`, or else the source."""
        said = self.metadata.get("data_source")
        return said if isinstance(said, str) else self.data_source

    @property
    def for_agents(self) -> dict[str, object]:
        """The metadata that agents receive. Its `data_source` is the row's own value, or the source
        if that is missing or null. Agents have no other field that names the source."""
        said = self.metadata.get("data_source")
        return {**self.metadata, "data_source": self.data_source if said is None else said}


def setting(section: str, key: str) -> str:
    """The name of a setting of a section, for errors. An option of the command line stands for all."""
    return section if section.startswith("--") else f"{section}.{key}"


class Source(Protocol):
    """An endless sequence of problems. The same index always returns the same problem."""

    @property
    def name(self) -> str:
        """Name under which its problems are counted."""
        ...

    @property
    def identity(self) -> str:
        """A text that is equal for two sources only if every index has the same problem."""
        ...

    def problem(self, index: int) -> Problem:
        """Returns the problem of an index, from zero. Raises ConfigInvalid if the data cannot be read."""
        ...


@runtime_checkable
class Finite(Protocol):
    """A source that knows after how many problems it repeats."""

    @property
    def size(self) -> int:
        """Number of problems in one pass."""
        ...
