"""TrainerService: the trainer's one long-lived stream.

A session begins with Hello and ends with the stream. Its messages go to the module that serves them:

    Demand           `delivery`    groups in return
    GroupReceipt     `receipts`
    CheckpointNotice `receipts`
    SwitchWeights    `switches`    weight receipts in return
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from penstock.common.memory_file import host_id
from penstock.server.core.aio import Broadcast
from penstock.server.core.errors import DomainError, FieldInvalid
from penstock.server.journal.protocol import Journal
from penstock.server.journal.records import session_began
from penstock.server.rpc.trainer.delivery import Deliverer
from penstock.server.rpc.trainer.drops import Drops
from penstock.server.rpc.trainer.receipts import Receipts
from penstock.server.rpc.trainer.session import (
    CurrentSession,
    Session,
    SessionState,
    Write,
    read_contract,
)
from penstock.server.rpc.trainer.switches import Switches
from penstock.v1 import trainer_service_pb2
from penstock.wire.codec import twin
from penstock.wire.reasons import Reason

logger = logging.getLogger(__name__)

ExchangeResponse = twin(trainer_service_pb2.ExchangeResponse)
Welcome = twin(trainer_service_pb2.Welcome)

Requests = AsyncIterator[trainer_service_pb2.ExchangeRequest]


class TrainerServicer:
    def __init__(
        self,
        changed: Broadcast,
        journal: Journal,
        current: CurrentSession,
        deliverer: Deliverer,
        receipts: Receipts,
        drops: Drops,
        switches: Switches,
        on_session: Callable[[], Awaitable[None]],
    ) -> None:
        """`on_session` is called when a trainer has reported the version it holds."""
        self._changed = changed
        self._journal = journal
        self._current = current
        self._deliverer = deliverer
        self._receipts = receipts
        self._drops = drops
        self._switches = switches
        self._on_session = on_session

    async def exchange(self, requests: Requests, write: Write) -> None:
        first = await anext(requests, None)
        if first is None or first.WhichOneof("message") != "hello":
            raise DomainError(Reason.HELLO_EXPECTED, "the first message must be a Hello")
        session = await self._begin(first.hello, write)
        tasks = [
            asyncio.create_task(self._read(session, requests), name="exchange reader"),
            asyncio.create_task(self._deliverer.run(session), name="exchange deliveries"),
            asyncio.create_task(self._switches.run(session), name="exchange switches"),
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
        session = self._current.begin(hello, write)
        try:
            previous = self._current.begin_run(hello)
            if previous is not None:
                await self._journal.append(self._drops.run(*previous))
            self._deliverer.begin(contract, hello.weight_version, hello.resume_step)
            # Durable before the trainer sees it, so that no older trainer gets in after a restart either.
            # The append comes in the same moment in which the groups wait again, so no snapshot falls in
            # between.
            await self._journal.append([session_began(*self._current.run, hello.resume_step)])
            welcome = await self._welcome()
            logger.info(
                "trainer of run %s holds version %d, resumes after step %d; %s",
                hello.run_id,
                hello.weight_version,
                hello.resume_step,
                contract,
            )
            await self._on_session()
            await session.send(ExchangeResponse(welcome=welcome))
        except BaseException:
            # The caller left before the answer, or the journal failed.
            self._leave(session)
            raise
        session.move(SessionState.OPEN)
        return session

    async def _welcome(self) -> trainer_service_pb2.Welcome:
        welcome = Welcome(
            active_weight_version=await self._switches.settled_version(),
            buffered_group_count=self._deliverer.waiting_count,
        )
        folder = self._journal.folder
        if folder is not None:
            told = welcome.group_folder
            told.host_id, told.path = host_id(), str(folder.path)
            told.device, told.inode = folder.device, folder.inode
        return welcome

    def _leave(self, session: Session) -> None:
        """Clean up after a stream that ended or never began."""
        if self._current.leave(session):
            self._deliverer.leave()

    async def _read(self, session: Session, requests: Requests) -> None:
        async for request in requests:
            if session.ended:
                return  # Replaced: messages of an older trainer no longer count.
            kind = request.WhichOneof("message")
            if kind == "demand":
                self._deliverer.demand(session, request.demand)
            elif kind == "receipt":
                await self._receipts.receipt(session, request.receipt)
            elif kind == "switch_weights":
                await self._switches.ask(session, request.switch_weights)
            elif kind == "checkpoint":
                await self._receipts.finalize(request.checkpoint.step)
            elif kind == "hello":
                raise FieldInvalid("hello", "must be the first message, and only that")
            else:
                raise FieldInvalid("message", "must be set")
        session.move(SessionState.HALF_CLOSED)
        await session.switches.put(None)
        self._changed.notify()
