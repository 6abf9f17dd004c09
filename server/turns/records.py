"""Conversion of trajectories and turns to journal records and back.

A trajectory is recorded as it grows. Each record carries what was appended since the previous one, and the
token count at that point. So reading a record twice, or one whose tokens are already known, adds nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass

from google.protobuf import json_format
from opentelemetry import trace

from penstock.server.engine.protocol import Delta, Finish
from penstock.server.journal.protocol import Deferred, EncodedRecord, Journal, Record, Stored
from penstock.server.text.messages import Tool
from penstock.server.turns import encoding
from penstock.server.turns.history import HeldMessage, History
from penstock.server.turns.requests import read_sampling, sampling_message
from penstock.server.turns.store import ClosedMark, TrajectoryStore
from penstock.server.turns.trajectory import PromptKind, TrajectoryRecord, Turn
from penstock.server.turns.turn import FINISH_REASONS, TurnAttempt, TurnSampling, TurnState
from penstock.v1 import conversation_pb2, journal_pb2, trajectory_pb2
from penstock.wire import codec, messages
from penstock.wire.messages import JournalRecord

FINISHES = {int(reason): finish for finish, reason in FINISH_REASONS.items()}


class TurnRecorder:
    def __init__(self, journal: Journal, store: TrajectoryStore) -> None:
        self._journal = journal
        self._store = store
        self._nothing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._nothing.set_result(None)

    def record(self, record: TrajectoryRecord) -> Awaitable[object]:
        """Record the last turn as it is now, after the trajectory if that is new, and charge it to the
        memory budget. Await the result before reporting the turn's beginning or end. Raises
        JOURNAL_FAILED."""
        self._store.charge(record)
        if record.single_turn or not self._journal.on_disk:
            return self._nothing
        refers_from = self._journal.refers_from
        new = [] if refers_from is None else list(record.unrecorded_from(refers_from))
        opened = [] if record.recorded else [trajectory_opened(record)]
        appending = self._journal.append([*opened, turn_changed(record)])
        record.written.update(dict.fromkeys(new, appending))
        return appending


def trajectory_opened(record: TrajectoryRecord) -> Record:
    """Omits the prompt, which follows with the first turn."""
    return JournalRecord(
        trajectory_opened=messages.TrajectoryOpened(
            trajectory_id=record.trajectory_id,
            form=record.kind.value,
            group_id=record.group_id,
            sample_index=record.sample_index,
            parent_trajectory_id=record.parent_trajectory_id,
            priority=record.priority,
            required_weight_version=record.required_weight_version,
            traceparent=record.traceparent,
            tools=[] if record.history is None else map(_write_tool, record.history.tools),
            parent_token_count=record.parent_token_count,
        )
    )


def trajectory_closed(
    trajectory_id: str, mark: ClosedMark, outcome: trajectory_pb2.Outcome | None
) -> Record:
    """Without `outcome`, only its digest is recorded."""
    return JournalRecord(
        trajectory_closed=messages.TrajectoryClosed(
            trajectory_id=trajectory_id,
            outcome=outcome,
            outcome_sha256=mark.outcome_digest if outcome is None else b"",
            group_id=mark.group_id,
            group_completed=mark.group_completed,
            retried=mark.retried,
        )
    )


def turn_changed(record: TrajectoryRecord) -> EncodedRecord:
    """The last turn as it is now, with the tokens since it was last recorded."""
    turn, new = (
        _TurnNow.of(record).message(),
        record.pieces_between(record.recorded_end, record.end),
    )
    turn.token_count = max(record.recorded_token_count, record.parent_token_count)
    history = record.history
    if history is not None:
        turn.message_count = history.recorded
        turn.messages.extend(map(_write_held, history.messages[history.recorded :]))
        history.recorded = len(history.messages)
    encoded = encoding.turn_changed(turn, new)
    record.recorded_end, record.recorded_token_count = record.end, record.token_count
    record.recorded = True
    return encoded


def whole_turn(record: TrajectoryRecord) -> Deferred:
    """The last turn as it is now, with all tokens so far. Its messages are made later, in another thread,
    because a server holds many: only what changes is copied now. Until the journal knows the position of
    this record, no other record refers to its segments."""
    turn, end = _TurnNow.of(record), record.end
    held = () if record.history is None else tuple(record.history.messages)
    stored = Stored(0, 0, 0)
    if record.written:
        record.written = dict.fromkeys(record.written, stored)

    def make() -> list[EncodedRecord]:
        written = turn.message()
        written.token_count = record.parent_token_count
        written.messages.extend(map(_write_held, held))
        return [encoding.turn_changed(written, record.pieces_between((0, 0), end))]

    return Deferred(make, stored)


@dataclass(frozen=True, slots=True)
class _TurnNow:
    """What changes of a turn."""

    record: TrajectoryRecord
    turn: Turn
    sampling: TurnSampling
    budget: int
    policy_token_count: int
    request_count: int
    finish_reason: trajectory_pb2.FinishReason.ValueType
    turn_count: int

    @classmethod
    def of(cls, record: TrajectoryRecord) -> _TurnNow:
        turn = record.turn
        assert turn is not None
        return cls(
            *(record, turn, turn.sampling, turn.budget, turn.policy_token_count, turn.attempts),
            *(turn.attempt.finish_reason, record.turn_count),
        )

    def message(self) -> journal_pb2.TurnChanged:
        turn = self.turn
        return messages.TurnChanged(
            trajectory_id=self.record.trajectory_id,
            turn_index=turn.index,
            sampling_params=sampling_message(self.sampling),
            budget=self.budget,
            context_token_count=turn.context_token_count,
            policy_token_count=self.policy_token_count,
            request_count=self.request_count,
            finish_reason=self.finish_reason,
            turn_count=self.turn_count,
            finish_reason_before=turn.finish_reason_before,
        )


def open_record(
    opened: journal_pb2.TrajectoryOpened, parent: TrajectoryRecord | None
) -> TrajectoryRecord:
    record = TrajectoryRecord(
        opened.trajectory_id,
        PromptKind(opened.form),
        TurnSampling(),
        group_id=opened.group_id,
        sample_index=opened.sample_index,
        parent_trajectory_id=opened.parent_trajectory_id,
        priority=opened.priority,
        required_weight_version=opened.required_weight_version,
        traceparent=opened.traceparent,
        parent=parent,
        parent_token_count=opened.parent_token_count,
        token_count=opened.parent_token_count,
    )
    if record.kind is PromptKind.CONVERSATION:
        record.history = History(tuple(map(_read_tool, opened.tools)))
    return record


def apply_turn(record: TrajectoryRecord, changed: journal_pb2.TurnChanged, stored: Stored) -> None:
    """Append a record's new tokens and make its turn the last one. An interrupted turn becomes ABORTED.

    A record queued during compaction comes after the snapshot and may hold fewer tokens than it, because
    more were sampled meanwhile. The snapshot's counts then stand.
    """
    position = changed.token_count
    if position > record.token_count:
        raise ValueError(
            f"{record.trajectory_id} has {record.token_count} tokens, but a record continues at {position}"
        )
    for segment in changed.segments:
        tokens = codec.token_ids(segment)
        record.written[position, len(tokens)] = stored
        known = min(len(tokens), max(0, record.token_count - position))
        position += len(tokens)
        if known == len(tokens):
            continue
        if segment.author == trajectory_pb2.AUTHOR_CONTEXT:
            record.append_context(tokens[known:], segment.turn_index)
        else:
            logprobs = codec.logprobs(segment)
            delta = Delta(tokens[known:], logprobs[known:], segment.weight_version, None, 0)
            record.append_policy(delta, segment.turn_index, segment.temperature)
    if position < record.token_count:
        return
    if record.history is not None:
        _apply_messages(record, record.history, changed)
    sampling = read_sampling(changed.sampling_params)
    record.sampling = sampling
    record.turn_count = changed.turn_count
    attempt = TurnAttempt(
        finish=FINISHES.get(int(changed.finish_reason), Finish.ABORTED),
        policy_token_count=changed.policy_token_count,
        record_end=record.end,
    )
    attempt.ended.set()
    record.turn = Turn(
        record=record,
        index=changed.turn_index,
        sampling=sampling,
        budget=changed.budget,
        context_token_count=changed.context_token_count,
        span=trace.INVALID_SPAN,
        trace_headers={},
        stream_interval=1,
        policy_token_count=changed.policy_token_count,
        finish_reason_before=changed.finish_reason_before,
        attempts=changed.request_count,
        attempt=attempt,
        state=TurnState.FINISHED,
    )
    record.recorded_end, record.recorded_token_count = record.end, record.token_count
    record.recorded = True


def _apply_messages(
    record: TrajectoryRecord, history: History, changed: journal_pb2.TurnChanged
) -> None:
    if changed.message_count > len(history.messages):
        raise ValueError(
            f"{record.trajectory_id} has {len(history.messages)} messages, but a record continues at "
            f"{changed.message_count}"
        )
    history.messages[changed.message_count :] = [
        HeldMessage(held.exact, held.meaning, held.reasoning, held.token_end, held.written)
        for held in changed.messages
    ]
    history.recorded = len(history.messages)


def _write_held(held: HeldMessage) -> journal_pb2.HeldMessage:
    return messages.HeldMessage(
        exact=held.exact,
        meaning=held.meaning,
        reasoning=held.reasoning,
        token_end=held.token_end,
        written=held.written,
    )


def _write_tool(tool: Tool) -> conversation_pb2.Tool:
    return json_format.ParseDict(
        {
            "name": tool.name,
            "description": tool.description,
            "parameters": dict(tool.parameters),
        },
        messages.Tool(),
    )


def _read_tool(tool: conversation_pb2.Tool) -> Tool:
    return Tool(tool.name, tool.description, json_format.MessageToDict(tool.parameters))
