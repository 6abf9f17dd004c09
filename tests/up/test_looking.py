"""`penstock runs`, `penstock logs` and `penstock up RUN --status`, on folders as runs leave them."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from penstock.cli.__main__ import main
from penstock.trainer.config.trainer import RunConfig
from penstock.up import looking, runs
from penstock.up.columns import in_columns
from penstock.up.processes import Command, FirstMatch, Process
from penstock.up.state import locked

NOW = 1_790_000_000.0


def line(step: int, reward: float = 0.5, **more: object) -> str:
    figures = {"step": step, "reward_mean": reward, "seconds": 10.0, "time": NOW + 10 * step}
    return json.dumps({**figures, "time_gather_start": NOW + 10 * step - 10, **more}) + "\n"


def make_run(folder: Path, steps: int, wanted: int | None = 10) -> Path:
    folder.mkdir(parents=True)
    lines = [line(n + 1, n / 10) for n in range(steps)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    if wanted is not None:
        (folder / "trainer.toml").write_text(f"[run]\nsteps = {wanted}\n")
    return folder


def make_state(folder: Path) -> None:
    role: dict[str, Any] = {
        "name": "trainer",
        "state": "running",
        "host": "127.0.0.1",
        "pid": 12345,
        "restarts": 1,
        "since": NOW,
        "address": "",
        "log": str(folder / "trainer.log"),
    }
    server = {**role, "name": "server", "state": "serving", "address": "127.0.0.1:50051"}
    state = {"pid": 1, "placement": "processes", "roles": [server, role]}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "trainer.log").write_text("first\nstep 7/10  reward 0.300 and more words\n\n")


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(main, arguments)


def test_a_run_is_done_stopped_starting_or_running(tmp_path: Path) -> None:
    done, stopped = make_run(tmp_path / "a", 10), make_run(tmp_path / "b", 4)
    assert runs.read_run(done, NOW).state == "done"
    state = runs.read_run(stopped, NOW)
    assert (state.state, state.step, state.steps, state.seconds_left) == ("stopped", 4, 10, None)
    assert (state.reward, state.started) == (pytest.approx(0.15), NOW)
    begun = make_run(tmp_path / "c", 0)
    with locked(begun):
        assert runs.read_run(begun, NOW).state == "starting"
    with locked(stopped):
        # Six steps of ten seconds are left, and two seconds of the first have passed.
        running = runs.read_run(stopped, NOW + 42)
    assert (running.state, running.seconds_left) == ("running", 58.0)


def test_a_run_that_reached_its_target_is_done(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", 2)
    (run / "trainer.toml").write_text("[run.target]\nreward = 0.8\npatience = 2\n")
    means = [(None, "stopped"), (0.9, "stopped"), (0.8, "done"), (0.7, "stopped")]
    for step, (mean, state) in enumerate(means, 3):
        with (run / "metrics.jsonl").open("a") as file:
            file.write(line(step, reward_target_mean=mean))
        assert runs.read_run(run, NOW).state == state


def test_lines_of_other_kinds_and_half_lines_are_no_steps(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", 3, None)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(line(9, 9.0, kind="evaluation") + '{"step": 4, "rew')
    state = runs.read_run(run, NOW)
    assert (state.step, state.steps, state.reward) == (3, None, pytest.approx(0.1))
    assert RunConfig.model_fields["steps"].default == runs.DEFAULT_STEPS


def test_runs_lists_what_is_in_a_folder(tmp_path: Path) -> None:
    make_run(tmp_path / "runs/a", 10)
    make_run(tmp_path / "runs/more/b", 4)
    (tmp_path / "runs/notes").mkdir()
    shown = invoke("runs", str(tmp_path / "runs"))
    assert shown.exit_code == 0
    head, *rows = shown.output.splitlines()
    assert head.split() == ["state", "step", "reward", "left", "started", "run"]
    assert [row.split()[0:4] for row in rows] == [
        ["done", "10/10", "0.700", "-"],
        ["stopped", "4/10", "0.150", "-"],
    ]
    assert rows[1].endswith(str(tmp_path / "runs/more/b"))
    shown = invoke("runs", str(tmp_path / "runs"), "--json")
    assert [run["step"] for run in json.loads(shown.output)["runs"]] == [10, 4]
    # A run's own folder is a list of one.
    assert len(invoke("runs", str(tmp_path / "runs/a")).output.splitlines()) == 2


def test_no_run_and_no_folder_are_told(tmp_path: Path) -> None:
    shown = invoke("runs", str(tmp_path))
    assert (shown.exit_code, shown.output) == (
        1,
        f"penstock runs: there is no run in {tmp_path}\n",
    )
    shown = invoke("runs", str(tmp_path / "none"))
    assert shown.exit_code == 2
    assert "none: No such file or directory" in shown.output


def test_status_shows_step_reward_and_roles(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 7)
    make_state(run)
    with locked(run):
        shown = invoke("up", str(run), "--status")
    assert shown.exit_code == 0
    first, head, server, trainer = shown.output.splitlines()
    assert re.fullmatch(rf"{run}: running, step 7/10, reward 0\.400, 0:00:00 left", first)
    assert head.split() == ["role", "state", "since", "restarts", "pid", "where", "last", "words"]
    assert server.split()[:2] == ["server", "serving"]
    assert trainer.endswith("127.0.0.1        step 7/10  reward 0.300 and more words")
    shown = invoke("up", str(run), "--status", "--json")
    told = json.loads(shown.output)
    assert (told["state"], told["step"], told["roles"][1]["pid"]) == ("stopped", 7, 12345)


@pytest.mark.parametrize("width", [200, 120, 80, 60, 40])
def test_every_column_that_is_shown_has_its_width(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, width: int
) -> None:
    run = make_run(tmp_path / "run", 7)
    make_state(run)
    monkeypatch.setattr(looking, "terminal_width", lambda: width)
    _, *table = invoke("up", str(run), "--status").output.splitlines()
    assert all(len(each) <= width for each in table)
    assert table[2].startswith("trainer  running")
    assert ("12345" in table[2]) == (width >= 80)
    assert "step 7/10" in table[2]


def test_the_last_column_gets_the_rest_and_others_make_room() -> None:
    rows = [("a", "bb", "/a/long/path/to/a/run")]
    heads = ("x", "y", "path")
    assert in_columns(heads, rows, width=None) == [
        "x  y   path",
        "a  bb  /a/long/path/to/a/run",
    ]
    assert in_columns(heads, rows, width=20, expendable=["y"], keep_end=True) == [
        "x  path",
        "a  …ng/path/to/a/run",
    ]
    assert in_columns(heads, rows, width=24)[1] == "a  bb  /a/long/path/to/…"
    assert in_columns(heads, [], width=10) == ["x  y  path"]


def test_logs_prints_the_last_lines_of_each_role(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 7)
    (run / "trainer.log").write_text("".join(f"step {n}\n" for n in range(100)))
    (run / "worker.log").write_text("ready\nhalf a li")
    shown = invoke("logs", str(run), "-n", "2")
    assert shown.output == "trainer  | step 98\ntrainer  | step 99\nworker   | ready\n"
    shown = invoke("logs", str(run), "trainer", "-n", "1", "--json")
    assert json.loads(shown.output) == {"role": "trainer", "line": "step 99"}
    assert len(invoke("logs", str(run), "trainer", "-n", "1000").output.splitlines()) == 100
    assert invoke("logs", str(run), "trainer", "-n", "0").output == ""


def test_a_log_that_does_not_exist_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 7)
    (run / "trainer.log").write_text("")
    shown = invoke("logs", str(run), "trainr")
    assert shown.exit_code == 2
    assert f"{run} has no log of trainr; did you mean trainer?" in shown.output
    assert "it has trainer" in invoke("logs", str(run), "x").output
    shown = invoke("logs", str(tmp_path / "none"))
    assert (shown.exit_code, "`penstock runs` lists some" in shown.output) == (1, True)


def test_following_a_run_that_is_over_says_so(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 7)
    (run / "trainer.log").write_text("done\n")
    shown = invoke("logs", str(run), "-f")
    assert shown.exit_code == 0
    assert "done\n" in shown.output
    assert f"the run in {run} does not run" in shown.output


async def test_following_prints_what_comes_until_the_run_ends(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 7)
    (run / "trainer.log").write_text("old\n")
    lines: list[str] = []
    seen = FirstMatch(re.compile("(old)"))
    late = FirstMatch(re.compile("(new worker)"))

    def on_line(text: str) -> None:
        lines.append(text)
        seen(text)
        late(text)

    command = (sys.executable, "-m", "penstock.cli", "logs", str(run), "-f")
    with locked(run):
        process = Process.start(Command("logs", command, tmp_path / "logs.log"), on_line)
        await seen.wait(process)
        # A role that begins later, and a line in two parts.
        (run / "worker.log").write_text("new wor")
        await asyncio.sleep(2 * looking.POLL_SECONDS)
        with (run / "worker.log").open("a") as file:
            file.write("ker\n")
        await late.wait(process)
        with (run / "trainer.log").open("a") as file:
            file.write("the end\n")
    assert await process.wait() == 0
    assert "trainer  | the end" in lines
    assert "worker   | new worker" in lines


async def test_an_interruption_ends_following(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 7)
    (run / "trainer.log").write_text("old\n")
    seen = FirstMatch(re.compile("(old)"))
    command = (sys.executable, "-m", "penstock.cli", "logs", str(run), "-f")
    with locked(run):
        process = Process.start(Command("logs", command, tmp_path / "logs.log"), seen)
        await seen.wait(process)
        process.signal(signal.SIGINT)
        assert await process.wait() == 0
    assert "Traceback" not in (tmp_path / "logs.log").read_text()
