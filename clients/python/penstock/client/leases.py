"""Leases: attempts handed to this agent, kept while it works on them.

Two coroutines share the trajectories that are held:

- `_receive` consumes lease streams, one after another; waits for the server and for room; produces
  attempts; is unblocked by `__anext__` taking one, and by the server coming back.
- `_renew_held` consumes nothing; waits for a third of the lease; produces renewals.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import socket
import time
import weakref
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

from penstock.client.calls import Backoff, Calls
from penstock.client.errors import (
    DeadlineExceeded,
    Overloaded,
    PenstockError,
    ServerUnavailable,
)
from penstock.client.tasks import Purpose, Task, read_task, write_purpose
from penstock.client.trajectory import Trajectory
from penstock.v1 import task_service_pb2
from penstock.wire import codec

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from types import TracebackType

logger = logging.getLogger("penstock.client")

# A server takes the leases of a lost stream back after a grace of some ten seconds, and may notice the
# loss later than this side did; so even a long lease is renewed this often.
_LONGEST_RENEWAL_SECONDS = 3.0
_UNREACHABLE = (ServerUnavailable, Overloaded, DeadlineExceeded)
# After which a server that does not answer is spoken of.
_SILENCE_SECONDS = 2.0
# By how much a lease is outwaited: the server may have begun it a little after this side did.
_OUTWAIT_SECONDS = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class Attempt:
    """One attempt at a task."""

    task: Task
    trajectory: Trajectory
    """To be opened by its first turn and closed by `complete` or `fail`."""
    group_id: str
    sample_index: int
    """Position in the group, from zero."""
    retry_count: int
    """Attempts made before this one."""


class LeaseListener(Protocol):
    """What is told when leases are in danger."""

    def server_lost(self, error: PenstockError) -> None:
        """The server cannot be reached or does not lease now; it is asked again until it does."""
        ...

    def server_back(self, seconds: float) -> None:
        """The server leases again, after so long."""
        ...

    def leases_expired(self, trajectory_ids: Sequence[str], retried_ids: Collection[str]) -> None:
        """The leases of these attempts ran out, or their server forgot them.

        Those of them in `retried_ids` are made again, under another trajectory id; the others count
        as failed.
        """
        ...


class LoggedLeases:
    """The listener of a caller that brings none: it logs."""

    def server_lost(self, error: PenstockError) -> None:
        """Logs a loss."""
        logger.warning("lost the server: %s", error)

    def server_back(self, seconds: float) -> None:
        """Logs the return."""
        logger.warning("the server is back after %.1f s", seconds)

    def leases_expired(self, trajectory_ids: Sequence[str], retried_ids: Collection[str]) -> None:
        """Logs lost attempts."""
        logger.warning("leases ran out: %s", ", ".join(trajectory_ids))


def default_agent_id() -> str:
    """Names this process."""
    return f"{socket.gethostname()}-{os.getpid()}"


class Leases:
    """Attempts as they are leased: `async for attempt in client.lease_tasks(concurrency=8)`.

    The server leases another when one is closed. An attempt whose trajectory is closed, released or
    no longer referenced is not renewed. Iteration raises PenstockError where the server refuses. With
    `whole_groups` it also yields an attempt whose lease ran out for the last time before it was taken,
    for its siblings' sake: `leases_expired` named it, and the server refuses every call on it.
    """

    def __init__(
        self,
        calls: Calls,
        *,
        concurrency: int,
        agent_id: str,
        purpose: Purpose | None = None,
        whole_groups: bool = False,
        resume_aborted: bool = False,
        listener: LeaseListener | None = None,
    ) -> None:
        if concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, got {concurrency}")
        self._calls = calls
        self._concurrency = concurrency
        self._resume_aborted = resume_aborted
        self._listener: LeaseListener = listener or LoggedLeases()
        self._request = codec.twin(task_service_pb2.LeaseTasksRequest)(
            agent_id=agent_id,
            concurrency=concurrency,
            purpose=write_purpose(purpose),
            whole_groups=whole_groups,
        )
        self._held: weakref.WeakValueDictionary[str, Trajectory] = weakref.WeakValueDictionary()
        self._ready: deque[Attempt] = deque()
        self._news = asyncio.Event()
        """Set when an attempt is ready, and when receiving or renewing has ended."""
        self._room = asyncio.Event()
        """Set when a ready attempt was taken."""
        self._lease_seconds = 0.0
        """Length of the last lease."""
        self._renew_seconds = _LONGEST_RENEWAL_SECONDS
        self._renew_sooner = asyncio.Event()
        self._down_since: float | None = None
        self._down_reason = ""
        self._receiver: asyncio.Task[None] | None = None
        self._renewer: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Attempt:
        tasks = self._start()
        while not self._ready and not any(task.done() for task in tasks):
            self._news.clear()
            await self._news.wait()
        if self._ready:
            self._room.set()
            return self._ready.popleft()
        for task in tasks:
            if task.done() and not task.cancelled():
                task.result()
        raise StopAsyncIteration

    def release(self, trajectory_id: str) -> None:
        """Stops renewing an attempt: it goes to another agent when its lease has run out."""
        self._held.pop(trajectory_id, None)

    def release_all(self) -> None:
        """Stops renewing everything, and forgets what nobody has taken yet."""
        self._held.clear()
        self._ready.clear()

    async def run_out(self, trajectory_id: str) -> bool:
        """Stops renewing an attempt, and waits until its lease has run out, however long a call on it
        lasts; returns whether the attempt is made again. It must not be closed."""
        self.release(trajectory_id)
        request = codec.twin(task_service_pb2.RenewLeaseRequest)(trajectory_ids=[trajectory_id])
        while True:
            with contextlib.suppress(*_UNREACHABLE):
                response = await self._calls.renew_lease(request)
                if trajectory_id in response.expired_trajectory_ids:
                    return trajectory_id in response.retried_trajectory_ids
            # Asking has renewed it: not before its whole length does another question help.
            await asyncio.sleep(self._lease_seconds + _OUTWAIT_SECONDS)

    async def stop_leasing(self) -> None:
        """Takes no more attempts; iteration ends; those taken are renewed until `aclose`."""
        tasks = self._start()
        await _cancel(tasks[0])
        for attempt in self._ready:
            self.release(attempt.trajectory.trajectory_id)
        self._ready.clear()

    async def aclose(self) -> None:
        """Gives the stream up; what is still held goes back when its lease has run out."""
        for task in (self._receiver, self._renewer):
            if task is not None:
                await _cancel(task)
        self.release_all()

    def _start(self) -> tuple[asyncio.Task[None], asyncio.Task[None]]:
        if self._receiver is None or self._renewer is None:
            self._receiver = asyncio.create_task(self._receive())
            self._renewer = asyncio.create_task(self._renew_held())
            for task in (self._receiver, self._renewer):
                task.add_done_callback(lambda _: self._news.set())
        return self._receiver, self._renewer

    async def _receive(self) -> None:
        backoff = Backoff(math.inf)
        while True:
            try:
                await self._reach()
                leases = self._calls.lease_tasks(self._request)
                async with contextlib.aclosing(leases) as stream:
                    async for lease in stream:
                        backoff.reset()
                        self._say_back()
                        await self._offer(lease)
                self._say_lost(ServerUnavailable("the server ended the lease stream"))
            except (ServerUnavailable, Overloaded) as error:
                self._say_lost(error)
            await backoff.wait()

    async def _reach(self) -> None:
        """Waits for the server as long as it takes, and renews what is held first of all."""
        silence = ServerUnavailable(f"no answer from {self._calls.address} yet")
        loop = asyncio.get_running_loop()
        handle = loop.call_later(_SILENCE_SECONDS, self._say_lost, silence)
        try:
            await self._calls.get_server_info(wait_for_ready=True)
        finally:
            handle.cancel()
        if self._down_since is not None:
            await self._renew()
            if not self._down_reason:
                self._say_back()

    async def _offer(self, lease: task_service_pb2.LeaseTasksResponse) -> None:
        task = read_task(lease.task)
        trajectory = Trajectory(
            self._calls,
            lease.trajectory_id,
            task=task,
            group_id=lease.group_id,
            group_size=task.group_size,
            sample_index=lease.sample_index,
            resume_aborted=self._resume_aborted,
            on_closed=self.release,
        )
        attempt = Attempt(task, trajectory, lease.group_id, lease.sample_index, lease.retry_count)
        self._lease_seconds = lease.lease.seconds + lease.lease.nanos / 1e9
        if 0 < self._lease_seconds / 3 < self._renew_seconds:
            self._renew_seconds = self._lease_seconds / 3
            self._renew_sooner.set()
        self._held[lease.trajectory_id] = trajectory
        self._ready.append(attempt)
        self._news.set()
        # Bounded: after a loss the new stream leases while attempts of the old are still held.
        while len(self._ready) > self._concurrency:
            self._room.clear()
            await self._room.wait()

    async def _renew_held(self) -> None:
        while True:
            self._renew_sooner.clear()
            try:
                async with asyncio.timeout(self._renew_seconds):
                    await self._renew_sooner.wait()
            except TimeoutError:
                await self._renew()

    async def _renew(self) -> None:
        held = list(self._held)
        if not held:
            return
        request = codec.twin(task_service_pb2.RenewLeaseRequest)(trajectory_ids=held)
        try:
            response = await self._calls.renew_lease(request)
        except _UNREACHABLE:
            # `_receive` notices a lost server by its stream, and renews when it is back.
            return
        expired = [
            trajectory_id
            for trajectory_id in response.expired_trajectory_ids
            if self._runs_out(trajectory_id)
        ]
        for trajectory_id in expired:
            self.release(trajectory_id)
        if expired:
            retried = frozenset(response.retried_trajectory_ids)
            # The siblings of one that is not made again must learn of it from whoever takes it.
            gone = retried if self._request.whole_groups else frozenset(expired)
            kept = [a for a in self._ready if a.trajectory.trajectory_id not in gone]
            self._ready = deque(kept)
            self._room.set()
            self._listener.leases_expired(expired, retried)

    def _runs_out(self, trajectory_id: str) -> bool:
        trajectory = self._held.get(trajectory_id)
        # One that is being closed has no lease any more, because its close was accepted.
        return trajectory is not None and trajectory.outcome is None

    def _say_lost(self, error: PenstockError) -> None:
        self._down_reason = error.reason
        if self._down_since is None:
            self._down_since = time.monotonic()
            self._listener.server_lost(error)

    def _say_back(self) -> None:
        if self._down_since is not None:
            self._listener.server_back(time.monotonic() - self._down_since)
            self._down_since, self._down_reason = None, ""


async def _cancel(task: asyncio.Task[None]) -> None:
    """Cancels a task and waits for its end; an error it ended with is its iterator's to raise."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()
