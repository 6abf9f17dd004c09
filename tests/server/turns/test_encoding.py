"""A group's bytes are protobuf's encoding of it, with the fields in another order."""

from __future__ import annotations

import numpy as np

from penstock.server.engine.protocol import Delta
from penstock.server.turns import encoding
from penstock.server.turns.trajectory import PromptKind, TrajectoryRecord
from penstock.server.turns.turn import TurnSampling
from penstock.v1 import journal_pb2, trainer_service_pb2, trajectory_pb2
from penstock.wire import codec
from penstock.wire.messages import JournalRecord, Outcome, Task, TrajectoryGroup


def trajectory(name: str, tokens: int) -> TrajectoryRecord:
    record = TrajectoryRecord(name, PromptKind.TOKENS, TurnSampling(), group_id="g", sample_index=3)
    record.append_context(np.arange(5, dtype=np.int32), 0)
    ids = np.arange(tokens, dtype=np.int32)
    record.append_policy(Delta(ids, -ids.astype(np.float32), 7, None, 0), 0, 0.5)
    record.traceparent, record.turn_count = "00-ab-cd-01", 1
    record.outcome = Outcome(reward=0.25, metrics={"length": 3.0})
    return record


def encoded(*records: TrajectoryRecord) -> encoding.EncodedGroup:
    return encoding.encode_group("g", "t", trajectory_pb2.PURPOSE_TRAIN, records, range(4, 8 + 1))


def test_a_group_reads_as_the_message_of_its_trajectories() -> None:
    # Lengths of one, two and three bytes, and a trajectory that was never opened.
    records = [trajectory("a", 3), trajectory("b", 100), trajectory("c", 40_000)]
    records.append(TrajectoryRecord("d", PromptKind.TOKENS, TurnSampling()))
    expected = TrajectoryGroup(
        group_id="g",
        task_id="t",
        trajectories=[record.message() for record in records],
        purpose=trajectory_pb2.PURPOSE_TRAIN,
        oldest_weight_version=4,
        newest_weight_version=8,
    )
    found = encoded(*records).joined()
    assert encoding.decode_group(found) == expected
    assert len(found) == expected.ByteSize()
    # The bytes also parse with the generated message classes.
    typed = trajectory_pb2.TrajectoryGroup.FromString(found)
    assert list(typed.trajectories[0].segments[1].token_ids) == [0, 1, 2]


def test_a_record_and_a_delivery_carry_the_group_as_it_is() -> None:
    made = encoded(trajectory("a", 1000))
    group = made.joined()
    task = Task(task_id="t", group_size=1)
    record = encoding.group_finished(made, task, 6, has_policy_tokens=True)
    assert record.short is None
    payload = b"".join(record.parts)
    finished = JournalRecord.FromString(payload).group_finished
    assert finished.group == encoding.decode_group(group)
    assert (finished.admitted_weight_version, finished.has_policy_tokens) == (6, True)
    assert finished.task == task
    assert encoding.group_in(payload) == group
    data = encoding.Delivery(group, 9, 2).SerializeToString()
    delivery = codec.decode(trainer_service_pb2.ExchangeResponse, data).delivery
    assert delivery.group == encoding.decode_group(group)
    assert (delivery.delivery_id, delivery.redelivery_count) == (9, 2)


def test_a_group_is_found_in_a_record_of_another_order() -> None:
    group = encoded(trajectory("a", 10)).joined()
    tail = journal_pb2.GroupFinished(has_policy_tokens=True).SerializeToString()
    inner = tail + bytes([1 << 3 | 2]) + encoding._varint(len(group)) + group
    payload = encoding._FINISHED + encoding._varint(len(inner)) + inner
    found = encoding.group_in(payload)
    assert encoding.decode_group(found) == encoding.decode_group(group)
