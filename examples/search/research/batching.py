"""Answers individual requests in batches.

    submit -> queue -> _work: takes the first, waits for others up to the window or the size -> answer

A batch closes when it is full, or `window_seconds` after its first request. One batch at a time is computed
in a thread; requests that arrive meanwhile form the next. Each caller gets its own part of the answer. An
error of the computation is raised to every caller of that batch only. A caller that is cancelled leaves the
batch before it starts. If the queue is full, `submit` raises `Full` immediately. `close` answers what was
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
    """Too many requests are waiting."""


class Closed(Exception):
    """The batcher is closed and accepts no more requests."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a batcher."""

    window_seconds: float = 0.01
    """Maximum time that the first request of a batch waits for others."""
    max_batch: int = 64
    """Maximum requests in a batch."""
    max_waiting: int = 4096
    """Maximum requests in the queue."""


class Batcher(Generic[T, R]):
    """Runs `compute` on batches of requests. Create it in a running event loop."""

    def __init__(self, compute: Callable[[Sequence[T]], Sequence[R]], limits: Limits) -> None:
        """`compute` returns one answer for each request, in the same order; it runs in a thread."""
        self._compute, self._limits = compute, limits
        self._queue: asyncio.Queue[tuple[T, asyncio.Future[R]] | None] = asyncio.Queue()
        self._closed = False
        self.batches = 0
        """Number of batches computed."""
        self.requests = 0
        """Number of requests in those batches."""
        self._working = asyncio.create_task(self._work())

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return self._queue.qsize()

    async def submit(self, request: T) -> R:
        """Returns the answer to one request. Raises Full, Closed, and errors of the computation."""
        if self._closed:
            raise Closed
        if self._queue.qsize() >= self._limits.max_waiting:
            raise Full
        answer: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait((request, answer))
        return await answer

    async def close(self) -> None:
        """Stops accepting requests, and returns once all accepted ones are answered."""
        if not self._closed:
            self._closed = True
            self._queue.put_nowait(None)
        await self._working

    async def _work(self) -> None:
        """Takes batches from the queue and answers them, until `close` ends it."""
        try:
            more = True
            while more:
                batch, more = await self._gather()
                # A caller that was cancelled has a cancelled future.
                wanted = [(request, answer) for request, answer in batch if not answer.done()]
                if wanted:
                    await self._answer(wanted)
        finally:
            # However this ended, no caller may wait for an answer that will not come.
            self._closed = True
            while not self._queue.empty():
                entry = self._queue.get_nowait()
                if entry is not None and not entry[1].done():
                    entry[1].set_exception(Closed())

    async def _gather(self) -> tuple[list[tuple[T, asyncio.Future[R]]], bool]:
        """The next batch, and whether another may follow."""
        batch: list[tuple[T, asyncio.Future[R]]] = []
        closes_at: float | None = None
        while len(batch) < self._limits.max_batch:
            try:
                async with asyncio.timeout_at(closes_at):
                    entry = await self._queue.get()
            except TimeoutError:
                # The window is over; the batch is complete.
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
            # The callers handle the error; the next batch may succeed.
            for _, answer in batch:
                if not answer.done():
                    answer.set_exception(error)
            return
        for (_, answer), result in zip(batch, answers, strict=True):
            if not answer.done():
                answer.set_result(result)
