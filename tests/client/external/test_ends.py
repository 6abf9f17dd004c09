"""External processes: their limits and sandbox, and how they end, whichever side ends first."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from penstock.client.external import agent as agents
from penstock.client.external import cgroups
from penstock.client.external.cgroups import find_cgroups
from penstock.client.external.sandbox import find_sandbox
from penstock.client.external.settings import Api, SandboxUse
from penstock.client.worker import WorkerMisconfigured
from tests.support.external_workers import (
    TURN,
    delivered,
    fleeing,
    going,
    make,
    marked,
    matching,
    python,
    run,
    submit,
)
from tests.support.harness import Harness, sampling, serve, until
from tests.support.processes import worker_process


@pytest.fixture
async def server(tmp_path: Path) -> AsyncGenerator[Harness]:
    async with serve(tmp_path, "leases.max_attempts=1") as harness:
        yield harness


@pytest.mark.parametrize("how", ["ends", "fails", "runs out of time"])
async def test_no_process_outlives_its_attempt(
    server: Harness, tmp_path: Path, lock: SandboxUse, how: str
) -> None:
    await submit(server)
    mark = uuid.uuid4().hex
    last = {"ends": "exit 0", "fails": "exit 1", "runs out of time": "sleep 1000"}[how]
    command = f"{fleeing(mark)}; {fleeing(mark)}; sleep 0.3; {last}"
    limit = 1.5 if how == "runs out of time" else 60.0
    statistics = await run(server, tmp_path, command, sandbox=lock, time_limit_seconds=limit)
    assert statistics.failed_count == 1
    assert not marked(mark)


async def test_memory_beyond_the_limit_ends_a_process_and_is_named(
    server: Harness, tmp_path: Path, lock: SandboxUse
) -> None:
    await submit(server)
    # Two processes, neither of which exceeds the limit alone.
    half = f"{sys.executable} -I -S -c 'import time; a = bytearray(90 << 20); time.sleep(1000)'"
    command = f"{half} & {half} & wait -n; exit 1"
    if find_cgroups() is None:
        command = f"{sys.executable} -I -S -c 'a = bytearray(900 << 20)'"
    command = f'exec /bin/bash -c "{command}"'
    statistics = await run(server, tmp_path, command, sandbox=lock, memory_limit_bytes=128 << 20)
    expected = "PROCESS_FAILED" if find_cgroups() is None else "PROCESS_MEMORY"
    assert statistics.failures == {expected: 1}
    (outcome,) = await delivered(server)
    if expected == "PROCESS_MEMORY":
        assert "more than 128 MiB of memory" in outcome.failure.message


async def test_without_cgroups_each_process_has_the_limit(
    server: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    caplog.set_level(logging.INFO, "penstock.rollout")
    monkeypatch.setattr(agents, "find_cgroups", lambda: None)
    await submit(server)
    command = f"exec {sys.executable} -I -S -c 'a = bytearray(900 << 20)'"
    await run(server, tmp_path, command, memory_limit_bytes=200 << 20)
    (outcome,) = await delivered(server)
    assert "MemoryError" in outcome.failure.message
    assert any("RLIMIT_DATA: cgroups are unavailable here" in line for line in caplog.messages)


async def test_a_lease_is_renewed_while_its_process_runs(tmp_path: Path) -> None:
    # The lease is long enough to survive a machine that stalls for a second.
    async with serve(tmp_path, "leases.seconds=3", "leases.max_attempts=1") as server:
        await submit(server)
        command = python("import time; time.sleep(6.5)\n" + TURN + "answer(reward=1)")
        statistics = await run(server, tmp_path, command)
    assert statistics.scored_count == 1


async def test_a_process_whose_lease_is_lost_is_ended(server: Harness, tmp_path: Path) -> None:
    await submit(server)
    mark = uuid.uuid4().hex
    async with going(server, tmp_path, f"{fleeing(mark)}; sleep 1000") as site:
        await until(lambda: len(marked(mark)) == 1)
        server.pass_lease_time()
        await until(lambda: not marked(mark) and not site.folders())


async def test_a_turn_in_flight_ends_with_its_process(tmp_path: Path) -> None:
    async with serve(tmp_path, "leases.max_attempts=1", step_seconds=0.05) as server:
        await submit(server, sampling_params=sampling(400))
        # Detached, so that losing the caller alone would not end the turn.
        command = python(TURN.replace("max_tokens=8", "max_tokens=400, detach=True"))
        async with going(server, tmp_path, command, drain_seconds=0.0) as site:
            turns = server.serving.turns
            await until(lambda: bool(turns.in_flight))
            site.worker.stop()
            await site.running
            assert not turns.in_flight
        (outcome,) = await delivered(server)
        assert outcome.failure.reason == "WORKER_STOPPED"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_no_process_outlives_its_worker(
    server: Harness, tmp_path: Path, lock: SandboxUse, number: int
) -> None:
    await submit(server, 2)
    mark = uuid.uuid4().hex
    work = tmp_path / "work"
    options = (
        "--command",
        f"{fleeing(mark)}; sleep 1000",
        "--api",
        "grpc",
        "--sandbox",
        lock.value,
    )
    options += ("--work-folder", str(work), "--drain-timeout", "0", "--memory-limit", "1GiB")
    async with worker_process(tmp_path, server.address, *options) as worker:
        await until(lambda: len(marked(mark)) == 2)
        assert matching(str(work), "{") and len(list(work.iterdir())) == 2
        os.kill(worker.pid, number)
        await worker.wait()
        await until(lambda: not marked(mark) and not matching(str(work), "{"))
    assert not list(work.iterdir())


async def test_a_sandboxed_process_sees_neither_files_nor_networks_of_others(
    server: Harness, tmp_path: Path, locked: SandboxUse
) -> None:
    await submit(server)
    secret = tmp_path / "secret"
    secret.write_text("do not tell")
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    look = f"""
import json, os, socket
def fails(what):
    try:
        return str(what())
    except Exception as error:
        return type(error).__name__
found = [
    fails(lambda: open("{secret}").read()),
    fails(lambda: os.listdir("{tmp_path}")),
    fails(lambda: open("/usr/mine", "w")),
    fails(lambda: socket.create_connection(("127.0.0.1", {port}))),
    fails(lambda: [entry for entry in os.listdir("/proc") if entry == "{os.getpid()}"]),
    fails(lambda: os.listdir("/tmp")),
]
json.dump(dict(failure=dict(reason="SEEN", message=json.dumps(found))), open("result.json", "w"))
"""
    with listener:
        await run(server, tmp_path / "root", python(look), sandbox=locked)
    (outcome,) = await delivered(server)
    seen = json.loads(outcome.failure.message)
    assert outcome.failure.reason == "SEEN"
    assert seen[0] == "FileNotFoundError"
    # Only the path to the process's own folder is visible.
    assert seen[1] in ("['root']", "FileNotFoundError")
    assert seen[2] in ("OSError", "PermissionError")
    assert seen[3] in ("ConnectionRefusedError", "OSError")
    assert seen[4] == "[]" and str(tmp_path).split("/")[2] in seen[5]


async def test_a_sandbox_hides_the_workers_token(
    server: Harness, tmp_path: Path, locked: SandboxUse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "token").write_text("penstock_secret")
    (tmp_path / "beside").write_text("shown")
    folder = tmp_path / "work" / "attempt"
    folder.mkdir(parents=True)
    sandbox = find_sandbox(
        folder.parent, share_network=False, read=(tmp_path,), hidden=(tmp_path / "token",)
    )
    process = await asyncio.create_subprocess_exec(
        *sandbox.command(folder),
        *("/bin/sh", "-c", f"cat {tmp_path}/beside; cat {tmp_path}/token"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert b"shown" in output and b"penstock_secret" not in output


@pytest.mark.parametrize("read", ["/tmp", ".", "linked", "shown", "shown/work/beside"])
def test_a_sandbox_shows_no_other_attempt_though_it_shows_the_folder_they_are_in(
    tmp_path: Path, locked: SandboxUse, read: str
) -> None:
    work = tmp_path / "shown" / "work"
    for name in ("mine", "theirs", "beside"):
        (work / name).mkdir(parents=True)
    (tmp_path / "linked").symlink_to("shown")
    sandbox = find_sandbox(work, share_network=False, read=(tmp_path / read,), hidden=())
    look = f"ls {work} {tmp_path / 'linked' / 'work'}; touch it"
    command = [*sandbox.command(work / "mine"), "/bin/sh", "-c", look]
    seen = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    assert "mine" in seen and "theirs" not in seen
    assert ("beside" in seen) == (read == "shown/work/beside")
    assert (work / "mine" / "it").exists()


async def test_a_folder_for_attempts_that_every_process_is_shown_is_refused(
    server: Harness, tmp_path: Path, locked: SandboxUse
) -> None:
    with pytest.raises(WorkerMisconfigured, match=r"--work-folder .* choose a folder inside it"):
        await run(server, tmp_path, "exit 0", sandbox=locked, read=(tmp_path / "work",))


@pytest.mark.parametrize(
    ("start", "shown"),
    [(".", False), ("home", False), ("home/run", True), ("temporary", False)],
)
def test_a_sandbox_shows_no_home_folder_and_no_temporary_files_by_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: str, shown: bool
) -> None:
    (tmp_path / "home" / "run").mkdir(parents=True)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.chdir(tmp_path / start)
    assert agents._own_folder() == ([Path.cwd()] if shown else [])


async def test_a_machine_without_a_sandbox_is_told_of_or_refused(
    server: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    caplog.set_level(logging.INFO, "penstock.rollout")
    monkeypatch.setenv("PATH", "/nowhere")
    await submit(server)
    await run(server, tmp_path, "exit 1", sandbox=SandboxUse.AUTO)
    assert any("NO SANDBOX (bwrap is not installed" in line for line in caplog.messages)
    with pytest.raises(WorkerMisconfigured, match="--sandbox require: bwrap is not installed"):
        await run(server, tmp_path, "exit 1", sandbox=SandboxUse.REQUIRE)


async def test_a_server_without_http_is_named_before_anything_is_leased(
    server: Harness, tmp_path: Path
) -> None:
    await submit(server)
    with pytest.raises(WorkerMisconfigured, match="serves no HTTP"):
        await run(server, tmp_path, "true", api=Api.HTTP)
    assert server.serving.queue.pending.count == 1


async def test_a_worker_that_waits_for_its_server_can_be_stopped(
    server: Harness, tmp_path: Path
) -> None:
    nobody = socket.create_server(("127.0.0.1", 0))
    with nobody:
        away = Harness(server.life, server.engine, nobody.getsockname()[1], None, server.channel)
        async with going(away, tmp_path, "true") as site:
            site.worker.stop()
            await asyncio.wait_for(site.running, 20)


def test_a_delegated_cgroup_of_version_2_is_divided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Checks which files are written, in a folder that only looks like a cgroup. The kernel takes no part.
    own = tmp_path / "user.slice" / "run-1.scope"
    own.mkdir(parents=True)
    (own / "cgroup.controllers").write_text("cpu memory pids\n")
    (own / "cgroup.subtree_control").write_text("\n")
    mounts = f"cgroup2 {tmp_path} cgroup2 rw,nosuid 0 0\nproc /proc proc rw 0 0\n"
    monkeypatch.setattr(cgroups, "_mounted", lambda: mounts)
    monkeypatch.setattr(cgroups, "_joined", lambda: "0::/user.slice/run-1.scope\n")
    found = find_cgroups()
    assert found is not None and (found.parent, found.version) == (own, 2)
    (leaf,) = own.glob("penstock-worker-*")
    assert (leaf / "cgroup.procs").read_text() == str(os.getpid())
    assert (own / "cgroup.subtree_control").read_text() == "+memory"
    made = found.make(1 << 20)
    assert (made.folder / "memory.max").read_text() == str(1 << 20)
    (made.folder / "memory.events").write_text("low 0\noom 3\noom_kill 0\n")
    assert not made.was_out_of_memory()
    (made.folder / "memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    assert made.was_out_of_memory()


def test_a_cgroup_that_is_not_ours_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpu\n")
    monkeypatch.setattr(cgroups, "_mounted", lambda: f"cgroup2 {tmp_path} cgroup2 rw 0 0\n")
    monkeypatch.setattr(cgroups, "_joined", lambda: "0::/\n")
    assert find_cgroups() is None
    assert [path.name for path in tmp_path.iterdir()] == ["cgroup.controllers"]


async def test_a_folder_that_was_cleared_away_is_made_anew(server: Harness, tmp_path: Path) -> None:
    await submit(server, 2)
    first = make(server, tmp_path, "exit 3", attempts=2, concurrency=1)
    made = first.worker._processes._make_folder

    def cleared(task: Any) -> Path:
        shutil.rmtree(first.root)
        return made(task)

    first.worker._processes._make_folder = cleared  # type: ignore[method-assign]
    statistics = await asyncio.wait_for(first.worker.run(), 30)
    await first.calls.close()
    assert statistics.failures == {"PROCESS_FAILED": 2}
