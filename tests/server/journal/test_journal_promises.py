"""The guarantees of every journal: on disk and in a NATS JetStream stream."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Generator, Iterable
from pathlib import Path

import pytest

from penstock.server.core.errors import DomainError
from penstock.server.journal.protocol import JournalInUse, JournalUnreadable, Record, Stored
from penstock.wire.messages import JournalRecord
from penstock.wire.reasons import Reason
from tests.support.journal_stores import (
    MEBIBYTE,
    JetStreamStore,
    LogStore,
    Store,
    names_in,
    read_name,
    record,
)
from tests.support.nats_server import NatsServer, nats_server

POINTS = (
    "journal.before_write",
    "journal.before_reply",
    "journal.before_snapshot_fsync",
    "journal.before_snapshot_clean_up",
)


@pytest.fixture(scope="module")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Generator[NatsServer]:
    """One server for all tests in this file."""
    with nats_server(tmp_path_factory.mktemp("nats")) as server:
        yield server


@pytest.fixture(params=["log", "jetstream"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Each kind of store, empty. Takeover does not wait in these tests."""
    if request.param == "log":
        return LogStore(tmp_path)
    from penstock.server.journal.jetstream import log as jetstream_log

    monkeypatch.setattr(jetstream_log, "ABSENT_SECONDS", 0.0)
    return JetStreamStore(request.getfixturevalue("nats"))


# Appending


async def test_what_was_appended_is_there_in_its_order(store: Store) -> None:
    async with store.opened() as (journal, names):
        assert names == []
        waiting = [journal.append([record(f"{i}a"), record(f"{i}b")]) for i in range(50)]
        await waiting[-1]
        assert all(done.done() for done in waiting)
        await journal.append(())
        first = waiting[3].result()
        assert read_name(await journal.read(first[1])) == "3b"
    expected = [f"{i}{part}" for i in range(50) for part in "ab"]
    assert await store.names() == expected
    assert await store.names() == expected


async def test_an_append_of_nothing_waits_for_all_before_it(store: Store) -> None:
    async with store.opened() as (journal, _):
        before = journal.append([record("before", 300_000)])
        assert await journal.append(()) == []
        assert before.done()


async def test_records_of_all_sizes_are_there_in_their_order(store: Store) -> None:
    sizes = [0, 300_000, 10, 70_000, 250_000, 60_000, 1, 3 * MEBIBYTE]
    async with store.opened() as (journal, _):
        journal.check_room(3 * MEBIBYTE)
        stored: list[Stored] = []
        for n, size in enumerate(sizes):
            stored += await journal.append([record(f"{n}", size)], hold_last=True)
        await journal.append([record(f"together{n}", size) for n, size in enumerate(sizes[:4])])
        for n, place in enumerate(stored):
            found = JournalRecord.FromString(await journal.read(place))
            assert found == record(f"{n}", sizes[n])
    names = [*(f"{n}" for n in range(len(sizes))), *(f"together{n}" for n in range(4))]
    # Compaction may have copied held records, in any order.
    found = await store.names()
    assert sorted(found) == sorted(names)
    assert [name for name in found if name.startswith("t")] == names[len(sizes) :]


async def test_one_server_writes(store: Store) -> None:
    async with store.opened() as (journal, _):
        with pytest.raises(JournalInUse, match="another server"):
            await store.make()
        await journal.append([record("undisturbed")])
    assert await store.names() == ["undisturbed"]


async def test_a_record_of_a_later_server_is_not_misread(store: Store) -> None:
    unknown = JournalRecord()
    assert unknown.WhichOneof("record") is None
    async with store.opened() as (journal, _):
        await journal.append([unknown])
    journal = await store.make()
    assert [found.WhichOneof("record") async for found, _ in journal.replay()] == [None]
    await journal.start(list)
    await journal.close()


@pytest.mark.parametrize("size", [1_000, 200_000])
async def test_a_record_that_rots_is_not_handed_out(store: Store, size: int) -> None:
    async with store.opened() as (journal, _):
        (stored,) = await journal.append([record("group", size)])
        await journal.append([record("later")])
        await store.damage(journal, stored)
        with pytest.raises(DomainError) as error:
            await journal.read(stored)
        assert error.value.reason is Reason.JOURNAL_CORRUPT
        await journal.append([record("it goes on")])


@pytest.mark.parametrize("size", [1_000, 200_000])
async def test_a_corrupt_record_is_named_and_nothing_is_served(store: Store, size: int) -> None:
    async with store.opened() as (journal, _):
        (stored,) = await journal.append([record("group", size)])
        await journal.append([record("later")])
        await store.damage(journal, stored)
    with pytest.raises(JournalUnreadable, match=r"corrupt|missing"):
        await store.names()


# Kills


async def test_what_was_answered_is_there_after_a_kill_at_any_moment(store: Store) -> None:
    rng = random.Random(7)
    expected: list[str] = []
    for life in range(6):
        journal = await store.make()
        names = await names_in(journal)
        assert names[: len(expected)] == expected
        assert len(names) == len(set(names))
        expected = names
        await journal.start(lambda: [record(name) for name in names])  # noqa: B023
        futures = [
            journal.append([record(f"{life}-{n}", rng.choice([0, 100, 90_000]))]) for n in range(30)
        ]
        await futures[rng.randrange(len(futures))]
        await store.crash(journal)
        expected = [
            *names,
            *(f"{life}-{n}" for n, done in enumerate(futures) if not _lost(done)),
        ]
    assert (await store.names())[: len(expected)] == expected


def _lost(done: asyncio.Future[list[Stored]]) -> bool:
    return not done.done() or done.cancelled() or done.exception() is not None


@pytest.mark.parametrize("point", POINTS)
async def test_what_was_answered_is_there_after_an_end_at_each_step(
    store: Store, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: dict[str, Stored] = {}
    left = random.Random(point).randrange(1, 3)

    def end(name: str) -> None:
        nonlocal left
        left -= name == point
        if name == point and left <= 0:
            raise AssertionError("killed")

    def snapshot() -> Iterable[Record | Stored]:
        yield record("state")
        yield from held.values()

    journal = await store.make()
    assert await names_in(journal) == []
    await journal.start(snapshot)
    await journal.append([record("first")])
    for module in store.modules:
        monkeypatch.setattr(module, "hit", end)
    n = 0
    with pytest.raises(DomainError):
        async with asyncio.timeout(20):
            while True:
                name = f"group{n}"
                (held[name],) = await journal.append(
                    [record(name, 40_000 if n % 2 else 200_000)], hold_last=True
                )
                n += 1
                if n > 4:
                    journal.release(held.pop(f"group{n - 5}"))
                # Let compaction proceed.
                await asyncio.sleep(0.001)
    monkeypatch.undo()
    await store.crash(journal)
    names = await store.names()
    answered = [f"group{k}" for k in range(max(0, n - 4), n)]
    assert [name for name in names if name in answered] == answered
    assert "first" in names or "state" in names


# Room


async def test_at_its_bound_it_refuses_and_takes_again_what_was_released(store: Store) -> None:
    async with store.opened(max_bytes=16 * MEBIBYTE) as (journal, _):
        kept: list[Stored] = []
        while True:
            try:
                journal.check_room(400_000)
            except DomainError as error:
                assert error.reason is Reason.DISK_FULL
                assert error.retry_after_seconds
                break
            kept += await journal.append([record("group", 400_000)], hold_last=True)
        assert 5 <= len(kept) <= 20
        # Records that need no reserved room are still accepted.
        await journal.append([record("receipt")])
        journal.release(kept.pop())
        journal.check_room(400_000)


# Compaction


async def test_what_nobody_needs_is_given_back_while_appends_go_on(store: Store) -> None:
    held: dict[str, Stored] = {}

    def snapshot() -> Iterable[Record | Stored]:
        yield record("state")
        yield from held.values()

    last = 0
    async with store.opened(snapshot) as (journal, _), asyncio.timeout(60):
        # Loop until done, however slow the machine is.
        while last < 120 or journal.compactions < 3:
            size = 100_000 if last % 3 else 50_000
            (stored,) = await journal.append([record(f"group{last}", size)], hold_last=True)
            held[f"group{last}"] = stored
            if last >= 3:
                journal.release(held.pop(f"group{last - 3}"))
            for name, place in held.items():
                assert read_name(await journal.read(place)) == name
            last += 1
        while journal._compacting is not None:
            await asyncio.sleep(0.01)
        assert await store.stored_bytes(journal) < 6 * MEBIBYTE
    names = await store.names()
    assert names[0] == "state"
    assert set(names) >= {f"group{last - n}" for n in (1, 2, 3)}


async def test_what_was_held_is_held_by_the_next_server(store: Store) -> None:
    async with store.opened() as (journal, _):
        for name, size in (("small", 100), ("large", 200_000)):
            await journal.append([record(name, size)], hold_last=True)
        await journal.append([record("gone", 200_000)])
    journal = await store.make()
    found: list[Stored] = []
    async for _, stored in journal.replay():
        found.append(stored)
    for stored in found[:2]:
        journal.hold(stored)
    await journal.start(lambda: [record("state")])
    async with asyncio.timeout(20):
        while journal.compactions < 2:
            await journal.append([record("filler", 300_000)])
    assert [read_name(await journal.read(stored)) for stored in found[:2]] == ["small", "large"]
    journal.release(found[0])
    await journal.close()
    names = await store.names()
    assert {"small", "large", "state"} <= set(names) and "gone" not in names


async def test_a_defect_in_the_writer_fails_what_waits(store: Store) -> None:
    def broken() -> Iterable[Record | Stored]:
        raise AssertionError("defect")

    journal = await store.make()
    assert await names_in(journal) == []
    await journal.start(broken)
    with pytest.raises(DomainError) as error:
        async with asyncio.timeout(20):
            while True:
                await journal.append([record("x", 300_000)])
    assert error.value.reason is Reason.JOURNAL_FAILED
    assert "defect" in await journal.failed
    await journal.close()


async def test_a_defect_in_the_compaction_fails_the_journal(store: Store) -> None:
    def unwritable() -> Iterable[Record | Stored]:
        yield None  # type: ignore[misc]

    journal = await store.make()
    assert await names_in(journal) == []
    await journal.start(unwritable)
    with pytest.raises(DomainError) as error:
        async with asyncio.timeout(20):
            while True:
                await journal.append([record("x", 300_000)])
    assert error.value.reason is Reason.JOURNAL_FAILED
    assert journal.failed.done()
    await journal.close()
    assert set(await store.names()) == {"x"}
