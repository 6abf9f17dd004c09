"""Failpoints: named places at which a test makes a process fail, such as `hit("journal.before_fsync")`.

    PENSTOCK_FAILPOINTS="journal.before_fsync=kill@3,checkpoint.before_rename=raise:ENOSPC"

At the n-th hit of a name (by default the first) the process kills itself with SIGKILL, stops itself with
SIGSTOP, or raises OSError with that errno. If the variable is not set, `hit` does nothing.
"""

from __future__ import annotations

import errno
import os
import signal
from collections import Counter
from collections.abc import Callable

VARIABLE = "PENSTOCK_FAILPOINTS"


class FailpointInvalid(Exception):
    """The environment variable cannot be parsed."""


def _nothing(name: str) -> None:
    """Does nothing: failpoints are off."""


def _planned(text: str) -> Callable[[str], None]:
    plans = dict(_parse(item.strip()) for item in text.split(",") if item.strip())
    hits: Counter[str] = Counter()

    def count(name: str) -> None:
        hits[name] += 1
        at, act = plans.get(name, (0, None))
        if act is not None and hits[name] == at:
            act()

    return count


def _parse(item: str) -> tuple[str, tuple[int, Callable[[], None]]]:
    """The name, the hit to act at, and what to do then."""
    name, equals, rest = item.partition("=")
    action, _, at = rest.partition("@")
    kind, _, detail = action.partition(":")
    if not (name and equals) or (at and not at.isdecimal()):
        raise FailpointInvalid(f"{VARIABLE}: {item!r} is not name=action or name=action@n")
    return name, (int(at or 1), _action(item, kind, detail))


def _action(item: str, kind: str, detail: str) -> Callable[[], None]:
    if kind in ("kill", "stop"):
        number = signal.SIGKILL if kind == "kill" else signal.SIGSTOP
        return lambda: os.kill(os.getpid(), number)
    code = getattr(errno, detail, None) if kind == "raise" else None
    if not isinstance(code, int):
        raise FailpointInvalid(
            f"{VARIABLE}: the action of {item!r} is not kill, stop or raise:ERRNO"
        )

    def fail() -> None:
        raise OSError(code, os.strerror(code))

    return fail


hit: Callable[[str], None] = (
    _planned(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else _nothing
)
"""Marks a failpoint; call it with the failpoint's name."""
