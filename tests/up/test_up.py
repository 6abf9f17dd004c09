"""`penstock up`: its file, and a run in which every process is killed once."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock.cli.__main__ import main
from penstock.demo.tasks import write_printable
from penstock.demo.tiny import write_model
from penstock.up import checks as up_checks
from penstock.up.cast import Programs, make_cast
from penstock.up.config import UpConfigInvalid, command_line, load
from penstock.up.looking import status
from penstock.up.processes import Command, FirstMatch, Process
from penstock.up.state import FolderUnusable, locked
from penstock.up.supervisor import Listens
from penstock.up.up import up
from tests.faults.test_supervised_run import check
from tests.support.forked_command import NURSERY
from tests.support.trainer_processes import nursery

FILE = """
[up]
out = "{out}"
restarts = 3

[serve]
listen = "127.0.0.1:0"
[serve.engine]
model = "{out}/../model"
step-seconds = 0.002

[rollout]
reward = "penstock.demo.rewards:printable_share"
concurrency = 8

[train]
run.steps = 20
run.save_model = false
model.dtype = "float32"
model.threads = 1
data.group_size = 2
data.sampling.max_tokens = 8
data.jsonl.path = "{out}/../tasks.jsonl"
train.groups_per_step = 2
train.learning_rate = 1e-2
checkpoint.every_steps = 1
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "up.toml"
    path.write_text(FILE.format(out=tmp_path / "out"))
    return path


def test_what_the_three_have_to_agree_on_is_said_once(config: Path, tmp_path: Path) -> None:
    loaded = load(config, ["up.patience_seconds=77", "rollout.count=2", "train.run.steps=3"])
    assert loaded.train is not None
    train = loaded.train_at("10.0.0.1:5")
    assert train["server"] == {"address": "10.0.0.1:5", "give_up_after_seconds": 77}
    assert train["model"]["path"] == loaded.serve["engine"]["model"]
    assert (train["run"]["id"], train["run"]["out"]) == ("out", str(tmp_path / "out"))
    assert train["run"]["steps"] == 3
    assert (loaded.worker_count, loaded.worker_options["reconnect-timeout"]) == (2, 77)
    assert loaded.trainer_keeps_checkpoints


def test_a_trainer_of_several_ranks_is_started_as_one(config: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    for count, expected in (("1", []), ("2", ["--ranks", "2"])):
        loaded = load(config, [f"up.trainer_ranks={count}"])
        cast = make_cast(loaded, Programs(train=("train",)), resume=False)
        assert cast.trainer is not None
        command = cast.trainer("10.0.0.1:5", False).arguments
        assert list(command[2:]) == expected


def test_a_section_may_begin_with_a_file(tmp_path: Path) -> None:
    (tmp_path / "trainer.toml").write_text("[model]\npath = 'm'\n[run]\nsteps = 7\nseed = 1\n")
    path = tmp_path / "up.toml"
    path.write_text(
        "[up]\nout = 'o'\n[serve]\nlisten = 'h:1'\n"
        f"[train]\npath = '{tmp_path}/trainer.toml'\nrun.seed = 2\n"
    )
    loaded = load(path, [])
    assert loaded.train is not None
    assert loaded.train["run"] == {"id": "o", "out": "o", "steps": 7, "seed": 2}
    assert loaded.serve == {
        "listen": "h:1",
        "engine": {"model": "m"},
        "journal": {"folder": "o/journal"},
    }


def test_a_journal_in_a_stream_gets_no_folder(config: Path) -> None:
    stream = ["serve.journal.url=nats://h", "serve.journal.durability=process"]
    assert "folder" not in load(config, stream).serve["journal"]


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("up.restarts=-1", r"up\.restarts: .*got -1"),
        ("up.restart=1", r"up\.restart: unknown setting; did you mean up\.restarts\?"),
        ("rollout.count=many", r"rollout\.count: .*got 'many'"),
        ("engines.count=0", r"engines\.count: .*got 0"),
        ("engines.engine=m", r"engines\.engine: must be a table, got 'm'"),
        ("serve.engine=m", r"serve\.engine: must be a table, got 'm'"),
        ("train.model=m", r"train\.model: must be a table, got 'm'"),
        ("cluster.address=h:1", r'address needs placement = "ray"'),
        ("train.path=/no/such/file", "No such file"),
        ("restarts=1", r"restarts: unknown setting; did you mean up\.restarts\?"),
        ("up.restarts.most=1", "up.restarts is 3 already, and not a table"),
    ],
)
def test_what_is_wrong_is_named(config: Path, override: str, complaint: str) -> None:
    with pytest.raises(UpConfigInvalid, match=complaint):
        load(config, [override])


def test_ranks_of_a_trainer_that_is_elsewhere_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "up.toml"
    path.write_text("[up]\nout = 'o'\ntrainer_ranks = 2\n[serve]\nlisten = 'h:1'\n")
    with pytest.raises(UpConfigInvalid, match=r"up\.trainer_ranks: without \[train\]"):
        load(path, [])


def test_a_command_that_does_not_come_to_a_dry_run_is_named(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(up_checks, "CHECK_SECONDS", 0.2)
    programs = Programs(serve=("/bin/sh", "-c", "sleep 60", "serve"))
    with pytest.raises(
        UpConfigInvalid, match=r"\[serve\]: its --dry-run did not finish within 0.2"
    ):
        up_checks.resolve(load(config, []), programs)


def test_options_are_written_as_a_command_takes_them() -> None:
    options = {"reward": "a:b", "group-reward": True, "purpose": "train", "whole": False}
    assert command_line(options) == ["--reward", "a:b", "--group-reward", "--purpose", "train"]


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("rollout.concurency=8", "rollout: No such option"),
        ("rollout.concurrency=0", "rollout: .*0 is not in the range"),
        ("train.run.steps=0", r"\[train\]: .*run\.steps: .*got 0"),
    ],
)
def test_a_bad_part_is_named_before_anything_starts(
    config: Path, override: str, complaint: str
) -> None:
    shown = CliRunner().invoke(main, ["up", str(config), "--set", override])
    assert shown.exit_code == 2
    assert re.search(complaint, shown.output), shown.output


async def test_a_folder_that_holds_a_run_is_gone_on_with_only_where_that_is_said(
    config: Path, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    # Left by a start that found no room for any process.
    (tmp_path / "out" / "events.log").touch()
    shown = CliRunner().invoke(main, ["up", str(config), "--status"])
    assert (shown.exit_code, "nothing has run in" in shown.output) == (1, True)
    up_checks.check_folder(tmp_path / "out", resume=False)
    (tmp_path / "out" / "state.json").touch()
    shown = CliRunner().invoke(main, ["up", str(config)])
    assert shown.exit_code == 2
    assert "holds another run; give --resume" in shown.output


@pytest.mark.parametrize("option", ["--resume", "--status"])
def test_a_folder_that_is_none_is_named(config: Path, tmp_path: Path, option: str) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "out").touch()
    programs = Programs(("true",), ("true",), ("true",), ("true",), check=())
    with (
        pytest.raises(FolderUnusable, match=r"up\.out: .*out: File exists"),
        locked(tmp_path / "out"),
    ):
        pass
    assert (
        status(config, []) if option == "--status" else up(config, [], True, False, programs)
    ) == 2


def test_a_server_comes_back_on_the_addresses_it_had(config: Path) -> None:
    cast = make_cast(load(config, []), Programs(serve=("serve",)), resume=False)
    assert "--listen" not in cast.server(None).arguments
    again = cast.server(Listens("0.0.0.0:7000", 7007)).arguments
    assert again[again.index("--listen") + 1] == "0.0.0.0:7000"
    assert again[again.index("--http-listen") + 1] == "0.0.0.0:7007"
    assert "--http-listen" not in cast.server(Listens("0.0.0.0:7000")).arguments
    cast = make_cast(
        load(config, ["serve.http.listen=127.0.0.1:0"]), Programs(serve=("serve",)), resume=False
    )
    again = cast.server(Listens("0.0.0.0:7000", 7007)).arguments
    assert again[again.index("--http-listen") + 1] == "127.0.0.1:7007"


def pid_of(out: Path, command: str) -> int:
    """The one process with this command and the run's folder on its command line."""
    found: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (folder / "cmdline").read_bytes().decode().split("\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if command in arguments and any(str(out) in argument for argument in arguments):
            found.append(int(folder.name))
    (pid,) = found
    return pid


@pytest.mark.timeout(120)
async def test_a_run_goes_on_to_its_end_though_everything_is_killed(
    config: Path, tmp_path: Path
) -> None:
    write_model(tmp_path / "model")
    write_printable(tmp_path / "tasks.jsonl")
    out = tmp_path / "out"
    steps = {at: FirstMatch(re.compile(rf"(step {at}/20)")) for at in (3, 8)}
    printed: list[str] = []

    def on_line(line: str) -> None:
        printed.append(line)
        for wanted in steps.values():
            wanted(line)

    command = (sys.executable, "-m", "tests.support.up_with_fakes", str(config))
    environment = {NURSERY: str(await asyncio.to_thread(nursery))}
    process = Process.start(Command("up", command, tmp_path / "up.log", environment), on_line)
    try:
        await steps[3].wait(process)
        os.kill(pid_of(out, "tests.support.fake_serve"), signal.SIGKILL)
        await steps[8].wait(process)
        os.kill(pid_of(out, "train"), signal.SIGKILL)
        async with asyncio.timeout(90):
            assert await process.wait() == 0, "\n".join(printed)
    finally:
        process.kill()
    events = (out / "events.log").read_text()
    assert "server: was ended by SIGKILL; starting again" in events
    assert "trainer: was ended by SIGKILL; starting again" in events
    assert events.splitlines()[-2].endswith("trainer: done")
    # The restarted server held version 0, but no sample came from it mid-run.
    check(out, 20)


SHELLS = """
import sys
from pathlib import Path
from penstock.up.up import Programs, up

def script(name, first):
    said = f"trap 'echo {name} >> {sys.argv[2]}; exit 0' TERM; {first}; while :; do sleep 0.02; done"
    return ("/bin/sh", "-c", 'case "$*" in *--dry-run*) exit 0;; esac; ' + said, name)

serve = script("server", "echo 'penstock serving x on 127.0.0.1:77 (weight version 0)'")
# The worker is there before the step that the test waits for.
worker = script("worker", f": > {sys.argv[2]}.begun")
trainer = script("trainer", f"until test -e {sys.argv[2]}.begun; do sleep 0.02; done; echo step 1/9")
sys.exit(up(Path(sys.argv[1]), [], False, False, Programs(serve, worker, trainer, check=())))
"""


async def test_a_stop_on_request_goes_from_the_trainer_to_the_server(
    config: Path, tmp_path: Path
) -> None:
    ended = tmp_path / "ended"
    stepped = FirstMatch(re.compile("(step 1)"))
    command = (sys.executable, "-c", SHELLS, str(config), str(ended))
    process = Process.start(Command("up", command, tmp_path / "up.log"), stepped)
    try:
        await stepped.wait(process)
        process.signal(signal.SIGTERM)
        async with asyncio.timeout(20):
            assert await process.wait() == 0
    finally:
        process.kill()
    assert ended.read_text().split() == ["trainer", "worker", "server"]
    events = (tmp_path / "out" / "events.log").read_text().splitlines()
    assert [line.split(" ", 1)[1] for line in events[-2:]] == [
        "up: stopping on request",
        "up: stopped",
    ]


async def test_a_dry_run_prints_what_each_command_makes_of_its_part(
    config: Path, tmp_path: Path
) -> None:
    # Of the data and the model, it only matters that they are there.
    (tmp_path / "model").mkdir()
    (tmp_path / "tasks.jsonl").touch()
    command = (sys.executable, "-m", "tests.support.up_with_fakes", str(config), "--dry-run")
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    printed, _ = await process.communicate()
    resolved = tomllib.loads(printed.decode())
    assert resolved["up"]["restarts"] == 3
    assert resolved["serve"]["leases"]["seconds"] == 60
    assert resolved["rollout"]["concurrency"] == 8
    assert resolved["train"]["staleness"]["max_lag"] == 4
    assert not (tmp_path / "out").exists()


def test_what_a_workers_commands_find_in_their_environment_is_not_printed(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(up_checks, "_ask", lambda command, section, table, config: {})
    loaded = load(config, ['rollout.env=["OPENAI_API_KEY=sk-1", "TURNS=3", "HOME"]'])
    shown = up_checks.resolve(loaded, Programs())
    assert shown["rollout"]["env"] == ["OPENAI_API_KEY=***", "TURNS=3", "HOME"]
    assert loaded.worker_options["env"] == ["OPENAI_API_KEY=sk-1", "TURNS=3", "HOME"]
