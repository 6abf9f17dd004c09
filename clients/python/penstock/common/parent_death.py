"""Ties the life of spawned processes to the process that spawns them, SIGKILL of the latter included.

`multiprocessing` has no hook between the start of a child and its target, whose modules may take
many seconds to import. But before the target it unpickles the name of the child's parent: so while
`binding_children` is open that name is a string which, when unpickled, asks the kernel to kill the
child as soon as its parent is gone. A child whose parent died before that moment ends itself.

The kernel watches the *thread* that spawned the child: it must live as long as the child is wanted.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager

PR_SET_PDEATHSIG = 1


@contextmanager
def binding_children(prepare: Callable[[], None]) -> Generator[None]:
    """Binds every process that `multiprocessing` spawns meanwhile, and has it call `prepare` first.

    `prepare` is a function of a module that is quick to import.
    """
    process = multiprocessing.current_process()
    name = process.name
    process.name = _BindingName(name, prepare)
    try:
        yield
    finally:
        process.name = name


def die_with(parent_pid: int) -> None:
    """Has the kernel kill this process when `parent_pid`, its parent, ends; at once if it has."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # The parent may have ended before the request; the child then already has another one.
    if os.getppid() != parent_pid:
        os._exit(1)


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
    """Runs in the child, as its first act of ours."""
    die_with(parent_pid)
    prepare()
    return name
