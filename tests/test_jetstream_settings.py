"""How a journal on NATS JetStream is configured, and what is refused before anything is written."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

pytest.importorskip("nats", reason="nats-py is not installed (the extra jetstream)")

from penstock.server import config
from penstock.server.config import JournalSection
from penstock.server.errors import DomainError
from penstock.server.journal import JournalUnreadable, MemoryJournal
from penstock.server.journal_opening import open_journal
from tests.journal_stores import MEBIBYTE, names_in, record
from tests.nats_server import NatsServer, nats_server, version_of


@pytest.fixture(scope="module")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Generator[NatsServer]:
    """One for all tests of this file."""
    with nats_server(tmp_path_factory.mktemp("nats")) as server:
        yield server


# fsync


async def test_fsync_is_promised_only_where_nats_says_so(nats: NatsServer, tmp_path: Path) -> None:
    with nats_server(tmp_path / "unsynced", sync=False) as unsynced:
        section = unsynced.section(
            "SYNCED", durability="fsync", monitor=unsynced.monitor, max_bytes=64 * MEBIBYTE
        )
        with pytest.raises(JournalUnreadable, match="does not sync every write"):
            await open_journal(section)
        with pytest.raises(JournalUnreadable, match="monitor does not answer"):
            await open_journal(section.model_copy(update={"monitor": "http://127.0.0.1:1"}))
        with pytest.raises(JournalUnreadable, match="monitor is of the NATS server"):
            await open_journal(section.model_copy(update={"monitor": nats.monitor}))
    if nats.durability != "fsync":
        pytest.skip(f"a NATS that can sync: {nats.program} is of {version_of(nats.program)}")
    journal = await open_journal(nats.section("SYNCED", max_bytes=64 * MEBIBYTE))
    await journal.close()


async def test_nats_that_comes_back_without_syncing_is_given_nothing_more(tmp_path: Path) -> None:
    with nats_server(tmp_path) as nats:
        if nats.durability != "fsync":
            pytest.skip(f"a NATS that can sync: {nats.program} is of {version_of(nats.program)}")
        journal = await open_journal(nats.section("BACK", max_bytes=64 * MEBIBYTE))
        try:
            assert await names_in(journal) == []
            await journal.start(list)
            await journal.append([record("before")])
            for sync in (True, False):
                nats.stop()
                nats.sync = sync
                waiting = asyncio.create_task(journal.append([record(f"while away {sync}")]))
                nats.start()
                if sync:
                    await waiting
            with pytest.raises(DomainError, match="does not sync every write"):
                await waiting
            assert "does not sync every write" in await journal.failed
            with pytest.raises(DomainError, match="cannot be written"):
                await journal.append([record("after")])
        finally:
            await journal.close()
        nats.stop()
        nats.sync = True
        nats.start()
        again = await open_journal(nats.section("BACK", max_bytes=64 * MEBIBYTE))
        assert await names_in(again) == ["before", "while away True"]
        await again.close()


# Configuration


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"url": "nats://a", "folder": "b", "durability": "process"}, "exclude each other"),
        ({"url": "nats://a"}, "needs monitor"),
        ({"url": "nats://a,nats://b", "monitor": "http://a:8222"}, "needs one server in url"),
        ({"url": "a:4222", "durability": "process"}, "must begin with nats://"),
        (
            {"url": "nats://a", "durability": "process", "monitor": "nats://a"},
            "must begin with http",
        ),
        ({"url": "nats://a", "durability": "process", "stream": "a.b"}, "letters, digits"),
        ({"url": "nats://a:b@c", "durability": "process"}, "file of credentials"),
        ({"url": "nats://a", "durability": "process", "key": "k"}, "key needs certificate"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(
    settings: dict[str, str], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        JournalSection.model_validate(settings)


def test_a_password_is_in_no_message(tmp_path: Path) -> None:
    for setting in ("url=nats://me:secret@a", "folder=b"):
        with pytest.raises(config.ConfigError) as error:
            config.load(None, ["journal.url=nats://me:secret@a", f"journal.{setting}"])
        assert "secret" not in str(error.value)


async def test_without_durability_nothing_is_connected_to() -> None:
    section = JournalSection.model_validate({"url": "nats://127.0.0.1:1", "durability": "none"})
    assert isinstance(await open_journal(section), MemoryJournal)


async def test_without_the_library_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("penstock.server.jetstream")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "nats", None)
    section = JournalSection.model_validate({"url": "nats://a", "durability": "process"})
    with pytest.raises(JournalUnreadable, match=r"pip install 'penstock\[jetstream\]'"):
        await open_journal(section)
