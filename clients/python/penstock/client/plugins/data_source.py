"""The source from which a whole-rollout function takes groups.

How long `get_samples` waits depends on the caller. Inside the function's call, it waits until a
group arrives, because the worker keeps leasing groups meanwhile. Code that the function left
running between calls, such as a thread whose event loop takes and makes groups, would wait forever.
The server admits another group only after one is returned, and none is returned while that loop is
blocked. So such a caller gets the groups that are available, possibly none, after a short wait.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol
from weakref import WeakSet

from penstock.client.plugins.samples import Sample
from penstock.client.plugins.slime_functions import runner_of
from penstock.client.worker import WorkerMisconfigured


class Rollout(Protocol):
    """The methods of `WholeRollout` that a data source uses."""

    calling_thread: int

    @property
    def given_back_count(self) -> int: ...
    async def take(self, count: int, *, aside: bool) -> list[list[Sample]]: ...
    async def give_back(self, groups: Sequence[list[Sample]]) -> None: ...


class RolloutMisused(WorkerMisconfigured):
    """A whole-rollout function requested or returned something impossible."""


class RolloutStopped(Exception):
    """A group was requested while the worker stops."""


class DataSource:
    """Call it from any thread except that of the worker's own loop."""

    def __init__(self, rollout: Rollout, loop: asyncio.AbstractEventLoop) -> None:
        self._rollout, self._loop = rollout, loop
        self._standing: WeakSet[asyncio.AbstractEventLoop] = WeakSet()
        """Loops that received no groups and have not run since."""
        self.metadata: dict[str, Any] = {}

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Returns `num_samples` groups, or fewer if the available ones should not wait for others.

        The list can be empty if the caller is an event loop that runs between the function's calls, and
        the function has groups. Let the loop run, then ask again. Raises RolloutMisused if that loop asks
        again without having run, or if no groups can come. Raises RolloutStopped if the worker stops.
        """
        loop = self._loop_aside()
        if loop is not None and loop in self._standing:
            raise RolloutMisused(
                "get_samples returned no group and was called again before the event loop could run. The "
                "loop makes the function's groups: await something after an empty list"
            )
        taken = self._rollout.take(num_samples, aside=loop is not None)
        groups = asyncio.run_coroutine_threadsafe(taken, self._loop).result()
        if loop is not None and not groups:
            self._standing.add(loop)
            loop.call_soon(self._standing.discard, loop)
        return groups

    def _loop_aside(self) -> asyncio.AbstractEventLoop | None:
        """Returns the loop that this call blocks, unless the function's own call waits too."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return None
        thread = self._rollout.calling_thread
        if threading.get_ident() == thread or runner_of(asyncio.current_task()) == thread:
            return None
        return loop

    def add_samples(self, samples: Sequence[list[Sample]]) -> None:
        """Gives groups back, to be taken again."""
        given = self._rollout.give_back(list(samples))
        asyncio.run_coroutine_threadsafe(given, self._loop).result()

    def get_buffer_length(self) -> int:
        return self._rollout.given_back_count

    def update_metadata(self, metadata: Mapping[str, Any]) -> None:
        self.metadata.update(metadata)

    def get_metadata(self) -> dict[str, Any]:
        return self.metadata

    def __len__(self) -> int:
        """Large, because the number of tasks is unknown and the source must be truthy."""
        return 1 << 30
