"""The children of this process, including orphaned descendants that it adopts.

For a library that starts processes and leaves some behind when it ends. `/proc` lists the children of a
process per thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Set
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> set[int]:
    """Makes orphaned descendants children of this process from now on. Returns its current children."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")
    return _children()


def end_all_but(before: Set[int]) -> None:
    """Kills all children but those, and the descendants adopted meanwhile; blocks until all have ended."""
    while left := _children() - before:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _children() -> set[int]:
    found: set[int] = set()
    for listed in Path("/proc/self/task").glob("*/children"):
        # A thread may end while it is read.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found |= {int(pid) for pid in listed.read_text().split()}
    return found
