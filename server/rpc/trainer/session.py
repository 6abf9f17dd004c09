"""A trainer's session: its states, and which session is current.

    WELCOMING ──► OPEN ──► HALF_CLOSED      the trainer sends no more messages
        │          │            │
        └──────────┴────────────┴──► ENDED  the stream is gone, or the server ended it

A session begins with Hello. A Hello with a higher epoch ends the previous session with SESSION_REPLACED;
any other is refused with STALE_EPOCH.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from penstock.server.core.errors import MAX_ID_LENGTH, DomainError, FieldInvalid
from penstock.server.groups.staleness_gate import LatePolicy, StalenessContract
from penstock.server.turns.encoding import Delivery
from penstock.v1 import trainer_service_pb2
from penstock.wire.reasons import Reason

LATE_POLICIES: Mapping[int, LatePolicy] = {
    trainer_service_pb2.LATE_POLICY_UNSPECIFIED: LatePolicy.MASK,
    trainer_service_pb2.LATE_POLICY_MASK: LatePolicy.MASK,
    trainer_service_pb2.LATE_POLICY_WAIT: LatePolicy.WAIT,
    trainer_service_pb2.LATE_POLICY_REQUEUE: LatePolicy.REQUEUE,
    trainer_service_pb2.LATE_POLICY_DROP: LatePolicy.DROP,
}
MAX_WAITING_SWITCHES = 4

Write = Callable[[trainer_service_pb2.ExchangeResponse | Delivery], Awaitable[None]]


class SessionState(Enum):
    WELCOMING = "welcoming"
    """Its Hello was accepted. The Welcome has not been sent yet."""
    OPEN = "open"
    HALF_CLOSED = "half closed"
    """The trainer sends no more messages. It still receives what its credit allows."""
    ENDED = "ended"


TRANSITIONS: Mapping[SessionState, frozenset[SessionState]] = {
    SessionState.WELCOMING: frozenset({SessionState.OPEN, SessionState.ENDED}),
    SessionState.OPEN: frozenset({SessionState.HALF_CLOSED, SessionState.ENDED}),
    SessionState.HALF_CLOSED: frozenset({SessionState.ENDED}),
    SessionState.ENDED: frozenset(),
}


@dataclass(eq=False)
class Session:
    """One Exchange stream. Needs a running event loop."""

    resume_step: int
    """Last step that the trainer's state is known to contain, from its Hello and its receipts."""
    write: Write
    by_place: bool = False
    """Whether the trainer reads groups from the journal's folder."""
    credit: int = 0
    evaluation_credit: int = 0
    state: SessionState = SessionState.WELCOMING
    """Changed by `move` alone."""
    failure: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """Fails with the error that ends the session from outside."""
    switches: asyncio.Queue[trainer_service_pb2.SwitchWeights | None] = field(
        default_factory=lambda: asyncio.Queue(MAX_WAITING_SWITCHES)
    )
    heard_at: float = field(default_factory=time.monotonic)
    """When its last message arrived."""
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def ended(self) -> bool:
        return self.state is SessionState.ENDED

    def move(self, state: SessionState) -> None:
        """An ended session stays so. Otherwise raises RuntimeError for a state that cannot follow."""
        if self.ended:
            return
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"a session cannot be {state.value} after {self.state.value}")
        self.state = state

    def end(self, reason: DomainError) -> None:
        """End the session from outside: its stream fails with `reason`, or with an earlier one."""
        self.move(SessionState.ENDED)
        if not self.failure.done():
            self.failure.set_exception(reason)

    def check(self) -> None:
        """Raise what ended the session from outside. To be called after each await before it is open: a
        newer session may have begun meanwhile."""
        if self.failure.done():
            self.failure.result()

    def leave(self) -> None:
        """Called when the stream is gone."""
        self.move(SessionState.ENDED)
        self.failure.cancel()

    async def send(self, response: trainer_service_pb2.ExchangeResponse | Delivery) -> None:
        """The lock is needed because a stream takes one write at a time."""
        async with self._lock:
            await self.write(response)


class CurrentSession:
    """The current session, if any, and the run and epoch that every Hello is checked against."""

    def __init__(self, fence_uploads: Callable[[int], None]) -> None:
        """`fence_uploads` refuses weight uploads of older epochs from now on."""
        self._fence_uploads = fence_uploads
        self._session: Session | None = None
        self._run_id = ""
        self._start_id = ""
        """Identifies the start of that run; empty if no trainer has named one."""
        self._epoch = 0
        self.left_at = time.monotonic()
        """When the last session ended, or this server began."""

    @property
    def current(self) -> Session | None:
        return self._session

    @property
    def connected(self) -> bool:
        return self._session is not None

    @property
    def run(self) -> tuple[str, int, str]:
        """Run id and epoch of the last session, and the id of the run's start."""
        return self._run_id, self._epoch, self._start_id

    def restore(self, run_id: str, trainer_epoch: int, start_id: str) -> None:
        self._run_id, self._epoch, self._start_id = run_id, trainer_epoch, start_id
        self._fence_uploads(trainer_epoch)

    def check(self, run_id: str, trainer_epoch: int) -> None:
        """Raise STALE_EPOCH if a newer session has replaced the one that the trainer names."""
        if trainer_epoch and (run_id, trainer_epoch) != (self._run_id, self._epoch):
            raise DomainError(
                Reason.STALE_EPOCH,
                f"trainer epoch {trainer_epoch} of run {run_id} is not current;"
                f" the last session is epoch {self._epoch} of run {self._run_id}",
                {"trainer_epoch": trainer_epoch, "current": self._epoch},
            )

    def check_upload(self, trainer_epoch: int) -> None:
        """Raise TRAINER_CONNECTED if the upload of a newer epoch is not the connected trainer's."""
        if self._session is not None and trainer_epoch > self._epoch:
            raise DomainError(
                Reason.TRAINER_CONNECTED,
                f"the trainer of run {self._run_id} is connected, and uploads its own versions",
                {"trainer_epoch": trainer_epoch, "current": self._epoch, "run_id": self._run_id},
            )

    def begin(self, hello: trainer_service_pb2.Hello, write: Write) -> Session:
        """Raises STALE_EPOCH."""
        epoch = hello.trainer_epoch
        if epoch <= self._epoch:
            raise DomainError(
                Reason.STALE_EPOCH,
                f"trainer epoch {epoch} is not greater than {self._epoch}",
                {"trainer_epoch": epoch, "current": self._epoch},
            )
        took_over = f"a trainer of epoch {epoch} took over"
        self.end(DomainError(Reason.SESSION_REPLACED, took_over, {"trainer_epoch": epoch}))
        self._epoch = epoch
        self._fence_uploads(epoch)
        self._session = Session(hello.resume_step, write)
        return self._session

    def begin_run(self, hello: trainer_service_pb2.Hello) -> tuple[str, str] | None:
        """Make the Hello's run the current one. Returns the run whose state is to be dropped and what
        happened to it, or None if the run continues or is the first."""
        previous, known = self._run_id, self._start_id
        self._run_id, self._start_id = hello.run_id, hello.start_id
        if previous and previous != hello.run_id:
            return previous, "was replaced"
        if known and hello.start_id and known != hello.start_id:
            return previous, "was restarted from scratch"
        self._start_id = hello.start_id or known
        return None

    def end(self, reason: DomainError) -> None:
        if self._session is not None:
            self._session.end(reason)

    def leave(self, session: Session) -> bool:
        """Return whether this was the current session, so that no trainer is connected now."""
        session.leave()
        if self._session is not session:
            return False
        self._session, self.left_at = None, time.monotonic()
        return True


def read_contract(hello: trainer_service_pb2.Hello) -> StalenessContract:
    """Raises FIELD_INVALID for anything missing or out of range."""
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
    for name, least in (("max_lag", 0), ("groups_per_step", 1)):
        value = getattr(staleness, name)
        if not least <= value <= 1_000_000:
            problem = f"must be from {least} to 1000000"
            raise FieldInvalid(f"hello.staleness.{name}", problem, value)
    if staleness.late_policy not in LATE_POLICIES:
        raise FieldInvalid("hello.staleness.late_policy", "is unknown", staleness.late_policy)
    return StalenessContract(
        staleness.max_lag, staleness.groups_per_step, LATE_POLICIES[staleness.late_policy]
    )
