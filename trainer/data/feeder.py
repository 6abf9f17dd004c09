"""Submits tasks from the data source so that every server has enough of them waiting.

If a server may have lost tasks, only the outstanding ones are submitted again. A server that lost a group
and made another one delivers both under the same task, which is still trained once: `take` returns False
for the second group.

Each reply to `SubmitTasks` reports how many tasks wait at the server. Every group that the server delivers
or reports as dropped during that call, or until the next one, counts one less. Servers are filled
independently, so an unreachable one does not keep tasks from the others.

A full server, whether of tasks or of anything else, is left alone for the delay that it asked for, because
room may open only when this trainer takes groups and trains them.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import grpc

from penstock.trainer.config.data import DataConfig
from penstock.trainer.core.errors import ServerFull
from penstock.trainer.data.indices import DataIndices
from penstock.trainer.data.sources.problem import Problem, Source
from penstock.trainer.data.submission import MOST_TASKS_PER_CALL, submit_tasks
from penstock.trainer.data.tasks import AGAIN, TIMES, build_task, renamed, times_asked_again
from penstock.v1 import task_service_pb2

log = logging.getLogger(__name__)

# Data source under which rewards are counted if the task belongs to another run.
UNKNOWN_SOURCE = "unknown"

# Refusal reason for a group in which every attempt failed. Refusing the group settles its task.
ALL_FAILED = "ALL_FAILED"


Call = tuple[Sequence[int], str]
"""Indices that fit one call, and their id suffix."""


@dataclass(slots=True, eq=False)
class ServerTasks:
    """The tasks waiting at one server."""

    channel: grpc.aio.Channel
    target: int
    """How many tasks should wait."""
    pending: int = 0
    """How many tasks wait, as far as the trainer knows."""
    trainer_epoch: Callable[[], int] = lambda: 0
    """Epoch of the live session with that server; zero without one."""
    filling: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while filling: two concurrent fills would submit the same indices."""
    lacking: deque[Call] = field(default_factory=deque[Call])
    """Tasks that the server may have lost and has not been given again."""
    full: asyncio.Event = field(default_factory=asyncio.Event)
    """Set if the server was full at the last fill."""
    full_seconds: float = 0.0
    """The delay that the full server asked for."""


@dataclass(eq=False, repr=False)
class TaskFeeder:
    """Keeps enough tasks waiting at every server."""

    servers: Sequence[ServerTasks]
    source: Source
    config: DataConfig
    indices: DataIndices
    """Which index of the data is in which state, and to which server it belongs."""
    run_id: str
    attempts: int | None = None
    """Attempts to start for each group (`groups.attempts`)."""
    _again: dict[int, str] = field(default_factory=dict[int, str])
    """Id suffixes of the indices whose prompt is asked again."""
    _to_ask_again: dict[int, str] = field(default_factory=dict[int, str])
    _data_sources: dict[int, str] = field(default_factory=dict[int, str])
    """Data sources of the unsettled indices that this process submitted."""

    def arrived(self, server: int) -> None:
        """Count one task less at the server: it delivered a group, or reported one as dropped."""
        self.servers[server].pending -= 1

    def take(self, task_id: str) -> bool:
        """Mark a group of this task as in hand.

        Returns False if another group of the task is in hand, or was already trained or refused.
        Always returns True for a task of another run.
        """
        index = self._index(task_id)
        return True if index is None else self.indices.take(index)

    def awaits(self, task_id: str) -> bool:
        """Return whether a group of this task can still arrive: it is this run's, and unsettled."""
        index = self._index(task_id)
        return index is not None and self.indices.is_outstanding(index)

    def settled(self, task_id: str) -> None:
        """Mark the task as done: its group was trained or refused, and no other one is needed."""
        index = self._index(task_id)
        if index is not None:
            self.indices.settle(index)
            self._again.pop(index, None)
            self._to_ask_again.pop(index, None)
            self._data_sources.pop(index, None)

    def ask_again(self, task_id: str) -> None:
        """Have the prompt of a refused group answered by another group.

        The next `fill` submits it under a new task id. Does nothing if the task is already settled.
        """
        index = self._index(task_id)
        if index is None or not self.indices.is_outstanding(index):
            return
        suffix = task_id.rpartition("/")[2].partition(AGAIN)[2].partition(TIMES)[0]
        self.indices.give_back(index)
        suffix = f"{suffix}{TIMES}{times_asked_again(task_id) + 1}"
        self._again[index] = self._to_ask_again[index] = suffix

    def place(self, task_id: str) -> int:
        """Return the task's index in the data; tasks of other runs sort after all others."""
        index = self._index(task_id)
        return sys.maxsize if index is None else index

    def data_source(self, task_id: str) -> str:
        """Return the data source under which the task's rewards are counted.

        It is the task's `data_source` as agents see it. It follows from the index alone, so a
        resumed trainer finds it too. For a task of another run, returns `UNKNOWN_SOURCE`.
        """
        index = self._index(task_id)
        if index is None:
            return UNKNOWN_SOURCE
        found = self._data_sources.get(index)
        return self.source.problem(index).counted_under if found is None else found

    def task(self, task_id: str) -> task_service_pb2.Task | None:
        """Rebuild the task as agents saw it; None if it belongs to another run.

        Raises ConfigInvalid if the data cannot be read.
        """
        index = self._index(task_id)
        if index is None:
            return None
        task = self._build(self.source.problem(index), index)
        task.task_id = task_id
        return task

    def _build(self, problem: Problem, index: int, again: str = "") -> task_service_pb2.Task:
        config, attempts = self.config, self.attempts
        return build_task(
            problem, run_id=self.run_id, index=index, config=config, attempts=attempts, again=again
        )

    def _index(self, task_id: str) -> int | None:
        """Return the task's index and record that it was submitted; None for another run's task."""
        run_id, _, place = task_id.rpartition("/")
        number = place.partition(AGAIN)[0]
        if run_id != self.run_id or not number.isdecimal():
            return None
        index = int(number)
        before = self.indices.known(index)
        if before:
            # A killed trainer submitted these. It may have used other servers, one of which may be
            # gone for good. A server that has the tasks already ignores the repetition.
            server = self.indices.division.server_of(index)
            self.servers[server].lacking.extend(_calls(before))
        return index

    async def submit_again(self, server: int) -> None:
        """Submit again what is outstanding and not in hand, to a server that may have lost it.

        Tasks that the server still knows are unaffected. Raises ServerLost and SessionRefused.
        """
        tasks = self.servers[server]
        async with tasks.filling:
            tasks.lacking.clear()
            tasks.lacking.extend(_calls(self.indices.waiting(server)))
        await self.fill(server)

    async def submit_anew(self, server: int, task_ids: Iterable[str], again: int) -> None:
        """Submit, under new ids, tasks whose groups a server lost while it still knows their ids.

        Tasks of other servers are skipped. Raises ServerLost and SessionRefused.
        """
        tasks = self.servers[server]
        async with tasks.filling:
            known = (self._index(task_id) for task_id in task_ids)
            lost = [
                index
                for index in known
                if index is not None
                and self.indices.is_outstanding(index)
                and self.indices.division.server_of(index) == server
            ]
            tasks.lacking.extend(_calls(lost, str(again)))
        await self.fill(server)

    async def fill(self, server: int) -> None:
        """Submit what the server lacks, then new tasks until enough are waiting or the server is full.

        Raises ServerLost and SessionRefused.
        """
        tasks = self.servers[server]
        async with tasks.filling:
            try:
                await self._give_back(server)
                await self._fill(server)
            except ServerFull as error:
                if not tasks.full.is_set():
                    log.warning("%s; submitting again until there is room", error)
                tasks.full_seconds = error.retry_after_seconds
                tasks.full.set()
                return
            tasks.full.clear()

    async def keep_filled(
        self, server: int, ask: Callable[[Callable[[], Awaitable[None]]], Awaitable[object]]
    ) -> None:
        """Whenever the server is full, fill it through `ask` until it no longer is.

        Runs until it is cancelled. Raises what `fill` raises.
        """
        tasks = self.servers[server]
        while True:
            await tasks.full.wait()
            await asyncio.sleep(tasks.full_seconds)
            await ask(lambda: self.fill(server))

    async def _give_back(self, server: int) -> None:
        lacking = self.servers[server].lacking
        while lacking:
            indices, again = lacking[0]
            still = [index for index in indices if self.indices.is_outstanding(index)]
            if still:
                await self._submit(server, still, again)
            lacking.popleft()

    async def _fill(self, server: int) -> None:
        tasks = self.servers[server]
        while asked := self._asked_again(server):
            await self._submit(server, [index for index, _ in asked])
            for index, suffix in asked:
                # During the call, the index may have been given another suffix.
                if self._to_ask_again.get(index) == suffix:
                    del self._to_ask_again[index]
        while tasks.pending < tasks.target:
            count = min(tasks.target - tasks.pending, MOST_TASKS_PER_CALL)
            indices = self.indices.upcoming(server, count)
            await self._submit(server, indices)
            self.indices.submitted(indices)

    def _asked_again(self, server: int) -> list[tuple[int, str]]:
        """Return the server's indices to ask again with their suffixes, at most one call's worth."""
        own = (
            (index, suffix)
            for index, suffix in self._to_ask_again.items()
            if self.indices.division.server_of(index) == server
        )
        return list(islice(own, MOST_TASKS_PER_CALL))

    async def _submit(self, server: int, indices: Sequence[int], again: str = "") -> None:
        """Raises ServerFull, ServerLost and SessionRefused."""
        tasks: list[task_service_pb2.Task] = []
        for index in indices:
            problem = self.source.problem(index)
            self._data_sources[index] = problem.counted_under
            suffix = renamed(self._again.get(index, ""), again)
            tasks.append(self._build(problem, index, suffix))
            # Computing a problem may take long; let streams and uploads proceed in between.
            await asyncio.sleep(0)
        at = self.servers[server]
        before = at.pending
        waiting = await submit_tasks(at.channel, tasks, self.run_id, at.trainer_epoch)
        # The reply may be older than a group that arrived during the call. Counting that group twice
        # brings one task too many; not counting it could leave the server without tasks for good.
        at.pending += waiting - before


def _calls(indices: Sequence[int], again: str = "") -> Iterable[Call]:
    for begin in range(0, len(indices), MOST_TASKS_PER_CALL):
        yield indices[begin : begin + MOST_TASKS_PER_CALL], again
