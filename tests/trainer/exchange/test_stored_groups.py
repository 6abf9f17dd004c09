"""Groups by place: the server names a file and position, and a trainer on the same host reads the
group there.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from penstock.common import memory_file
from penstock.server.core.errors import DomainError
from penstock.server.groups import buffer as group_buffer
from penstock.server.journal.disk import journal as log_journal
from penstock.trainer.exchange.stored_groups import GroupUnreadable, StoredGroups
from penstock.wire import codec
from penstock.wire.frames import FRAME
from penstock.wire.messages import GroupDeliveries, GroupDelivery, GroupFolder, StoredGroup, Welcome
from tests.server.groups.test_recovery import on_disk
from tests.server.journal.test_journal import opened, record
from tests.server.rpc.test_wire_exchange import finish_groups
from tests.support.harness import Harness, hello
from tests.support.scripted_trainer_server import ScriptedServer, Session
from tests.trainer.exchange.test_stream import delivery, exchanging


async def one_stored(harness: Harness, epoch: int = 1) -> tuple[StoredGroups, Any]:
    """The folder that the trainer found, and a delivery by place of group "a"."""
    exchange = await hello(harness.wire, epoch)
    if epoch == 1:
        await finish_groups(harness, "a")
    exchange.send(demand={"group_count": 1, "by_place": True})
    found = StoredGroups.find(exchange.welcome.group_folder)
    assert found is not None
    return found, await exchange.receive("delivery")


async def test_a_group_is_the_same_by_place_and_as_a_message(tmp_path: Path) -> None:
    async with on_disk(tmp_path) as harness:
        found, by_place = await one_stored(harness)
        assert not by_place.HasField("group")
        group = found.read(by_place.stored)
        # The group has no receipt, so the next session gets it again, and does not ask for places.
        exchange = await hello(harness.wire, 2)
        exchange.send(demand={"group_count": 1})
        message = await exchange.receive("delivery")
        assert not message.HasField("stored")
        assert message.group == group
        assert group.task_id == "a" and codec.token_ids(group.trajectories[0].segments[-1]).size
        assert message.redelivery_count == 1


async def test_the_last_demand_says_how_groups_come(tmp_path: Path) -> None:
    async with on_disk(tmp_path) as harness:
        exchange = await hello(harness.wire, groups_per_step=4)
        await finish_groups(harness, "a", "b", "c")
        for by_place in (False, True, False):
            exchange.send(demand={"group_count": 1, "by_place": by_place})
            assert (await exchange.receive("delivery")).HasField("stored") is by_place


async def test_those_that_are_ready_come_in_one_message(tmp_path: Path) -> None:
    async with on_disk(tmp_path) as harness:
        exchange = await hello(harness.wire, groups_per_step=4)
        found = StoredGroups.find(exchange.welcome.group_folder)
        assert found is not None
        await finish_groups(harness, "a", "b", "c", "d")
        exchange.send(demand={"group_count": 3, "by_place": True})
        deliveries = (await exchange.receive("deliveries")).deliveries
        assert [found.read(one.stored).task_id for one in deliveries] == ["a", "b", "c"]
        assert [one.delivery_id for one in deliveries] == [1, 2, 3]
        assert [one.redelivery_count for one in deliveries] == [0, 0, 0]
        # A single group is sent in its own message.
        exchange.send(demand={"group_count": 1, "by_place": True})
        assert (await exchange.receive("delivery")).delivery_id == 4


async def test_a_message_has_no_more_places_than_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_buffer, "MOST_PLACED", 2)
    async with on_disk(tmp_path) as harness:
        exchange = await hello(harness.wire, groups_per_step=5)
        await finish_groups(harness, "a", "b", "c", "d", "e")
        exchange.send(demand={"group_count": 5, "by_place": True})
        counts = [len((await exchange.receive("deliveries")).deliveries) for _ in range(2)]
        assert counts == [2, 2]
        assert (await exchange.receive("delivery")).delivery_id == 5


async def test_what_a_trainer_reads_itself_is_not_kept_in_memory_for_it(tmp_path: Path) -> None:
    async with on_disk(tmp_path) as harness:
        exchange = await hello(harness.wire)
        await finish_groups(harness, "a")
        assert harness.serving.buffer.kept.byte_count > 0
        exchange.send(demand={"group_count": 1, "by_place": True})
        await exchange.receive("delivery")
        assert harness.serving.buffer.kept.byte_count == 0


async def test_without_files_there_is_no_place(harness: Harness) -> None:
    exchange = await hello(harness.wire)
    assert not exchange.welcome.HasField("group_folder")
    await finish_groups(harness, "a")
    exchange.send(demand={"group_count": 1, "by_place": True})
    assert (await exchange.receive("delivery")).group.task_id == "a"


async def test_another_host_another_folder_and_none_are_not_the_servers(tmp_path: Path) -> None:
    async with on_disk(tmp_path) as harness:
        folder = (await hello(harness.wire)).welcome.group_folder
    assert StoredGroups.find(folder) is not None
    assert StoredGroups.find(GroupFolder()) is None
    for changed in (
        {"host_id": "another"},
        {"path": str(tmp_path / "nowhere")},
        {"inode": folder.inode + 1},
        {"device": folder.device + 1},
    ):
        other = GroupFolder()
        other.CopyFrom(folder)
        for name, value in changed.items():
            setattr(other, name, value)
        assert StoredGroups.find(other) is None, changed


async def test_a_host_without_a_boot_id_is_not_the_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with on_disk(tmp_path) as harness:
        folder = (await hello(harness.wire)).welcome.group_folder
    monkeypatch.setattr(memory_file, "BOOT_ID", tmp_path / "no such file")
    assert StoredGroups.find(folder) is None


@pytest.mark.parametrize(
    "damage",
    ["gone", "short", "flipped", "another frame", "no group", "link", "pipe", "up", "none"],
)
async def test_what_is_not_there_as_written_is_not_read(tmp_path: Path, damage: str) -> None:
    async with on_disk(tmp_path) as harness:
        found, by_place = await one_stored(harness)
        place = by_place.stored
        path = tmp_path / "journal" / place.file
        if damage == "gone":
            path.unlink()
        elif damage == "short":
            os.truncate(path, place.offset_bytes + place.length_bytes // 2)
        elif damage == "flipped":
            with path.open("r+b") as file:
                file.seek(place.offset_bytes + FRAME.size + 5)
                byte = file.read(1)
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte[0] ^ 1]))
        elif damage == "another frame":
            place.offset_bytes += 8
        elif damage == "no group":
            # The first record of a journal notes a server's start.
            place.offset_bytes, place.length_bytes = 40, 1 << 10
        elif damage == "link":
            path.rename(tmp_path / "elsewhere")
            path.symlink_to(tmp_path / "elsewhere")
        elif damage == "pipe":
            path.unlink()
            os.mkfifo(path)
        else:
            place.file = {"up": f"../journal/{place.file}", "none": ""}[damage]
        with pytest.raises(GroupUnreadable):
            found.read(place)


async def test_files_stay_for_those_who_were_told_unless_their_room_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_journal, "READING_SECONDS", 30.0)
    async with opened(tmp_path, lambda: [record("state")]) as (journal, _):
        (held,) = await journal.append([record("held")], hold_last=True)
        place = journal.place(held)
        assert place is not None
        first = tmp_path / place.file
        # A compaction has moved the record, and the file that the place names still exists.
        async with asyncio.timeout(20):
            while journal.place(held) == place:
                await journal.append([record("filler", 300_000)])
                await asyncio.sleep(0.01)
        moved = journal.place(held)
        assert moved is not None and (tmp_path / moved.file).exists() and first.exists()
        await asyncio.sleep(0.1)
        assert first.exists() and not journal.compactions
        with pytest.raises(DomainError, match="do not fit"):
            journal.check_room(1 << 40)
        async with asyncio.timeout(20):
            while first.exists():
                await asyncio.sleep(0.01)


async def test_files_go_once_nobody_can_still_be_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_journal, "READING_SECONDS", 0.2)
    async with opened(tmp_path, lambda: [record("state")]) as (journal, _):
        (held,) = await journal.append([record("held")], hold_last=True)
        place = journal.place(held)
        assert place is not None
        async with asyncio.timeout(20):
            while (tmp_path / place.file).exists():
                await journal.append([record("filler", 300_000)])
                await asyncio.sleep(0.01)


# The trainer's side


async def test_a_trainer_reads_groups_where_they_lie(tmp_path: Path) -> None:
    async with on_disk(tmp_path) as harness:
        await finish_groups(harness, "a", "b")
        told: list[Any] = []
        original = StoredGroups.read

        def read(self: StoredGroups, stored: Any) -> Any:
            told.append(stored)
            return original(self, stored)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(StoredGroups, "read", read)
            async with exchanging(f"127.0.0.1:{harness.port}") as exchange:
                exchange.demand(2)
                groups = [await exchange.next_group() for _ in range(2)]
        assert {group.task_id for group in groups} == {"a", "b"}
        assert len(told) == 2


async def test_a_group_that_cannot_be_read_comes_as_a_message(tmp_path: Path) -> None:
    """The next stream asks for messages, and the one after it for places again."""
    lock = tmp_path / "LOCK"
    lock.touch()
    status = lock.stat()
    folder = GroupFolder(
        host_id=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        path=str(tmp_path),
        device=status.st_dev,
        inode=status.st_ino,
    )
    asked: list[bool] = []
    third_is_there = asyncio.Event()

    async def welcome(session: Session) -> None:
        await session.receive("hello")
        await session.send(welcome=Welcome(active_weight_version=5, group_folder=folder))

    async def first(session: Session) -> None:
        await welcome(session)
        asked.append((await session.receive("demand")).by_place)
        await session.send(
            delivery=GroupDelivery(delivery_id=1, stored=StoredGroup(file="gone", length_bytes=64))
        )
        with pytest.raises(StopAsyncIteration):
            await anext(session.requests)

    async def second(session: Session) -> None:
        await welcome(session)
        await session.receive("checkpoint")
        demand = await session.receive("demand")
        asked.append(demand.by_place)
        # The unreadable group used up no demand.
        assert demand.group_count == 2
        await session.send(delivery=delivery(2, "a", 1))

    async def third(session: Session) -> None:
        await welcome(session)
        await session.receive("checkpoint")
        asked.append((await session.receive("demand")).by_place)
        third_is_there.set()
        with pytest.raises(StopAsyncIteration):
            await anext(session.requests)

    async with (
        ScriptedServer(first, second, third) as server,
        exchanging(server.address) as exchange,
    ):
        exchange.demand(2)
        assert (await exchange.next_group()).group_id == "a"
        await third_is_there.wait()
    assert asked == [True, False, True]


async def test_what_came_before_one_that_cannot_be_read_is_taken(tmp_path: Path) -> None:
    """The groups after the unreadable one in the same message are delivered again."""
    async with on_disk(tmp_path / "journal") as harness:
        told = (await hello(harness.wire)).welcome.group_folder
        await finish_groups(harness, "a")
        exchange = await hello(harness.wire, 2)
        exchange.send(demand={"group_count": 1, "by_place": True})
        good = await exchange.receive("delivery")
        left: list[int] = []

        async def first(session: Session) -> None:
            await session.receive("hello")
            await session.send(welcome=Welcome(active_weight_version=5, group_folder=told))
            await session.receive("demand")
            gone = GroupDelivery(delivery_id=2, stored=StoredGroup(file="gone", length_bytes=64))
            await session.send(deliveries=GroupDeliveries(deliveries=[good, gone]))
            with pytest.raises(StopAsyncIteration):
                await anext(session.requests)

        async def second(session: Session) -> None:
            await session.receive("hello")
            await session.send(welcome=Welcome(active_weight_version=5, group_folder=told))
            await session.receive("checkpoint")
            demand = await session.receive("demand")
            assert not demand.by_place
            left.append(demand.group_count)
            await session.send(delivery=delivery(2, "b", 1))

        async with (
            ScriptedServer(first, second) as server,
            exchanging(server.address) as trainer,
        ):
            trainer.demand(2)
            groups = [await trainer.next_group() for _ in range(2)]
    assert [group.group_id for group in groups][1] == "b" and groups[0].task_id == "a"
    assert left == [1]
