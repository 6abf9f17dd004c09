"""With only protoc, as docs/guides/clients.md describes, a language has enough to make an attempt."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from google.protobuf.text_format import Parse

from penstock.v1 import task_service_pb2
from penstock.wire import codec
from tests.support.fakes import decode_bytes
from tests.support.harness import (
    AbortRequest,
    Harness,
    SubmitTasksRequest,
    Task,
    hello,
    serve,
    until,
)

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "guides" / "clients.md"
FROZEN_AT = 3
"""Number of tokens of the first turn after which it is aborted."""


def generate(folder: Path) -> None:
    """Run the protoc command of the page, with its files and include path, but for Python."""
    [command] = re.findall(r"```sh\n(protoc .*?)```", PAGE.read_text(), re.DOTALL)
    # Expand the shell's braces.
    command = re.sub(
        r"(\S*)\{([\w,]+)\}(\S*)",
        lambda found: " ".join(f"{found[1]}{name}{found[3]}" for name in found[2].split(",")),
        command,
    )
    _, *arguments = shlex.split(command.replace("\\\n", " "))
    kept = [each for each in arguments if "_out=" not in each and not each.startswith("--plugin")]
    assert "proto/penstock/v1/task_service.proto" in kept
    out = [f"--python_out={folder}", f"--grpc_python_out={folder}"]
    protoc = [sys.executable, "-m", "grpc_tools.protoc", *out, *kept]
    subprocess.run(protoc, cwd=ROOT, check=True, capture_output=True, text=True)


def page_task() -> Any:
    """The task in the page's example of a lease, with a group of one."""
    [body] = re.findall(
        r"```textproto\n# penstock\.v1\.LeaseTasksResponse\n(.*?)```", PAGE.read_text(), re.DOTALL
    )
    task = Parse(body, task_service_pb2.LeaseTasksResponse()).task
    task.group_size = 1
    return Task.FromString(task.SerializeToString())


async def test_stubs_of_the_files_that_the_page_names_make_an_attempt(tmp_path: Path) -> None:
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    generate(stubs)
    async with serve(tmp_path) as server:
        exchange = await hello(server.wire, groups_per_step=1)
        await server.wire.SubmitTasks(SubmitTasksRequest(tasks=[page_task()]))
        exchange.send(demand={"group_count": 1})
        server.engine.freeze_at = FROZEN_AT
        # Without site-packages on the path: of this project, the agent sees only the stubs.
        libraries = sysconfig.get_paths()["purelib"]
        agent = await asyncio.create_subprocess_exec(
            *(sys.executable, "-S", "-P", str(ROOT / "tests" / "support" / "bare_agent.py")),
            *(str(stubs), server.address),
            env={"PYTHONPATH": f"{stubs}:{libraries}"},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        working = asyncio.create_task(agent.communicate(PAGE.read_bytes()))
        aborting = asyncio.create_task(abort_the_first_turn(server))
        try:
            async with asyncio.timeout(60):
                printed, errors = await asyncio.shield(working)
            assert agent.returncode == 0, errors.decode()
            await aborting
        finally:
            aborting.cancel()
            if agent.returncode is None:
                agent.kill()
            await asyncio.wait([working, aborting])
        told = json.loads(printed)
        group = (await exchange.receive("delivery")).group
        exchange.half_close()
    [trajectory] = group.trajectories
    assert (group.task_id, trajectory.trajectory_id) == ("sum-17", told["trajectory_id"])
    assert (told["answer"], told["completed"], told["aborted"]) == ("5", True, True)
    assert told["expired"] == ["nobody's"]
    written: dict[int, list[int]] = {}
    for segment in trajectory.segments:
        if len(segment.logprobs):
            written.setdefault(segment.turn_index, []).extend(map(int, codec.token_ids(segment)))
    assert told["texts"] == [decode_bytes(tokens) for tokens in written.values()]
    assert len(written) == trajectory.turn_count == 2 and len(written[0]) > FROZEN_AT
    assert (trajectory.outcome.reward, trajectory.outcome.metrics) == (1.0, {"turns": 2.0})
    assert list(trajectory.outcome.turn_rewards) == [0.0, 1.0]


async def abort_the_first_turn(server: Harness) -> None:
    """Abort the frozen turn, and let the engine continue."""
    await until(lambda: bool(server.engine.salts), 60)
    every = AbortRequest()
    every.all.SetInParent()
    await server.wire.Abort(every)
    server.engine.freeze_at = None
