"""Groups and turns as the bytes that they have on the wire.

A group is put together once, as pieces of which most are the byte buffers in which its tokens were sampled.
The journal's record of it and its delivery are the same pieces with a few others before and after them, so
nobody on the server's side parses it or serializes it again.

    Segment, Trajectory      what is small, by protobuf; then the arrays, or the segments, as they are
    TrajectoryGroup          the same
    JournalRecord            tags and lengths | group | task, version;
                             a turn in the same way, with the tokens since the record before
    ExchangeResponse         tags and lengths | group | delivery id, deliveries before

The record has a short form, too: large segments that a record of a turn has, as almost all do, are left out
(`GroupReferred`, `penstock.wire.referred`), so that their tokens are written once and not twice.

Fields may come in any order within a message, so what is small is written first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from google.protobuf.descriptor import Descriptor

from penstock.server.journal.records import EncodedRecord, JournalRecord, Part, ShortRecord, Stored
from penstock.server.turns.encoded_trajectory import EncodedTrajectory, LeftOut
from penstock.server.turns.store import SegmentRecord, TrajectoryRecord
from penstock.v1 import journal_pb2, task_service_pb2, trainer_service_pb2, trajectory_pb2
from penstock.wire.codec import TOKEN, twin
from penstock.wire.referred import put_together

_Segment = twin(trajectory_pb2.Segment)
_Trajectory = twin(trajectory_pb2.Trajectory)
_TrajectoryGroup = twin(trajectory_pb2.TrajectoryGroup)
_GroupFinished = twin(journal_pb2.GroupFinished)
_GroupReferred = twin(journal_pb2.GroupReferred)
_ReferredSegment = twin(journal_pb2.ReferredSegment)
_GroupDelivery = twin(trainer_service_pb2.GroupDelivery)

LENGTH_DELIMITED = 2


@lru_cache(4096)
def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _tag(descriptor: Descriptor, field: str) -> bytes:
    return _varint(descriptor.fields_by_name[field].number << 3 | LENGTH_DELIMITED)


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


class _Pieces:
    """Bytes that follow each other, and how many they are."""

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


def _field(tag: bytes, inner: _Pieces) -> _Pieces:
    pieces = _Pieces(tag + _varint(inner.byte_count))
    pieces.extend(inner.parts, inner.byte_count)
    return pieces


class _Around(NamedTuple):
    """A field with a segment, but for its arrays."""

    begin: bytes
    """Before its tokens."""
    middle: bytes
    """Before its log-probabilities."""
    byte_count: int
    """Of the field, arrays included."""
    without: bytes
    """The field without arrays."""


# Siblings have most of them in common.
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
    head = _Segment(
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


def _trajectory_head(record: TrajectoryRecord) -> bytes:
    """All but its segments."""
    return _Trajectory(
        trajectory_id=record.trajectory_id,
        sample_index=record.sample_index,
        outcome=record.outcome,
        finish_reason=(
            trajectory_pb2.FINISH_REASON_UNSPECIFIED
            if record.turn is None
            else record.turn.last_finish_reason
        ),
        turn_count=record.turn_count,
        parent_trajectory_id=record.parent_trajectory_id,
        parent_token_count=record.parent_token_count,
        traceparent=record.traceparent,
    ).SerializeToString()


def encode_early(record: TrajectoryRecord) -> None:
    """Encodes a trajectory that is closed before its group is complete, so that little is left to do then;
    not one of which something is still sampled or written."""
    if not record.growing and record.is_written:
        record.encoded = encode_trajectory(record)


def encode_trajectory(record: TrajectoryRecord) -> EncodedTrajectory:
    """A trajectory that is closed."""
    growing = record.growing
    head = _trajectory_head(record)
    whole, short = _Pieces(head), _Pieces(head)
    left_out: list[LeftOut] = []
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
            left_out.append(LeftOut(index, position, count))
        position += count
    if not left_out:
        return EncodedTrajectory(
            whole.parts, whole.byte_count, whole.parts, whole.byte_count, left_out
        )
    # What is large is left out of it.
    joined = (b"".join(short.parts),)
    return EncodedTrajectory(whole.parts, whole.byte_count, joined, short.byte_count, left_out)


@dataclass(frozen=True, slots=True)
class EncodedGroup:
    """A TrajectoryGroup, in pieces that nobody changes any more."""

    parts: tuple[Part, ...]
    byte_count: int
    short: tuple[Part, ...]
    """The same without the arrays of some segments."""
    short_byte_count: int
    left_out: tuple[journal_pb2.ReferredSegment, ...]
    """Those."""
    turns: tuple[Stored, ...]
    """For each of them, the record that has it."""

    def joined(self) -> bytes:
        """In one piece."""
        return b"".join(self.parts)


def encode_group(
    group_id: str,
    task_id: str,
    purpose: trajectory_pb2.Purpose.ValueType,
    records: Iterable[TrajectoryRecord],
    versions: range,
) -> EncodedGroup:
    """A TrajectoryGroup of these trajectories, which are closed; `versions` is from its oldest to its
    newest."""
    head = _TrajectoryGroup(
        group_id=group_id,
        task_id=task_id,
        purpose=purpose,
        oldest_weight_version=versions.start,
        newest_weight_version=versions.stop - 1,
    ).SerializeToString()
    whole, short = _Pieces(head), _Pieces(head)
    left_out: list[journal_pb2.ReferredSegment] = []
    turns: list[Stored] = []
    for index, record in enumerate(records):
        one = encode_trajectory(record) if record.encoded is None else record.encoded
        whole.add(_TRAJECTORIES + _varint(one.byte_count))
        whole.extend(one.parts, one.byte_count)
        short.add(_TRAJECTORIES + _varint(one.short_byte_count))
        short.extend(one.short, one.short_byte_count)
        for segment, position, count in one.left_out:
            # Not before now: a compaction has it in another record.
            turn = record.recorded_at(position, count)
            assert turn is not None
            turns.append(turn)
            left_out.append(
                _ReferredSegment(
                    trajectory=index, segment=segment, token_position=position, token_count=count
                )
            )
    return EncodedGroup(
        tuple(whole.parts),
        whole.byte_count,
        tuple(short.parts),
        short.byte_count,
        tuple(left_out),
        tuple(turns),
    )


def decode_group(group: bytes) -> trajectory_pb2.TrajectoryGroup:
    """As a twin message."""
    return _TrajectoryGroup.FromString(group)


def group_finished(
    group: EncodedGroup,
    task: task_service_pb2.Task | None,
    admitted_version: int,
    *,
    has_policy_tokens: bool,
) -> EncodedRecord:
    """A group is complete; with its short form, where there is anything to leave out."""
    message = _GroupFinished(
        admitted_weight_version=admitted_version, has_policy_tokens=has_policy_tokens
    )
    if task is not None:
        message.task.CopyFrom(task)
    tail = message.SerializeToString()
    whole = _finished(_FINISHED, group.parts, group.byte_count, tail)
    if not group.left_out:
        return EncodedRecord(tuple(whole.parts))
    short = _finished(_REFERRED_FINISHED, group.short, group.short_byte_count, tail)
    referred = _GroupReferred(segments=group.left_out, group_byte_count=group.byte_count)
    short.add(referred.SerializeToString())
    record = _field(_REFERRED, short)
    return EncodedRecord(tuple(whole.parts), ShortRecord(tuple(record.parts), group.turns))


def _finished(tag: bytes, group: tuple[Part, ...], byte_count: int, tail: bytes) -> _Pieces:
    """A field with a group that is complete, and what else is said of it."""
    inner = _Pieces(_FINISHED_GROUP + _varint(byte_count))
    inner.extend(group, byte_count)
    inner.add(tail)
    return _field(tag, inner)


def turn_changed(
    turn: journal_pb2.TurnChanged, segments: Iterable[tuple[SegmentRecord, int, int]]
) -> EncodedRecord:
    """A turn as it is now, with these of its tokens."""
    pieces = _Pieces(turn.SerializeToString())
    for segment, start, stop in segments:
        # Copies of its arrays: they may grow meanwhile, which a view of them would not let them.
        begin, end = start * TOKEN.itemsize, stop * TOKEN.itemsize
        tokens, logprobs = segment.tokens[begin:end], segment.logprobs[begin:end]
        around = _around_arrays(_TURN_SEGMENTS, segment, tokens, logprobs)
        pieces.extend((around.begin, tokens, around.middle, logprobs), around.byte_count)
    return EncodedRecord(tuple(_field(_TURN_CHANGED, pieces).parts))


def whole_record(payload: bytes, turns: Iterable[bytes]) -> bytes:
    """A record that may be short, as it would be whole; `turns` has the records that it leaves something
    to, in the order of what that is. Raises ValueError where they are not those, and DecodeError."""
    record = JournalRecord.FromString(payload)
    if not record.HasField("group_referred"):
        return payload
    found = (JournalRecord.FromString(turn).turn_changed for turn in turns)
    finished = put_together(record.group_referred, found)
    return JournalRecord(group_finished=finished).SerializeToString()


def group_in(payload: bytes) -> bytes:
    """The group in a record that says it is complete."""
    begin = 0
    for tag in (_FINISHED, _FINISHED_GROUP):
        if payload[begin : begin + len(tag)] != tag:
            # Another order of its fields, which protobuf may choose.
            return JournalRecord.FromString(payload).group_finished.group.SerializeToString()
        length, begin = _read_varint(payload, begin + len(tag))
    return payload[begin : begin + length]


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """A number, and where what follows it begins."""
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
        """As protobuf's messages have it."""
        tail = _GroupDelivery(
            delivery_id=self.delivery_id, redelivery_count=self.redelivery_count
        ).SerializeToString()
        head = _DELIVERED_GROUP + _varint(len(self.group))
        length = len(head) + len(self.group) + len(tail)
        return b"".join((_DELIVERY, _varint(length), head, self.group, tail))
