"""Kills all processes that the policy's code has started, even those in a new session.

An orphaned descendant becomes a child of this process, so no descendant can escape.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
# Pause between two rounds: a killed process does not always end at once.
LOOK_SECONDS = 0.01


def adopt_descendants() -> None:
    """Makes orphaned descendants children of this process from now on. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


def end_descendants() -> None:
    """Kills every descendant of this process; returns when none is left."""
    while True:
        for process_id in descendants():
            with suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(LOOK_SECONDS)


def descendants() -> set[int]:
    """Process ids of all descendants, from /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            # "PID (NAME) STATE PARENT ...": the name may contain any characters.
            parent = (entry / "stat").read_bytes().rpartition(b")")[2].split()[1]
            children.setdefault(int(parent), []).append(int(entry.name))
    found: set[int] = set()
    waiting = [os.getpid()]
    while waiting:
        below = children.get(waiting.pop(), [])
        found.update(below)
        waiting += below
    return found
