"""What a check found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

GIB = 1 << 30


class State(StrEnum):
    OK = "ok"
    WARNING = "warning"
    """A run works, but slowly, or only for some of what Penstock can do."""
    MISSING = "missing"
    """No run of server, worker and trainer works on this machine."""


@dataclass(frozen=True)
class Finding:
    name: str
    state: State
    found: str
    """What was found, and what it means."""
    hint: str = ""
    """What to do."""


def gib(count: float) -> str:
    return f"{count / GIB:.1f} GiB"


def gigabytes(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
