"""What a whole-rollout function takes groups from.

`get_samples` waits, and who waits decides for how long. The function's own call waits until there is a
group: what it waits for comes by itself. What the function left running beside its calls, such as a thread
whose event loop takes groups and makes them, would wait for ever: the server admits another group when one
is returned, and while its loop stands still none is. It gets what there is, after a moment also nothing.
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
    """What a data source asks of the `WholeRollout` that it is of."""

    @property
    def calling_thread(self) -> int: ...
    @property
    def given_back_count(self) -> int: ...
    async def take(self, count: int, *, aside: bool) -> list[list[Sample]]: ...
    async def give_back(self, groups: Sequence[list[Sample]]) -> None: ...


class RolloutMisused(WorkerMisconfigured):
    """A whole-rollout function asked for, or returned, what cannot be."""


class RolloutStopped(Exception):
    """A group asked for when the worker stops."""


class DataSource:
    """What the function takes groups from; it may be called from any thread but the worker's own loop."""

    def __init__(self, rollout: Rollout, loop: asyncio.AbstractEventLoop) -> None:
        self._rollout, self._loop = rollout, loop
        self._standing: WeakSet[asyncio.AbstractEventLoop] = WeakSet()
        """Loops that were given nothing and have not gone on since."""
        self.metadata: dict[str, Any] = {}

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """So many groups, or fewer where those that are there should not wait for others.

        None where it is called from an event loop that goes on between the function's calls, and the
        function has groups: let the loop go on, and ask again. Raises RolloutMisused where that loop asks
        again without having gone on, and where groups cannot come; RolloutStopped where the worker stops.
        """
        loop = self._loop_aside()
        if loop is not None and loop in self._standing:
            raise RolloutMisused(
                "get_samples had no group and was asked again before the event loop went on, by which the "
                "groups that the function has are made: await something where it returns an empty list"
            )
        taken = self._rollout.take(num_samples, aside=loop is not None)
        groups = asyncio.run_coroutine_threadsafe(taken, self._loop).result()
        if loop is not None and not groups:
            self._standing.add(loop)
            loop.call_soon(self._standing.discard, loop)
        return groups

    def _loop_aside(self) -> asyncio.AbstractEventLoop | None:
        """The event loop that stands still while the caller waits, unless the function's call waits too."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return None
        thread = self._rollout.calling_thread
        if threading.get_ident() == thread or runner_of(asyncio.current_task()) == thread:
            return None
        return loop

    def add_samples(self, samples: Sequence[list[Sample]]) -> None:
        """Gives groups back."""
        given = self._rollout.give_back(list(samples))
        asyncio.run_coroutine_threadsafe(given, self._loop).result()

    def get_buffer_length(self) -> int:
        """Groups that were given back."""
        return self._rollout.given_back_count

    def update_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Keeps something for the function."""
        self.metadata.update(metadata)

    def get_metadata(self) -> dict[str, Any]:
        """What was kept."""
        return self.metadata

    def __len__(self) -> int:
        """As many as there are tasks, which nobody here knows: it only has to be true."""
        return 1 << 30
