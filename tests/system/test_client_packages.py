"""The TypeScript and Go clients as packages.

Covers their generated stubs, own tests and published files, the ten-line agent, and a server that
is killed while they use it.
"""

from __future__ import annotations

import asyncio
import filecmp
import json
import os
import re
import subprocess
from collections import deque
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from penstock.client import Task, connect
from tests.support.authorities import make_authorities
from tests.support.harness import Harness, hello, serve
from tests.support.languages import ROOT, clients, language, run
from tests.support.processes import server_process
from tests.support.scripted_server import Script, ScriptedServer

STUBS = {"typescript": "clients/typescript/src/gen", "go": "clients/go/v1"}
LANGUAGES = pytest.mark.parametrize("name", sorted(STUBS))


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncGenerator[Harness]:
    """A server whose trainer accepts every group."""
    options = ("leases.seconds=1", "leases.grace_seconds=1")
    async with serve(tmp_path, *options, step_seconds=0.002) as harness:
        exchange = await hello(harness.wire, groups_per_step=16, max_lag=8)
        yield harness
        exchange.half_close()


def test_generating_the_stubs_again_gives_no_difference(tmp_path: Path) -> None:
    for needed in STUBS:
        language(needed)  # One run of buf makes both.
    command = ["make", "--no-print-directory", "gen-clients-into", f"CLIENT_STUBS={tmp_path}"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    for folder in STUBS.values():
        generated, committed = tmp_path / folder, ROOT / folder
        names = {str(path.relative_to(generated)) for path in generated.rglob("*.*")}
        assert names
        assert names == {str(path.relative_to(committed)) for path in committed.rglob("*.*")}
        compared = filecmp.cmpfiles(generated, committed, sorted(names), shallow=False)
        assert compared[1:] == ([], []), "run `make gen-clients` and commit what it changes"


def test_the_node_that_came_with_pyright_has_an_npm_that_works() -> None:
    folder = clients.bundled_node()
    if folder is None:
        pytest.skip("pyright's Node is not in .venv")
    environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    for name in ("node", "npm"):
        assert clients.version_of([name, "--version"], environment) > (0, 0)


def test_why_nothing_was_downloaded_is_the_line_with_the_error(tmp_path: Path) -> None:
    said = "npm error code ECONNREFUSED\nnpm error }\nA complete log can be found in x"
    command = ["sh", "-c", f"echo '{said}'; exit 1"]
    with pytest.raises(clients.NotHere, match=r"^npm ci failed: npm error code ECONNREFUSED$"):
        clients.download(command, os.environ, tmp_path, "npm ci")


@LANGUAGES
async def test_a_clients_own_tests_pass(tmp_path: Path, harness: Harness, name: str) -> None:
    spoken = language(name)
    made = make_authorities(tmp_path / "secrets")
    token = tmp_path / "token"
    token.write_text(made.tokens["agent"])
    (tmp_path / "secure").mkdir()
    security = made.security("admin")
    async with serve(tmp_path / "secure", *made.settings(), security=security) as secure:
        environment = {
            **spoken.environment,
            "PENSTOCK_TEST_ADDRESS": harness.address,
            "PENSTOCK_TEST_SECURE_ADDRESS": secure.address,
            "PENSTOCK_TEST_CA": str(made.ca),
            "PENSTOCK_TEST_TOKEN_FILE": str(token),
        }
        printed = await run(spoken.own_tests(), environment, spoken.folder, 60)
    assert len(re.findall(r"^(?:ok|--- PASS)", printed, re.MULTILINE)) >= 10, printed


@LANGUAGES
async def test_the_ten_line_agent_works(harness: Harness, name: str) -> None:
    spoken = language(name)
    async with connect(harness.address) as penstock:
        # A letter that the fake engine writes within two turns, and one that it never writes.
        for task_id, answer in (("right", "e"), ("wrong", "E")):
            task = Task(task_id, "What is it?", metadata={"answer": answer})
            await penstock.submit_tasks([task])
        exchange = await hello(harness.wire, epoch=2, groups_per_step=16, max_lag=8)
        exchange.send(demand={"group_count": 2})
        program = (*spoken.program("agent"), harness.address)
        process = await asyncio.create_subprocess_exec(*program, env=dict(spoken.environment))
        try:
            groups = [(await exchange.receive("delivery", 60)).group for _ in range(2)]
        finally:
            process.kill()
            await process.wait()
    found = {group.task_id: group.trajectories[0] for group in groups}
    assert {name: each.outcome.reward for name, each in found.items()} == {
        "right": 1.0,
        "wrong": 0.0,
    }
    assert found["wrong"].turn_count == 2


@pytest.mark.parametrize(
    ("path", "begins", "ends"),
    [
        ("clients/typescript/examples/agent.ts", "import", None),
        ("clients/go/examples/agent/main.go", "func agent", "}\n\n"),
    ],
)
def test_the_ten_line_agent_has_ten_lines(path: str, begins: str, ends: str | None) -> None:
    text = (ROOT / path).read_text()
    agent = text[text.index(begins) :]
    agent = agent[: agent.index(ends)] if ends else agent
    assert 5 < len([line for line in agent.splitlines() if line.strip(" }")]) <= 10
    pages = [
        ROOT / "docs" / "guides" / "clients.md",
        ROOT / "clients" / path.split("/")[1] / "README.md",
    ]
    assert all(agent.strip() in page.read_text() for page in pages)


async def test_what_is_published_is_what_is_imported(tmp_path: Path) -> None:
    spoken = language("typescript")
    command = (spoken.tool("npm"), "pack", "--dry-run", "--json", "--ignore-scripts")
    printed = await run(command, spoken.environment, spoken.folder)
    packed = json.loads(printed[printed.index("[") :])[0]
    names = {file["path"] for file in packed["files"]}
    package = json.loads((ROOT / "clients" / "typescript" / "package.json").read_text())
    for entry in package["exports"].values():
        assert {path.removeprefix("./") for path in entry.values()} <= names
    assert "README.md" in names
    assert not any("test" in name or "examples" in name for name in names)


@LANGUAGES
async def test_a_server_that_is_killed_is_found_again(tmp_path: Path, name: str) -> None:
    spoken = language(name)
    async with server_process(tmp_path, "--step-seconds", "0.02") as server:
        async with connect(server.address) as penstock:
            tasks: list[Any] = [
                Task(f"task-{index}", "A prompt.", metadata={"agent": "lost"}, index=index)
                for index in range(3)
            ]
            await penstock.submit_tasks(tasks)
        command = (*spoken.program("life"), server.address, str(len(tasks)))
        working = asyncio.create_task(run(command, spoken.environment))
        try:
            await in_a_turn(server.address)
            await server.restart()
            printed = await working
        finally:
            working.cancel()
            await asyncio.wait([working])
    counts = [int(number) for number in re.findall(r"\d+", printed)]
    assert counts == [len(tasks), 0, 0], printed  # Rewarded, failed, lost.


@LANGUAGES
async def test_a_server_that_goes_on_from_fewer_tokens_than_it_told_is_asked_anew(
    name: str,
) -> None:
    spoken = language(name)
    script = Script(break_after=deque([4]), forgets=deque([2]))
    async with ScriptedServer(script) as server:
        server.add_task(Task("task", "A prompt.", metadata={"agent": "lost"}))
        command = (*spoken.program("life"), server.address, "1")
        printed = await run(command, spoken.environment)
    ((_, outcome),) = server.outcomes
    assert outcome.reward == 1.0, printed
    assert server.calls.count("GetTrajectory") == 2


async def in_a_turn(address: str) -> None:
    """Return when the server is sampling a turn."""
    async with connect(address) as penstock, asyncio.timeout(60):
        while not (await penstock.server_info()).load.running_turn_count:
            await asyncio.sleep(0.005)
