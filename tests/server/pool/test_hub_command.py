"""`penstock serve --engines`: a hub as a process, and how it finds its engine servers."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.__main__ import main
from penstock.client import connect
from penstock.server.config import settings as config
from penstock.server.config.settings import ConfigError
from penstock.server.pool.discovery import LOOKS_WITHOUT, Discovery
from penstock.up.processes import Command, FirstMatch, Process
from penstock.up.supervisor import SERVING
from tests.faults.test_f21_killed_engines import FAKE, engine_processes
from tests.support.processes import ENVIRONMENT
from tests.support.tiny_model import make_tiny_model

WAITING = "penstock hub waiting for an engine of"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), layers=1)


def start(folder: Path, *options: str, on_line: Any = None) -> Process:
    command = (sys.executable, "-m", "penstock.cli", "serve", *options)
    return Process.start(Command("hub", command, folder / "hub.log", ENVIRONMENT), on_line)


async def test_a_hub_serves_what_its_engines_sample_and_stops_when_told(
    model: Path, tmp_path: Path
) -> None:
    listed = tmp_path / "engines.txt"
    listed.write_text("# none yet\n")
    serves = FirstMatch(SERVING)
    hub = start(
        tmp_path,
        *("--engines", f"file:{listed}", "--model", str(model), "--listen", "127.0.0.1:0"),
        *("--http-listen", "", "--set", "pool.discover_seconds=0.1"),
        on_line=serves,
    )
    try:
        async with engine_processes(tmp_path, model, FAKE, 2) as servers:
            listed.write_text("".join(f"{server.address}\n" for server in servers))
            address = await serves.wait(hub)
            assert WAITING in (tmp_path / "hub.log").read_text()
            async with connect(address) as client:
                info = await client.server_info()
                async with asyncio.timeout(30):
                    while any(replica.problem for replica in info.replicas):
                        await asyncio.sleep(0.05)
                        info = await client.server_info()
                assert [replica.address for replica in info.replicas] == [
                    server.address for server in servers
                ]
                trajectory = client.trajectory("a")
                turn = await trajectory.turn([1, 2, 3], max_tokens=8, ignore_eos=True)
                assert len(turn.token_ids) == 8
                # An engine that is no longer listed takes no turns.
                listed.write_text(f"{servers[1].address}\n")
                async with asyncio.timeout(30):
                    while len((await client.server_info()).replicas) > 1:
                        await asyncio.sleep(0.05)
            hub.signal(signal.SIGTERM)
            async with asyncio.timeout(30):
                assert await hub.wait() == 0
    finally:
        hub.kill()
        await hub.wait()


async def test_a_hub_that_waits_for_its_first_engine_can_be_stopped(tmp_path: Path) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
        waits = asyncio.Event()

        def on_line(line: str) -> None:
            if line.startswith(WAITING):
                waits.set()

        hub = start(
            tmp_path, "--engines", f"127.0.0.1:{port}", "--listen", "127.0.0.1:0", on_line=on_line
        )
        try:
            async with asyncio.timeout(60):
                await waits.wait()
                hub.signal(signal.SIGTERM)
                assert await hub.wait() == 0
        finally:
            hub.kill()
            await hub.wait()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--engines", "nowhere"], "reads HOST:PORT, got 'nowhere'\n"),
        (["--engines", "dns:nowhere"], "HOST:PORT"),
        (["--engines", "127.0.0.1:1", "--max-model-len", "64"], "no engine to configure"),
        (["--engines", "127.0.0.1:1", "--set", "pool.switch=sometimes"], "sometimes"),
        (["--engines", "127.0.0.1:1", "--set", "pool.routing=random"], "random"),
        (["--engines", "127.0.0.1:1", "--set", "pool.most_turns=3"], "first_turns is above"),
        ([], "--engines"),
    ],
)
def test_what_makes_no_hub_is_said_in_a_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", *arguments])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_dry_run_of_a_hub_prints_its_settings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--engines", "a:1,b:2", "--model", "M", "--dry-run"])
    assert not ended.value.code
    resolved = tomllib.loads(capsys.readouterr().out)
    assert resolved["pool"]["engines"] == ["a:1", "b:2"]
    assert resolved["engine"] == {"model": "M"}


def test_engines_in_a_file_are_a_list(tmp_path: Path) -> None:
    path = tmp_path / "hub.toml"
    path.write_text('[pool]\nengines = ["a:1", "dns:b:2", "file:/c"]\n')
    assert config.load(path, []).pool.engines == ("a:1", "dns:b:2", "file:/c")
    with pytest.raises(ConfigError, match=r"pool\.engines"):
        config.load(None, ["pool.engines=a"])


async def test_names_and_files_are_looked_up_again_and_keep_what_they_had(tmp_path: Path) -> None:
    path = tmp_path / "engines"
    path.write_text("a:1\nb:2  # the other\n\n")
    found = Discovery(["c:3", f"file:{path}", "dns:localhost:4", "a:1"])
    assert not found.is_fixed
    first = await found.look()
    assert first[:3] == ["c:3", "a:1", "b:2"]
    assert set(first[3:]) <= {"127.0.0.1:4", "[::1]:4"} and first[3:]
    path.write_text("nonsense\n")
    assert await found.look() == first
    path.unlink()
    assert await found.look() == first
    # A program that rewrites the file in place leaves it empty for a moment.
    path.write_text("")
    assert await found.look() == first
    path.write_text("d:5\n")
    assert (await found.look())[:2] == ["c:3", "d:5"]
    assert Discovery(["a:1"]).is_fixed


async def test_an_address_of_a_name_goes_once_several_answers_in_a_row_are_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers: dict[str, list[str]] = {"pods": ["10.0.0.1", "10.0.0.2"]}

    async def getaddrinfo(host: str, port: int, **_: object) -> list[tuple[Any, ...]]:
        return [(2, 1, 6, "", (address, port)) for address in answers[host]]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    found = Discovery(["dns:pods:1"])
    both = ["10.0.0.1:1", "10.0.0.2:1"]
    assert await found.look() == both
    for _ in range(2):
        answers["pods"] = ["10.0.0.1"]
        for _ in range(LOOKS_WITHOUT - 1):
            assert await found.look() == both
        # The address is back in time, which resets the count.
        answers["pods"] = ["10.0.0.1", "10.0.0.2"]
        assert await found.look() == both
    answers["pods"] = ["10.0.0.2", "10.0.0.3"]
    for _ in range(LOOKS_WITHOUT - 1):
        assert await found.look() == ["10.0.0.2:1", "10.0.0.3:1", "10.0.0.1:1"]
    assert await found.look() == ["10.0.0.2:1", "10.0.0.3:1"]
