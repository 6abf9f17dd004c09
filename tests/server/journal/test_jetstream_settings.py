"""Configuration of a journal on NATS JetStream; invalid settings are refused before any write."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nats", reason="nats-py is not installed (the extra jetstream)")

from penstock.server.config import settings as config
from penstock.server.config.journal import JournalSection
from penstock.server.core.errors import DomainError
from penstock.server.journal.memory import MemoryJournal
from penstock.server.journal.protocol import JournalUnreadable
from penstock.server.journals import open_journal
from tests.support.journal_stores import MEBIBYTE, names_in, record
from tests.support.nats_server import NatsServer, nats_server, version_of


@pytest.fixture(scope="module")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Generator[NatsServer]:
    """One server for all tests in this file."""
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
                waiting = asyncio.ensure_future(journal.append([record(f"while away {sync}")]))
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


# Credentials and TLS


def signed(issuer: Any, subject: str, kind: str, **fields: object) -> str:
    """A JWT of the kind that `nsc` creates. See
    https://docs.nats.io/running-a-nats-service/nats_admin/security/jwt."""

    def encoded(data: bytes) -> str:
        return base64.urlsafe_b64encode(data).rstrip(b"=").decode()

    claims = {
        "jti": "TEST",
        "iat": int(time.time()),
        "iss": issuer.public_key.decode(),
        "sub": subject,
        "name": kind,
        "nats": {"type": kind, "version": 2, **fields},
    }
    head = {"typ": "JWT", "alg": "ed25519-nkey"}
    body = ".".join(encoded(json.dumps(part).encode()) for part in (head, claims))
    return f"{body}.{encoded(issuer.sign(body.encode()))}"


def key(prefix: int) -> Any:
    nkeys = pytest.importorskip("nkeys")
    return nkeys.from_seed(nkeys.encode_seed(os.urandom(32), prefix))


async def test_credentials_let_a_server_in(tmp_path: Path) -> None:
    nkeys = pytest.importorskip("nkeys")
    operator, account = key(nkeys.PREFIX_BYTE_OPERATOR), key(nkeys.PREFIX_BYTE_ACCOUNT)
    system, user = key(nkeys.PREFIX_BYTE_ACCOUNT), key(nkeys.PREFIX_BYTE_USER)
    names = {one: one.public_key.decode() for one in (operator, account, system, user)}
    limits = {"mem_storage": -1, "disk_storage": -1, "streams": -1, "consumer": -1}
    limits |= {"subs": -1, "data": -1, "payload": -1, "conn": -1, "leaf": -1}
    limits |= {"imports": -1, "exports": -1, "wildcards": True}
    known = signed(operator, names[account], "account", limits=limits)
    others = signed(operator, names[system], "account", limits={"conn": -1, "subs": -1, "data": -1})
    extra = (
        f"operator: {signed(operator, names[operator], 'operator')}\n"
        f"system_account: {names[system]}\nresolver: MEMORY\n"
        f"resolver_preload: {{ {names[account]}: {known}, {names[system]}: {others} }}\n"
    )
    token = signed(account, names[user], "user", subs=-1, data=-1, payload=-1)
    path = tmp_path / "hub.creds"
    path.write_text(
        f"-----BEGIN NATS USER JWT-----\n{token}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user.seed.decode()}\n------END USER NKEY SEED------\n"
    )
    with nats_server(tmp_path / "nats", extra=extra) as nats:
        most: dict[str, Any] = {"max_bytes": 64 * MEBIBYTE, "patience_seconds": 2.0}
        with pytest.raises(JournalUnreadable, match=r"cannot be reached: .*[Aa]uthorization"):
            await open_journal(nats.section("LOCKED", **most))
        journal = await open_journal(nats.section("LOCKED", credentials=path, **most))
        assert await names_in(journal) == []
        await journal.start(list)
        await journal.append([record("let in")])
        await journal.close()


@pytest.mark.parametrize("name", ["credentials", "ca", "certificate", "key"])
async def test_a_file_that_is_not_there_is_named(name: str, tmp_path: Path) -> None:
    there = tmp_path / "there.pem"
    there.touch()
    files = {"certificate": there, "key": there, name: tmp_path / "gone"}
    section = JournalSection.model_validate(
        {"url": "nats://127.0.0.1:1", "durability": "process", "ca": there, **files}
    )
    with pytest.raises(JournalUnreadable, match=rf"journal\.{name}: No such file .*gone"):
        await open_journal(section)
    section = section.model_copy(update={name: there})
    with pytest.raises(JournalUnreadable, match=r"journal\.ca, certificate, key: "):
        await open_journal(section)


async def test_without_the_library_of_keys_the_reason_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "nkeys", None)
    path = tmp_path / "hub.creds"
    path.touch()
    section = JournalSection.model_validate(
        {"url": "nats://127.0.0.1:1", "durability": "process", "credentials": path}
    )
    with pytest.raises(
        JournalUnreadable, match=r"needs nkeys: pip install 'penstock-rl\[jetstream\]'"
    ):
        await open_journal(section)


# Configuration


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"url": "nats://a", "folder": "b", "durability": "process"}, "mutually exclusive"),
        ({"url": "nats://a"}, "needs monitor"),
        ({"url": "nats://a,nats://b", "monitor": "http://a:8222"}, "needs a single server in url"),
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
    for name in [
        name for name in sys.modules if name.startswith("penstock.server.journal.jetstream")
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "nats", None)
    section = JournalSection.model_validate({"url": "nats://a", "durability": "process"})
    with pytest.raises(JournalUnreadable, match=r"pip install 'penstock-rl\[jetstream\]'"):
        await open_journal(section)
