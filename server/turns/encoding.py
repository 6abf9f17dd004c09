"""Encodes groups and turns directly as bytes on the wire.

A group is assembled once, as a list of pieces. Most are the byte buffers into which its tokens were
sampled. The journal's record and the delivery consist of the same pieces, with a few others before and
after them. So the server neither parses nor serializes a group again.

    Segment, Trajectory      small fields, by protobuf; then the arrays, or the segments, unchanged
    TrajectoryGroup          the same
    JournalRecord            tags and lengths | group | task, version;
                             a turn in the same way, with the tokens since the previous record
    ExchangeResponse         tags and lengths | group | delivery id, previous deliveries

The record also has a short form, without the large segments that the record of a turn already has
(`GroupReferred`, `penstock.wire.referred`). So their tokens are written once and not twice.

Fields of a message may come in any order, so small fields are written first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from google.protobuf.descriptor import Descriptor

from penstock.server.journal.protocol import EncodedRecord, ShortRecord, Stored
from penstock.server.turns.trajectory import (
    EncodedTrajectory,
    Pieces,
    SegmentRecord,
    TrajectoryRecord,
)
from penstock.v1 import journal_pb2, task_service_pb2, trainer_service_pb2, trajectory_pb2
from penstock.wire import messages
from penstock.wire.codec import TOKEN
from penstock.wire.messages import JournalRecord


@lru_cache(4096)
def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _tag(descriptor: Descriptor, field: str) -> bytes:
    length_delimited = 2
    return _varint(descriptor.fields_by_name[field].number << 3 | length_delimited)


_TOKEN_IDS = _tag(trajectory_pb2.Segment.DESCRIPTOR, "token_ids")
_LOGPROBS = _tag(trajectory_pb2.Segment.DESCRIPTOR, "logprobs")
_SEGMENTS = _tag(trajectory_pb2.Trajectory.DESCRIPTOR, "segments")
_TRAJECTORIES = _tag(trajectory_pb2.TrajectoryGroup.DESCRIPTOR, "trajectories")
_FINISHED = _tag(journal_pb2.JournalRecord.DESCRIPTOR, "group_finished")
_FINISHED_GROUP = _tag(journal_pb2.GroupFinished.DESCRIPTOR, "group")
_REFERRED = _tag(journal_pb2.JournalRecord.DESCRIPTOR, "group_referred")
_REFERRED_FINISHED = _tag(journal_pb2.GroupReferred.DESCRIPTOR, "finished")
_TURN_CHANGED = _tag(journal_pb2.JournalRecord.DESCRIPTOR, "turn_changed")
_TURN_SEGMENTS = _tag(journal_pb2.TurnChanged.DESCRIPTOR, "segments")
_DELIVERY = _tag(trainer_service_pb2.ExchangeResponse.DESCRIPTOR, "delivery")
_DELIVERED_GROUP = _tag(trainer_service_pb2.GroupDelivery.DESCRIPTOR, "group")


def _field(tag: bytes, inner: Pieces) -> Pieces:
    pieces = Pieces(tag + _varint(inner.byte_count))
    pieces.extend(inner.parts, inner.byte_count)
    return pieces


class _Around(NamedTuple):
    begin: bytes
    """Bytes before its tokens."""
    middle: bytes
    """Bytes before its log-probabilities."""
    byte_count: int
    """Size of the whole field, including the arrays."""
    without: bytes


# Cached, because siblings share most of these values.
@lru_cache(4096)
def _around(
    tag: bytes,
    author: trajectory_pb2.Author.ValueType,
    weight_version: int,
    turn_index: int,
    temperature: float,
    token_bytes: int,
    logprob_bytes: int,
) -> _Around:
    head = messages.Segment(
        author=author,
        weight_version=weight_version,
        turn_index=turn_index,
        temperature=temperature,
    ).SerializeToString()
    before_tokens = _TOKEN_IDS + _varint(token_bytes) if token_bytes else b""
    middle = _LOGPROBS + _varint(logprob_bytes) if logprob_bytes else b""
    inner = len(head) + len(before_tokens) + token_bytes + len(middle) + logprob_bytes
    begin = tag + _varint(inner)
    return _Around(
        begin + head + before_tokens, middle, len(begin) + inner, tag + _varint(len(head)) + head
    )


def _around_arrays(
    tag: bytes, segment: SegmentRecord, tokens: bytearray, logprobs: bytearray
) -> _Around:
    return _around(
        tag,
        segment.author,
        segment.weight_version,
        segment.turn_index,
        segment.temperature,
        len(tokens),
        len(logprobs),
    )


def encode_early(record: TrajectoryRecord) -> None:
    """Encodes a closed trajectory before its group is complete, so that less work is left for then. Skips
    a trajectory that is still being sampled or written."""
    if not record.growing and record.is_written:
        record.encoded = encode_trajectory(record)


def encode_trajectory(record: TrajectoryRecord) -> EncodedTrajectory:
    """`record` is closed."""
    growing = record.growing
    head = record.head().SerializeToString()
    whole, short = Pieces(head), Pieces(head)
    left_out: list[journal_pb2.ReferredSegment] = []
    position = record.parent_token_count
    for index, segment in enumerate(record.segments):
        tokens, logprobs = segment.tokens, segment.logprobs
        if growing:
            tokens, logprobs = tokens[:], logprobs[:]
        around = _around_arrays(_SEGMENTS, segment, tokens, logprobs)
        pieces = (around.begin, tokens, around.middle, logprobs)
        whole.extend(pieces, around.byte_count)
        count = len(tokens) // TOKEN.itemsize
        if growing or record.recorded_at(position, count) is None:
            short.extend(pieces, around.byte_count)
        else:
            short.add(around.without)
            left_out.append(
                messages.ReferredSegment(segment=index, token_position=position, token_count=count)
            )
        position += count
    # Without the large parts, joining the rest is cheap.
    return EncodedTrajectory(whole, Pieces(b"".join(short.parts)) if left_out else whole, left_out)


@dataclass(frozen=True, slots=True)
class EncodedGroup:
    """A TrajectoryGroup message, in pieces that no longer change."""

    whole: Pieces
    short: Pieces
    """The same message without the arrays of some segments."""
    left_out: Sequence[journal_pb2.ReferredSegment]
    """The segments whose arrays `short` omits."""
    turns: Sequence[Stored]
    """The record that has the arrays of each of `left_out`."""

    @property
    def byte_count(self) -> int:
        return self.whole.byte_count

    def joined(self) -> bytes:
        return b"".join(self.whole.parts)


def encode_group(
    group_id: str,
    task_id: str,
    purpose: trajectory_pb2.Purpose.ValueType,
    records: Iterable[TrajectoryRecord],
    versions: range,
) -> EncodedGroup:
    """`versions` ranges from the oldest to the newest weight version, both included."""
    head = messages.TrajectoryGroup(
        group_id=group_id,
        task_id=task_id,
        purpose=purpose,
        oldest_weight_version=versions.start,
        newest_weight_version=versions.stop - 1,
    ).SerializeToString()
    whole, short = Pieces(head), Pieces(head)
    left_out: list[journal_pb2.ReferredSegment] = []
    turns: list[Stored] = []
    for index, record in enumerate(records):
        one = encode_trajectory(record) if record.encoded is None else record.encoded
        for pieces, new in ((whole, one.whole), (short, one.short)):
            pieces.add(_TRAJECTORIES + _varint(new.byte_count))
            pieces.extend(new.parts, new.byte_count)
        for segment in one.left_out:
            # Not earlier, because a compaction may have moved it to another record.
            turn = record.recorded_at(segment.token_position, segment.token_count)
            assert turn is not None
            turns.append(turn)
            segment.trajectory = index
            left_out.append(segment)
    return EncodedGroup(whole, short, left_out, turns)


def decode_group(group: bytes) -> trajectory_pb2.TrajectoryGroup:
    """As a twin message."""
    return messages.TrajectoryGroup.FromString(group)


def group_finished(
    group: EncodedGroup,
    task: task_service_pb2.Task | None,
    admitted_version: int,
    *,
    has_policy_tokens: bool,
) -> EncodedRecord:
    """Includes a short form if segments can be omitted."""
    message = messages.GroupFinished(
        admitted_weight_version=admitted_version, has_policy_tokens=has_policy_tokens
    )
    if task is not None:
        message.task.CopyFrom(task)
    tail = message.SerializeToString()
    whole = _finished(_FINISHED, group.whole, tail)
    if not group.left_out:
        return EncodedRecord(tuple(whole.parts))
    short = _finished(_REFERRED_FINISHED, group.short, tail)
    referred = messages.GroupReferred(segments=group.left_out, group_byte_count=group.byte_count)
    short.add(referred.SerializeToString())
    record = _field(_REFERRED, short)
    return EncodedRecord(tuple(whole.parts), ShortRecord(tuple(record.parts), tuple(group.turns)))


def _finished(tag: bytes, group: Pieces, tail: bytes) -> Pieces:
    inner = _field(_FINISHED_GROUP, group)
    inner.add(tail)
    return _field(tag, inner)


def turn_changed(
    turn: journal_pb2.TurnChanged, segments: Iterable[tuple[SegmentRecord, int, int]]
) -> EncodedRecord:
    pieces = Pieces(turn.SerializeToString())
    for segment, start, stop in segments:
        # Copy the arrays: a view would prevent them from growing in the meantime.
        begin, end = start * TOKEN.itemsize, stop * TOKEN.itemsize
        tokens, logprobs = segment.tokens[begin:end], segment.logprobs[begin:end]
        around = _around_arrays(_TURN_SEGMENTS, segment, tokens, logprobs)
        pieces.extend((around.begin, tokens, around.middle, logprobs), around.byte_count)
    return EncodedRecord(tuple(_field(_TURN_CHANGED, pieces).parts))


def group_in(payload: bytes) -> bytes:
    """Extracts the encoded group from the record of a completed group."""
    begin = 0
    for tag in (_FINISHED, _FINISHED_GROUP):
        if payload[begin : begin + len(tag)] != tag:
            # protobuf may choose a different order of the fields.
            return JournalRecord.FromString(payload).group_finished.group.SerializeToString()
        length, begin = _read_varint(payload, begin + len(tag))
    return payload[begin : begin + length]


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while data[at] & 0x80:
        value |= (data[at] & 0x7F) << shift
        shift += 7
        at += 1
    return value | data[at] << shift, at + 1


@dataclass(frozen=True, slots=True)
class Delivery:
    """An ExchangeResponse that delivers a group."""

    group: bytes
    delivery_id: int
    redelivery_count: int

    def SerializeToString(self) -> bytes:  # noqa: N802 (protobuf's name)
        tail = messages.GroupDelivery(
            delivery_id=self.delivery_id, redelivery_count=self.redelivery_count
        ).SerializeToString()
        head = _DELIVERED_GROUP + _varint(len(self.group))
        length = len(head) + len(self.group) + len(tail)
        return b"".join((_DELIVERY, _varint(length), head, self.group, tail))
