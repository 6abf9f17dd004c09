"""What a check found: problems that no run survives, and remarks that it may."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")


@dataclass
class Report:
    """Each line says where, what, and what to do."""

    problems: list[str] = field(default_factory=list[str])
    remarks: list[str] = field(default_factory=list[str])
    """What could not be checked, or may be wrong."""
    checked: list[str] = field(default_factory=list[str])
    """What is as it should be."""

    def problem(self, where: str, what: object) -> None:
        """`what` may have several lines, each a problem."""
        self.problems += [_line(where, line) for line in str(what).splitlines()]

    def remark(self, where: str, what: object) -> None:
        self.remarks.append(_line(where, what))


def _line(where: str, what: object) -> str:
    return f"{where}: {what}" if where else str(what)


def within(seconds: float, act: Callable[[], T]) -> T:
    """What `act` returns or raises. Raises TimeoutError if it takes longer, and leaves it running."""
    result: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            result.append(act())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not result:
        raise TimeoutError
    return result[0]
