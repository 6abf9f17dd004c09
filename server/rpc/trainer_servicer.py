"""TrainerService: the trainer's one long-lived stream.

A session begins with Hello and ends with the stream. One session is live at a time. A Hello with a higher
epoch ends the previous session with SESSION_REPLACED; any other is refused with STALE_EPOCH.

A lost stream loses no groups. Groups delivered without a receipt wait for the next Hello, which carries
the step after which the trainer resumes. Groups that the trainer's state already contains are not delivered
again; the others are.

A trainer on the same host that can open the journal's folder (Welcome names it) may ask for groups by
place. It then reads them from that folder, which saves hundreds of KiB on the socket. Places of groups that
are ready at the same time share one message. A trainer that cannot read a place reconnects with Hello and
then receives the group as a message.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from penstock.common.failpoints import hit
from penstock.common.memory_file import host_id
from penstock.server.core.broadcast import Broadcast
from penstock.server.core.errors import MAX_ID_LENGTH, DomainError, FieldInvalid, to_rejection
from penstock.server.groups import places as group_places
from penstock.server.groups.admission import Admission
from penstock.server.groups.buffer import BufferedGroup, GroupBuffer
from penstock.server.groups.staleness_gate import LatePolicy, StalenessContract
from penstock.server.groups.task_queue import TaskQueue
from penstock.server.journal.protocol import Journal, Record
from penstock.server.journal.records import (
    group_dropped,
    groups_receipted,
    run_replaced,
    session_began,
    step_final,
    task_accepted,
)
from penstock.server.turns.group_bytes import Delivery
from penstock.server.turns.runner import TurnRunner
from penstock.server.turns.store import TrajectoryStore
from penstock.server.weights.header import read_in_flight
from penstock.server.weights.switch import InFlight, ProbeMismatch, Switched
from penstock.v1 import trainer_service_pb2, trajectory_pb2, weights_pb2
from penstock.wire.codec import twin
from penstock.wire.reasons import Reason

logger = logging.getLogger(__name__)

ExchangeResponse = twin(trainer_service_pb2.ExchangeResponse)
Welcome = twin(trainer_service_pb2.Welcome)
Notice = twin(trainer_service_pb2.Notice)
WeightReceipt = twin(weights_pb2.WeightReceipt)

LATE_POLICIES = {
    trainer_service_pb2.LATE_POLICY_UNSPECIFIED: LatePolicy.MASK,
    trainer_service_pb2.LATE_POLICY_MASK: LatePolicy.MASK,
    trainer_service_pb2.LATE_POLICY_WAIT: LatePolicy.WAIT,
    trainer_service_pb2.LATE_POLICY_REQUEUE: LatePolicy.REQUEUE,
    trainer_service_pb2.LATE_POLICY_DROP: LatePolicy.DROP,
}
MAX_CREDIT = 1 << 20
MAX_NOTICES = 1_000
MAX_WAITING_SWITCHES = 4

Write = Callable[[trainer_service_pb2.ExchangeResponse | Delivery], Awaitable[None]]


class Weights(Protocol):
    """The part of the weight versions that a session uses."""

    @property
    def active_version(self) -> int: ...

    async def activate(self, weight_version: int, in_flight: InFlight | None) -> Switched: ...

    def has(self, weight_version: int) -> bool: ...

    async def settled(self) -> None: ...


@dataclass(eq=False)
class Session:
    """One live Exchange stream."""

    trainer_epoch: int
    resume_step: int
    """Last step that the trainer's state is known to contain, from its Hello and its receipts."""
    write: Write
    ended: asyncio.Future[None]
    """Fails with the error that ends the session from outside."""
    by_place: bool = False
    """Whether the trainer reads groups from the journal's folder."""
    credit: int = 0
    evaluation_credit: int = 0
    half_closed: bool = False
    switches: asyncio.Queue[trainer_service_pb2.SwitchWeights | None] = field(
        default_factory=lambda: asyncio.Queue[trainer_service_pb2.SwitchWeights | None](
            MAX_WAITING_SWITCHES
        )
    )
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def send(self, response: trainer_service_pb2.ExchangeResponse | Delivery) -> None:
        """Write one message. The lock is needed because a stream takes one write at a time."""
        async with self._lock:
            await self.write(response)


class TrainerServicer:
    """Serves the Exchange stream and keeps the state that outlives a session."""

    def __init__(
        self,
        changed: Broadcast,
        admission: Admission,
        queue: TaskQueue,
        buffer: GroupBuffer,
        store: TrajectoryStore,
        weights: Weights,
        fence_uploads: Callable[[int], None],
        turns: TurnRunner,
        journal: Journal,
        drop_in_hand: Callable[[], list[str]],
    ) -> None:
        """`drop_in_hand` drops complete groups that are not in the buffer yet, and returns their ids."""
        self._changed = changed
        self._admission = admission
        self._queue = queue
        self._buffer = buffer
        self._store = store
        self._weights = weights
        self._fence_uploads = fence_uploads
        self._turns = turns
        self._journal = journal
        self._drop_in_hand = drop_in_hand
        self._notices: deque[trainer_service_pb2.Notice] = deque(maxlen=MAX_NOTICES)
        """Notices that no stream has taken yet. If a stream is lost, they go to the next."""
        self._session: Session | None = None
        self._run_id = ""
        self._start_id = ""
        """Identifies the start of that run; empty if no trainer has named one."""
        self._epoch = 0
        self.drops = buffer.drops
        """Groups that left without being trained, by reason."""
        self.on_delivery: Callable[[BufferedGroup], None] | None = None
        """Called with each delivered group, for metrics."""
        self.on_session: Callable[[], Awaitable[None]] | None = None
        """Called when a trainer has reported the version it holds."""

    async def exchange(
        self, requests: AsyncIterator[trainer_service_pb2.ExchangeRequest], write: Write
    ) -> None:
        """Run one session to its end; see the module's docstring."""
        first = await anext(requests, None)
        if first is None or first.WhichOneof("message") != "hello":
            raise DomainError(Reason.HELLO_EXPECTED, "the first message must be a Hello")
        session = await self._begin(first.hello, write)
        reader = asyncio.create_task(self._read(session, requests), name="exchange reader")
        tasks = [
            reader,
            asyncio.create_task(self._deliver(session), name="exchange deliveries"),
            asyncio.create_task(self._switch(session), name="exchange switches"),
        ]
        waiting: set[asyncio.Future[None]] = {session.ended, *tasks}
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

    def check_session(self, run_id: str, trainer_epoch: int) -> None:
        """Raise STALE_EPOCH if a newer session has replaced the one that the trainer names."""
        if trainer_epoch and (run_id, trainer_epoch) != (self._run_id, self._epoch):
            raise DomainError(
                Reason.STALE_EPOCH,
                f"trainer epoch {trainer_epoch} of run {run_id} is not current;"
                f" the last session is epoch {self._epoch} of run {self._run_id}",
                {"trainer_epoch": trainer_epoch, "current": self._epoch},
            )

    def end(self, reason: DomainError) -> None:
        """End the live session, if there is one, with `reason`."""
        if self._session is not None and not self._session.ended.done():
            self._session.ended.set_exception(reason)

    async def _begin(self, hello: trainer_service_pb2.Hello, write: Write) -> Session:
        contract = read_contract(hello)
        if hello.trainer_epoch <= self._epoch:
            raise DomainError(
                Reason.STALE_EPOCH,
                f"trainer epoch {hello.trainer_epoch} is not greater than {self._epoch}",
                {"trainer_epoch": hello.trainer_epoch, "current": self._epoch},
            )
        self.end(
            DomainError(
                Reason.SESSION_REPLACED,
                f"a trainer of epoch {hello.trainer_epoch} took over",
                {"trainer_epoch": hello.trainer_epoch},
            )
        )
        self._epoch = hello.trainer_epoch
        self._fence_uploads(hello.trainer_epoch)
        ended = asyncio.get_running_loop().create_future()
        session = Session(hello.trainer_epoch, hello.resume_step, write, ended)
        self._session = session
        try:
            await self._welcome(session, hello, contract)
        except BaseException:
            # The caller left before the answer, or the journal failed.
            self._leave(session)
            raise
        return session

    def _leave(self, session: Session) -> None:
        """Clean up after a stream that ended or never began."""
        session.ended.cancel()
        if self._session is session:
            self._session = None
            logger.info("the trainer is gone; keeping %d groups for it", self._buffer.held_count)
            # A trainer that is away does not starve.
            self._admission.select(0)

    async def _welcome(
        self, session: Session, hello: trainer_service_pb2.Hello, contract: StalenessContract
    ) -> None:
        replaced, self._run_id = self._run_id, hello.run_id
        known, self._start_id = self._start_id, hello.start_id
        if replaced and replaced != hello.run_id:
            await self._drop_run(replaced, "was replaced")
        elif known and hello.start_id and known != hello.start_id:
            await self._drop_run(replaced, "was restarted from scratch")
        else:
            self._start_id = hello.start_id or known
        self._admission.agree(contract, hello.weight_version)
        again = self._buffer.resume(hello.resume_step)
        self._admission.restore(
            (g.group_id, g.admitted_version, g.oldest_version) for g in again if g.training
        )
        # Durable before the trainer sees it, so that no older trainer gets in after a restart either. The
        # append comes in the same moment in which the groups wait again, so no snapshot falls in between.
        await self._journal.append(
            [session_began(self._run_id, self._epoch, self._start_id, hello.resume_step)]
        )
        await self._weights.settled()
        welcome = Welcome(
            active_weight_version=self._weights.active_version,
            # Evaluation groups have their own demand and are not counted here.
            buffered_group_count=(
                self._buffer.waiting_count - self._buffer.waiting_evaluation_count
            ),
        )
        folder = self._journal.folder
        if folder is not None:
            told = welcome.group_folder
            told.host_id, told.path = host_id(), str(folder.path)
            told.device, told.inode = folder.device, folder.inode
        logger.info(
            "trainer of run %s holds version %d, resumes after step %d; %s",
            hello.run_id,
            hello.weight_version,
            hello.resume_step,
            contract,
        )
        if self.on_session is not None:
            await self.on_session()
        await session.send(ExchangeResponse(welcome=welcome))

    async def _drop_run(self, run_id: str, what: str) -> None:
        """Drop what the previous run left: another run begins, or the same one starts from scratch. The
        dropped groups are counted."""
        reason = "RUN_REPLACED"
        buffered = self._buffer.drop_all()
        # Last, because it forgets the ids of all tasks, including those of the buffered groups.
        tasks, groups = self._queue.drop_all()
        dropped = [group.group_id for group in (*groups, *buffered)]
        dropped += self._drop_in_hand()
        for group_id in dropped:
            self._admission.vacate(group_id)
            self.drops[reason] += 1
        # From now on, calls on open trajectories of those groups get LEASE_EXPIRED. Abort their turns,
        # because their tokens would not be read.
        gone = set(dropped)
        for record in self._store.records():
            if record.group_id in gone:
                if record.turn is not None and record.turn.in_flight:
                    self._turns.abort_soon(record.turn)
                self._store.forget(record.trajectory_id)
        message = f"run {run_id} {what}: {tasks} tasks, {len(dropped)} groups dropped"
        # Older notices are about groups that are gone.
        self._notices.clear()
        self._notices.append(Notice(reason=reason, message=message))
        await self._journal.append([run_replaced(run_id)])

    async def _read(
        self, session: Session, requests: AsyncIterator[trainer_service_pb2.ExchangeRequest]
    ) -> None:
        """Consume the trainer's messages; produce credit, receipts and switches."""
        async for request in requests:
            if session is not self._session:
                return  # Replaced: messages of an older trainer no longer count.
            kind = request.WhichOneof("message")
            if kind == "demand":
                self._demand(session, request.demand)
            elif kind == "receipt":
                await self._receipt(session, request.receipt)
            elif kind == "switch_weights":
                if request.switch_weights.weight_version < 0:
                    raise FieldInvalid(
                        "switch_weights.weight_version",
                        "must not be negative",
                        request.switch_weights.weight_version,
                    )
                # The trainer holds this version from now on, even if the switch fails. The exception is a
                # version that was never uploaded.
                if self._weights.has(request.switch_weights.weight_version):
                    self._admission.advance(request.switch_weights.weight_version)
                await session.switches.put(request.switch_weights)
            elif kind == "checkpoint":
                await self._finalize(request.checkpoint.step)
            elif kind == "hello":
                raise FieldInvalid("hello", "must be the first message, and only that")
            else:
                raise FieldInvalid("message", "must be set")
        session.half_closed = True
        await session.switches.put(None)
        self._changed.notify()

    def _demand(self, session: Session, demand: trainer_service_pb2.Demand) -> None:
        if not 0 < demand.group_count <= MAX_CREDIT:
            raise FieldInvalid(
                "demand.group_count", f"must be from 1 to {MAX_CREDIT}", demand.group_count
            )
        session.by_place = demand.by_place
        if demand.purpose == trajectory_pb2.PURPOSE_EVAL:
            session.evaluation_credit = min(
                MAX_CREDIT, session.evaluation_credit + demand.group_count
            )
        elif demand.purpose in (
            trajectory_pb2.PURPOSE_TRAIN,
            trajectory_pb2.PURPOSE_UNSPECIFIED,
        ):
            session.credit = min(MAX_CREDIT, session.credit + demand.group_count)
        else:
            raise FieldInvalid("demand.purpose", "is unknown", demand.purpose)
        self._changed.notify()

    async def _receipt(self, session: Session, receipt: trainer_service_pb2.GroupReceipt) -> None:
        if receipt.step < 0:
            raise FieldInvalid("receipt.step", "must not be negative", receipt.step)
        refused = receipt.HasField("rejection")
        if refused == bool(receipt.step):
            raise FieldInvalid(
                "receipt.step", "must be positive, or zero with a rejection", receipt.step
            )
        groups = self._buffer.receipt(receipt.delivery_ids, receipt.step)
        if refused:
            self.drops.count(receipt.rejection.reason or "REFUSED", len(groups))
        if refused or receipt.step <= session.resume_step:
            # Such groups do not count for the step being gathered. Their receipt was lost with an earlier
            # stream, or names deliveries of it, so they were delivered again. They must not keep the slots
            # of others.
            for group in groups:
                self._admission.vacate(group.group_id)
        if not groups or any(group.training for group in groups):
            session.resume_step = max(session.resume_step, receipt.step)
        group_ids = tuple(group.group_id for group in groups if group.training)
        measured_ids = tuple(group.group_id for group in groups if not group.training)
        records = [groups_receipted(group_ids, receipt.step)]
        if measured_ids:
            # Recorded as gone, because no trainer asks for them again.
            records.append(groups_receipted(measured_ids, 0))
        hit("receipt.before_append")
        await self._journal.append(records)
        hit("receipt.after_append")

    async def _finalize(self, step: int) -> None:
        if step < 0:
            raise FieldInvalid("checkpoint.step", "must not be negative", step)
        self._buffer.finalize(step)
        hit("checkpoint.before_append")
        await self._journal.append([step_final(step)])

    async def _deliver(self, session: Session) -> None:
        """Consume credit and finished groups; produce deliveries."""
        while session is self._session:
            selection = self._admission.select(session.credit)
            # The gate has forgotten the selected groups. Move them to their new place before the first
            # await, which may fail.
            records = [
                record for group_id in selection.late for record in self._discard_late(group_id)
            ]
            chosen = [
                *selection.taken,
                *self._buffer.waiting_evaluations(session.evaluation_credit),
            ]
            groups = self._buffer.take(chosen)
            session.credit -= len(selection.taken)
            session.evaluation_credit -= len(chosen) - len(selection.taken)
            if records:
                await self._journal.append(records)
            await self._send_groups(session, groups)
            self._note_drops()
            noticed = bool(self._notices)
            await self._send_notices(session)
            if groups or selection.late or noticed:
                continue  # Something may have changed during the awaits: look again before waiting.
            if session.half_closed:
                return
            await self._changed.wait()

    def _note_drops(self) -> None:
        """Queue notices for the groups that the buffer dropped because no message can carry them."""
        for dropped in self._buffer.read_drops():
            self._note(dropped.reason, dropped.message, dropped.group_id, dropped.task_id)

    def _note(self, reason: str, message: str, group_id: str, task_id: str) -> None:
        """Queue a notice about a group for the trainer."""
        self._notices.append(
            Notice(reason=reason, message=message, group_id=group_id, task_id=task_id)
        )

    async def _send_notices(self, session: Session) -> None:
        while self._notices:
            notice = self._notices[0]
            await session.send(ExchangeResponse(notice=notice))
            # Another stream may have begun meanwhile and sent it.
            if self._notices and self._notices[0] is notice:
                self._notices.popleft()

    async def _send_groups(self, session: Session, groups: Iterable[BufferedGroup]) -> None:
        """Deliver groups; those sent by place share messages."""
        placed: list[trainer_service_pb2.GroupDelivery] = []
        for group in groups:
            place = group.payload.place() if session.by_place else None
            if place is not None:
                self._note_delivery(group)
                placed.append(group_places.placed(group, place))
            if placed and (place is None or len(placed) == group_places.MOST):
                await session.send(group_places.message_of(placed))
                placed = []
            if place is None:
                await self._send_whole(session, group)
        if placed:
            await session.send(group_places.message_of(placed))

    def _note_delivery(self, group: BufferedGroup) -> None:
        if self.on_delivery is not None:
            self.on_delivery(group)

    async def _send_whole(self, session: Session, group: BufferedGroup) -> None:
        """Deliver a group. If it cannot be read back, drop it and queue its task again."""
        try:
            data = await group.payload.read()
        except DomainError as error:
            logger.error("dropping unreadable group %s: %s", group.group_id, error.message)
            self._buffer.lose(group)
            # Frees its slot in the batch for another group.
            self._admission.vacate(group.group_id)
            self.drops[error.reason] += 1
            records = [group_dropped(group.group_id, error.reason)]
            if group.task is not None:
                self._queue.resubmit(group.task)
                records.append(task_accepted(group.task, first=True))
            # Before the first await, because the notice may go to another stream.
            self._note(error.reason, error.message, group.group_id, group.task_id)
            await self._journal.append(records)
            # The trainer's demand for this group is still unmet.
            if group.training:
                session.credit += 1
            else:
                session.evaluation_credit += 1
            return
        self._note_delivery(group)
        await session.send(Delivery(data, group.delivery_id, group.delivery_count - 1))

    @property
    def connected(self) -> bool:
        """Whether a session is live."""
        return self._session is not None

    @property
    def run(self) -> tuple[str, int, str]:
        """Run id and epoch of the last session, and the id of the run's start."""
        return self._run_id, self._epoch, self._start_id

    def restore(self, run_id: str, trainer_epoch: int, start_id: str) -> None:
        """Restore the last session from the journal."""
        self._run_id, self._epoch, self._start_id = run_id, trainer_epoch, start_id
        self._fence_uploads(trainer_epoch)

    def _discard_late(self, group_id: str) -> list[Record]:
        """Drop a group for its age. Returns the records for the journal."""
        group = self._buffer.discard(group_id)
        contract = self._admission.contract
        assert contract is not None
        requeued = contract.late_policy is LatePolicy.REQUEUE and group.task is not None
        reason = "GROUP_REQUEUED" if requeued else "GROUP_DROPPED"
        self.drops[reason] += 1
        records = [group_dropped(group_id, reason)]
        if requeued and group.task is not None:
            self._queue.resubmit(group.task)
            records.append(task_accepted(group.task, first=True))
        message = (
            f"group {group_id} has tokens of version {group.oldest_version}; "
            f"the trainer is at version {self._admission.trainer_version}"
        )
        self._note(reason, message, group_id, group.task_id)
        return records

    async def _switch(self, session: Session) -> None:
        """Consume switch requests, one at a time; produce weight receipts."""
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


def read_contract(hello: trainer_service_pb2.Hello) -> StalenessContract:
    """The contract of a Hello. Raises FIELD_INVALID for anything missing or out of range."""
    if not 0 < len(hello.run_id) <= MAX_ID_LENGTH:
        raise FieldInvalid(
            "hello.run_id", f"must have 1 to {MAX_ID_LENGTH} characters", hello.run_id
        )
    if hello.trainer_epoch < 1:
        raise FieldInvalid("hello.trainer_epoch", "must be positive", hello.trainer_epoch)
    if hello.weight_version < 0:
        raise FieldInvalid("hello.weight_version", "must not be negative", hello.weight_version)
    if hello.resume_step < 0:
        raise FieldInvalid("hello.resume_step", "must not be negative", hello.resume_step)
    if len(hello.start_id) > MAX_ID_LENGTH:
        raise FieldInvalid(
            "hello.start_id", f"must have at most {MAX_ID_LENGTH} characters", hello.start_id
        )
    staleness = hello.staleness
    if not 0 <= staleness.max_lag <= 1_000_000:
        raise FieldInvalid(
            "hello.staleness.max_lag", "must be from 0 to 1000000", staleness.max_lag
        )
    if not 1 <= staleness.groups_per_step <= 1_000_000:
        raise FieldInvalid(
            "hello.staleness.groups_per_step",
            "must be from 1 to 1000000",
            staleness.groups_per_step,
        )
    known = {int(number): value for number, value in LATE_POLICIES.items()}
    if staleness.late_policy not in known:
        raise FieldInvalid("hello.staleness.late_policy", "is unknown", staleness.late_policy)
    return StalenessContract(
        staleness.max_lag, staleness.groups_per_step, known[staleness.late_policy]
    )
