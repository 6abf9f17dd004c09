"""Open and closed trajectories by id, with bounds on their number."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from penstock.server.core.errors import DomainError
from penstock.server.turns.trajectory import BYTES_PER_TOKEN, TrajectoryRecord
from penstock.server.turns.turn import TurnState
from penstock.v1 import trajectory_pb2
from penstock.wire.reasons import Reason

# Memory of a trajectory in addition to its tokens and its outcome.
RECORD_BYTES = 2048


@dataclass(frozen=True, slots=True)
class ClosedMark:
    """What the store keeps of a closed trajectory after its record is gone."""

    outcome_digest: bytes
    """SHA-256 of the outcome, to recognise a repeated close."""
    group_id: str
    """Empty for an unleased trajectory without a group."""
    group_completed: bool
    retried: bool
    """Whether the attempt failed and will be made again."""


def outcome_digest(outcome: trajectory_pb2.Outcome) -> bytes:
    """SHA-256 of the deterministic serialization."""
    return hashlib.sha256(outcome.SerializeToString(deterministic=True)).digest()


def unknown_trajectory(trajectory_id: str) -> DomainError:
    return DomainError(
        Reason.TRAJECTORY_UNKNOWN,
        f"no trajectory {trajectory_id!r}",
        {"trajectory_id": trajectory_id},
    )


class TrajectoryStore:
    def __init__(
        self,
        max_open: int,
        on_closed: Callable[[str], None] = lambda trajectory_id: None,
    ) -> None:
        """`on_closed` is called with each trajectory that can have no further turn."""
        self._max_open = max_open
        self._max_remembered = 100_000
        self._records: dict[str, TrajectoryRecord] = {}
        self._closed: OrderedDict[str, ClosedMark] = OrderedDict()
        self.open_count = 0
        self.byte_count = 0
        """Memory budget that the records use."""
        self._on_closed = on_closed

    def check_new(self, trajectory_id: str, *, bounded: bool = True) -> None:
        """Raise TRAJECTORY_EXISTS for a known id, QUEUE_FULL at the bound."""
        if trajectory_id in self._records or trajectory_id in self._closed:
            raise DomainError(
                Reason.TRAJECTORY_EXISTS,
                f"trajectory {trajectory_id} exists; extend it with Continue",
                {"trajectory_id": trajectory_id},
            )
        if bounded and self.open_count >= self._max_open:
            raise DomainError(
                Reason.QUEUE_FULL,
                f"{self.open_count} trajectories are open, the most this server holds",
                {"open_trajectory_count": self.open_count, "limit": self._max_open},
            )

    def add(self, record: TrajectoryRecord, *, bounded: bool = True) -> None:
        """Raises what `check_new` raises. A trajectory that closes immediately is not bounded."""
        self.check_new(record.trajectory_id, bounded=bounded)
        self._records[record.trajectory_id] = record
        self.open_count += 1

    def get(self, trajectory_id: str) -> TrajectoryRecord:
        """Raises TRAJECTORY_UNKNOWN, or TRAJECTORY_CLOSED if the trajectory was delivered and dropped."""
        record = self.find(trajectory_id)
        if record is not None:
            return record
        if trajectory_id not in self._closed:
            raise unknown_trajectory(trajectory_id)
        raise DomainError(
            Reason.TRAJECTORY_CLOSED,
            f"trajectory {trajectory_id} is closed and no longer held",
            {"trajectory_id": trajectory_id},
        )

    def charge(self, record: TrajectoryRecord) -> None:
        """Charge a record to the memory budget, including what its turn in flight may still add."""
        if record.trajectory_id not in self._records:
            return
        turn = record.turn
        grows = turn is not None and turn.in_flight and turn.state is not TurnState.RECORDING
        coming = turn.budget - turn.policy_token_count if turn is not None and grows else 0
        outcome = record.outcome.ByteSize() if record.outcome is not None else 0
        own = record.token_count - record.parent_token_count
        held = record.history.byte_count if record.history is not None else 0
        if turn is not None and turn.attempt.written is not None:
            held += turn.attempt.written.byte_count
        taken = (own + coming) * BYTES_PER_TOKEN + RECORD_BYTES + outcome + held
        self.byte_count += taken - record.charged_bytes
        record.charged_bytes = taken

    def find(self, trajectory_id: str) -> TrajectoryRecord | None:
        return self._records.get(trajectory_id)

    def root_of(self, record: TrajectoryRecord) -> TrajectoryRecord | None:
        """The root of a trajectory's branches, which may be itself; None if the root is gone."""
        while record.parent_trajectory_id:
            parent = self._records.get(record.parent_trajectory_id)
            if parent is None:
                return None
            record = parent
        return record

    @property
    def closed(self) -> Iterable[tuple[str, ClosedMark]]:
        """Oldest first."""
        return self._closed.items()

    def restore(
        self, records: Iterable[TrajectoryRecord], closed: Iterable[tuple[str, ClosedMark]]
    ) -> None:
        for record in records:
            self._records[record.trajectory_id] = record
            self.open_count += not record.closed
            self.charge(record)
        for record in self._records.values():
            parent = self._records.get(record.parent_trajectory_id)
            if parent is not None:
                parent.children.append(record)
        self._closed.update(closed)

    def closed_mark(self, trajectory_id: str) -> ClosedMark | None:
        """None if the trajectory is open, unknown or no longer remembered."""
        return self._closed.get(trajectory_id)

    def close(self, record: TrajectoryRecord, outcome: trajectory_pb2.Outcome) -> ClosedMark:
        """Keep a mark to recognise a repeated close. The record stays until `forget`."""
        record.outcome = outcome
        self.open_count -= 1
        self._on_closed(record.trajectory_id)
        self.charge(record)
        mark = ClosedMark(
            outcome_digest(outcome), record.group_id, group_completed=False, retried=False
        )
        self._closed[record.trajectory_id] = mark
        for _ in range(len(self._closed) - self._max_remembered):
            oldest = next(iter(self._closed))
            if oldest in self._records:
                # Its group waits for a sibling, so the mark must outlive the record.
                self._closed.move_to_end(oldest)
            else:
                del self._closed[oldest]
        return mark

    def note_settled(
        self, record: TrajectoryRecord, *, group_completed: bool, retried: bool
    ) -> ClosedMark:
        """Keep the result of a close, for callers that repeat it."""
        mark = self._closed[record.trajectory_id]
        settled = replace(mark, group_completed=group_completed, retried=retried)
        self._closed[record.trajectory_id] = settled
        return settled

    def forget(self, trajectory_id: str) -> None:
        """Drop a record; ignore unknown ids. An open trajectory leaves no mark."""
        record = self._records.pop(trajectory_id, None)
        if record is not None:
            self.byte_count -= record.charged_bytes
            record.charged_bytes = 0
            self.open_count -= not record.closed
            self._on_closed(trajectory_id)

    def records(self) -> list[TrajectoryRecord]:
        return list(self._records.values())
