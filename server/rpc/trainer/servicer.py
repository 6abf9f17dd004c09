"""TrainerService: the trainer's one long-lived stream.

A session begins with Hello and ends with the stream. `Deliverer` answers Demand with groups, `Switches`
answers SwitchWeights with weight receipts, and `Receipts` takes GroupReceipt and CheckpointNotice.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from penstock.common.memory_file import host_id
from penstock.server.core.aio import Broadcast
from penstock.server.core.errors import DomainError, FieldInvalid, to_rejection
from penstock.server.groups.admission import Admission
from penstock.server.journal.protocol import Journal
from penstock.server.journal.records import session_began
from penstock.server.rpc.trainer.delivery import Deliverer, Receipts
from penstock.server.rpc.trainer.drops import Drops
from penstock.server.rpc.trainer.session import (
    CurrentSession,
    Session,
    SessionState,
    Write,
    read_contract,
)
from penstock.server.weights.header import read_in_flight
from penstock.server.weights.switch import ProbeMismatch
from penstock.server.weights.versions import WeightVersions
from penstock.v1 import trainer_service_pb2
from penstock.wire.messages import ExchangeResponse, WeightReceipt, Welcome
from penstock.wire.reasons import Reason

logger = logging.getLogger(__name__)


Requests = AsyncIterator[trainer_service_pb2.ExchangeRequest]


class Switches:
    """Weight switches that a trainer asks for."""

    def __init__(self, changed: Broadcast, admission: Admission, weights: WeightVersions) -> None:
        self._changed = changed
        self._admission = admission
        self._weights = weights

    async def ask(self, session: Session, request: trainer_service_pb2.SwitchWeights) -> None:
        if (version := request.weight_version) < 0:
            raise FieldInvalid("switch_weights.weight_version", "must not be negative", version)
        # The trainer holds an uploaded version from now on, even if the switch fails.
        if self._weights.has(version):
            self._admission.advance(version)
        await session.switches.put(request)

    async def settled_version(self) -> int:
        """The active version, once no switch is under way."""
        await self._weights.settled()
        return self._weights.active_version

    async def run(self, session: Session) -> None:
        """One at a time."""
        while (request := await session.switches.get()) is not None:
            receipt = WeightReceipt(weight_version=request.weight_version)
            try:
                switched = await self._weights.activate(
                    request.weight_version, read_in_flight(request.in_flight)
                )
                receipt.pause.FromNanoseconds(int(switched.pause_seconds * 1e9))
                probe = switched.probe
            except DomainError as error:
                receipt.rejection.CopyFrom(to_rejection(error))
                probe = error.result if isinstance(error, ProbeMismatch) else None
            if probe is not None:
                receipt.probe.CopyFrom(probe.message())
            receipt.active_weight_version = self._weights.active_version
            # A new version may make admission possible again.
            self._changed.notify()
            await session.send(ExchangeResponse(weight_receipt=receipt))


@dataclass(eq=False)
class TrainerServicer:
    changed: Broadcast
    journal: Journal
    current: CurrentSession
    deliverer: Deliverer
    receipts: Receipts
    drops: Drops
    switches: Switches
    on_session: Callable[[], None]
    """Called when a trainer has reported the version it holds."""

    async def exchange(self, requests: Requests, write: Write) -> None:
        first = await anext(requests, None)
        if first is None or first.WhichOneof("message") != "hello":
            raise DomainError(Reason.HELLO_EXPECTED, "the first message must be a Hello")
        session = await self._begin(first.hello, write)
        tasks = [
            asyncio.create_task(self._read(session, requests), name="exchange reader"),
            asyncio.create_task(self.deliverer.run(session), name="exchange deliveries"),
            asyncio.create_task(self.switches.run(session), name="exchange switches"),
        ]
        waiting: set[asyncio.Future[None]] = {session.failure, *tasks}
        try:
            while not all(task.done() for task in tasks):
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for finished in done:
                    finished.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._leave(session)

    async def _begin(self, hello: trainer_service_pb2.Hello, write: Write) -> Session:
        contract = read_contract(hello)
        session = self.current.begin(hello, write)
        try:
            previous = self.current.begin_run(hello)
            if previous is not None:
                await self.journal.append(self.drops.run(*previous))
                session.check()
            self.deliverer.begin(contract, hello.weight_version, hello.resume_step)
            # Durable before the trainer sees it, so that no older trainer gets in after a restart either.
            # No await since the groups wait again, so no snapshot falls in between.
            await self.journal.append([session_began(*self.current.run, hello.resume_step)])
            session.check()
            welcome = await self._welcome()
            session.check()
            message = "trainer of run %s holds version %d, resumes after step %d; %s"
            logger.info(message, hello.run_id, hello.weight_version, hello.resume_step, contract)
            self.on_session()
            await session.send(ExchangeResponse(welcome=welcome))
        except BaseException:
            # The caller left before the answer, or the journal failed.
            self._leave(session)
            raise
        session.move(SessionState.OPEN)
        return session

    async def _welcome(self) -> trainer_service_pb2.Welcome:
        welcome = Welcome(
            active_weight_version=await self.switches.settled_version(),
            buffered_group_count=self.deliverer.waiting_count,
        )
        folder = self.journal.folder
        if folder is not None:
            place = welcome.group_folder
            place.host_id, place.path = host_id(), str(folder.path)
            place.device, place.inode = folder.device, folder.inode
        return welcome

    def _leave(self, session: Session) -> None:
        """Clean up after a stream that ended or never began."""
        if self.current.leave(session):
            self.deliverer.leave()

    async def _read(self, session: Session, requests: Requests) -> None:
        async for request in requests:
            if session.ended:
                return  # Replaced: messages of an older trainer no longer count.
            session.heard_at = time.monotonic()
            kind = request.WhichOneof("message")
            if kind == "demand":
                self.deliverer.demand(session, request.demand)
            elif kind == "receipt":
                await self.receipts.receipt(session, request.receipt)
            elif kind == "switch_weights":
                await self.switches.ask(session, request.switch_weights)
            elif kind == "checkpoint":
                await self.receipts.finalize(request.checkpoint.step)
            elif kind == "hello":
                raise FieldInvalid("hello", "must be the first message, and only that")
            else:
                raise FieldInvalid("message", "must be set")
        session.move(SessionState.HALF_CLOSED)
        await session.switches.put(None)
        self.changed.notify()
