"""The search example's launcher: retrieval servers next to `penstock up`, which are restarted and
end with it.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import tomllib
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

pytest.importorskip("bm25s")

import launch
from research import figures, indexes
from research.settings import VARIABLE, Settings, SettingsInvalid, load

from penstock.up.processes import ProcessFailed

# A stand-in for `penstock up`. It records the settings it received, and ends when the test lets it.
STAND_IN = f"""
import os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
(folder / "told").write_text(os.environ["{VARIABLE}"])
while not (folder / "may-end").exists():
    time.sleep(0.05)
sys.exit(3)
"""


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    texts = [f"chunk {number} nile" for number in range(5)]
    rows = [{"chunk_id": n, "passage": n, "title": "T", "text": t} for n, t in enumerate(texts)]
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "chunks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    indexes.build(folder, "bm25", texts)
    return folder


def servers() -> dict[int, psutil.Process]:
    """The retrieval servers that this process started, by port."""
    return {
        connection.laddr.port: child
        for child in psutil.Process().children(recursive=True)
        for connection in child.net_connections("tcp4")
        if connection.status == psutil.CONN_LISTEN
    }


async def appears(path: Path) -> str:
    async with asyncio.timeout(90):
        while not path.exists() or not path.read_text():
            await asyncio.sleep(0.01)
    return path.read_text()


async def health(url: str) -> dict[str, Any]:
    async with httpx.AsyncClient() as http, asyncio.timeout(90):
        while True:
            try:
                return (await http.get(f"{url}/health", timeout=60)).json()
            except httpx.TransportError:
                await asyncio.sleep(0.02)


async def test_servers_run_beside_it_come_back_on_their_port_and_end_with_it(
    corpus: Path, tmp_path: Path
) -> None:
    settings = Settings.model_validate({"retrieval": {"shards": 2, "replicas": 1}})
    command = [sys.executable, "-c", STAND_IN, str(tmp_path)]
    running = asyncio.create_task(launch.run_all(settings, corpus, tmp_path, command))
    try:
        told = Path(await appears(tmp_path / "told"))
        shards = load(told).retrieval.servers
        assert [len(urls) for urls in shards] == [1, 1]
        found = [await health(urls[0]) for urls in shards]
        assert [(each["shard"], each["chunks"]) for each in found] == [("1/2", 2), ("2/2", 3)]
        port = int(shards[0][0].rpartition(":")[2])
        killed = servers()[port]
        killed.send_signal(signal.SIGKILL)
        killed.wait(20)
        assert (await health(shards[0][0]))["shard"] == "1/2"
        assert servers()[port].pid != killed.pid
    finally:
        (tmp_path / "may-end").touch()
        status = await running
    assert status == 3 and not servers()


async def test_servers_that_cannot_live_stop_everything(tmp_path: Path) -> None:
    settings = Settings.model_validate({"retrieval": {"replicas": 1}})
    command = [sys.executable, "-c", STAND_IN, str(tmp_path)]
    with pytest.raises(BaseExceptionGroup) as caught:
        await launch.run_all(settings, tmp_path, tmp_path, command)
    (failed,) = caught.value.exceptions
    assert isinstance(failed, ProcessFailed) and "bm25" in str(failed)
    assert not (tmp_path / "told").exists() and not servers()


def test_settings_that_nobody_reads_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "search.toml"
    path.write_text("[agent]\nmax_turn = 3\n")
    with pytest.raises(SettingsInvalid, match="max_turn"):
        load(path)
    path.write_text("[agent")
    with pytest.raises(SettingsInvalid, match=r"search\.toml"):
        load(path)
    with pytest.raises(SettingsInvalid, match="No such file"):
        load(tmp_path / "none.toml")
    assert tomllib.loads((launch.HERE / "search.toml").read_text())["retrieval"]["replicas"] == 2


def test_a_run_is_summed_up_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures.print_summary(tmp_path)
    assert capsys.readouterr().out == ""
    said = {
        "f1": 0.25,
        "found": 0.5,
        "turns": 2.0,
        "calls": 1.5,
        "overlong": 0.25,
        "tool_errors": 0.125,
    }
    stopped = {"stopped_turns": 0.25, "stopped_calls": 0.25}
    steps = [
        {
            "step": step,
            "reward_mean": step / 100,
            "lag_mean": 1.5,
            "seconds": 7.0,
            "outcome_metrics": {**said, **stopped},
        }
        for step in range(1, 25)
    ]
    evaluation = {
        "kind": "evaluation",
        "step": 20,
        "weight_version": 20,
        "reward_mean": 0.375,
        "reward_stderr": 0.0625,
        "by_source": {"all": {"reward_mean": 0.375}},
    }
    lines = [json.dumps(row) for row in (*steps, evaluation)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    figures.print_summary(tmp_path)
    printed = capsys.readouterr().out
    assert "0.015" in printed and "50%" in printed and "0.125" in printed
    assert "version 20: 0.375" in printed
    figures.draw(tmp_path, tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
