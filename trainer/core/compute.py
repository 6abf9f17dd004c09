"""The thread that computes.

Torch works in one thread that is not the event loop's, so that the exchange goes on under a long
step, and always in the same one, because each thread that calls into OpenMP starts a team of its
own.
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
    """Runs functions one after another."""

    def __init__(self, threads: int = 0) -> None:
        """`threads` is the size of torch's team; zero leaves it to torch."""
        self._executor = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix="compute",
            initializer=_set_threads,
            initargs=(threads,),
        )

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The function's result. It runs to its end even where the caller is cancelled."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, lambda: function(*args, **kwargs))

    def close(self) -> None:
        """Waits for what runs."""
        self._executor.shutdown()


def _set_threads(threads: int) -> None:
    if threads:
        torch.set_num_threads(threads)
