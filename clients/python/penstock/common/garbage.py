"""Tunes Python's garbage collector for processes with a large start-up and a long life."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Generator


@contextlib.contextmanager
def start_up_kept() -> Generator[None]:
    """Excludes all existing objects, modules included, from garbage collection within the block.

    With torch's modules among them, each full collection would pause the process for half a second.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        # Otherwise the objects are not freed at exit, and libraries report leaks.
        gc.unfreeze()
