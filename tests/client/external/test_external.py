"""External processes: what a process sees, what it can use, how it is ended, and how its result is
reported.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from penstock.cli.__main__ import main
from penstock.client import Failed, group_reward
from penstock.client.external.settings import Keep, SandboxUse, read_size
from penstock.up.config import command_line
from tests.support.external_workers import (
    TURN,
    delivered,
    python,
    run,
    submit,
)
from tests.support.harness import Harness, serve
from tests.support.processes import worker_process


@pytest.fixture
async def server(tmp_path: Path) -> AsyncGenerator[Harness]:
    async with serve(tmp_path, "leases.max_attempts=1") as harness:
        yield harness


async def test_a_process_finds_its_task_and_its_own_folder_and_no_secret_of_the_workers(
    server: Harness, tmp_path: Path, lock: SandboxUse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLOUD_SECRET", "do not tell")
    monkeypatch.setenv("PASSED_ON", "told")
    metadata = {"answer": "5"}
    await submit(server, metadata=metadata, data_source="sums")
    show = TURN + (
        'task = json.load(open(os.environ["PENSTOCK_TASK_FILE"]))\n'
        'extra = {"cwd": os.getcwd(), "files": sorted(os.listdir())}\n'
        'answer(reward=0.25, metrics={"tokens": len(taken.token_ids)},\n'
        '    metadata={"environment": dict(os.environ), "task": task, **extra})\n'
    )
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "inner.txt").write_text("a file")
    statistics = await run(
        server,
        tmp_path,
        python(show.replace("'", '"')),
        sandbox=lock,
        environment=("PASSED_ON", "SET=here", "NOT_THERE"),
        files=(notes,),
    )
    assert (statistics.scored_count, statistics.reward_sum) == (1, 0.25)
    # The server counted these tokens, though this process never saw them.
    assert statistics.token_count == 8
    (outcome,) = await delivered(server)
    assert dict(outcome.metrics) == {"tokens": 8}
    told = outcome.metadata
    environment = told["environment"]
    assert environment["PASSED_ON"] == "told" and environment["SET"] == "here"
    assert not {"CLOUD_SECRET", "NOT_THERE", "PENSTOCK_TOKEN"} & set(environment.fields)
    assert environment["HOME"] == told["cwd"] != str(Path.cwd())
    assert set(told["files"]) == {"notes", "task.json"}
    assert told["task"]["metadata"]["answer"] == "5" and told["task"]["text"] == "hello"
    assert told["task"]["sampling"]["max_tokens"] == 8
    # No base URL, because this server has no HTTP endpoint.
    assert environment["PENSTOCK_SAMPLE_INDEX"] == "0" and "OPENAI_BASE_URL" not in environment


@pytest.mark.parametrize(("status", "reward"), [(0, 1.0), (1, 0.0)])
async def test_an_exit_status_is_a_reward(
    server: Harness, tmp_path: Path, status: int, reward: float
) -> None:
    await submit(server)
    command = python(TURN + f"sys.exit({status})")
    statistics = await run(server, tmp_path, command, reward="exit-status")
    assert (statistics.scored_count, statistics.reward_sum) == (1, reward)


async def test_a_reward_function_sees_the_process_its_folder_and_the_turns(
    server: Harness, tmp_path: Path
) -> None:
    await submit(server)
    seen: list[Any] = []

    def reward(task: Any, trajectory: Any) -> float:
        process = trajectory.process
        seen.append((process.status, process.output.strip(), process.result, trajectory.text))
        seen.append((process.folder / "answer.txt").read_text())
        return float(len(trajectory.last_turn.token_ids))

    command = python(TURN + 'print("said"); open("answer.txt", "w").write("42"); answer(reward=3)')
    statistics = await run(server, tmp_path, command, function=reward, reward="f")
    assert statistics.reward_sum == 8.0
    status, output, result, text = seen[0]
    assert (status, output, result) == (0, "said", {"reward": 3}) and text
    assert seen[1] == "42"


async def test_a_group_reward_sees_the_folders_of_all_siblings(
    server: Harness, tmp_path: Path
) -> None:
    await submit(server, group_size=2)

    @group_reward
    async def reward(task: Any, trajectories: Any) -> list[float]:
        numbers = [
            int((trajectory.process.folder / "index").read_text()) for trajectory in trajectories
        ]
        return [number + 0.5 for number in numbers]

    command = python(TURN + 'open("index", "w").write(os.environ["PENSTOCK_SAMPLE_INDEX"])')
    statistics = await run(server, tmp_path, command, function=reward, reward="f", attempts=2)
    assert statistics.reward_sum == 2.0


@pytest.mark.parametrize(
    ("command", "reward", "reason", "message"),
    [
        ("echo on stdout; echo on stderr >&2; exit 3", "result-file", "PROCESS_FAILED", "stderr"),
        ("exit 3", "result-file", "PROCESS_FAILED", "exit status 3; it wrote nothing"),
        ("kill -SEGV $$", "exit-status", "PROCESS_FAILED", "SIGSEGV"),
        ("no-such-program", "exit-status", "PROCESS_FAILED", "no-such-program"),
        ("true", "exit-status", "PROCESS_TOOK_NO_TURN", "exit status 0, but took no turn"),
        ("sleep 1000", "exit-status", "PROCESS_TIMEOUT", "still running after 1 s"),
        ("echo '{' > $PENSTOCK_RESULT_FILE", "result-file", "RESULT_INVALID", "is not JSON"),
        (
            'echo \'{"failure": {"reason": "TOOL_BROKE", "message": "why"}}\' > result.json; exit 1',
            "result-file",
            "TOOL_BROKE",
            "why",
        ),
        (
            python(
                TURN + "deep = []\nfor _ in range(60): deep = [deep]\n"
                "answer(reward=1.0, metadata=dict(deep=deep))"
            ),
            "result-file",
            "VALUE_ERROR",
            "the outcome cannot be sent",
        ),
    ],
)
async def test_each_way_to_fail_is_data(
    server: Harness, tmp_path: Path, command: str, reward: str, reason: str, message: str
) -> None:
    await submit(server)
    options = {"time_limit_seconds": 1.0} if reason == "PROCESS_TIMEOUT" else {}
    statistics = await run(server, tmp_path, command, reward=reward, **options)
    assert statistics.failures == {reason: 1}
    (outcome,) = await delivered(server)
    assert outcome.failure.reason == reason and message in outcome.failure.message


async def test_no_process_goes_on_because_another_was_killed(
    server: Harness, tmp_path: Path
) -> None:
    await submit(server)
    shells = "for i in $(seq 300); do sh -c 'sleep 1000; echo went on' & done; wait"
    await run(server, tmp_path, shells, keep=Keep.FAILED, time_limit_seconds=1.0)
    (folder,) = (tmp_path / "work").glob("attempt-*")
    assert (folder / "output.log").read_text() == ""


async def test_output_is_bounded_and_its_end_is_shown(server: Harness, tmp_path: Path) -> None:
    await submit(server)
    command = "yes line | head -c 50000000; echo the end; exit 1"
    await run(server, tmp_path, command)
    (outcome,) = await delivered(server)
    assert outcome.failure.message.endswith("the end") and len(outcome.failure.message) <= 1000


BROKE = 'echo \'{"failure": {"reason": "TOOL_BROKE", "message": "why"}}\' > result.json'


async def gives_up(*_: object) -> Failed:
    return Failed("GIVEN_UP", "")


async def give_up_together(_: Any, trajectories: Any) -> list[Failed]:
    return [Failed("GIVEN_UP", "") for _ in trajectories]


@pytest.mark.parametrize(
    ("last", "function"),
    [
        ("exit 1", None),
        ("sleep 1000", None),
        (BROKE, None),
        (python(TURN), gives_up),
        (python(TURN), group_reward(give_up_together)),
    ],
    ids=["its status", "its time", "its own word", "a function", "a group's function"],
)
async def test_folders_of_failed_attempts_are_kept_where_asked(
    server: Harness, tmp_path: Path, last: str, function: Any
) -> None:
    await submit(server)
    command = f"echo left > behind; echo said; {last}"
    options = {"function": function, "reward": "f"} if function else {"time_limit_seconds": 1.0}
    await run(server, tmp_path, command, keep=Keep.FAILED, **options)
    (folder,) = (tmp_path / "work").glob("attempt-*")
    assert (folder / "behind").read_text() == "left\n"
    assert (folder / "output.log").read_text() == "said\n"


@pytest.mark.parametrize(
    ("text", "count"),
    [("1048576", 1 << 20), ("512M", 512 << 20), ("2GiB", 2 << 30), ("1.5 kB", 1536)],
)
def test_sizes_are_read(text: str, count: int) -> None:
    assert read_size(text) == count


@pytest.mark.parametrize("text", ["", "-1", "0", "many", "2 PiB"])
def test_what_is_no_size_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="a size is a number"):
        read_size(text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--time-limit", "5"), "--time-limit requires --command"),
        (
            ("--command", "true", "--memory-limit", "lots"),
            "with an optional unit, such as 512M or 2GiB",
        ),
        (("--command", "true", "--generate", "m:f"), "--command, --environment and --generate"),
        (("--command", "true", "--style", "slime"), "cannot be combined with --command"),
        (("--command", "true", "--group-reward"), "--group-reward requires"),
        (
            ("--command", "true", "--reward", "no_such.py:function"),
            "no_such.py: No such file or directory",
        ),
    ],
)
def test_options_that_make_no_sense_are_named(
    options: tuple[str, ...], message: str, caplog: Any
) -> None:
    done = CliRunner().invoke(main, ["rollout", "--server", "127.0.0.1:1", *options])
    assert done.exit_code == 2
    assert message in done.output + "".join(caplog.messages)


def test_a_section_of_penstock_up_may_repeat_an_option() -> None:
    options = {"command": "sh agent.sh", "env": ["A=1", "B"], "group-reward": False}
    expected = ["--command", "sh agent.sh", "--env", "A=1", "--env", "B"]
    assert command_line(options) == expected


async def test_a_reward_may_be_a_function_of_a_file(server: Harness, tmp_path: Path) -> None:
    await submit(server)
    (tmp_path / "score_here.py").write_text(
        "def score(task, trajectory):\n    return len(trajectory.process.output)\n"
    )
    options = ("--command", python(TURN + 'print("four")'), "--api", "grpc", "--sandbox", "off")
    options += ("--reward", f"{tmp_path / 'score_here.py'}:score", "--attempts", "1")
    async with worker_process(tmp_path, server.address, *options) as worker:
        assert await worker.wait() == 0, (tmp_path / "worker.log").read_text()
    (outcome,) = await delivered(server)
    assert outcome.reward == 5.0
