"""The keeper actor around a process, ranks that end together, and what libraries leave behind.
Without Ray.
"""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from penstock.up import ranked_process
from penstock.up.keeper import WATCH, FolderMissing, Keeper
from penstock.up.placement import LocalPlacement
from penstock.up.processes import Command, Process
from penstock.up.ranked_process import RankedProcess, rank_environments
from tests.support.clusters import is_alive


def shell(folder: Path, name: str, script: str) -> Command:
    return Command(name, ("/bin/sh", "-c", script), folder / f"{name}.log")


def test_a_folder_that_is_not_on_the_node_is_named() -> None:
    with pytest.raises(FolderMissing, match="/no/such/folder, where `penstock up` runs"):
        Keeper("/no/such/folder")


async def test_a_keeper_tells_lines_passes_signals_and_knows_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So that monkeypatch restores the working directory afterwards.
    monkeypatch.chdir(Path.cwd())
    keeper = Keeper(str(tmp_path))
    script = "trap 'echo bye >&2; exit 7' TERM; cat told; while :; do sleep 0.02; done"
    command = Command("c", ("/bin/sh", "-c", script), Path(), files={Path("told"): "hello\n"})
    pid = await keeper.start(command)
    assert await keeper.read() == [b"hello\n"]
    await keeper.write({Path("later"): "x"})
    assert (tmp_path / "later").read_text() == "x"
    await keeper.signal(signal.SIGTERM)
    assert await keeper.read() == [b"bye\n"]
    assert await keeper.read() == []
    assert await keeper.status() == 7
    assert not is_alive(pid)


KEEPING = """
import asyncio, sys
from pathlib import Path
from penstock.up.keeper import Keeper
from penstock.up.processes import Command

async def main():
    keeper = Keeper(".")
    await keeper.start(Command("c", ("/bin/sh", "-c", sys.argv[1]), Path()))
    print((await keeper.read())[0].decode(), end="", flush=True)
    await keeper.read()

asyncio.run(main())
"""


@pytest.mark.parametrize(
    "script",
    ["trap 'sleep 60' TERM; echo $$; sleep 60", "sleep 60 & echo $!; sleep 60"],
    ids=["the process", "what it started"],
)
async def test_who_is_killed_with_a_keeper(tmp_path: Path, script: str) -> None:
    keeping = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", KEEPING, script), stdout=asyncio.subprocess.PIPE, cwd=tmp_path
    )
    assert keeping.stdout is not None
    pid = int(await keeping.stdout.readline())
    assert is_alive(pid)
    keeping.kill()
    await keeping.wait()
    async with asyncio.timeout(10):
        while is_alive(pid):
            await asyncio.sleep(0.01)


async def test_a_watcher_goes_with_the_process_it_watches(tmp_path: Path) -> None:
    keeper = Keeper(str(Path.cwd()))
    before = watchers()
    await keeper.start(shell(tmp_path, "c", "read line; exit 3"))
    assert await keeper.status() == 3
    async with asyncio.timeout(10):
        while watchers() - before:
            await asyncio.sleep(0.01)


def watchers() -> set[int]:
    found = (p.info for p in psutil.process_iter(["pid", "cmdline"]))
    return {info["pid"] for info in found if WATCH in (info["cmdline"] or ())}


ORPHANS = """
import subprocess
import psutil
from penstock.up.ray_placement import adopt_orphans, end_all_but
mine = subprocess.Popen(("sleep", "60"))
before = adopt_orphans()
subprocess.run(("sh", "-c", "sleep 61 & (sleep 62 & sleep 63) &"))
left = psutil.Process().children(recursive=True)
end_all_but(before)
there = [process.pid for process in left if process.is_running()]
print(before == {mine.pid}, len(left) >= 3, mine.poll(), there == [mine.pid])
mine.kill()
"""


def test_what_a_child_left_behind_is_ended_and_nothing_else() -> None:
    command = (sys.executable, "-c", ORPHANS)
    shown = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert shown.stdout.split() == ["True", "True", "None", "True"], shown.stderr


def test_ranks_are_told_their_places_as_torchrun_does() -> None:
    here = rank_environments(["h", "h"], 5, own_device=False)
    assert [place["LOCAL_RANK"] for place in here] == ["0", "1"]
    assert here[1] == {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "5",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    there = rank_environments(["a", "b", "b"], 5, own_device=False)
    assert [place["LOCAL_RANK"] for place in there] == ["0", "0", "1"]
    assert {place["MASTER_ADDR"] for place in there} == {"a"}
    assert "GLOO_SOCKET_IFNAME" not in there[0]
    apart = rank_environments(["h", "h"], 5, own_device=True)
    assert [place["LOCAL_RANK"] for place in apart] == ["0", "0"]


@pytest.mark.parametrize(
    ("scripts", "status", "patience"), [(["exit 0", "exit 3"], 3, 20), (["exit 4", ""], 4, 0.1)]
)
async def test_ranks_end_together(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    scripts: list[str],
    status: int,
    patience: float,
) -> None:
    monkeypatch.setattr(ranked_process, "PARTING_SECONDS", patience)
    whole = Command("trainer", (), tmp_path / "trainer.log")
    ranks = [
        Process.start(shell(tmp_path, f"rank-{rank}", script or "exec sleep 60"))
        for rank, script in enumerate(scripts)
    ]
    trainer = RankedProcess(dataclasses.replace(whole, ranks=2), ranks)
    async with asyncio.timeout(20):
        assert await trainer.wait() == status
    assert not any(is_alive(rank.pid) for rank in ranks)


async def test_what_is_placed_here_has_the_variables_of_its_place(tmp_path: Path) -> None:
    placement = LocalPlacement({"a": {"CUDA_VISIBLE_DEVICES": "3"}})
    for name, seen in (("a", "3"), ("b", "")):
        command = shell(tmp_path, name, "echo $CUDA_VISIBLE_DEVICES")
        running = await placement.start(
            dataclasses.replace(command, environment={"CUDA_VISIBLE_DEVICES": ""}), None
        )
        assert await running.wait() == 0
        assert (tmp_path / f"{name}.log").read_text() == f"{seen}\n"
