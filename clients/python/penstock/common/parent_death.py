"""Ends spawned processes when the process that spawned them ends, even by SIGKILL.

`multiprocessing` has no hook between the start of a child and its target, whose modules may take many
seconds to import. But it unpickles the name of the child's parent before the target. So while
`binding_children` is open, that name is a special string. Unpickling it asks the kernel to kill the child
as soon as its parent is gone. A child whose parent died before that moment exits.

The kernel watches the *thread* that spawned the child. It must live as long as the child is wanted.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


@contextmanager
def binding_children(prepare: Callable[[], None]) -> Generator[None]:
    """Bind every process that `multiprocessing` spawns in this context; each calls `prepare` first.

    `prepare` must be a function of a module that is quick to import.
    """
    process = multiprocessing.current_process()
    name = process.name
    process.name = _BindingName(name, prepare)
    try:
        yield
    finally:
        process.name = name


def die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent `parent_pid` ends; exit if it already has."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have ended before the request; the child then already has another parent.
    if os.getppid() != parent_pid:
        os._exit(1)


def prctl(option: int, value: int) -> None:
    """Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


class _BindingName(str):
    __slots__ = ("_prepare",)
    _prepare: Callable[[], None]

    def __new__(cls, name: str, prepare: Callable[[], None]) -> _BindingName:
        binding = super().__new__(cls, name)
        binding._prepare = prepare
        return binding

    def __reduce__(self) -> tuple[Callable[..., str], tuple[object, ...]]:
        return _arrive, (str(self), os.getpid(), self._prepare)


def _arrive(name: str, parent_pid: int, prepare: Callable[[], None]) -> str:
    """Run in the child, before any other code of this package."""
    die_with(parent_pid)
    prepare()
    return name
