"""F13: the journal's disk is full, fails, or is read-only.

The existing records stay intact, and after a failed fsync the server stops.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
from pathlib import Path

import grpc
import pytest

from penstock.common.failpoints import VARIABLE
from penstock.server.journal.disk.files import Reading, find_files, read_records
from penstock.wire.channel import client_options
from penstock.wire.failure import read_failure
from tests.faults.report import Report
from tests.support.harness import SubmitTasksRequest, Task, Wire, sequence
from tests.support.processes import Server, server_process

ENDED = ("JOURNAL_FAILED", "UNAVAILABLE", "CANCELLED")
"""Reasons that a caller can get from a server whose journal failed.

Either the failure itself or, if the server is ending or has ended, a broken connection
(docs/guides/clients.md). CANCELLED is not the server's answer: when a server stops, gRPC drops calls that
arrived but were not yet accepted, whatever the grace period.
"""


async def submit_until_refused(
    server: Server, size: int = 50_000, most: int = 500, name: str = "task"
) -> tuple[list[str], str]:
    """Submit tasks one by one until one is refused. Returns the accepted ids, and the reason of the
    refusal.
    """
    accepted: list[str] = []
    async with grpc.aio.insecure_channel(server.address, options=client_options()) as channel:
        wire = Wire(channel)
        while len(accepted) < most:
            task = Task(task_id=f"{name}{len(accepted)}", group_size=1, tokens=sequence([1]))
            task.metadata["filler"] = "x" * size
            try:
                async with asyncio.timeout(20):
                    await wire.SubmitTasks(SubmitTasksRequest(tasks=[task]))
            except grpc.aio.AioRpcError as error:
                return accepted, str(read_failure(error).reason or error.code().name)
            accepted.append(task.task_id)
    return accepted, ""


def run(*command: str) -> int:
    """The exit status of a command, with its error output suppressed."""
    return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode


def kept(folder: Path) -> list[str]:
    """The tasks in the journal. Raises if a record is not whole."""
    records = [record for record, _ in read_records(find_files(folder / "journal"), Reading())]
    return [r.task_accepted.task.task_id for r in records if r.HasField("task_accepted")]


async def test_a_failed_write_or_fsync_ends_the_server_and_loses_nothing(
    tmp_path: Path, report: Report, request: pytest.FixtureRequest
) -> None:
    # A file system returns EROFS if the kernel has made it read-only because its disk fails.
    faults = (
        "journal.before_write=raise:EIO",
        "journal.before_write=raise:EROFS",
        "journal.before_fsync=raise:EIO",
    )

    async def happen(rng: random.Random) -> None:
        fault = rng.choice(faults)
        folder = tmp_path / f"{rng.random()}"
        folder.mkdir()
        async with server_process(folder) as server:
            await server.kill()
            server.environment[VARIABLE] = f"{fault}@{rng.randint(3, 30)}"
            await server.start()
            accepted, reason = await submit_until_refused(server)
            # If the failed write was a compaction's, the next call finds no server.
            assert reason in ENDED
            assert await server.wait() == 1
            assert "the journal cannot be written: " in server.log
            # The last task was not acknowledged, so it may be present or absent.
            assert kept(folder)[: len(accepted)] == accepted
            del server.environment[VARIABLE]
            await server.start()
            again, _ = await submit_known(server, accepted)
            assert again == 0

    count = report.count or 1
    await report.repeat("journal", "write or fsync fails", request.node.nodeid, count, happen)
    report.survived("journal", "write or fsync fails", count)


async def submit_known(server: Server, names: list[str]) -> tuple[int, int]:
    async with grpc.aio.insecure_channel(server.address, options=client_options()) as channel:
        tasks = [Task(task_id=name, group_size=1, tokens=sequence([1])) for name in names]
        answer = await Wire(channel).SubmitTasks(SubmitTasksRequest(tasks=tasks))
    return answer.accepted_count, answer.duplicate_count


async def test_a_disk_that_is_full_refuses_and_the_server_goes_on(
    tmp_path: Path, report: Report
) -> None:
    mounted = tmp_path / "small"
    mounted.mkdir()
    if os.geteuid() != 0 or run("mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", str(mounted)):
        report.skipped("journal", "disk full", "mounting a small file system needs root")
        pytest.skip("mounting a small file system needs root")
    try:
        async with server_process(mounted) as server:
            accepted, reason = await submit_until_refused(server)
            assert reason == "DISK_FULL"
            assert len(accepted) > 10
            again, known = await submit_known(server, accepted[:1])
            assert (again, known) == (0, 1)
            assert kept(mounted) == accepted
        report.survived("journal", "disk full", 1)
    finally:
        run("umount", str(mounted))


async def test_a_read_only_file_system_refuses_to_start_and_keeps_what_it_has(
    tmp_path: Path, report: Report
) -> None:
    mounted = tmp_path / "disk"
    mounted.mkdir()
    if os.geteuid() != 0 or run("mount", "-t", "tmpfs", "tmpfs", str(mounted)):
        report.skipped("journal", "read-only", "mounting a file system needs root")
        pytest.skip("mounting a file system needs root")
    # The server's log is on another disk.
    options = ("--set", f"journal.folder={mounted / 'journal'}")
    try:
        async with server_process(tmp_path, *options) as server:
            accepted, reason = await submit_until_refused(server, most=20)
            assert (len(accepted), reason) == (20, "")
            await server.kill()
            before = contents(mounted)
            assert run("mount", "-o", "remount,ro", str(mounted)) == 0
            with pytest.raises(Exception, match="journal"):
                await server.start()
            assert await server.wait() == 1
            assert "cannot be opened" in server.log
            assert contents(mounted) == before
            assert run("mount", "-o", "remount,rw", str(mounted)) == 0
            await server.start()
            assert await submit_known(server, accepted) == (0, 20)
        report.survived("journal", "read-only", 1)
    finally:
        run("umount", str(mounted))


def contents(folder: Path) -> dict[str, bytes]:
    """The contents of every journal file, by name."""
    return {path.name: path.read_bytes() for path in sorted((folder / "journal").iterdir())}


async def test_a_folder_that_cannot_be_written_refuses_to_start(
    tmp_path: Path, report: Report
) -> None:
    (tmp_path / "journal").write_text("a file where the folder should be")
    server = Server(tmp_path, ("--set", f"journal.folder={tmp_path / 'journal'}"))
    with pytest.raises(Exception, match="journal"):
        await server.start()
    assert await server.wait() == 1
    assert "cannot be opened" in server.log
    report.survived("journal", "folder unusable", 1)
