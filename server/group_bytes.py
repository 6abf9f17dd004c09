"""Groups and turns as the bytes that they have on the wire.

A group is put together once, from the byte buffers in which its tokens were sampled. From there on it is
bytes: the journal's record of it and its delivery are the same bytes with a few others before and after
them, so nobody on the server's side parses it or serializes it again, and a group of some hundred KiB is
copied twice: when it is put together, and into the message that carries it.

    Segment, Trajectory      what is small, by protobuf; then the arrays, or the segments, as they are
    TrajectoryGroup          the same, in one piece of memory
    JournalRecord            tags and lengths | group | task, version;
                             a turn in the same way, with the tokens since the record before
    ExchangeResponse         tags and lengths | group | delivery id, deliveries before

Fields may come in any order within a message, so what is small is written first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from google.protobuf.descriptor import Descriptor

from penstock.server.journal import EncodedRecord, JournalRecord, Part
from penstock.server.trajectory_store import SegmentRecord, TrajectoryRecord
from penstock.v1 import journal_pb2, task_service_pb2, trainer_service_pb2, trajectory_pb2
from penstock.wire.codec import TOKEN, twin

_Segment = twin(trajectory_pb2.Segment)
_Trajectory = twin(trajectory_pb2.Trajectory)
_TrajectoryGroup = twin(trajectory_pb2.TrajectoryGroup)
_GroupFinished = twin(journal_pb2.GroupFinished)
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
_TURN_CHANGED = _tag(journal_pb2.JournalRecord.DESCRIPTOR, "turn_changed")
_TURN_SEGMENTS = _tag(journal_pb2.TurnChanged.DESCRIPTOR, "segments")
_DELIVERY = _tag(trainer_service_pb2.ExchangeResponse.DESCRIPTOR, "delivery")
_DELIVERED_GROUP = _tag(trainer_service_pb2.GroupDelivery.DESCRIPTOR, "group")


def _length(parts: Iterable[Part]) -> int:
    return sum(map(len, parts))


def _segment(segment: SegmentRecord, start: int, stop: int) -> list[Part]:
    """With copies of its arrays: they may grow meanwhile, which a view of them would not let them."""
    begin, end = start * TOKEN.itemsize, stop * TOKEN.itemsize
    return _with_arrays(segment, segment.tokens[begin:end], segment.logprobs[begin:end])


def _with_arrays(segment: SegmentRecord, token_ids: bytearray, logprobs: bytearray) -> list[Part]:
    head = _Segment(
        author=segment.author,
        weight_version=segment.weight_version,
        turn_index=segment.turn_index,
        temperature=segment.temperature,
    )
    parts: list[Part] = [head.SerializeToString()]
    for tag, array in ((_TOKEN_IDS, token_ids), (_LOGPROBS, logprobs)):
        if array:
            parts += (tag + _varint(len(array)), array)
    return parts


def _trajectory(record: TrajectoryRecord) -> list[Part]:
    head = _Trajectory(
        trajectory_id=record.trajectory_id,
        sample_index=record.sample_index,
        outcome=record.outcome,
        finish_reason=(
            trajectory_pb2.FINISH_REASON_UNSPECIFIED
            if record.turn is None
            else record.turn.finish_reason
        ),
        turn_count=record.turn_count,
        parent_trajectory_id=record.parent_trajectory_id,
        parent_token_count=record.parent_token_count,
        traceparent=record.traceparent,
    )
    parts: list[Part] = [head.SerializeToString()]
    for segment in record.segments:
        inner = _with_arrays(segment, segment.tokens, segment.logprobs)
        parts += (_SEGMENTS + _varint(_length(inner)), *inner)
    return parts


def encode_group(
    group_id: str,
    task_id: str,
    purpose: trajectory_pb2.Purpose.ValueType,
    records: Iterable[TrajectoryRecord],
    versions: range,
) -> bytes:
    """A TrajectoryGroup of these trajectories; `versions` is from its oldest to its newest."""
    head = _TrajectoryGroup(
        group_id=group_id,
        task_id=task_id,
        purpose=purpose,
        oldest_weight_version=versions.start,
        newest_weight_version=versions.stop - 1,
    )
    parts: list[Part] = [head.SerializeToString()]
    for record in records:
        inner = _trajectory(record)
        parts += (_TRAJECTORIES + _varint(_length(inner)), *inner)
    return b"".join(parts)


def decode_group(group: bytes) -> trajectory_pb2.TrajectoryGroup:
    """As a twin message."""
    return _TrajectoryGroup.FromString(group)


def group_finished(
    group: bytes,
    task: task_service_pb2.Task | None,
    admitted_version: int,
    *,
    has_policy_tokens: bool,
) -> EncodedRecord:
    """A group is complete."""
    tail = _GroupFinished(
        admitted_weight_version=admitted_version, has_policy_tokens=has_policy_tokens
    )
    if task is not None:
        tail.task.CopyFrom(task)
    parts = (_FINISHED_GROUP + _varint(len(group)), group, tail.SerializeToString())
    return EncodedRecord((_FINISHED + _varint(_length(parts)), *parts))


def turn_changed(
    turn: journal_pb2.TurnChanged, segments: Iterable[tuple[SegmentRecord, int, int]]
) -> EncodedRecord:
    """A turn as it is now, with these of its tokens."""
    parts: list[Part] = [turn.SerializeToString()]
    for segment, start, stop in segments:
        inner = _segment(segment, start, stop)
        parts += (_TURN_SEGMENTS + _varint(_length(inner)), *inner)
    return EncodedRecord((_TURN_CHANGED + _varint(_length(parts)), *parts))


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
