"""Twin messages: the same bytes as the typed messages, and arrays without a Python object for each
token.
"""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import given
from hypothesis import strategies as st

from penstock.v1 import (
    conversation_pb2,
    rejection_pb2,
    rollout_service_pb2,
    task_service_pb2,
    trainer_service_pb2,
    trajectory_pb2,
    weights_pb2,
)
from penstock.wire import codec

MODULES = (
    conversation_pb2,
    rejection_pb2,
    rollout_service_pb2,
    task_service_pb2,
    trainer_service_pb2,
    trajectory_pb2,
    weights_pb2,
)
Segment = trajectory_pb2.Segment
Trajectory = trajectory_pb2.Trajectory

TOKEN_IDS_TAG = 2
LENGTH_DELIMITED = 2
FOUR_BYTES = 5

tokens = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40)
floats = st.floats(width=32, allow_nan=False)
segments = st.builds(
    Segment,
    author=st.sampled_from([0, 1, 2]),
    token_ids=tokens,
    logprobs=st.lists(floats, max_size=40),
    weight_version=st.integers(0, 2**63 - 1),
    turn_index=st.integers(0, 100),
    temperature=floats,
)
trajectories = st.builds(
    Trajectory,
    trajectory_id=st.text(max_size=10),
    segments=st.lists(segments, max_size=5),
    sample_index=st.integers(0, 100),
)


def message_classes() -> list[type[Message]]:
    """Every message class of the protocol, including nested ones, except map entries."""
    found: list[type[Message]] = []
    pending: list[Descriptor] = [
        message
        for module in MODULES
        for message in module.DESCRIPTOR.message_types_by_name.values()
    ]
    while pending:
        message = pending.pop()
        pending.extend(message.nested_types)
        if not message.GetOptions().map_entry:
            found.append(GetMessageClass(message))
    return found


def field(tag: int, wire_type: int, payload: bytes) -> bytes:
    """One encoded field. The payload must be shorter than 128 bytes."""
    length = bytes([len(payload)]) if wire_type == LENGTH_DELIMITED else b""
    return bytes([tag << 3 | wire_type]) + length + payload


@given(trajectories)
def test_a_twin_reads_and_writes_the_bytes_of_the_typed_message(trajectory: Trajectory) -> None:
    data = trajectory.SerializeToString(deterministic=True)
    decoded = codec.decode(Trajectory, data)
    assert codec.encode(decoded) == data
    assert Trajectory.FromString(codec.encode(decoded)) == trajectory
    for twin, typed in zip(decoded.segments, trajectory.segments, strict=True):
        assert codec.token_ids(twin).tolist() == list(typed.token_ids)
        assert codec.logprobs(twin).tolist() == list(typed.logprobs)


@given(tokens, st.lists(floats, max_size=40))
def test_arrays_put_into_a_twin_are_the_lists_a_typed_reader_sees(
    ids: list[int], logprobs: list[float]
) -> None:
    twin = codec.twin(Segment)(
        author=trajectory_pb2.AUTHOR_POLICY,
        token_ids=codec.array_bytes(np.array(ids, np.int32)),
        logprobs=codec.array_bytes(np.array(logprobs, np.float32), codec.LOGPROB),
        weight_version=3,
    )
    typed = Segment.FromString(codec.encode(twin))
    assert list(typed.token_ids) == ids
    assert list(typed.logprobs) == logprobs
    assert typed.weight_version == 3


def test_arrays_of_another_type_or_stride_are_converted() -> None:
    every_second = np.arange(10, dtype=np.int64)[::2]
    segment = codec.twin(Segment)(token_ids=codec.array_bytes(every_second))
    assert codec.token_ids(segment).tolist() == [0, 2, 4, 6, 8]
    assert codec.token_ids(segment).dtype == np.int32


@given(tokens)
def test_an_unpacked_array_is_read_whole(ids: list[int]) -> None:
    pieces = [
        field(TOKEN_IDS_TAG, FOUR_BYTES, np.int32(token).astype("<i4").tobytes()) for token in ids
    ]
    data = Segment(weight_version=4).SerializeToString() + b"".join(pieces)
    decoded = codec.decode(Segment, data)
    assert codec.token_ids(decoded).tolist() == ids
    assert decoded.weight_version == 4


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=8), max_size=5))
def test_an_array_packed_in_several_pieces_is_read_whole(parts: list[list[int]]) -> None:
    data = b"".join(
        field(TOKEN_IDS_TAG, LENGTH_DELIMITED, np.array(part, "<i4").tobytes()) for part in parts
    )
    whole = [token for part in parts for token in part]
    assert codec.token_ids(codec.decode(Segment, data)).tolist() == whole


def test_split_and_unpacked_arrays_are_read_whole_inside_other_messages() -> None:
    split = field(TOKEN_IDS_TAG, LENGTH_DELIMITED, bytes(8)) * 2
    unpacked = field(TOKEN_IDS_TAG, FOUR_BYTES, bytes([7, 0, 0, 0]))
    segments_tag = Trajectory.DESCRIPTOR.fields_by_name["segments"].number
    data = field(segments_tag, LENGTH_DELIMITED, split) + field(
        segments_tag, LENGTH_DELIMITED, unpacked
    )
    first, second = codec.decode(Trajectory, data).segments
    assert codec.token_ids(first).tolist() == [0, 0, 0, 0]
    assert codec.token_ids(second).tolist() == [7]


def test_fields_of_a_later_release_are_dropped_and_the_rest_is_kept() -> None:
    later = field(15, LENGTH_DELIMITED, b"from the future")
    data = Segment(token_ids=[1, 2], weight_version=9).SerializeToString() + later
    decoded = codec.decode(Segment, data)
    assert codec.token_ids(decoded).tolist() == [1, 2]
    assert decoded.weight_version == 9


@pytest.mark.parametrize("length", [1, 2, 3, 5, 6, 7])
def test_an_array_that_is_no_whole_number_of_elements_is_refused(length: int) -> None:
    data = field(TOKEN_IDS_TAG, LENGTH_DELIMITED, bytes(length))
    with pytest.raises(codec.MalformedMessage):
        codec.token_ids(codec.decode(Segment, data))


@given(st.binary(max_size=60))
def test_any_bytes_are_a_message_or_refused_as_malformed(data: bytes) -> None:
    for typed in (Trajectory, Segment, rollout_service_pb2.GenerateRequest):
        try:
            decoded = codec.decode(typed, data)
        except codec.MalformedMessage:
            continue
        again = codec.encode(decoded)
        assert codec.encode(codec.decode(typed, again)) == again


def test_bytes_of_no_message_are_refused() -> None:
    with pytest.raises(codec.MalformedMessage, match=r"penstock\.v1\.Trajectory"):
        codec.decode(Trajectory, b"\xff\xff\xff")


@pytest.mark.parametrize("typed", message_classes(), ids=lambda typed: typed.DESCRIPTOR.full_name)
def test_every_message_has_a_twin_with_the_same_fields(typed: type[Message]) -> None:
    twin = codec.twin(typed).DESCRIPTOR
    arrays = codec.ARRAY_FIELDS.get(typed.DESCRIPTOR.full_name, ())
    assert [(f.name, f.number) for f in twin.fields] == [
        (f.name, f.number) for f in typed.DESCRIPTOR.fields
    ]
    for ours, theirs in zip(twin.fields, typed.DESCRIPTOR.fields, strict=True):
        expected = ours.TYPE_BYTES if theirs.name in arrays else theirs.type
        assert ours.type == expected


def test_every_token_and_logprob_array_of_the_protocol_is_read_without_objects() -> None:
    hot = {
        (typed.DESCRIPTOR.full_name, field.name)
        for typed in message_classes()
        for field in typed.DESCRIPTOR.fields
        if field.name in {"token_ids", "logprobs"}
    }
    known = {(name, field) for name, fields in codec.ARRAY_FIELDS.items() for field in fields}
    assert hot == known


def test_reading_and_writing_makes_no_object_per_token() -> None:
    count = 100_000
    ids = np.arange(count, dtype=np.int32)
    logprobs = np.full(count, -0.5, np.float32)
    segment_class = codec.twin(Segment)

    def round_trip() -> None:
        segment = segment_class(
            token_ids=codec.array_bytes(ids),
            logprobs=codec.array_bytes(logprobs, codec.LOGPROB),
        )
        decoded = codec.decode(Segment, codec.encode(segment))
        kept.append((codec.token_ids(decoded), codec.logprobs(decoded)))

    kept: list[tuple[np.ndarray, np.ndarray]] = []
    round_trip()
    tracemalloc.start()
    try:
        before = tracemalloc.take_snapshot()
        round_trip()
        after = tracemalloc.take_snapshot()
    finally:
        tracemalloc.stop()
    blocks = sum(max(0, entry.count_diff) for entry in after.compare_to(before, "filename"))
    assert blocks < 1_000
    assert np.array_equal(kept[-1][0], ids)
    assert np.array_equal(kept[-1][1], logprobs)


def test_what_is_read_cannot_be_written_to() -> None:
    segment = codec.decode(Segment, Segment(token_ids=[1, 2, 3]).SerializeToString())
    with pytest.raises(ValueError, match="read-only"):
        codec.token_ids(segment)[0] = 9
