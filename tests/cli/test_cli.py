"""The `penstock` command line: its subcommands, options and error messages."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner

from penstock.cli.__main__ import main
from penstock.client import Task, connect
from tests.support.scripted_server import Script, ScriptedServer

FUNCTIONS = """
async def generate(task, trajectory):
    await trajectory.turn()

async def held(task, trajectory):
    await trajectory.turn()
    import asyncio
    await asyncio.Event().wait()

def reward(task, trajectory):
    return 1.0

def one_argument(task):
    return 1.0

value = 3
"""


def invoke(*arguments: str):
    return CliRunner().invoke(main, arguments)


@pytest.fixture
def stub(monkeypatch):
    """Replace a lazily imported module with a stub."""

    def put(name: str, **functions) -> None:
        module = ModuleType(name)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, name, module)

    return put


@pytest.fixture
def functions(tmp_path, monkeypatch) -> Path:
    (tmp_path / "my_functions.py").write_text(FUNCTIONS)
    (tmp_path / "my_broken.py").write_text("raise RuntimeError('at import')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_help_lists_every_command():
    shown = invoke("--help")
    assert shown.exit_code == 0
    for command in ("serve", "train", "rollout", "weights", "token", "demo", "up", "version"):
        assert command in shown.output


def test_version_is_printed():
    assert invoke("version").output.strip() == invoke("--version").output.split()[-1]


@pytest.mark.parametrize(("command", "package"), [("serve", "server"), ("demo", "demo")])
def test_every_option_is_passed_through(stub, command, package):
    got = []
    stub(f"penstock.{package}.__main__", main=lambda options: got.append(options) or 3)
    shown = invoke(command, "--model", "m", "--dtype=float32", "--help", "-x", "--", "--y")
    assert shown.exit_code == 3
    assert got == [["--model", "m", "--dtype=float32", "--help", "-x", "--", "--y"]]


def test_train_passes_its_options(stub):
    got = []
    stub("penstock.trainer.__main__", train=lambda *given: got.append(given) or 0)
    shown = invoke("train", "c.toml", "--set", "a=1", "--set", "b.c=2", "--dry-run")
    assert shown.exit_code == 0
    assert got == [(Path("c.toml"), ["a=1", "b.c=2"], False, True, 1)]


def test_a_missing_extra_is_named(stub):
    def absent(options):
        raise ModuleNotFoundError("No module named 'vllm'", name="vllm")

    stub("penstock.server.__main__", main=absent)
    shown = invoke("serve")
    assert shown.exit_code == 2
    assert "vllm is not installed" in shown.output and "penstock-rl[cpu]" in shown.output


def test_a_missing_module_of_ours_is_a_defect_and_not_an_extra(stub):
    def absent(options):
        raise ModuleNotFoundError("No module named 'penstock.x'", name="penstock.x")

    stub("penstock.demo.__main__", main=absent)
    assert isinstance(invoke("demo").exception, ModuleNotFoundError)


async def run_rollout(folder: Path, *arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "penstock.cli", "rollout", *arguments),
        stderr=asyncio.subprocess.PIPE,
        cwd=folder,
        env={**os.environ, "GRPC_VERBOSITY": "NONE"},
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give --reward"),
        (("--reward", "my_functions"), "write it as pkg.module:function"),
        (("--reward", "no_such_module:reward"), "cannot import no_such_module"),
        (("--reward", "my_broken:reward"), "RuntimeError: at import"),
        (("--reward", "my_functions:absent"), "has no absent"),
        (("--reward", "my_functions:value"), "a int is not callable"),
        (("--reward", "my_functions:one_argument"), "called with (task, trajectory)"),
        (("--generate", "my_functions:generate", "--group-reward"), "--group-reward"),
    ],
)
def test_a_bad_function_ends_the_worker_with_2(functions, arguments, message):
    shown = invoke("rollout", "--server", "127.0.0.1:1", *arguments)
    assert shown.exit_code == 2
    assert message in shown.output


async def test_rollout_works_until_its_attempts_are_done(functions):
    async with ScriptedServer(Script()) as server:
        for index in range(6):
            server.add_task(Task(f"t{index}", "hello"))
        options = ("--reward", "my_functions:reward", "--generate", "my_functions:generate")
        process = await run_rollout(
            functions, "--server", server.address, "--attempts", "6", *options
        )
        _, errors = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 0, errors.decode()
        assert [outcome.reward for _, outcome in server.outcomes] == [1.0] * 6
        assert "penstock rollout: 6 attempts ended: reward 1.000" in errors.decode()


TWO = ("--server", "127.0.0.1:1", "--server", "127.0.0.1:2", "--reward", "my_functions:reward")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--concurrency", "1"), "--concurrency must be at least 2, one for each --server, got 1"),
        (("--attempts", "3"), "--attempts and --style require a single --server"),
        (("--style", "verl"), "--attempts and --style require a single --server"),
        (("--server", "127.0.0.1:1"), "--server 127.0.0.1:1 is given twice"),
    ],
)
def test_what_does_not_go_with_several_servers_ends_the_worker_with_2(
    functions, arguments, message
):
    shown = invoke("rollout", *TWO, *arguments)
    assert shown.exit_code == 2
    assert message in shown.output


@pytest.mark.parametrize(
    "address", ["localhost", "127.0.0.1:", ":50051", "127.0.0.1:99999", "h:x", ""]
)
@pytest.mark.parametrize(
    "command",
    [
        ("rollout", "--reward", "a:b", "--server"),
        ("eval", "--task", "sums", "--server"),
        ("weights", "show"),
        ("health",),
    ],
)
def test_what_is_no_address_is_refused_at_once(command: tuple[str, ...], address: str) -> None:
    shown = invoke(*command, address)
    assert shown.exit_code == 2
    assert f"got {address!r}" in shown.output


def test_a_uri_that_grpc_resolves_is_an_address() -> None:
    shown = invoke("health", "unix:/nowhere", "--timeout", "1")
    assert shown.exit_code == 1
    assert "penstock health: unix:/nowhere: there is no such socket" in shown.output


def test_a_client_of_no_address_is_not_made() -> None:
    with pytest.raises(ValueError, match="HOST:PORT, got 'localhost'"):
        connect("localhost")


async def test_a_worker_before_two_servers_works_for_both_with_a_share_each(functions):
    async with ScriptedServer(Script()) as first, ScriptedServer(Script()) as second:
        for index in range(3):
            first.add_task(Task(f"first-{index}", "hello"))
            second.add_task(Task(f"second-{index}", "hello"))
        options = ("--reward", "my_functions:reward", "--generate", "my_functions:generate")
        addresses = ("--server", first.address, "--server", second.address)
        process = await run_rollout(functions, *addresses, "--concurrency", "5", *options)
        for server in (first, second):
            await asyncio.wait_for(server.wait_until(lambda s=server: len(s.outcomes) == 3), 60)
        process.send_signal(signal.SIGTERM)
        _, errors = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 0, errors.decode()
        leases = [server.requests[server.calls.index("LeaseTasks")] for server in (first, second)]
        assert [request.concurrency for request in leases] == [3, 2]


async def test_sigterm_gives_back_and_ends_with_0(functions):
    async with ScriptedServer(Script(max_attempts=1)) as server:
        server.add_task(Task("t", "hello"))
        options = ("--reward", "my_functions:reward", "--generate", "my_functions:held")
        process = await run_rollout(
            functions, "--server", server.address, "--drain-timeout", "0.3", *options
        )
        await asyncio.wait_for(server.wait_until(lambda: "t-0-0" in server.records), 60)
        process.send_signal(signal.SIGTERM)
        _, errors = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 0, errors.decode()
        assert server.outcomes[0][1].failure.reason == "WORKER_STOPPED"


async def test_a_worker_without_a_server_says_so_and_can_be_stopped(functions):
    process = await run_rollout(
        functions, "--server", "127.0.0.1:1", "--reward", "my_functions:reward"
    )
    assert process.stderr is not None
    async with asyncio.timeout(60):
        said = b""
        while b"the server at 127.0.0.1:1 is unavailable" not in said:
            said = await process.stderr.readline()
    assert b": connection refused; is a server running there?; retrying" in said
    process.send_signal(signal.SIGTERM)
    await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0
