"""A turn as the caller sees it, and its assembly from the events of one or more streams."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from penstock.client.conversation import Message, read_message
from penstock.client.errors import DeadlineExceeded, PenstockError, ServerUnavailable
from penstock.client.outcome import Failed, Outcome, read_outcome
from penstock.v1 import trajectory_pb2
from penstock.wire import codec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from penstock.client.calls import TurnRequest
    from penstock.v1 import rollout_service_pb2


N = TypeVar("N", bound=np.generic)


class FinishReason(StrEnum):
    """Why generation stopped."""

    STOP = "stop"
    """A stop token or stop text."""
    LENGTH = "length"
    """The budget or the context ran out."""
    ABORTED = "aborted"
    """Stopped from outside; `resume` goes on at the exact token."""


_FINISH_REASONS: dict[int, FinishReason] = {
    trajectory_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    trajectory_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    trajectory_pb2.FINISH_REASON_ABORTED: FinishReason.ABORTED,
}


@dataclass(frozen=True, slots=True, eq=False)
class SegmentView:
    """A run of tokens with one author and, for the policy, one weight version."""

    token_ids: NDArray[np.int32]
    """Shape [n], read-only."""
    logprobs: NDArray[np.float32]
    """Of each token under the distribution it was sampled from, shape [n]; [0] for context."""
    weight_version: int
    """Weights that sampled the tokens; zero for context."""
    turn_index: int
    """From zero."""
    temperature: float = 1.0
    """Temperature the tokens were sampled at; zero for context."""
    from_policy: bool = True
    """Whether the policy wrote them, or the environment did."""

    def after(self, count: int) -> SegmentView:
        """The segment without its first `count` tokens."""
        return SegmentView(
            self.token_ids[count:],
            self.logprobs[count:],
            self.weight_version,
            self.turn_index,
            self.temperature,
            self.from_policy,
        )


@dataclass(frozen=True, eq=False)
class Turn:
    """One turn of the policy, over all its attempts."""

    index: int
    """From zero."""
    segments: tuple[SegmentView, ...]
    """The policy's tokens, one segment per weight version."""
    finish_reason: FinishReason
    text: str = ""
    """What the policy wrote; empty where the trajectory was opened with tokens."""
    message: Message | None = None
    """The same with tool calls, where the trajectory was opened with messages."""
    context_token_count: int = 0
    """Tokens the policy saw before it wrote."""
    cached_token_count: int = 0
    """Those of them that the engine took from its cache."""

    @property
    def aborted(self) -> bool:
        """Whether `resume` can go on with it."""
        return self.finish_reason is FinishReason.ABORTED

    @cached_property
    def token_ids(self) -> NDArray[np.int32]:
        """The policy's tokens, shape [n]."""
        return _concatenate([s.token_ids for s in self.segments], np.dtype(np.int32))

    @cached_property
    def logprobs(self) -> NDArray[np.float32]:
        """Log-probability of each token, shape [n]."""
        return _concatenate([s.logprobs for s in self.segments], np.dtype(np.float32))

    @property
    def weight_versions(self) -> tuple[int, ...]:
        """Versions that sampled the turn, in order."""
        return tuple(segment.weight_version for segment in self.segments)


@dataclass(frozen=True, slots=True, eq=False)
class TrajectoryRecord:
    """A trajectory as the server holds it."""

    trajectory_id: str
    segments: tuple[SegmentView, ...]
    """Context and policy; their tokens, concatenated, are the sequence the model saw."""
    finish_reason: FinishReason | None
    """Why the last policy segment stopped; None while a turn runs."""
    turn_count: int
    outcome: Outcome | Failed | None
    open: bool
    """Whether it can still be extended."""

    def policy_segments(self, turn_index: int) -> list[SegmentView]:
        """What the policy wrote in one turn."""
        return [s for s in self.segments if s.from_policy and s.turn_index == turn_index]


@dataclass
class TurnProgress:
    """A turn under way: what has arrived of it so far, over streams and attempts."""

    index: int
    request: TurnRequest
    """What began it."""
    started: bool = False
    """Whether the server is known to have begun it."""
    segments: list[SegmentView] = field(default_factory=list[SegmentView])
    token_count: int = 0
    context_token_count: int = 0
    finished: Turn | None = None

    @classmethod
    def of(cls, turn: Turn, resume: TurnRequest) -> TurnProgress:
        """An aborted turn that is to go on."""
        count = sum(len(segment.token_ids) for segment in turn.segments)
        segments, context = list(turn.segments), turn.context_token_count
        return cls(turn.index, resume, True, segments, count, context)

    def start(self, event: rollout_service_pb2.TurnStarted) -> None:
        """The server has begun it."""
        self.started = True
        # A resumed attempt counts what was written before as context; the turn's own is the first.
        self.context_token_count = self.context_token_count or event.context_token_count

    def add(self, segment: SegmentView) -> None:
        """Appends tokens that arrived."""
        self.segments.append(segment)
        self.token_count += len(segment.token_ids)

    def catch_up(self, record: TrajectoryRecord) -> list[SegmentView]:
        """The server has begun it: what the record holds of it beyond what has arrived.

        Raises PenstockError where it holds less: what was sent must have been recorded first.
        """
        self.started = True
        written = record.policy_segments(self.index)
        if not self.context_token_count:
            held, own = (sum(len(s.token_ids) for s in part) for part in (record.segments, written))
            self.context_token_count = held - own
        skip = self.token_count
        missing: list[SegmentView] = []
        for segment in written:
            taken = min(skip, len(segment.token_ids))
            skip -= taken
            if taken < len(segment.token_ids):
                missing.append(segment.after(taken))
        if skip:
            raise PenstockError(f"the server lost {skip} tokens of {record.trajectory_id}")
        return missing

    def finish(self, event: rollout_service_pb2.TurnFinished) -> Turn:
        """Ends the turn. Raises PenstockError where tokens are missing."""
        if event.policy_token_count != self.token_count:
            raise PenstockError(
                f"{self.token_count} of {event.policy_token_count} tokens of a turn arrived"
            )
        message = read_message(event.message) if event.HasField("message") else None
        self.finished = Turn(
            self.index,
            tuple(_merge_runs(self.segments)),
            read_finish_reason(event.finish_reason) or FinishReason.STOP,
            message.content if message else event.text,
            message,
            self.context_token_count,
            event.cached_token_count,
        )
        return self.finished

    def refused(self, error: PenstockError) -> bool:
        """Whether an error means that the server never began it."""
        unsure = isinstance(error, ServerUnavailable | DeadlineExceeded)
        return not self.started and not unsure


def read_finish_reason(reason: int) -> FinishReason | None:
    """A finish reason of the wire; None while running."""
    return _FINISH_REASONS.get(reason)


def read_segment(segment: trajectory_pb2.Segment) -> SegmentView:
    """A segment of the wire, read as a twin, without a copy.

    Raises MalformedMessage where its arrays disagree.
    """
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


def read_trajectory(trajectory: trajectory_pb2.Trajectory, *, is_open: bool) -> TrajectoryRecord:
    """A trajectory of the wire, read as a twin."""
    return TrajectoryRecord(
        trajectory.trajectory_id,
        tuple(read_segment(segment) for segment in trajectory.segments),
        read_finish_reason(trajectory.finish_reason),
        trajectory.turn_count,
        read_outcome(trajectory.outcome),
        is_open,
    )


def _merge_runs(segments: Iterable[SegmentView]) -> list[SegmentView]:
    """One segment per run of equal weight version and temperature."""
    runs: list[list[SegmentView]] = []
    for segment in segments:
        last = runs[-1][-1] if runs else None
        if (
            last
            and last.weight_version == segment.weight_version
            and last.temperature == segment.temperature
        ):
            runs[-1].append(segment)
        else:
            runs.append([segment])
    return [
        SegmentView(
            _concatenate([s.token_ids for s in run], np.dtype(np.int32)),
            _concatenate([s.logprobs for s in run], np.dtype(np.float32)),
            run[0].weight_version,
            run[0].turn_index,
            run[0].temperature,
        )
        for run in runs
    ]


def _concatenate(arrays: Sequence[NDArray[N]], dtype: np.dtype[N]) -> NDArray[N]:
    if len(arrays) == 1:
        return arrays[0]
    return np.concatenate(arrays) if arrays else np.empty(0, dtype)
