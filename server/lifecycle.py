"""A server's life from the first bind to the last answer.

Order of start: port bound (a port in use fails before a model is loaded) -> journal locked -> engine ->
journal read -> handlers -> serving, logged in one line.

Order of a stop (SIGTERM, SIGINT): health NOT_SERVING -> no new turns, no new leases -> turns in flight
finish within `drain_seconds`, the rest end ABORTED -> the trainer's session ends with DRAINING -> open
calls end -> engine closed -> journal closed.

If the engine dies, so does the server: health NOT_SERVING, turns end with ENGINE_LOST. The process logs the
reason and exits with 1, so that its supervisor starts another. The same happens if the journal can no
longer be written.

A server started in the middle of a run, according to its journal or its configuration, holds turns back.
It is NOT_SERVING until the trainer's version is active.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any, cast

import grpc

from penstock.common.loop_watch import LoopWatch
from penstock.server.assembly import Serving
from penstock.server.config.settings import AddressInUse, SecuritySection, check_exposure
from penstock.server.core.errors import DomainError
from penstock.server.gauges import observe
from penstock.server.groups.recovery import recover_from, snapshot
from penstock.server.journal.protocol import SnapshotItem
from penstock.server.journal.records import server_started
from penstock.server.preflight import check_port
from penstock.server.routes import endpoints, handlers
from penstock.server.rpc.boundary import service_handlers
from penstock.server.rpc.standard import add_reflection
from penstock.server.security.gate import Gate
from penstock.server.state import restore
from penstock.wire.channel import server_options
from penstock.wire.reasons import Reason


def bind(
    listen: str, concurrent_calls: int, gate: Gate | None = None
) -> tuple[grpc.aio.Server, int]:
    """Also returns the port. Without a gate the server accepts calls from this host only, unauthenticated.

    Raises AddressInUse if another process has the port or the host is not this machine's, and ConfigError
    if the server would be open to anyone.
    """
    credentials = None if gate is None else gate.credentials.server_credentials()
    if gate is None:
        check_exposure(listen, SecuritySection())
    server = grpc.aio.server(
        interceptors=() if gate is None else (gate,),
        # gRPC lets in twice as many calls. The gate refuses the second half and tells when to retry.
        options=server_options(2 * concurrent_calls),
        maximum_concurrent_rpcs=concurrent_calls if gate is None else 2 * concurrent_calls,
    )
    try:
        if credentials is None:
            port = server.add_insecure_port(listen)
        else:
            port = server.add_secure_port(listen, credentials)
    except RuntimeError as error:
        # gRPC does not tell why.
        check_port(listen)
        raise AddressInUse(f"cannot listen on {listen}: {error}") from error
    return server, port


class Lifecycle:
    def __init__(self, serving: Serving, server: grpc.aio.Server) -> None:
        """`server` is bound and has no handlers yet."""
        self.serving = serving
        self._server = server
        self._background: list[asyncio.Task[None]] = []
        self.watch = LoopWatch("server", serving.metrics.stalled)

    async def start(self) -> None:
        """Raises JournalUnreadable and OSError."""
        serving = self.serving
        observe(serving)
        await self._recover()
        if serving.pool is not None:
            serving.pool.begin()
        guarded = serving.ownership.guard(handlers(serving))
        stalled_seconds = serving.config.limits.stalled_seconds
        self._server.add_generic_rpc_handlers(service_handlers(guarded, stalled_seconds))
        serving.health.add_to(self._server)
        add_reflection(self._server)
        serving.health.publish()
        await self._server.start()
        if serving.http is not None:
            await serving.http.start(cast("Any", endpoints(serving)))
        self.watch.start()
        self._background += [
            asyncio.create_task(serving.lease_lines.run(), name="dealing of leases"),
            asyncio.create_task(serving.closing.expire_leases(), name="lease clock"),
            asyncio.create_task(serving.own.expire(), name="clock of callers' own trajectories"),
            asyncio.create_task(serving.progress.watch(), name="watch for what stands still"),
        ]

    async def _recover(self) -> None:
        """Raises JournalUnreadable."""
        serving, switch = self.serving, self.serving.switch
        found = await recover_from(serving.journal)
        restore(serving, found)
        await serving.messages.restore(serving.store.records())
        starts = found.starts + 1
        awaiting = serving.config.weights.await_trainer or found.weight_version > 0
        if awaiting:
            serving.admission.await_trainer()
        switch.await_trainer(awaiting)

        # A separate variable, so that the closure does not keep the rest of `found`, which may be large.
        left_version = found.weight_version

        def state() -> Iterator[SnapshotItem]:
            # Until the trainer has published again, this is still the middle of its run.
            version = switch.active_version or (left_version if switch.awaiting_trainer else 0)
            run = serving.session.run
            notices = [*serving.drops.notices, *serving.completed.drops_under_way]
            parts = (serving.queue, serving.store, serving.buffer, notices)
            return snapshot(starts, run, version, *parts)

        await serving.journal.start(state, serving.own.give_way)
        await serving.journal.append([server_started(starts)])

    async def failed(self) -> str:
        """Return, with the reason, when the server can no longer serve."""
        switch = self.serving.switch
        lost = asyncio.create_task(self.serving.engine.lost())
        ended = asyncio.create_task(self._ended())
        unwritable = self.serving.journal.failed
        try:
            await asyncio.wait(
                [lost, ended, unwritable, *self._background], return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            lost.cancel()
            ended.cancel()
        if ended.done():
            return ended.result()
        if unwritable.done():
            switch.refuse(DomainError(Reason.JOURNAL_FAILED, unwritable.result()))
            return unwritable.result()
        for task in self._background:
            if task.done():
                task.result()
        reason = await lost
        switch.refuse(DomainError(Reason.ENGINE_LOST, f"the engine is lost: {reason}"))
        return f"the engine is lost: {reason}"

    async def _ended(self) -> str:
        """Return, with the reason, if gRPC itself has ended the server, which no call should cause."""
        try:
            # Without a timeout, cancelling this wait would cancel the server's termination itself.
            await self._server.wait_for_termination(1e9)
        except Exception as error:
            return f"the gRPC server ended: {error!r}"
        return "the gRPC server ended"

    async def stop(self, drain_seconds: float | None = None) -> None:
        """Drain and stop; see the module's docstring for the order."""
        serving = self.serving
        refusal = DomainError(
            Reason.DRAINING, "the server is shutting down", retry_after_seconds=5.0
        )
        self.watch.stop()
        serving.health.drain()
        serving.opening.drain(refusal)
        serving.lease_lines.drain(refusal)
        limit = serving.config.drain_seconds if drain_seconds is None else drain_seconds
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit):
                await serving.turns.wait_idle()
        # Also those that still wait for admission.
        await serving.turns.abort(serving.turns.in_flight)
        serving.session.end(refusal)
        if serving.http is not None:
            await serving.http.stop()
        await self._server.stop(grace=2.0)
        await serving.closing.wait_durable()
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await serving.engine.close()
        await serving.uploads.close()
        await serving.weights.close()
        if serving.adapters is not None:
            await serving.adapters.close()
        await serving.journal.close()
