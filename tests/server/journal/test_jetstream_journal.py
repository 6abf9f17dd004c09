"""Specifics of the journal on NATS JetStream: frames, sequence numbers,
ownership, and NATS outages."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("nats", reason="nats-py is not installed (the extra jetstream)")

from penstock.server.core.errors import DomainError
from penstock.server.journal import appending
from penstock.server.journal.jetstream import journal as jetstream_journal
from penstock.server.journal.jetstream import log as jetstream_log
from penstock.server.journal.jetstream import stream as jetstream_stream
from penstock.server.journal.jetstream.answers import StreamRefused
from penstock.server.journal.jetstream.frames import (
    Entry,
    FrameCorrupt,
    Kind,
    Packing,
    StoredOutside,
    Subjects,
    read_message,
)
from penstock.server.journal.jetstream.journal import JetStreamJournal
from penstock.server.journal.jetstream.stream import open_stream
from penstock.server.journal.protocol import JournalInUse, JournalUnreadable
from penstock.wire.reasons import Reason
from tests.support.journal_stores import MEBIBYTE, JetStreamStore, names_in, read_name, record
from tests.support.nats_server import NatsServer, nats_server

PACKING = Packing(Subjects("TEST"), message_bytes=1_000, inline_bytes=300)


@pytest.fixture(scope="module")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Generator[NatsServer]:
    """One server for all tests in this file."""
    with nats_server(tmp_path_factory.mktemp("nats")) as server:
        yield server


@pytest.fixture
def store(nats: NatsServer, monkeypatch: pytest.MonkeyPatch) -> JetStreamStore:
    """An unused stream. Takeover does not wait in these tests."""
    monkeypatch.setattr(jetstream_log, "ABSENT_SECONDS", 0.0)
    return JetStreamStore(nats)


# Frames


@given(st.lists(st.binary(max_size=2_500), max_size=12), st.integers(1, 1 << 40))
def test_messages_say_what_was_packed(records: list[bytes], first: int) -> None:
    entries = [Entry(Kind.RECORD, (data[:5], data[5:])) for data in records]
    messages, places = PACKING.pack(first, entries)
    assert [message.sequence for message in messages] == list(range(first, first + len(messages)))
    assert all(len(message.body) <= 1_000 for message in messages)
    bodies = {message.sequence: message.body for message in messages}
    found: list[bytes] = []
    stored: list[Any] = []
    for message in messages:
        if message.subject != PACKING.subjects.log:
            continue
        for frame in read_message(message.sequence, message.body):
            stored.append(frame.stored)
            if isinstance(frame.stored, StoredOutside):
                reference = frame.stored.reference
                # Content stored outside precedes the message that refers to it.
                assert reference.first + reference.count <= message.sequence
                chunks = [bodies[reference.first + n] for n in range(reference.count)]
                found.append(reference.join(chunks))
            else:
                found.append(bytes(frame.content))
    assert found == records
    assert [(s.segment, s.offset, s.length) for s in stored] == [
        (s.segment, s.offset, s.length) for s in places
    ]


@given(st.data())
def test_no_flipped_bit_is_read(data: st.DataObject) -> None:
    (message,), _ = PACKING.pack(7, [Entry(Kind.RECORD, (b"first" * 9,)), Entry(Kind.END, (b"x",))])
    body = bytearray(message.body)
    place = data.draw(st.integers(0, len(body) - 1))
    body[place] ^= 1 << data.draw(st.integers(0, 7))
    try:
        found = [bytes(frame.content) for frame in read_message(7, bytes(body))]
    except FrameCorrupt:
        return
    assert found == [b"first" * 9, b"x"]  # The flipped bit was in the padding between two frames.


def test_a_message_in_another_place_is_corrupt() -> None:
    (message,), _ = PACKING.pack(7, [Entry(Kind.RECORD, (b"a",))])
    with pytest.raises(FrameCorrupt, match="belongs to message 7"):
        list(read_message(8, message.body))


def test_a_record_outside_that_is_not_what_was_written_is_corrupt() -> None:
    messages, (stored,) = PACKING.pack(1, [Entry(Kind.RECORD, (b"x" * 2_000,))])
    assert isinstance(stored, StoredOutside)
    chunks = [message.body for message in messages[:-1]]
    assert stored.reference.join(chunks) == b"x" * 2_000
    for wrong in (chunks[:-1], [*chunks, b"x"], [b"y" + chunks[0][1:], *chunks[1:]]):
        with pytest.raises(FrameCorrupt):
            stored.reference.join(wrong)


# Sequence numbers


async def test_what_is_sent_again_is_stored_once(store: JetStreamStore) -> None:
    async with store.opened() as (journal, _):
        connection = journal._log.connection
        await journal.append([record("before")])
        last = (await connection.state()).last
        messages, _ = journal._log._packing.pack(
            last + 1, [Entry(Kind.RECORD, (record("twice").SerializeToString(),))]
        )
        for _ in range(3):
            await connection.store(messages)
        assert (await connection.state()).last == last + 1
        journal._log._next += 1
        await journal.append([record("after")])
    assert await store.names() == ["before", "twice", "after"]


async def test_a_place_that_was_taken_before_it_was_forgotten_counts_as_stored(
    store: JetStreamStore,
) -> None:
    # This happens if NATS was away for longer than it remembers message ids.
    async with store.opened() as (journal, _):
        await journal.append([record("a")])
        connection = journal._log.connection
        last = (await connection.state()).last
        await connection._check_taken(last)


async def test_what_nats_has_lost_is_noticed(store: JetStreamStore) -> None:
    async with store.opened() as (journal, _):
        await journal.append([record("a")])
        # As if a NATS without synced writes had acknowledged these messages and lost them.
        journal._log._next += 5
        with pytest.raises(DomainError, match="NATS has lost messages that it had acknowledged"):
            await journal.append([record("b")])
        assert "lost" in await journal.failed


@pytest.mark.parametrize("durability", ["fsync", "process"])
@pytest.mark.parametrize("which", [[-1], [-2], [-2, -1]])
async def test_only_one_message_at_the_end_can_have_been_lost_with_the_power(
    store: JetStreamStore, durability: str, which: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    journal = await store.make()
    assert await names_in(journal) == []
    await journal.start(list)
    for number in range(4):
        await journal.append([record(f"{number}")])
    last = (await journal._log.connection.state()).last
    for place in which:
        await journal._log.connection.ask("STREAM.MSG.DELETE", {"seq": last + 1 + place})
    await store.crash(journal)
    if durability != store.nats.durability == "process":
        pytest.skip("this NATS cannot sync each write")
    again = await store.make(durability=durability)
    try:
        if durability == "fsync" and which == [-1]:
            # Read twice, because the gap remains until the next compaction.
            assert await names_in(again) == ["0", "1", "2"]
            assert await names_in(again) == ["0", "1", "2"]
            assert f"message {last} was never whole" in caplog.text
        else:
            with pytest.raises(
                JournalUnreadable, match=f"message {last + 1 + which[0]} is missing"
            ):
                await names_in(again)
    finally:
        await store.crash(again)


async def test_many_at_a_time_are_few_messages(store: JetStreamStore) -> None:
    async with store.opened() as (journal, _):
        before = (await journal._log.connection.state()).last
        await asyncio.gather(*(journal.append([record(f"{n}")]) for n in range(500)))
        assert (await journal._log.connection.state()).last - before <= 4


# Ownership


async def test_a_server_that_was_taken_over_from_writes_nothing_more(
    store: JetStreamStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jetstream_log, "OWNER_SECONDS", 0.2)
    first = await store.make()
    assert await names_in(first) == []
    await first.start(list)
    await first.append([record("first")])
    with pytest.raises(JournalInUse, match="process"):
        await store.make()

    async def silent(_: Any) -> None:
        """The machine is down and answers nothing."""

    for subscription in first._log.connection._client._subs.values():
        if subscription.subject == first._log.connection.subjects.owner:
            subscription._cb = silent
    async with store.opened() as (second, names):
        assert names == ["first"]
        await second.append([record("second")])
        with pytest.raises(DomainError, match="another server writes"):
            await first.append([record("stale")])
        assert first.failed.done()
        await second.append([record("third")])
    await first.close()
    assert await store.names() == ["first", "second", "third"]


async def test_a_server_that_comes_back_to_nats_later_than_another_one_asks_is_not_taken_over_from(
    store: JetStreamStore, nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jetstream_log, "ABSENT_SECONDS", 20.0)
    async with store.opened() as (first, _):
        await first.append([record("a")])
        client = first._log.connection._client
        connect, back = client._connect_to_server, asyncio.Event()

        async def later(server: Any) -> None:
            await back.wait()
            await connect(server)

        client._connect_to_server = later
        nats.kill()
        await asyncio.to_thread(nats.start)
        asking = asyncio.create_task(store.make())
        # NATS is up again, but the writer has not resubscribed yet.
        await asyncio.sleep(1.0)
        assert not asking.done()
        back.set()
        with pytest.raises(JournalInUse, match="process"):
            await asking
        await first.append([record("b")])
    monkeypatch.setattr(jetstream_log, "ABSENT_SECONDS", 0.0)
    assert await store.names() == ["a", "b"]


async def test_nats_that_goes_away_as_it_is_asked_who_writes_is_no_answer(
    store: JetStreamStore, nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jetstream_log, "OWNER_SECONDS", 3.0)
    monkeypatch.setattr(jetstream_log, "ABSENT_SECONDS", 20.0)
    async with store.opened() as (first, _):
        await first.append([record("a")])
        asked = asyncio.Event()
        (listening,) = (
            each
            for each in first._log.connection._client._subs.values()
            if each.subject == first._log.connection.subjects.owner
        )
        answer = listening._cb

        async def lost(_: Any) -> None:
            """The writer's answer never reaches NATS."""
            asked.set()

        listening._cb = lost
        asking = asyncio.create_task(store.make())
        await asked.wait()
        listening._cb = answer
        nats.kill()
        # Longer than the new server waits for an answer.
        await asyncio.sleep(3.5)
        assert not asking.done()
        await asyncio.to_thread(nats.start)
        with pytest.raises(JournalInUse, match="process"):
            await asking
        await first.append([record("b")])


async def test_only_a_stream_that_was_written_to_is_waited_for(
    store: JetStreamStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jetstream_log, "ABSENT_SECONDS", 60.0)
    async with asyncio.timeout(20), store.opened() as (journal, _):
        await journal.append([record("a")])
    monkeypatch.setattr(jetstream_log, "ABSENT_SECONDS", 1.0)
    clock = asyncio.get_running_loop().time
    began = clock()
    assert await store.names() == ["a"]
    assert clock() >= began + 1.0


@pytest.mark.parametrize("late", [1, 3])
async def test_what_a_killed_server_had_sent_may_be_stored_while_the_next_one_begins(
    store: JetStreamStore, monkeypatch: pytest.MonkeyPatch, late: int
) -> None:
    killed = await store.make()
    assert await names_in(killed) == []
    await killed.start(list)
    opened = 0

    async def open_before_it_is_stored(connection: Any, max_bytes: int) -> Any:
        nonlocal opened
        state = await open_stream(connection, max_bytes)
        opened += 1
        if opened <= late:
            await killed.append([record(f"late{opened}")])
        if opened == late:
            await store.crash(killed)
        return state

    # The killed server no longer answers.
    await killed._log.connection.stop_answering()
    monkeypatch.setattr(jetstream_log, "open_stream", open_before_it_is_stored)
    if late < jetstream_log.TRIES:
        assert await store.names() == ["late1"]
        assert opened == late + 1
    else:
        # The server is apparently alive: it writes after every check.
        with pytest.raises(JournalInUse, match="another server writes"):
            await store.make()
        assert opened == jetstream_log.TRIES
        monkeypatch.undo()
        monkeypatch.setattr(jetstream_log, "ABSENT_SECONDS", 0.0)
        assert await store.names() == ["late1", "late2", "late3"]


async def test_of_two_that_begin_at_once_one_writes(store: JetStreamStore) -> None:
    async with store.opened() as (journal, _):
        await journal.append([record("a")])
    made = await asyncio.gather(*(store.make() for _ in range(4)), return_exceptions=True)
    ours = [each for each in made if not isinstance(each, BaseException)]
    assert len(ours) == 1, made
    assert all(isinstance(each, JournalInUse) for each in made if each not in ours)
    assert await names_in(ours[0]) == ["a"]
    await ours[0].start(list)
    await ours[0].append([record("b")])
    await ours[0].close()
    assert await store.names() == ["a", "b"]


# NATS outages


async def test_appends_and_reads_wait_for_nats(store: JetStreamStore, nats: NatsServer) -> None:
    async with store.opened() as (journal, _):
        (stored,) = await journal.append([record("before", 200_000)], hold_last=True)
        nats.kill()
        waiting = [journal.append([record(f"{n}", 100_000 * (n % 2))]) for n in range(20)]
        reading = asyncio.create_task(journal.read(stored))
        await asyncio.sleep(0.3)
        assert not reading.done() and not any(done.done() for done in waiting)
        await asyncio.to_thread(nats.start)
        await waiting[-1]
        assert read_name(await reading) == "before"
    assert await store.names() == ["before", *(f"{n}" for n in range(20))]


async def test_nats_killed_again_and_again_loses_and_doubles_nothing(
    store: JetStreamStore, nats: NatsServer
) -> None:
    rng = random.Random(3)
    async with store.opened(max_bytes=512 * MEBIBYTE) as (journal, _):
        waiting: list[asyncio.Future[Any]] = []
        for _ in range(8):
            for _ in range(25):
                size = rng.choice([0, 1_000, 90_000])
                waiting.append(journal.append([record(f"{len(waiting)}", size)], hold_last=True))
                await asyncio.sleep(rng.choice([0, 0.002]))
            nats.kill()
            await asyncio.to_thread(nats.start)
        await asyncio.gather(*waiting)
    assert await store.names() == [f"{n}" for n in range(200)]


async def test_nats_that_stays_away_fails_the_journal(tmp_path: Path) -> None:
    with nats_server(tmp_path / "own") as own:
        store = JetStreamStore(own)
        journal = await store.make(patience_seconds=0.5)
        assert await names_in(journal) == []
        await journal.start(list)
        await journal.append([record("answered")])
        own.kill()
        with pytest.raises(DomainError, match="NATS has not answered"):
            await journal.append([record("never")])
        assert "NATS has not answered" in await journal.failed
        async with asyncio.timeout(20):
            await journal.close()
        own.start()
        assert (await store.names())[0] == "answered"


async def test_a_start_waits_for_nats_and_not_for_ever(tmp_path: Path) -> None:
    with nats_server(tmp_path / "own") as own:
        own.kill()
        store = JetStreamStore(own)
        with pytest.raises(JournalUnreadable, match="cannot be reached"):
            await store.make(patience_seconds=0.5)
        starting = asyncio.create_task(store.make())
        await asyncio.sleep(0.3)
        await asyncio.to_thread(own.start)
        await (await starting).close()


# The stream


async def test_a_stream_of_something_else_is_left_alone(
    store: JetStreamStore, nats: NatsServer
) -> None:
    async with store.opened() as (journal, _):
        other = {
            "name": f"{store.stream}_OTHER",
            "subjects": [f"other.{store.stream}"],
            "storage": "file",
            "max_bytes": 1 << 20,
        }
        subject = f"$JS.API.STREAM.CREATE.{other['name']}"
        await journal._log.connection._request(subject, json.dumps(other).encode())
    taken = JetStreamStore(nats)
    taken.stream = f"{store.stream}_OTHER"
    with pytest.raises(JournalUnreadable, match="is not a journal's"):
        await taken.make()


async def test_a_server_without_that_much_room_says_so(store: JetStreamStore) -> None:
    with pytest.raises(JournalUnreadable, match=r"no \d+ bytes to set aside .*journal\.max_bytes"):
        await store.make(max_bytes=1 << 60)


async def test_a_stream_may_have_more_room_at_a_later_start(store: JetStreamStore) -> None:
    async with store.opened(max_bytes=16 * MEBIBYTE) as (journal, _):
        await journal.append([record("a")])
        with pytest.raises(DomainError):
            journal.check_room(8 * MEBIBYTE)
    async with store.opened(max_bytes=64 * MEBIBYTE) as (journal, names):
        assert names == ["a"]
        journal.check_room(8 * MEBIBYTE)


async def test_a_stream_is_not_made_smaller_than_what_it_holds(store: JetStreamStore) -> None:
    async with store.opened(max_bytes=64 * MEBIBYTE) as (journal, _):
        for number in range(200):
            # Hold the record, so that compaction keeps it.
            await journal.append([record(f"{number}-" + "x" * 200_000)], hold_last=True)
    journal = await store.make(max_bytes=4 * MEBIBYTE)
    found = [stored async for _, stored in journal.replay()]
    assert len(found) == 200
    for stored in found:
        journal.hold(stored)
    with pytest.raises(DomainError, match="keeps"):
        journal.check_room(1)
    await journal.close()
    # No record is held any more.
    async with store.opened(max_bytes=4 * MEBIBYTE) as (journal, names):
        assert len(names) == 200
        await journal.append([record("a")])
        async with asyncio.timeout(20):
            while not journal.compactions:
                await asyncio.sleep(0.01)
        journal.check_room(1)
        state = await journal._log.connection.state()
        assert state.config["max_bytes"] == 4 * MEBIBYTE + jetstream_stream.SLACK_BYTES


async def test_a_compaction_has_room_however_often_it_was_killed_before(
    store: JetStreamStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jetstream_stream, "SLACK_BYTES", 2 * MEBIBYTE)
    most, state = 16 * MEBIBYTE, [record(f"{n}-" + "x" * 50_000) for n in range(80)]
    full = most + jetstream_stream.SLACK_BYTES
    queue, copied = JetStreamJournal._enqueue, asyncio.Event()

    def killed_at_the_end(journal: Any, entries: Any, **options: Any) -> Any:
        if entries and entries[0].kind is Kind.END:
            copied.set()
            return asyncio.Future()
        return queue(journal, entries, **options)

    with monkeypatch.context() as patched:
        patched.setattr(JetStreamJournal, "_enqueue", killed_at_the_end)
        for kill in range(8):
            copied.clear()
            journal = await store.make(max_bytes=most)
            names = await names_in(journal)
            await journal.start(partial(list, state))
            if not kill:
                await journal.append(state)
            else:
                assert len(names) == len(state)
            journal._pace.pressed = True
            await journal.append([record("more")])
            state = [*state, record("more")]
            async with asyncio.timeout(20):
                await copied.wait()
            left = (await journal._log.connection.state()).byte_count
            await store.crash(journal)
    assert left > full
    async with store.opened(lambda: state, max_bytes=most) as (journal, names):
        assert len(names) == len(state)
        state = [*state, record("last")]
        await journal.append(state[-1:])
        async with asyncio.timeout(20):
            while not journal.compactions:
                await asyncio.sleep(0.01)
        found = await journal._log.connection.state()
        assert found.byte_count < 2 * most // 3
        assert found.config["max_bytes"] == full
    assert len(await store.names(max_bytes=most)) == len(state)


async def test_a_stream_whose_beginning_is_gone_is_not_read(store: JetStreamStore) -> None:
    async with store.opened() as (journal, _):
        for name in "abc":
            await journal.append([record(name)])
        await journal._log.connection.ask("STREAM.MSG.DELETE", {"seq": 1})
    with pytest.raises(JournalUnreadable, match="its beginning is lost"):
        await store.make()


async def test_what_a_killed_server_did_not_remove_counts_for_nothing_and_goes(
    store: JetStreamStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def killed(log: Any, carried: set[int]) -> None:
        """Die once the snapshot is complete."""

    monkeypatch.setattr(jetstream_log.StreamLog, "remove", killed)
    async with store.opened(lambda: [record("state")]) as (journal, _):
        await journal.append([record("first", 100_000)])
        async with asyncio.timeout(20):
            while not journal.compactions:
                await journal.append([record("filler", 300_000)])
        assert (await journal._log.connection.state()).first == 1
        assert journal._log._begin > 1
    async with store.opened() as (journal, names):
        assert names[0] == "state" and "first" not in names
        state = await journal._log.connection.state()
        assert state.first >= journal._log._begin


async def test_a_compaction_that_failed_is_tried_again(
    store: JetStreamStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(appending, "SHORTEST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(appending, "TIMES_AS_LONG", 1)
    remove, failures = jetstream_log.StreamLog.remove, 0

    async def refused(log: Any, carried: set[int]) -> None:
        nonlocal failures
        if failures < 3:
            failures += 1
            raise StreamRefused("maximum bytes exceeded", 10077)
        await remove(log, carried)

    monkeypatch.setattr(jetstream_log.StreamLog, "remove", refused)
    async with store.opened(lambda: [record("state")]) as (journal, _):
        await journal.append([record("first", 100_000)])
        async with asyncio.timeout(20):
            while not journal.compactions:
                await journal.append([record("filler", 300_000)])
        assert failures == 3
    async with store.opened() as (_, names):
        assert names[0] == "state" and "first" not in names
    assert caplog.text.count("cannot be compacted") == 1


async def test_what_is_refused_has_it_compacted(
    store: JetStreamStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When records are refused, the journal compacts again, because earlier
    live records no longer count."""
    monkeypatch.setattr(appending, "SHORTEST_WAIT_SECONDS", 0.01)
    state = [record(f"open{n}", 100_000) for n in range(8)]
    asked: list[int] = []
    async with store.opened(lambda: state, asked.append) as (journal, _):
        async with asyncio.timeout(20):
            while not journal.compactions:
                await journal.append([record("nobody's", 100_000)])
        # Fits once half of the state is gone.
        room = journal._most_kept - jetstream_journal.HEADROOM_BYTES - 400_000
        state.clear()
        await journal.append([record("closed")])
        async with asyncio.timeout(20):
            while True:
                try:
                    journal.check_room(room)
                    break
                except DomainError as error:
                    assert error.reason is Reason.DISK_FULL
                    await asyncio.sleep(0.01)
        assert asked and asked[0] > room
