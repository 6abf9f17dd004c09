"""A turn as the caller sees it, and its assembly from the events of one or more streams."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from penstock.client.conversation import Message, read_message
from penstock.client.errors import DeadlineExceeded, PenstockError, ServerUnavailable
from penstock.client.outcome import Failed, Outcome, read_outcome
from penstock.v1 import trajectory_pb2
from penstock.wire import codec
from penstock.wire.words import FINISH_REASONS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from penstock.client.calls import TurnRequest
    from penstock.v1 import rollout_service_pb2


class FinishReason(StrEnum):
    STOP = "stop"
    """The policy wrote a stop token or stop text."""
    LENGTH = "length"
    """The token budget or the context was used up."""
    ABORTED = "aborted"
    """Stopped from outside. `resume` continues at the exact token."""


_FINISH_REASONS = {int(reason): FinishReason(word) for word, reason in FINISH_REASONS.items()}


@dataclass(frozen=True, slots=True, eq=False)
class SegmentView:
    """A run of tokens with one author and, for the policy, one weight version."""

    token_ids: NDArray[np.int32]
    """Shape [n], read-only."""
    logprobs: NDArray[np.float32]
    """Log-probability of each token under the distribution it was sampled from, shape [n]; [0] for
    context."""
    weight_version: int
    """Version of the weights that sampled the tokens; zero for context."""
    turn_index: int
    temperature: float = 1.0
    """Temperature the tokens were sampled at; zero for context."""
    from_policy: bool = True
    """Whether the policy wrote the tokens, rather than the environment."""
    position: int = 0
    """For segments that `stream` yields: number of the turn's tokens before this segment."""

    def after(self, count: int) -> SegmentView:
        return replace(
            self,
            token_ids=self.token_ids[count:],
            logprobs=self.logprobs[count:] if self.from_policy else self.logprobs,
            position=self.position + count,
        )


@dataclass(frozen=True, eq=False)
class Turn:
    """One turn of the policy, across aborts and resumes."""

    index: int
    segments: tuple[SegmentView, ...]
    """The policy's tokens, one segment per weight version."""
    finish_reason: FinishReason
    text: str = ""
    """The policy's text; empty if the trajectory was opened with tokens."""
    message: Message | None = None
    """The same with tool calls, if the trajectory was opened with messages."""
    context_token_count: int = 0
    """Number of tokens the policy saw before it wrote."""
    cached_token_count: int = 0
    """Number of context tokens that the engine took from its prefix cache."""
    tool_call_error: str = ""
    """Why text that starts like a tool call is not a valid one, to show to the policy. The text
    itself is in the message's content. Empty if there was no such error."""

    @property
    def aborted(self) -> bool:
        """Whether `resume` can continue it."""
        return self.finish_reason is FinishReason.ABORTED

    @cached_property
    def token_ids(self) -> NDArray[np.int32]:
        """The policy's tokens, shape [n]."""
        return _token_ids(self.segments)

    @cached_property
    def logprobs(self) -> NDArray[np.float32]:
        """Log-probability of each token, shape [n]."""
        return _logprobs(self.segments)

    @property
    def weight_versions(self) -> tuple[int, ...]:
        """Versions that sampled the turn, in order."""
        return tuple(segment.weight_version for segment in self.segments)


@dataclass(frozen=True, slots=True, eq=False)
class TrajectoryRecord:
    trajectory_id: str
    segments: tuple[SegmentView, ...]
    """Context and policy segments. Concatenated, their tokens are the sequence that the model saw,
    without the prefix that a branch shares with its parent."""
    finish_reason: FinishReason | None
    """Why the last policy segment stopped; None while a turn runs."""
    turn_count: int
    outcome: Outcome | Failed | None
    open: bool
    """Whether it can still be extended."""
    parent_token_count: int = 0
    """For a branch, the number of tokens it shares with the beginning of its parent."""

    def policy_segments(self, turn_index: int) -> list[SegmentView]:
        return [s for s in self.segments if s.from_policy and s.turn_index == turn_index]

    def policy_count_before(self, turn_index: int) -> int:
        before = (s for s in self.segments if s.from_policy and s.turn_index < turn_index)
        return sum(len(segment.token_ids) for segment in before)


@dataclass
class TurnProgress:
    """A turn in progress: what has arrived so far, across streams and resumes."""

    index: int
    request: TurnRequest
    started: bool = False
    """Whether the server is known to have started it."""
    segments: list[SegmentView] = field(default_factory=list[SegmentView])
    token_count: int = 0
    context_token_count: int = 0
    finished: Turn | None = None
    on_start: Callable[[], None] | None = None

    @classmethod
    def of(cls, turn: Turn, resume: TurnRequest) -> TurnProgress:
        count = sum(len(segment.token_ids) for segment in turn.segments)
        segments, context = list(turn.segments), turn.context_token_count
        return cls(turn.index, resume, True, segments, count, context)

    def start(self, event: rollout_service_pb2.TurnStarted) -> None:
        self._begin()
        # A resumed turn counts its earlier tokens as context, so the first count is the turn's own.
        self.context_token_count = self.context_token_count or event.context_token_count

    def _begin(self) -> None:
        self.started = True
        if self.on_start is not None:
            self.on_start()

    def add(self, segment: SegmentView) -> SegmentView:
        """Appends tokens that arrived. Returns them with their position."""
        segment = replace(segment, position=self.token_count)
        self.segments.append(segment)
        self.token_count += len(segment.token_ids)
        return segment

    def forget(self) -> None:
        """Resets the turn, because the server never started it or does not remember it."""
        self.started = False
        self.segments, self.token_count, self.context_token_count = [], 0, 0

    def catch_up(self, record: TrajectoryRecord) -> list[SegmentView]:
        """Adopts the server's record, which is the authoritative state of the turn.

        Returns the tokens that the caller has not received yet. Tokens that the caller received but
        the record lacks never became durable. Then the position of the first segment, or of the
        next to arrive, lies before them.
        """
        self._begin()
        written = record.policy_segments(self.index)
        if not self.context_token_count:
            held, own = (sum(len(s.token_ids) for s in part) for part in (record.segments, written))
            self.context_token_count = record.parent_token_count + held - own
        known = common_count(_token_ids(self.segments), _token_ids(written))
        self.segments, self.token_count = [], 0
        missing: list[SegmentView] = []
        for segment in written:
            placed = self.add(segment)
            taken = min(max(0, known - placed.position), len(placed.token_ids))
            if taken < len(placed.token_ids):
                missing.append(placed.after(taken))
        return missing

    def is_all_of(self, event: rollout_service_pb2.TurnFinished) -> bool:
        return event.policy_token_count == self.token_count

    def said_of(self, event: rollout_service_pb2.TurnFinished) -> str:
        return f"{self.token_count} of {event.policy_token_count} tokens of a turn arrived"

    def finish(self, event: rollout_service_pb2.TurnFinished) -> Turn:
        """Raises PenstockError if tokens are missing."""
        if not self.is_all_of(event):
            raise PenstockError(self.said_of(event))
        message = read_message(event.message) if event.HasField("message") else None
        self.finished = Turn(
            self.index,
            tuple(_merge_runs(self.segments)),
            read_finish_reason(event.finish_reason) or FinishReason.STOP,
            message.content if message else event.text,
            message,
            self.context_token_count,
            event.cached_token_count,
            event.tool_call_error,
        )
        return self.finished

    def refused(self, error: PenstockError) -> bool:
        """Whether an error means that the server never started the turn."""
        unsure = isinstance(error, ServerUnavailable | DeadlineExceeded)
        return not self.started and not unsure


def read_finish_reason(reason: int) -> FinishReason | None:
    """Returns None while the turn is running."""
    return _FINISH_REASONS.get(reason)


def read_segment(segment: trajectory_pb2.Segment) -> SegmentView:
    """Makes no copy. Raises MalformedMessage if its arrays differ in length."""
    token_ids, logprobs = codec.token_ids(segment), codec.logprobs(segment)
    from_policy = segment.author == trajectory_pb2.AUTHOR_POLICY
    if from_policy and len(token_ids) != len(logprobs):
        raise codec.MalformedMessage(f"{len(token_ids)} tokens, {len(logprobs)} log-probabilities")
    return SegmentView(
        token_ids,
        logprobs,
        segment.weight_version,
        segment.turn_index,
        segment.temperature,
        from_policy,
    )


def read_trajectory(held: rollout_service_pb2.GetTrajectoryResponse) -> TrajectoryRecord:
    trajectory = held.trajectory
    return TrajectoryRecord(
        trajectory.trajectory_id,
        tuple(read_segment(segment) for segment in trajectory.segments),
        read_finish_reason(trajectory.finish_reason),
        trajectory.turn_count,
        read_outcome(trajectory.outcome),
        held.open,
        trajectory.parent_token_count,
    )


def common_count(first: NDArray[np.int32], second: NDArray[np.int32]) -> int:
    """Returns the number of tokens that two runs share from the beginning."""
    length = min(len(first), len(second))
    differing = np.flatnonzero(first[:length] != second[:length])
    return int(differing[0]) if len(differing) else length


def _merge_runs(segments: Iterable[SegmentView]) -> list[SegmentView]:
    """Merges segments into one per run of equal weight version and temperature."""
    grouped = groupby(segments, lambda segment: (segment.weight_version, segment.temperature))
    runs = [list(run) for _, run in grouped]
    return [
        SegmentView(
            _token_ids(run),
            _logprobs(run),
            run[0].weight_version,
            run[0].turn_index,
            run[0].temperature,
        )
        for run in runs
    ]


def _token_ids(segments: Sequence[SegmentView]) -> NDArray[np.int32]:
    if len(segments) == 1:
        return segments[0].token_ids
    return np.concatenate([np.empty(0, np.int32), *(s.token_ids for s in segments)])


def _logprobs(segments: Sequence[SegmentView]) -> NDArray[np.float32]:
    if len(segments) == 1:
        return segments[0].logprobs
    return np.concatenate([np.empty(0, np.float32), *(s.logprobs for s in segments)])
