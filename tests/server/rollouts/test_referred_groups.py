"""Group records that refer to the turns' records for large segments."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.server.engine.protocol import Delta
from penstock.server.groups.recovery import recover
from penstock.server.journal.disk import journal as log_journal
from penstock.server.journal.disk.files import Reading, find_files, read_records
from penstock.server.journal.disk.journal import LogJournal
from penstock.server.journal.disk.reading import open_stored
from penstock.server.journal.protocol import JournalUnreadable, Stored
from penstock.server.journal.tools.contents import read_contents
from penstock.server.turns import encoding
from penstock.server.turns.records import trajectory_closed, trajectory_opened, turn_changed
from penstock.server.turns.store import ClosedMark
from penstock.server.turns.trajectory import PromptKind, TrajectoryRecord
from penstock.server.turns.turn import TurnAttempt, TurnSampling
from penstock.trainer.exchange.stored_groups import GroupUnreadable, StoredGroups
from penstock.v1 import trajectory_pb2
from penstock.wire import codec
from penstock.wire.messages import GroupReferred, JournalRecord, Outcome, TurnChanged
from penstock.wire.referred import put_together
from tests.server.groups.test_recovery import ContinueRequest, killed, on_disk
from tests.server.rpc.test_wire_exchange import finish_groups
from tests.support.harness import Harness, hello, sampling, sequence

POLICY_BYTES = 4 * 8
"""Bytes of the four tokens that a turn of `finish_groups` samples."""


def finished_in(folder: Path) -> list[Any]:
    """The records of complete groups, oldest first."""
    found = [record for record, _ in read_records(find_files(folder / "journal"), Reading())]
    return [r for r in found if r.HasField("group_finished") or r.HasField("group_referred")]


def journal_of(harness: Harness) -> LogJournal:
    journal = harness.serving.journal
    assert isinstance(journal, LogJournal)
    return journal


async def compact(harness: Harness) -> None:
    journal = journal_of(harness)
    journal._room_needed.set()
    await journal._begin_compaction()
    assert journal._compacting is not None
    await journal._compacting


def held_bytes(journal: LogJournal) -> int:
    return sum(stored.byte_count for stored in journal._held)


async def delivered(harness: Harness, epoch: int, *, by_place: bool = False) -> Any:
    """The group "a", delivered on a new session."""
    exchange = await hello(harness.wire, epoch)
    exchange.send(demand={"group_count": 1, "by_place": by_place})
    delivery = await exchange.receive("delivery")
    if not by_place:
        return delivery.group
    found = StoredGroups.find(exchange.welcome.group_folder)
    assert found is not None
    return found.read(delivery.stored)


async def test_a_large_segment_is_written_once_and_read_the_same_everywhere(tmp_path: Path) -> None:
    setting = f"journal.refers_from_bytes={POLICY_BYTES}"
    async with on_disk(tmp_path / "a", setting) as first:
        await finish_groups(first, "a")
        (record,) = finished_in(tmp_path / "a")
        referred = record.group_referred
        # The prompt is small, so the group's record contains it too.
        prompt, answer = referred.finished.group.trajectories[0].segments
        assert codec.token_ids(prompt).tolist() == [1, 2] and not answer.token_ids
        (place,) = referred.segments
        assert (place.trajectory, place.segment) == (0, 1)
        assert (place.token_position, place.token_count) == (2, 4)
        after = killed(tmp_path / "a")
        from_memory = await delivered(first, 1)
        assert referred.group_byte_count == from_memory.ByteSize()
        assert codec.token_ids(from_memory.trajectories[0].segments[1]).size == 4
        assert await delivered(first, 2) == from_memory
        assert await delivered(first, 3, by_place=True) == from_memory
    async with on_disk(after, setting) as second:
        assert await delivered(second, 4) == from_memory
        assert await delivered(second, 5, by_place=True) == from_memory
        with open_stored(after / "journal") as journal:
            (line,) = read_contents(journal)["finished_groups"]
            assert (line["token_count"], line["byte_count"]) == (6, from_memory.ByteSize())
        await compact(second)
        (record,) = finished_in(after)
        assert record.group_finished.group == from_memory
        assert await delivered(second, 6) == from_memory
        assert await delivered(second, 7, by_place=True) == from_memory


async def test_a_smaller_one_is_written_again(tmp_path: Path) -> None:
    async with on_disk(tmp_path, f"journal.refers_from_bytes={POLICY_BYTES + 1}") as harness:
        await finish_groups(harness, "a")
        assert finished_in(tmp_path)[0].HasField("group_finished")


async def test_what_it_refers_to_is_kept_and_counted(tmp_path: Path) -> None:
    async with on_disk(tmp_path) as harness:
        await finish_groups(harness, "a", "b")
        journal = journal_of(harness)
        assert all(stored.turns for stored in journal._held)
        in_turns = journal._room.kept
        assert in_turns == held_bytes(journal)
        assert in_turns > sum(stored.length for stored in journal._held)
        await compact(harness)
        assert not any(stored.turns for stored in journal._held)
        assert 0 < journal._room.kept == held_bytes(journal) < in_turns
        for group in list(harness.serving.buffer.groups):
            assert group.stored is not None
            journal.release(group.stored)
        assert journal._room.kept == 0


async def test_a_group_that_goes_while_it_is_copied_is_counted_once(tmp_path: Path) -> None:
    async with on_disk(tmp_path) as harness:
        await finish_groups(harness, "a", "b")
        journal = journal_of(harness)
        journal._room_needed.set()
        await journal._begin_compaction()
        first, _ = harness.serving.buffer.groups
        assert first.stored is not None
        journal.release(first.stored)
        assert journal._compacting is not None
        await journal._compacting
        assert journal._room.kept == held_bytes(journal) > 0


async def held_groups(harness: Harness) -> list[Any]:
    """Those that are finished."""
    buffer = harness.serving.buffer
    groups = [await buffer.read(group) for group in buffer.groups]
    return [encoding.decode_group(group) for group in groups]


async def open_turn(harness: Harness, name: str = "x") -> None:
    await harness.generate(
        name, [1, 2], sampling_params=sampling(4), group_id=f"group of {name}", group_size=1
    )


async def test_nothing_refers_to_a_file_that_is_about_to_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = threading.Event()
    original = log_journal.write_snapshot

    def write_snapshot(*arguments: Any) -> Any:
        assert may_write.wait(60)
        return original(*arguments)

    monkeypatch.setattr(log_journal, "write_snapshot", write_snapshot)
    async with on_disk(tmp_path) as harness:
        await open_turn(harness)
        journal = journal_of(harness)
        journal._room_needed.set()
        await journal._begin_compaction()
        # x has a record that compaction is about to copy; y was written after compaction began.
        await open_turn(harness, "y")
        await harness.complete("x")
        await harness.complete("y")
        kinds = [record.WhichOneof("record") for record in finished_in(tmp_path)]
        assert kinds == ["group_finished", "group_referred"]
        may_write.set()
        assert journal._compacting is not None
        await journal._compacting
        after = killed(tmp_path)
        groups = await held_groups(harness)
    async with on_disk(after) as second:
        assert await held_groups(second) == groups


async def test_what_a_snapshot_has_is_referred_to_like_any_other(tmp_path: Path) -> None:
    async with on_disk(tmp_path / "a") as first:
        for name in ("x", "y"):
            await open_turn(first, name)
        await compact(first)
        await first.complete("x")
        (record,) = finished_in(tmp_path / "a")
        assert len(record.group_referred.segments) == 2
        whole = await delivered(first, 1, by_place=True)
        assert [whole] == await held_groups(first)
        after = killed(tmp_path / "a")
    async with on_disk(after) as second:
        assert [whole] == await held_groups(second)
        await second.complete("y")
        (_, record) = finished_in(after)
        assert len(record.group_referred.segments) == 2
        again = killed(after, "again")
        groups = await held_groups(second)
    async with on_disk(again) as third:
        assert await held_groups(third) == groups


@pytest.mark.parametrize("compacted", [False, True])
async def test_a_sibling_that_was_encoded_early_is_referred_to_where_it_lies_now(
    tmp_path: Path, compacted: bool
) -> None:
    async with on_disk(tmp_path / "a", f"journal.refers_from_bytes={POLICY_BYTES}") as first:
        for index, name in enumerate(("x", "y")):
            await first.generate(
                name,
                [1, 2],
                group_id="g",
                group_size=2,
                sample_index=index,
                sampling_params=sampling(4),
            )
        assert not await first.complete("y")
        early = first.serving.store.find("y")
        assert early is not None and early.encoded is not None
        assert [left.token_count for left in early.encoded.left_out] == [4]
        expected = early.message()
        if compacted:
            await compact(first)
        assert await first.complete("x")
        (record,) = finished_in(tmp_path / "a")
        places = record.group_referred.segments
        assert [(p.trajectory, p.segment, p.token_position, p.token_count) for p in places] == [
            (0, 1, 2, 4),
            (1, 1, 2, 4),
        ]
        whole = await delivered(first, 1, by_place=True)
        assert whole.trajectories[1] == expected
        assert [whole] == await held_groups(first)
        after = killed(tmp_path / "a")
    async with on_disk(after) as second:
        assert [whole] == await held_groups(second)


def test_what_is_still_written_is_not_encoded_early() -> None:
    record = sampled()
    record.outcome = Outcome(reward=1.0)
    loop = asyncio.new_event_loop()
    appended: asyncio.Future[list[Stored]] = loop.create_future()
    record.written[2, 4] = appended
    encoding.encode_early(record)
    assert record.encoded is None
    appended.set_result([Stored(1, 40, 64)])
    encoding.encode_early(record)
    loop.close()
    assert record.encoded is not None and len(record.encoded.left_out) == 1


async def test_a_turn_that_was_cut_and_continued_is_put_together(tmp_path: Path) -> None:
    async with on_disk(tmp_path / "a") as first:
        await open_turn(first)
        for _ in range(2):
            call = first.wire.Continue(
                ContinueRequest(
                    trajectory_id="x", tokens=sequence([7, 7, 7]), sampling_params=sampling(3)
                )
            )
            async for _ in call:
                pass
        await first.complete("x")
        (record,) = finished_in(tmp_path / "a")
        assert len(record.group_referred.segments) == 6
        after = killed(tmp_path / "a")
        whole = await delivered(first, 1)
    async with on_disk(after) as second:
        assert await delivered(second, 2, by_place=True) == whole
        assert await delivered(second, 3) == whole


async def test_a_turn_that_is_damaged_is_noticed_by_both(tmp_path: Path) -> None:
    async with on_disk(tmp_path) as harness:
        await finish_groups(harness, "a")
        (group,) = harness.serving.buffer.groups
        assert group.stored is not None
        turn = group.stored.turns[-1]
        path = journal_of(harness)._segments.paths[turn.segment]
        with path.open("r+b") as file:
            file.seek(turn.offset + turn.length // 2)
            byte = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte[0] ^ 1]))
        exchange = await hello(harness.wire, 1)
        exchange.send(demand={"group_count": 1, "by_place": True})
        told = (await exchange.receive("delivery")).stored
        found = StoredGroups.find(exchange.welcome.group_folder)
        assert found is not None
        with pytest.raises(GroupUnreadable, match="checksum"):
            found.read(told)
        del told.turns[-1]
        with pytest.raises(GroupUnreadable):
            found.read(told)
        exchange = await hello(harness.wire, 2)
        exchange.send(demand={"group_count": 1})
        notice = await exchange.receive("notice")
        assert notice.reason == "JOURNAL_CORRUPT" and notice.task_id == "a"
        assert harness.serving.queue.pending.count == 1


async def test_a_compaction_that_fails_leaves_groups_to_be_written_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with on_disk(tmp_path / "a") as first:
        await open_turn(first)

        def fails(*_: object) -> None:
            raise OSError("no disk")

        with monkeypatch.context() as patched:
            patched.setattr(log_journal, "write_snapshot", fails)
            await compact(first)
        await first.complete("x")
        (record,) = finished_in(tmp_path / "a")
        assert record.HasField("group_finished")
        groups = await held_groups(first)
        after = killed(tmp_path / "a")
    async with on_disk(after) as second:
        assert await held_groups(second) == groups


# Records alone


def sampled(name: str = "x", tokens: int = 4) -> TrajectoryRecord:
    """A trajectory whose turn is over."""
    record = TrajectoryRecord(name, PromptKind.TOKENS, TurnSampling(), group_id="g")
    record.append_context(np.arange(2, dtype=np.int32), 0)
    ids = np.arange(tokens, dtype=np.int32)
    record.append_policy(Delta(ids, -ids.astype(np.float32), 7, None, 0), 0, 0.5)
    record.turn = SimpleNamespace(  # type: ignore[assignment]
        index=0,
        sampling=TurnSampling(),
        budget=4,
        context_token_count=2,
        policy_token_count=tokens,
        attempts=1,
        attempt=TurnAttempt(finish=None),
        in_flight=False,
        finish_reason_before=trajectory_pb2.FINISH_REASON_UNSPECIFIED,
        last_finish_reason=trajectory_pb2.FINISH_REASON_LENGTH,
    )
    record.turn_count = 1
    return record


def short_of(record: TrajectoryRecord) -> tuple[Any, Any]:
    """The referring record of a trajectory's group, and the record of its turn."""
    stored = Stored(1, 40, 64)
    record.written = dict.fromkeys(record.unrecorded_from(1), stored)
    turn = JournalRecord.FromString(b"".join(turn_changed(record).parts)).turn_changed
    record.outcome = Outcome(reward=1.0)
    group = encoding.encode_group("g", "", trajectory_pb2.PURPOSE_TRAIN, [record], range(7, 8))
    made = encoding.group_finished(group, None, 7, has_policy_tokens=True)
    assert made.short is not None and set(made.short.turns) == {stored}
    whole = JournalRecord.FromString(b"".join(made.parts))
    short = JournalRecord.FromString(b"".join(made.short.parts))
    assert short.ByteSize() < whole.ByteSize()
    again = GroupReferred()
    again.CopyFrom(short.group_referred)
    assert put_together(again, [turn, turn]) == whole.group_finished
    return short.group_referred, turn


def test_the_short_form_and_the_turn_are_the_group() -> None:
    short_of(sampled(tokens=40_000))


@pytest.mark.parametrize(
    "change", ["trajectory", "position", "count", "version", "author", "no such", "none", "fewer"]
)
def test_another_turn_is_not_taken_for_it(change: str) -> None:
    referred, turn = short_of(sampled())
    turns = [turn, turn]
    if change == "trajectory":
        turn.trajectory_id = "y"
    elif change == "position":
        turn.token_count = 1
    elif change == "count":
        referred.segments[1].token_count = 3
    elif change == "version":
        turn.segments[1].weight_version = 8
    elif change == "author":
        turn.segments[1].author = trajectory_pb2.AUTHOR_CONTEXT
    elif change == "no such":
        referred.segments[1].segment = 2
    elif change == "none":
        turns = [turn, TurnChanged(trajectory_id="x")]
    else:
        turns = [turn]
    with pytest.raises(ValueError, match=r"tokens at|no such segment|shorter"):
        put_together(referred, turns)


def test_a_turn_that_still_samples_is_copied_as_it_is() -> None:
    record = sampled()
    record.written = dict.fromkeys(record.unrecorded_from(1), Stored(1, 40, 64))
    assert isinstance(record.turn, SimpleNamespace)
    record.turn.in_flight = True
    record.outcome = Outcome(reward=1.0)
    group = encoding.encode_group("g", "", trajectory_pb2.PURPOSE_TRAIN, [record], range(7, 8))
    before = group.joined()
    ids = np.arange(3, dtype=np.int32)
    record.append_policy(Delta(ids, ids.astype(np.float32), 7, None, 0), 0, 0.5)
    assert group.joined() == before and not group.left_out
    assert len(encoding.decode_group(before).trajectories[0].segments[1].token_ids) == 16


async def test_an_append_is_referred_to_once_it_is_durable() -> None:
    record = sampled()
    appended: asyncio.Future[list[Stored]] = asyncio.get_running_loop().create_future()
    record.written[2, 4] = appended
    assert record.recorded_at(2, 4) is None
    stored = Stored(1, 40, 64)
    appended.set_result([Stored(1, 16, 24), stored])
    assert record.recorded_at(2, 4) is stored and record.recorded_at(2, 3) is None
    record.written[2, 4] = failed = asyncio.get_running_loop().create_future()
    failed.set_exception(OSError("no disk"))
    assert record.recorded_at(2, 4) is None


def test_no_server_starts_over_a_group_whose_turn_is_missing() -> None:
    record = sampled()
    opened = trajectory_opened(record)
    referred, turn = short_of(record)
    where = Stored(1, 40, 64)
    records = [
        opened,
        JournalRecord(turn_changed=turn),
        trajectory_closed("x", ClosedMark(b"", "g", True, False), record.outcome),
        JournalRecord(group_referred=referred),
    ]
    found = recover((r, where) for r in records)
    assert found.finished["g"].stored.turns == (where, where)
    del records[1]
    with pytest.raises(JournalUnreadable, match="no turn of x"):
        recover((r, where) for r in records)
    del records[0]
    with pytest.raises(JournalUnreadable, match="no turn of x"):
        recover((r, where) for r in records)
