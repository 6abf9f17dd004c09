"""The compute thread.

Torch runs in a thread other than the event loop's, so that the exchange continues during a long
step. It is always the same thread, because OpenMP starts a separate team for each thread that calls
it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


class ComputeThread:
    """Runs functions one after another in a single thread."""

    def __init__(self, threads: int = 0) -> None:
        """`threads` is the size of torch's team. Zero leaves the choice to torch."""
        self._executor = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix="compute",
            initializer=_set_threads,
            initargs=(threads,),
        )

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Returns the function's result. The function runs to its end even if the caller is
        cancelled."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, lambda: function(*args, **kwargs))

    def close(self) -> None:
        """Waits for the running function."""
        self._executor.shutdown()


def _set_threads(threads: int) -> None:
    if threads:
        torch.set_num_threads(threads)
