"""Processes in actors of a local Ray cluster, which the test starts and stops."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.up.cluster_config import Cluster, Share
from penstock.up.placement import PlacementFailed
from penstock.up.processes import Command
from penstock.up.ray_placement import RayPlacement, RayProcess, open_ray
from tests.faults.test_supervised_run import check
from tests.support.clusters import ROLES, all_gone, cluster, is_alive

ray: Any = pytest.importorskip("ray", reason="ray is not installed; `make cluster-test` does it")

pytestmark = pytest.mark.filterwarnings("ignore")


def shell(folder: Path, name: str, script: str, ranks: int = 1) -> Command:
    log = folder / f"{name}.log"
    return Command(name, ("/bin/sh", "-c", script), log, {"SAID": "so"}, ranks=ranks)


OTHERS: list[psutil.Process] = []
"""Child processes that existed before the test."""


def rays_own() -> list[psutil.Process]:
    """Child processes that this process has started and that still run, without those of other tests."""
    children = psutil.Process().children(recursive=True)
    return [child for child in children if is_alive(child.pid) and child not in OTHERS]


@pytest.mark.timeout(180)
async def test_processes_run_in_actors_and_nothing_is_left_of_either(tmp_path: Path) -> None:
    shares = {name: Share(cpus=0.5) for name in ("a", "b", "trainer", "trainer-rank-1")}
    OTHERS[:] = psutil.Process().children(recursive=True)
    async with open_ray(Cluster(placement="ray"), shares, "test") as placement:
        await runs_tells_and_ends(placement, tmp_path)
        await is_lost_with_its_actor(placement, tmp_path)
        await says_what_it_cannot_start(placement, tmp_path)
        await ranks_are_told_their_places(placement, tmp_path)
        left = await placement.start(shell(tmp_path, "a", "exec sleep 60"), None)
        assert is_alive(left.pid)
        await room_is_waited_for_and_named()
    assert not is_alive(left.pid)
    async with asyncio.timeout(20):
        while rays_own():
            await asyncio.sleep(0.1)


async def runs_tells_and_ends(placement: RayPlacement, folder: Path) -> None:
    lines: list[str] = []
    script = (
        "trap 'echo bye; exit 7' TERM; cat told; echo $SAID; echo err >&2; "
        "while :; do sleep 0.02; done"
    )
    told = folder / "told"
    command = shell(folder, "a", script.replace("told", str(told)))
    command = replace(command, files={told: "hello\n"})
    running = await placement.start(command, lines.append)
    assert is_alive(running.pid)
    assert isinstance(running, RayProcess)
    async with asyncio.timeout(30):
        while not {"hello", "so", "err"} <= set(lines):
            await asyncio.sleep(0.02)
        await running.write({told: "again"})
        assert told.read_text() == "again"
        with pytest.raises(OSError, match="/proc/nowhere"):
            await running.write({Path("/proc/nowhere/told"): "no room"})
        running.signal(signal.SIGTERM)
        assert await running.wait() == 7
    assert running.ending(7) == "exited 7"
    assert lines[-1] == "bye"
    assert sorted(command.log.read_text().split()) == sorted(lines)
    assert not is_alive(running.pid)
    await running.write({told: "too late"})
    assert told.read_text() == "again"


async def is_lost_with_its_actor(placement: RayPlacement, folder: Path) -> None:
    script = "trap 'sleep 60' TERM; echo there; while :; do sleep 0.02; done"
    for kill in ("the process", "ray.kill"):
        running = await placement.start(shell(folder, "b", script), None)
        assert isinstance(running, RayProcess)
        if kill == "ray.kill":
            ray.kill(running.actor)
        else:
            psutil.Process(running.pid).parent().kill()  # type: ignore[union-attr]
        async with asyncio.timeout(30):
            assert await running.wait() == -signal.SIGKILL
            while is_alive(running.pid):
                await asyncio.sleep(0.01)
        assert running.ending(-9).startswith("lost its actor (The actor is dead because")
        assert "The actor" in running.command.log.read_text()


async def says_what_it_cannot_start(placement: RayPlacement, folder: Path) -> None:
    nothing = Command("b", ("/no/such/program",), folder / "b.log")
    running = await placement.start(nothing, None)
    assert await running.wait() == 1
    assert "FileNotFoundError" in nothing.log.read_text()
    unlogged = replace(shell(folder, "b", "exec sleep 60"), log=folder / "nowhere" / "b.log")
    running = await placement.start(unlogged, None)
    assert await running.wait() == 1
    assert running.ending(1).startswith("cannot open its log: ")


async def ranks_are_told_their_places(placement: RayPlacement, folder: Path) -> None:
    said: list[str] = []
    script = "echo $RANK of $WORLD_SIZE at $MASTER_ADDR; test $RANK = 1 || sleep 0.2; exit 0"
    whole = await placement.start(shell(folder, "trainer", script, ranks=2), said.append)
    assert await whole.wait() == 0
    assert said == ["0 of 2 at 127.0.0.1"]
    assert (folder / "trainer-rank-1.log").read_text() == "1 of 2 at 127.0.0.1\n"


async def room_is_waited_for_and_named() -> None:
    """Runs next to what the cluster has already placed."""
    from penstock.up.ray_placement import _group  # pyright: ignore[reportPrivateUsage]

    few = Cluster(placement="ray", wait_seconds=0.5)
    with pytest.raises(PlacementFailed, match=r"no room within 0\.5 s.*'CPU': 1000"):
        async with _group(few, {"a": Share(cpus=1000)}, "other"):
            pass


@pytest.mark.timeout(120)
async def test_a_cluster_that_is_not_there_is_named(tmp_path: Path) -> None:
    nowhere = Cluster(placement="ray", address="127.0.0.1:1")
    with pytest.raises(PlacementFailed, match=r"cluster\.address: 127\.0\.0\.1:1"):
        async with open_ray(nowhere, {"a": Share()}, "test"):
            pass


@pytest.mark.timeout(280)
async def test_a_run_survives_the_killing_of_each_actor_and_leaves_no_process(
    tmp_path: Path,
) -> None:
    steps = 40
    async with cluster(tmp_path, "ray", steps) as running:
        await running.until(lambda: running.steps >= 2, 200)
        for name in ("engine-1", "worker", "trainer", "hub", "engine-2"):
            killed = await running.kill(name, actor=True)
            if name != "engine-2":
                await running.came_back(name, killed)
        assert await asyncio.wait_for(running.ending, 200) == 0
        check(running.out, steps)
        for name in ROLES:
            assert f"{name}: lost its actor" in running.events
        await all_gone(running.mark)


@pytest.mark.timeout(180)
async def test_a_stop_on_request_ends_actors_and_cluster(tmp_path: Path) -> None:
    async with cluster(tmp_path, "ray", 100_000) as running:
        await running.until(lambda: running.steps >= 2, 120)
        running.process.signal(signal.SIGINT)
        assert await asyncio.wait_for(running.ending, 90) == 0
        assert running.events.splitlines()[-1].endswith("up: stopped")
        assert "up: stopping on request" in running.events
        await all_gone(running.mark)


@pytest.mark.timeout(180)
async def test_up_that_is_killed_takes_actors_and_cluster_along(tmp_path: Path) -> None:
    async with cluster(tmp_path, "ray", 100_000) as running:
        await running.until(lambda: running.steps >= 1, 120)
        running.process.kill()
        await running.ending
        await all_gone(running.mark)
