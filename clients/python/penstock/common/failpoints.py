"""Named places at which a test can make a process fail: `hit("journal.before_fsync")`.

    PENSTOCK_FAILPOINTS="journal.before_fsync=kill@3,checkpoint.before_rename=raise:ENOSPC"

At the n-th hit of a name (the first, without `@n`) the process kills itself with SIGKILL, stops itself with
SIGSTOP, or raises OSError with that errno. Without the variable `hit` is an empty function.
"""

from __future__ import annotations

import errno
import os
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

VARIABLE = "PENSTOCK_FAILPOINTS"


class FailpointInvalid(Exception):
    """The variable does not say what to do where."""


@dataclass(frozen=True, slots=True)
class _Plan:
    at: int
    act: Callable[[], None]


def _nothing(name: str) -> None:
    """Failpoints are off."""


def _planned(text: str) -> Callable[[str], None]:
    plans = dict(_parse(item.strip()) for item in text.split(",") if item.strip())
    hits: Counter[str] = Counter()

    def act(name: str) -> None:
        hits[name] += 1
        plan = plans.get(name)
        if plan is not None and hits[name] == plan.at:
            plan.act()

    return act


def _parse(item: str) -> tuple[str, _Plan]:
    name, equals, rest = item.partition("=")
    action, _, at = rest.partition("@")
    kind, _, detail = action.partition(":")
    if not (name and equals) or (at and not at.isdecimal()):
        raise FailpointInvalid(f"{VARIABLE}: {item!r} is no name=action or name=action@n")
    return name, _Plan(int(at or 1), _action(item, kind, detail))


def _action(item: str, kind: str, detail: str) -> Callable[[], None]:
    if kind == "kill":
        return lambda: os.kill(os.getpid(), signal.SIGKILL)
    if kind == "stop":
        return lambda: os.kill(os.getpid(), signal.SIGSTOP)
    code = getattr(errno, detail, None) if kind == "raise" else None
    if not isinstance(code, int):
        raise FailpointInvalid(f"{VARIABLE}: {item!r} names none of kill, stop, raise:ERRNO")

    def fail() -> None:
        raise OSError(code, os.strerror(code))

    return fail


hit: Callable[[str], None] = (
    _planned(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else _nothing
)
"""To be called at a place with its name."""
