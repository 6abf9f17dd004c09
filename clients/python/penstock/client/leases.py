"""Leases attempts for this agent and renews them while it works on them.

Two coroutines share the held trajectories:

- `_receive` consumes one lease stream after another and produces attempts. It waits for the server
  and for room; `__anext__` makes room by taking an attempt.
- `_renew_held` renews all leases whenever a third of the lease time has passed.
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
from typing import TYPE_CHECKING, Self

from penstock.client.calls import Backoff, Calls
from penstock.client.errors import DeadlineExceeded, Overloaded, PenstockError, ServerUnavailable
from penstock.client.tasks import Purpose, Task, read_task, write_purpose
from penstock.client.trajectory import Place, Trajectory
from penstock.common import telemetry
from penstock.v1 import task_service_pb2
from penstock.wire.words import ORDINARY, wait_in_words

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from penstock.v1 import rollout_service_pb2

logger = logging.getLogger("penstock.client")

# A server takes back the leases of a lost stream after a grace of about ten seconds. It may notice
# the loss later than the client, so even long leases are renewed this often.
_LONGEST_RENEWAL_SECONDS = 3.0
_UNREACHABLE = (ServerUnavailable, Overloaded, DeadlineExceeded)
# A server that does not answer for longer than this is reported.
_SILENCE_SECONDS = 2.0
# A worker that gets no task for this long, though it could take one, logs why.
_IDLE_SECONDS = 30.0
# Extra wait before a lease counts as expired: the server may have started it slightly later.
_OUTWAIT_SECONDS = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class Attempt:
    task: Task
    trajectory: Trajectory
    """The first turn opens it; `complete` or `fail` closes it."""
    group_id: str
    sample_index: int
    """Position in the group, from zero."""
    retry_count: int
    """Number of earlier attempts in this place."""
    ends_at: float = math.inf
    """When it has to be closed, on the clock of `time.monotonic`. The server takes it back after that."""


class LeaseListener:
    """Learns what happens to leases. This one logs it."""

    def server_lost(self, error: PenstockError) -> None:
        """The server is unreachable or does not lease now. The client keeps trying."""
        logger.warning("lost the server: %s", error)

    def server_back(self, seconds: float) -> None:
        """The server leases again, after `seconds`."""
        logger.warning("the server is back after %.1f s", seconds)

    def leases_expired(self, trajectory_ids: Sequence[str], retried_ids: Collection[str]) -> None:
        """The leases of these attempts expired, or their server forgot them.

        The server makes those in `retried_ids` again, under another trajectory id. The others count as
        failed.
        """
        logger.warning("leases expired: %s", ", ".join(trajectory_ids))


def default_agent_id() -> str:
    return f"{socket.gethostname()}-{os.getpid()}"


class Leases:
    """Yields attempts as they are leased: `async for attempt in client.lease_tasks(concurrency=8)`.

    When an attempt is closed, the server leases another. An attempt is not renewed once its trajectory is
    closed, released or no longer referenced. Iteration raises PenstockError if the server refuses.

    With `whole_groups`, it also yields an attempt whose last lease expired before the caller took it,
    because its siblings need it. `leases_expired` reported it, and the server refuses every call on it.
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
        self._listener = listener or LeaseListener()
        self._leased = asyncio.Event()
        """Set when a lease arrives."""
        self._connected = asyncio.Event()
        """Set by the first connection."""
        self._request = task_service_pb2.LeaseTasksRequest(
            agent_id=agent_id,
            concurrency=concurrency,
            purpose=write_purpose(purpose),
            whole_groups=whole_groups,
        )
        self._held: weakref.WeakValueDictionary[str, Trajectory] = weakref.WeakValueDictionary()
        self._ready: deque[Attempt] = deque()
        self._news = asyncio.Event()
        """Set when an attempt is ready, or when receiving or renewing has ended."""
        self._room = asyncio.Event()
        """Set when the caller took a ready attempt."""
        self._lease_seconds = 0.0
        self._renew_seconds = _LONGEST_RENEWAL_SECONDS
        self._renew_sooner = asyncio.Event()
        self._down_since: float | None = None
        self._down_reason = ""
        self._receiver: asyncio.Task[None] | None = None
        self._renewer: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._start()
        return self

    async def __aexit__(self, *_: object) -> None:
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
        """Stops renewing an attempt. It goes to another agent when its lease has expired."""
        self._held.pop(trajectory_id, None)

    def release_all(self) -> None:
        """Stops renewing all attempts, and forgets those that the caller has not taken yet."""
        self._held.clear()
        self._ready.clear()

    async def run_out(self, trajectory_id: str) -> bool:
        """Stops renewing an attempt and waits until its lease has expired, even if a call on it
        takes long.

        Returns whether the server makes the attempt again. The attempt must not be closed.
        """
        self.release(trajectory_id)
        while True:
            with contextlib.suppress(*_UNREACHABLE):
                response = await self._ask_renewal([trajectory_id])
                if trajectory_id in response.expired_trajectory_ids:
                    return trajectory_id in response.retried_trajectory_ids
            # The question itself renewed the lease, so asking again helps only after its whole length.
            await asyncio.sleep(self._lease_seconds + _OUTWAIT_SECONDS)

    async def stop_leasing(self) -> None:
        """Stops leasing and ends iteration. Attempts already taken are renewed until `aclose`."""
        tasks = self._start()
        await _cancel(tasks[0])
        for attempt in self._ready:
            self.release(attempt.trajectory.trajectory_id)
        self._ready.clear()

    async def aclose(self) -> None:
        """Closes the stream. Attempts still held return to the server when their leases expire."""
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
        idle = asyncio.create_task(self._say_idle())
        try:
            await self._receive_streams()
        finally:
            idle.cancel()

    async def _receive_streams(self) -> None:
        backoff = Backoff(math.inf)
        while True:
            try:
                await self._reach()
                if not self._connected.is_set():
                    logger.info("connected to %s; waiting for tasks", self._calls.address)
                    self._connected.set()
                # Closing the stream gives the leases up.
                leases = self._calls.stream(
                    self._request, task_service_pb2.LeaseTasksResponse, None, telemetry.outgoing()
                )
                async with contextlib.aclosing(leases) as stream:
                    async for lease in stream:
                        self._leased.set()
                        backoff.reset()
                        self._say_back()
                        await self._offer(lease)
                self._say_lost(ServerUnavailable("the server ended the lease stream"))
            except (ServerUnavailable, Overloaded) as error:
                self._say_lost(error)
            await backoff.wait()

    async def _reach(self) -> None:
        """Waits for the server without a limit, then first renews the held leases."""
        silence = asyncio.create_task(self._say_silent())
        try:
            await self._calls.get_server_info(wait_for_ready=True)
        finally:
            silence.cancel()
        if self._down_since is not None:
            await self._renew()
            if not self._down_reason:
                self._say_back()

    async def _say_silent(self) -> None:
        await asyncio.sleep(_SILENCE_SECONDS)
        cause = await self._calls.why_unreachable() or "no answer yet"
        self._say_lost(ServerUnavailable(f"no connection to {self._calls.address}: {cause}"))

    async def _say_idle(self) -> None:
        """Says why no lease arrives, once for each time that this lasts, although there is room for one."""
        await self._connected.wait()
        while True:
            self._leased.clear()
            try:
                async with asyncio.timeout(_IDLE_SECONDS):
                    await self._leased.wait()
            except TimeoutError:
                if len(self._held) < self._concurrency and self._down_since is None:
                    await self._explain_idle()
                    await self._leased.wait()

    async def _explain_idle(self) -> None:
        waits: Sequence[rollout_service_pb2.Wait] = ()
        # A lost server is reported by the stream.
        with contextlib.suppress(*_UNREACHABLE):
            waits = (await self._calls.get_server_info()).waits
        ordinary = bool(waits) and waits[0].cause in ORDINARY
        why = wait_in_words(waits[0]) if waits else "is a trainer connected to it?"
        logger.log(
            logging.INFO if ordinary else logging.WARNING,
            "no task from %s for %g s; %s",
            *(self._calls.address, _IDLE_SECONDS, why),
        )

    async def _offer(self, lease: task_service_pb2.LeaseTasksResponse) -> None:
        task = read_task(lease.task)
        trajectory = Trajectory(
            self._calls,
            lease.trajectory_id,
            task=task,
            place=Place(lease.group_id, task.group_size, lease.sample_index, leased=True),
            resume_aborted=self._resume_aborted,
            on_closed=self.release,
        )
        # A server from before this field names no limit.
        limit = lease.time_limit.ToNanoseconds() / 1e9 or math.inf
        attempt = Attempt(
            *(task, trajectory, lease.group_id, lease.sample_index, lease.retry_count),
            ends_at=time.monotonic() + limit,
        )
        self._lease_seconds = lease.lease.ToNanoseconds() / 1e9
        if 0 < self._lease_seconds / 3 < self._renew_seconds:
            self._renew_seconds = self._lease_seconds / 3
            self._renew_sooner.set()
        self._held[lease.trajectory_id] = trajectory
        self._ready.append(attempt)
        self._news.set()
        # Bounded, because after a loss the new stream leases while attempts of the old one are still held.
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
        try:
            response = await self._ask_renewal(held)
        except _UNREACHABLE:
            # `_receive` detects a lost server through its stream, and renews when it is back.
            return
        # An attempt whose close was accepted has no lease any more.
        unclosed = {key for key, trajectory in self._held.items() if trajectory.outcome is None}
        expired = [key for key in response.expired_trajectory_ids if key in unclosed]
        for trajectory_id in expired:
            self.release(trajectory_id)
        if expired:
            retried = frozenset(response.retried_trajectory_ids)
            # If an attempt is not made again, the caller must take it, so that its siblings find out.
            gone = retried if self._request.whole_groups else frozenset(expired)
            kept = [a for a in self._ready if a.trajectory.trajectory_id not in gone]
            self._ready = deque(kept)
            self._room.set()
            self._listener.leases_expired(expired, retried)

    async def _ask_renewal(
        self, trajectory_ids: Sequence[str]
    ) -> task_service_pb2.RenewLeaseResponse:
        request = task_service_pb2.RenewLeaseRequest(trajectory_ids=trajectory_ids)
        return await self._calls.ask(request, task_service_pb2.RenewLeaseResponse)

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
    """Cancels a task and waits for its end. Its iterator raises any error it ended with."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()
