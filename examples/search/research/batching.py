"""Requests that come one by one, answered in batches.

    submit -> queue -> _work: takes the first, waits for others up to the window or the size -> answer

A batch closes when it is full, or `window_seconds` after its first request; one batch is computed at a
time, in a thread, and those that come meanwhile are the next. Each caller gets its own part of the answer.
What the computation raises reaches every caller of that batch, and no other. A caller that gave up leaves
the batch before it begins. A queue that is full refuses at once, with `Full`. `close` answers what was
accepted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Full(Exception):
    """More requests wait than there is room for."""


class Closed(Exception):
    """It was closed, and takes no more."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of a batcher."""

    window_seconds: float = 0.01
    """Longest time the first request of a batch waits for others."""
    max_batch: int = 64
    """Requests in a batch."""
    max_waiting: int = 4096
    """Requests that wait for a batch."""


class Batcher(Generic[T, R]):
    """Runs `compute` on batches of what is submitted; to be made where an event loop runs."""

    def __init__(self, compute: Callable[[Sequence[T]], Sequence[R]], limits: Limits) -> None:
        """`compute` returns one answer for each request, in their order; it runs in a thread."""
        self._compute, self._limits = compute, limits
        self._queue: asyncio.Queue[tuple[T, asyncio.Future[R]] | None] = asyncio.Queue()
        self._closed = False
        self.batches = 0
        """Batches computed."""
        self.requests = 0
        """Requests in them."""
        self._working = asyncio.create_task(self._work())

    @property
    def waiting(self) -> int:
        """Requests that wait for a batch."""
        return self._queue.qsize()

    async def submit(self, request: T) -> R:
        """The answer to one request. Raises Full, Closed, and what the computation raised."""
        if self._closed:
            raise Closed
        if self._queue.qsize() >= self._limits.max_waiting:
            raise Full
        answer: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait((request, answer))
        return await answer

    async def close(self) -> None:
        """Takes no more, and returns when everything accepted is answered."""
        if not self._closed:
            self._closed = True
            self._queue.put_nowait(None)
        await self._working

    async def _work(self) -> None:
        """Consumes requests; waits for the first of a batch; produces answers; ended by `close`."""
        try:
            more = True
            while more:
                batch, more = await self._gather()
                # Who gave up has a cancelled future.
                wanted = [(request, answer) for request, answer in batch if not answer.done()]
                if wanted:
                    await self._answer(wanted)
        finally:
            # However it ended, nobody waits for an answer that will not come.
            self._closed = True
            while not self._queue.empty():
                entry = self._queue.get_nowait()
                if entry is not None and not entry[1].done():
                    entry[1].set_exception(Closed())

    async def _gather(self) -> tuple[list[tuple[T, asyncio.Future[R]]], bool]:
        """The next batch, and whether there may be another after it."""
        batch: list[tuple[T, asyncio.Future[R]]] = []
        closes_at: float | None = None
        while len(batch) < self._limits.max_batch:
            try:
                async with asyncio.timeout_at(closes_at):
                    entry = await self._queue.get()
            except TimeoutError:
                # The window is over: the batch is what came.
                break
            if entry is None:
                return batch, False
            batch.append(entry)
            if closes_at is None:
                closes_at = asyncio.get_running_loop().time() + self._limits.window_seconds
        return batch, True

    async def _answer(self, batch: list[tuple[T, asyncio.Future[R]]]) -> None:
        self.batches += 1
        self.requests += len(batch)
        try:
            answers = await asyncio.to_thread(self._compute, [request for request, _ in batch])
            if len(answers) != len(batch):
                raise RuntimeError(f"{len(answers)} answers to {len(batch)} requests")
        except Exception as error:
            # Theirs to handle who asked; the next batch may well be fine.
            for _, answer in batch:
                if not answer.done():
                    answer.set_exception(error)
            return
        for (_, answer), result in zip(batch, answers, strict=True):
            if not answer.done():
                answer.set_result(result)
