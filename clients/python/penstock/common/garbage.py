"""What Python's garbage collector looks through, in a process that starts much and then serves for long."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Generator


@contextlib.contextmanager
def start_up_kept() -> Generator[None]:
    """Takes what there is by now for good, modules and all, until the block ends: nobody looks for garbage
    in it. With torch's modules among it each full look stands still for half a second."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        # Else an interpreter that ends leaves it, which libraries report as leaks of their own.
        gc.unfreeze()
