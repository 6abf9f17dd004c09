"""Trajectories and their turns: tokens, authors and weight versions.

The record is appended to before anything is sent, so a lost caller loses nothing. Tokens live in byte
buffers (little-endian int32 and float32, as on the wire): appending is amortised, and no Python object is
made per token.
"""

from __future__ import annotations

import asyncio
import time
from asyncio import Future
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray
from opentelemetry.trace import Span

from penstock.server.engine.protocol import Delta, Finish
from penstock.server.journal.protocol import Part, Stored
from penstock.server.turns.history import History
from penstock.server.turns.turn import TRANSITIONS, TurnAttempt, TurnSampling, TurnState
from penstock.v1 import journal_pb2, rollout_service_pb2, trajectory_pb2
from penstock.wire.codec import LOGPROB, TOKEN
from penstock.wire.messages import Segment, Trajectory

BYTES_PER_TOKEN = TOKEN.itemsize + LOGPROB.itemsize


class PromptKind(Enum):
    """How the trajectory was opened; determines the form in which its turns are returned."""

    TOKENS = journal_pb2.PROMPT_FORM_TOKENS
    TEXT = journal_pb2.PROMPT_FORM_TEXT
    CONVERSATION = journal_pb2.PROMPT_FORM_CONVERSATION


@dataclass(slots=True)
class SegmentRecord:
    """A run of tokens with one author, turn and weight version."""

    author: trajectory_pb2.Author.ValueType
    turn_index: int
    weight_version: int = 0
    temperature: float = 0.0
    tokens: bytearray = field(default_factory=bytearray)
    logprobs: bytearray = field(default_factory=bytearray)

    @property
    def token_bytes(self) -> int:
        """Policy tokens also have a log-probability."""
        by_policy = self.author == trajectory_pb2.AUTHOR_POLICY
        return BYTES_PER_TOKEN if by_policy else TOKEN.itemsize

    @property
    def token_count(self) -> int:
        return len(self.tokens) // TOKEN.itemsize

    def message(self, start: int = 0, stop: int | None = None) -> trajectory_pb2.Segment:
        """Tokens `start` to `stop` as a twin Segment."""
        width = TOKEN.itemsize
        end = len(self.tokens) if stop is None else stop * width
        return Segment(
            author=self.author,
            # Slicing the bytearrays themselves would copy twice.
            token_ids=bytes(memoryview(self.tokens)[start * width : end]),
            logprobs=bytes(memoryview(self.logprobs)[start * width : end]),
            weight_version=self.weight_version,
            turn_index=self.turn_index,
            temperature=self.temperature,
        )


class Pieces:
    """Bytes of a message on the wire, which are joined only when they are written."""

    __slots__ = ("byte_count", "parts")

    def __init__(self, first: Part) -> None:
        self.parts: list[Part] = [first]
        self.byte_count = len(first)

    def add(self, part: Part) -> None:
        self.parts.append(part)
        self.byte_count += len(part)

    def extend(self, parts: Iterable[Part], byte_count: int) -> None:
        self.parts += parts
        self.byte_count += byte_count


@dataclass(frozen=True, slots=True)
class EncodedTrajectory:
    """A Trajectory message, in pieces that no longer change."""

    whole: Pieces
    short: Pieces
    """The same message without the arrays of some segments."""
    left_out: Sequence[journal_pb2.ReferredSegment]
    """The segments whose arrays `short` omits; `trajectory` is not set."""


@dataclass(slots=True, eq=False)
class Answered:
    """The last request of an agent that sends whole conversations, kept to recognise a retry of it."""

    turn: Turn
    """It answers the request."""
    digest: bytes
    """Of the request."""
    followers: int = 0
    """Requests that are receiving the turn now."""
    delivered: bool = False
    """Whether one of them received the whole turn."""
    finished: rollout_service_pb2.TurnFinished | None = None
    """None until the turn is complete."""
    asked_at: float = field(default_factory=time.monotonic)
    """Monotonic clock, seconds."""

    def is_retried_by(self, digest: bytes, *, says_so: bool) -> bool:
        """Whether a request repeats this one; otherwise it wants another sample."""
        return digest == self.digest and (says_so or not (self.delivered or self.followers))


@dataclass(slots=True, eq=False)
class Turn:
    """One turn of the policy, over all its attempts."""

    record: TrajectoryRecord
    index: int
    sampling: TurnSampling
    budget: int
    """Maximum policy tokens of the turn, bounded by the context."""
    context_token_count: int
    """Tokens before the first one that the policy writes in this turn."""
    span: Span
    trace_headers: dict[str, str]
    stream_interval: int
    policy_token_count: int = 0
    finish_reason_before: trajectory_pb2.FinishReason.ValueType = (
        trajectory_pb2.FINISH_REASON_UNSPECIFIED
    )
    """If the context was full when this turn began: why the last turn that had room stopped."""
    attempts: int = 0
    """Requests made to the engine so far."""
    attempt: TurnAttempt = field(default_factory=TurnAttempt)
    """The attempt under way, or the last one."""
    state: TurnState = TurnState.NEW
    """Changed by `to` only."""
    request_id: str | None = None
    """Set while the engine has a request."""
    adapter_version: int | None = None
    """The adapter that samples the request; None for full weights."""
    abort_requested: bool = False
    """Not a state: an abort may come in any state, and only makes the turn leave it sooner."""
    task: asyncio.Task[None] | None = None

    def to(self, state: TurnState) -> None:
        """Raises ValueError if no turn moves from its state to that one."""
        if state not in TRANSITIONS[self.state]:
            raise ValueError(f"a turn cannot go from {self.state.value} to {state.value}")
        self.state = state
        if not state.in_engine:
            self.request_id = self.adapter_version = None

    @property
    def in_flight(self) -> bool:
        return self.state.in_flight

    @property
    def finish_reason(self) -> trajectory_pb2.FinishReason.ValueType:
        """Why the last attempt stopped; unspecified while one is in flight."""
        if self.in_flight:
            return trajectory_pb2.FINISH_REASON_UNSPECIFIED
        return self.attempt.finish_reason

    @property
    def last_finish_reason(self) -> trajectory_pb2.FinishReason.ValueType:
        """Why the last turn that had room stopped: this one or an earlier one."""
        # Records of older servers lack the earlier turn's reason.
        return (not self.budget and self.finish_reason_before) or self.finish_reason

    @property
    def resumable(self) -> bool:
        """Whether Continue without an observation resumes this turn."""
        return not self.in_flight and (
            self.attempt.error is not None or self.attempt.finish is Finish.ABORTED
        )

    def policy_tokens(self, stop: int, start: int = 0) -> NDArray[np.int32]:
        """The tokens from `start` to `stop` among those the policy wrote in this turn, shape
        [stop - start]."""
        before = self.context_token_count
        return self.record.token_array(before + start, before + stop)


@dataclass(slots=True)
class TrajectoryRecord:
    trajectory_id: str
    kind: PromptKind
    sampling: TurnSampling
    group_id: str = ""
    sample_index: int = 0
    parent_trajectory_id: str = ""
    priority: int = 0
    required_weight_version: int = 0
    traceparent: str = ""
    segments: list[SegmentRecord] = field(default_factory=list["SegmentRecord"])
    token_count: int = 0
    turn_count: int = 0
    turn: Turn | None = None
    """The turn in flight, or the last one."""
    outcome: trajectory_pb2.Outcome | None = None
    """Set when closed."""
    charged_bytes: int = 0
    recorded_end: tuple[int, int] = (0, 0)
    """Its `end` when it was last written to the journal."""
    recorded_token_count: int = 0
    recorded: bool = False
    written: dict[tuple[int, int], Future[list[Stored]] | Stored] = field(
        default_factory=dict["tuple[int, int]", "Future[list[Stored]] | Stored"]
    )
    """Journal records that hold large segments, keyed by (tokens before the segment, tokens in it). While
    the append is under way, the value is its future; the last record that it returns holds the segment."""
    encoded: EncodedTrajectory | None = None
    """Set when it is closed and encoded, before its group is complete."""
    parent: TrajectoryRecord | None = None
    parent_token_count: int = 0
    """Leading tokens that are the parent's and in no segment here."""
    children: list[TrajectoryRecord] = field(default_factory=list["TrajectoryRecord"])
    answered: Answered | None = None
    """Only on endpoints that receive whole conversations."""
    history: History | None = None
    """None unless opened with a conversation."""
    single_turn: bool = False
    """Forgotten when its turn ends, and never written to the journal."""

    @property
    def closed(self) -> bool:
        return self.outcome is not None

    @property
    def end(self) -> tuple[int, int]:
        """Number of segments, and of tokens in the last of them."""
        return len(self.segments), self.segments[-1].token_count if self.segments else 0

    def segments_between(
        self, begin: tuple[int, int], end: tuple[int, int]
    ) -> list[trajectory_pb2.Segment]:
        """The tokens between two values of `end`, as twin Segments."""
        pieces = self.pieces_between(begin, end)
        return [segment.message(start, stop) for segment, start, stop in pieces]

    def pieces_between(
        self, begin: tuple[int, int], end: tuple[int, int]
    ) -> Iterator[tuple[SegmentRecord, int, int]]:
        """Segments between two values of `end`, each with its token range (start, stop)."""
        count, last_token_count = end
        begun, start = begin
        for index in range(max(0, begun - 1), count):
            segment = self.segments[index]
            stop = last_token_count if index == count - 1 else segment.token_count
            if start < stop:
                yield segment, start, stop
            start = 0

    def unrecorded_from(self, byte_count: int) -> Iterator[tuple[int, int]]:
        """Unrecorded segments of at least `byte_count` bytes, as keys of `written`."""
        position = max(self.recorded_token_count, self.parent_token_count)
        for segment, start, stop in self.pieces_between(self.recorded_end, self.end):
            if (stop - start) * segment.token_bytes >= byte_count:
                yield position, stop - start
            position += stop - start

    def keep_written_from(self, byte_count: int | None) -> None:
        """Forget records of segments below `byte_count`, to which nothing refers; None forgets all."""
        bytes_at: dict[int, int] = {}
        position = self.parent_token_count
        for segment in self.segments:
            bytes_at[position] = segment.token_bytes
            position += segment.token_count
        self.written = {
            (position, count): written
            for (position, count), written in self.written.items()
            if byte_count is not None and count * bytes_at.get(position, 0) >= byte_count
        }

    def recorded_at(self, position: int, count: int) -> Stored | None:
        """The record that has the segment of `count` tokens after the first `position`."""
        found = self.written.get((position, count))
        if isinstance(found, Future):
            failed = not found.done() or found.cancelled() or found.exception() is not None
            return None if failed else found.result()[-1]
        return found

    @property
    def growing(self) -> bool:
        """Whether a turn is in flight. On a closed trajectory, no caller waits for that turn."""
        return self.turn is not None and self.turn.in_flight

    @property
    def is_written(self) -> bool:
        """Whether no append of a large segment is under way."""
        return all(not isinstance(found, Future) or found.done() for found in self.written.values())

    def token_array(self, start: int = 0, stop: int | None = None) -> NDArray[np.int32]:
        """Tokens `start` to `stop` of all, including the parent's. Reads no others, however deep the
        branches are nested."""
        end = self.token_count if stop is None else min(stop, self.token_count)
        pieces: list[memoryview] = []
        record: TrajectoryRecord | None = self
        while record is not None and start < end:
            pieces += record._own_pieces(max(start, record.parent_token_count), end)
            end = min(end, record.parent_token_count)
            record = record.parent
        return np.frombuffer(b"".join(reversed(pieces)), TOKEN)

    def _own_pieces(self, start: int, stop: int) -> Iterator[memoryview]:
        """Bytes of the tokens `start` to `stop`, which are not the parent's; the last ones first."""
        end = self.token_count
        for segment in reversed(self.segments):
            begin = end - segment.token_count
            if start < end and begin < stop:
                width = TOKEN.itemsize
                first, last = max(start, begin) - begin, min(stop, end) - begin
                yield memoryview(segment.tokens)[first * width : last * width]
            elif end <= start:
                return
            end = begin

    def shared_with(self, token_ids: NDArray[np.int32]) -> int:
        """Number of tokens at the beginning of a branch's prompt that are this trajectory's."""
        # The tokens of a turn in flight are not recorded yet.
        settled = self.turn.context_token_count if self.growing and self.turn else None
        theirs = self.token_array(0, settled)
        count = min(len(theirs), len(token_ids))
        differing = np.flatnonzero(theirs[:count] != token_ids[:count])
        return int(differing[0]) if len(differing) else count

    def branch_from(self, parent: TrajectoryRecord, shared: int) -> None:
        """Make this empty record a branch that begins with `shared` of the parent's tokens."""
        self.group_id, self.sample_index = parent.group_id, parent.sample_index
        self.parent_trajectory_id, self.parent = parent.trajectory_id, parent
        self.parent_token_count = self.token_count = shared
        parent.children.append(self)

    @property
    def depth(self) -> int:
        """Number of trajectories that this one branches from, directly and indirectly."""
        depth, record = 0, self.parent
        while record is not None:
            depth, record = depth + 1, record.parent
        return depth

    def append_context(self, token_ids: NDArray[np.int32], turn_index: int) -> None:
        if not len(token_ids):
            return
        segment = SegmentRecord(trajectory_pb2.AUTHOR_CONTEXT, turn_index)
        segment.tokens += np.ascontiguousarray(token_ids, TOKEN).tobytes()
        self.segments.append(segment)
        self.token_count += segment.token_count

    def append_policy(self, delta: Delta, turn_index: int, temperature: float) -> None:
        """A new weight version or temperature begins a new segment."""
        if not len(delta.token_ids):
            return
        last = self.segments[-1] if self.segments else None
        if (
            last is None
            or last.author != trajectory_pb2.AUTHOR_POLICY
            or last.weight_version != delta.weight_version
            or last.turn_index != turn_index
            or last.temperature != temperature
        ):
            last = SegmentRecord(
                trajectory_pb2.AUTHOR_POLICY, turn_index, delta.weight_version, temperature
            )
            self.segments.append(last)
        last.tokens += np.ascontiguousarray(delta.token_ids, TOKEN).tobytes()
        last.logprobs += np.ascontiguousarray(delta.logprobs, LOGPROB).tobytes()
        self.token_count += len(delta.token_ids)

    def open_branches(self) -> list[TrajectoryRecord]:
        """Open direct and indirect branches, each before its own branches."""
        return [branch for branch in self.with_branches()[1:] if not branch.closed]

    def with_branches(self) -> list[TrajectoryRecord]:
        """This trajectory and its direct and indirect branches, each before its own branches."""
        members: list[TrajectoryRecord] = []
        left: list[TrajectoryRecord] = [self]
        while left:
            members.append(member := left.pop())
            left += reversed(member.children)
        return members

    def policy_versions(self) -> list[int]:
        return [
            segment.weight_version
            for segment in self.segments
            if segment.author == trajectory_pb2.AUTHOR_POLICY
        ]

    def message(self) -> trajectory_pb2.Trajectory:
        """As a twin message."""
        message = self.head()
        message.segments.extend(segment.message() for segment in self.segments)
        return message

    def head(self) -> trajectory_pb2.Trajectory:
        """As a twin message without segments."""
        return Trajectory(
            trajectory_id=self.trajectory_id,
            sample_index=self.sample_index,
            outcome=self.outcome,
            finish_reason=(
                trajectory_pb2.FINISH_REASON_UNSPECIFIED
                if self.turn is None
                else self.turn.last_finish_reason
            ),
            turn_count=self.turn_count,
            parent_trajectory_id=self.parent_trajectory_id,
            parent_token_count=self.parent_token_count,
            traceparent=self.traceparent,
        )
