"""`penstock check`, and the same check before `penstock up` starts anything."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from penstock.cli.__main__ import main
from penstock.demo.tiny import write_model
from penstock.machine.devices import Machine
from penstock.machine.gpus import Gpu
from penstock.machine.models import ModelUnusable, find_model
from penstock.preflight import command, data, rewards
from penstock.up.cast import Programs
from penstock.up.checks import check_everything
from penstock.up.config import UpConfigInvalid
from penstock.up.up import up

UP = """[up]
out = "out"

[serve]
listen = "127.0.0.1:0"
[serve.engine]
model = "model"

[rollout]
reward = "check_scores:reward"

[train.data.jsonl]
path = "train.jsonl"
"""
SCORES = """
import os, sys, time
from penstock.client import Failed, group_reward

def reward(task, trajectory):
    return float(task.metadata["answer"] in trajectory.text)

def typo(task, trajectory):
    return float(task.metadata["anwser"] in trajectory.text)

def nothing(task, trajectory):
    print("a reward may print")

async def asks(task, trajectory):
    return len((await trajectory.get()).segments)

def judge(task, trajectory):
    return Failed("JUDGE_AWAY", "no answer")

@group_reward
def ranks(task, trajectories):
    return [0.5 for _ in trajectories]

def verl(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0

def verl_typo(data_source, solution_str, ground_truth, extra_info=None):
    return extra_info["anwser"]

def trl(completions, **columns):
    return [1.0 for _ in completions]

def trl_typo(completions, **columns):
    return columns["anwser"]

async def slime(args, sample):
    return 1.0

def slow(task, trajectory):
    time.sleep(5)

def ends(task, trajectory):
    os._exit(7)
"""


@pytest.fixture(autouse=True, scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = tmp_path_factory.mktemp("check")
    write_model(made / "model")
    (made / "up.toml").write_text(UP)
    (made / "check_scores.py").write_text(SCORES)
    rows = [{"prompt": "What is 2 + 3?", "answer": "5"}, {"prompt": "1 + 1?", "answer": "2"}]
    (made / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        patch.syspath_prepend(str(made))
        patch.setattr(command, "look", lambda: Machine("a CPU", 16 << 30))
        patch.setattr(command, "gpu_count", lambda: 0)
        yield made


def found(file: str = "up.toml", *settings: str) -> dict[str, list[str]]:
    """What the check says, with its exit status checked."""
    options = [part for setting in settings for part in ("--set", setting)]
    done = CliRunner().invoke(main, ["check", file, "--json", *options])
    told = json.loads(done.stdout)
    assert done.exit_code == (2 if told["problems"] else 0), done.output
    return told


def test_a_run_that_can_start_is_told_what_was_looked_at() -> None:
    told = found()
    assert (told["problems"], told["remarks"]) == ([], [])
    data, reward, model, memory = told["checked"]
    assert data == "data: train, 2 prompts"
    assert reward.startswith("reward: 0 for an empty answer, in ")
    assert model == "model: model, 0.4 MB"
    assert memory.startswith("memory: the server 0.4 MB, the trainer 1.6 MB, of ")
    done = CliRunner().invoke(main, ["check", "up.toml"])
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (
        0,
        "up.toml: nothing stands in the way",
    )


def test_every_part_is_checked_before_the_first_problem_is_told(folder: Path) -> None:
    told = found(
        "up.toml",
        "rollout.concurency=3",
        "rollout.reward=check_scores:typpo",
        "train.run.stepz=3",
        # [train] of this file has a table [train] itself.
        "train.learning_rate=1e-5",
        "serve.lease.seconds=3",
    )
    assert told["problems"] == [
        "--set rollout.reward: --reward check_scores:typpo: check_scores has no typpo; did you mean "
        f"typo? ({folder}/check_scores.py)",
        "--set serve.lease.seconds: [serve]: lease: unknown table; did you mean serve.leases?",
        "--set rollout.concurency: rollout: No such option '--concurency'. Did you mean "
        "'--concurrency'?",
        "--set train.run.stepz: [train]: run.stepz: unknown setting; did you mean train.run.steps?",
        "--set train.learning_rate: [train]: learning_rate: unknown setting; did you mean "
        "train.train.learning_rate?",
    ]


def test_the_model_is_named_where_the_file_has_it(folder: Path) -> None:
    (folder / "up2.toml").write_text(UP.replace('model = "model"', 'model = "./mdel"'))
    line = UP.splitlines().index('model = "model"') + 1
    assert found("up2.toml")["problems"] == [
        f"up2.toml:{line}: [serve]: engine.model: there is no folder ./mdel; did you mean ./model?"
    ]


def test_the_machine_and_the_functions_are_checked_together(folder: Path) -> None:
    shutil.copytree(folder / "model", folder / "cut", dirs_exist_ok=True)
    os.truncate(folder / "cut/model.safetensors", 1000)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        told = found(
            "up.toml",
            "serve.engine.model=cut",
            f"serve.listen={address}",
            "serve.engine.max-modellen=9",
            "rollout.reward=check_scores:typo",
        )
    reward, port, option, model = told["problems"]
    assert reward.startswith(
        "--set rollout.reward: --reward check_scores:typo: it raises KeyError for an empty answer to the "
        "first prompt: 'anwser'; the task's metadata has "
    )
    assert reward.endswith("; did you mean answer?; try it with `penstock reward try`")
    assert port.startswith(
        f"--set serve.listen: cannot listen on {address}: address already in use"
    )
    assert option == (
        "--set serve.engine.max-modellen: [serve]: engine.max-modellen: neither Penstock nor the "
        "engine has this option; did you mean max_model_len?"
    )
    assert model.startswith("--set serve.engine.model: [serve]: engine.model: cut/model.safeten")
    assert model.endswith("the file is cut off or broken: copy it again")


def test_the_ports_of_engines_are_checked_too(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        told = found("up.toml", "engines.count=1", f"engines.listen={address}")
    (port,) = told["problems"]
    assert port.startswith(f"--set engines.listen: cannot listen on {address}: address already in")


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        (
            "train.data.jsonl.path=trian.jsonl",
            "--set train.data.jsonl.path: [train]: data.jsonl.path: trian.jsonl: No such file or "
            "directory (in {here}); did you mean train.jsonl?",
        ),
        (
            "train.data.jsonl.columns.prompt=promt",
            "train.jsonl:1: no prompt in 'promt'; the row has prompt, answer; did you mean prompt?",
        ),
        (
            "train.model.path=./nowhere",
            "--set train.model.path: [train]: model.path: there is no folder ./nowhere",
        ),
        (
            "rollout.reward=check_scores:rewrd",
            "--set rollout.reward: --reward check_scores:rewrd: check_scores has no rewrd; did you mean "
            "reward? ({here}/check_scores.py)",
        ),
        (
            "rollout.reward=check_scores:nothing",
            "--set rollout.reward: --reward check_scores:nothing: a reward must be a number, not NoneType",
        ),
        (
            "rollout.generate=check_scores:genrate",
            "up.toml:10: --generate check_scores:genrate: check_scores has no genrate "
            "({here}/check_scores.py)",
        ),
    ],
)
def test_a_mistake_is_told_with_its_place(folder: Path, setting: str, problem: str) -> None:
    assert found("up.toml", setting)["problems"] == [problem.replace("{here}", str(folder))]


@pytest.mark.parametrize(
    ("reward", "remark"),
    [
        ("asks", "it calls the server, so it was imported and not called"),
        ("judge", "an empty answer fails the attempt: JUDGE_AWAY no answer"),
        ("slow", "no reward of an empty answer within 0.3 s"),
    ],
)
def test_what_a_trial_cannot_tell_is_only_remarked(
    monkeypatch: pytest.MonkeyPatch, reward: str, remark: str
) -> None:
    monkeypatch.setattr(rewards, "CALL_SECONDS", 0.3)
    told = found("up.toml", f"rollout.reward=check_scores:{reward}")
    assert told["problems"] == []
    assert told["remarks"] == [f"--set rollout.reward: --reward check_scores:{reward}: {remark}"]


def test_a_group_reward_is_called_with_a_group() -> None:
    told = found("up.toml", "rollout.reward=check_scores:ranks")
    assert any(line.startswith("reward: 0.5 for") for line in told["checked"])


def test_ready_made_rewards_are_named_like_others() -> None:
    assert found("up.toml", "rollout.reward=penstock.rewards:numeric")["problems"] == []
    (problem,) = found("up.toml", "rollout.reward=penstock.rewards:exact(feld=1)")["problems"]
    assert problem.endswith("it has no argument feld; did you mean field?")


def test_the_files_of_other_commands_are_checked_too(folder: Path) -> None:
    (folder / "trainer.toml").write_text(
        '[model]\npath = "model"\n[data.jsonl]\npath = "train.jsonl"\n'
    )
    assert found("trainer.toml")["checked"][:2] == [
        "data: train, 2 prompts",
        "model: model, 0.4 MB",
    ]
    assert found("trainer.toml", "data.jsonl.path=none.jsonl", "model.path=./none")["problems"] == [
        f"--set data.jsonl.path: none.jsonl: No such file or directory (in {folder})",
        "--set model.path: there is no folder ./none",
    ]
    (folder / "server.toml").write_text('listen = "127.0.0.1:0"\n[engine]\nmodel = "model"\n')
    assert found("server.toml")["checked"] == ["model: model, 0.4 MB"]
    assert found("server.toml", "engine.modle=3")["problems"] == [
        "--set engine.modle: neither Penstock nor the engine has this option; did you mean model?"
    ]
    (folder / "other.toml").write_text("[nothing]\nof = 'these'\n")
    assert found("other.toml")["problems"] != []
    assert found("none.toml")["problems"] == [f"none.toml: No such file or directory (in {folder})"]


def test_gpus_may_be_shared_unless_they_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu("GPU", 80 << 30, 80 << 30, 9.0, "580")
    monkeypatch.setattr(command, "look", lambda: Machine("a CPU", 16 << 30, (gpu, gpu)))
    checked = found()["checked"]
    assert "GPUs: 1 of 2" in checked
    assert checked[-1] == "memory: the server 0.4 MB, the trainer 1.6 MB, of 171.8 GB"
    told = found("up.toml", "serve.engine.tensor-parallel-size=4")
    assert told["problems"] == ["[serve]: 4 GPUs are needed, and this machine shows 2"]
    divided = ("cluster.engine.gpus=2", "cluster.trainer.gpus=1")
    assert found("up.toml", *divided)["problems"] == [
        "[cluster]: 3 GPUs are needed, and this machine shows 2"
    ]
    monkeypatch.setattr(command, "look", lambda: Machine("a CPU", 16 << 30))
    assert found("up.toml", *divided)["problems"] == [
        "[cluster]: 3 GPUs are needed, and this machine shows none"
    ]
    # A driver that does not answer hides how many there are.
    monkeypatch.setattr(command, "gpu_count", lambda: 3)
    assert found("up.toml", *divided)["problems"] == []


@pytest.mark.parametrize("style", ["verl", "trl"])
def test_a_reward_of_another_style_is_called_too(style: str) -> None:
    settings = (f"rollout.style={style}", f"rollout.reward=check_scores:{style}")
    assert any(
        line.startswith("reward: 1 for an empty") for line in found("up.toml", *settings)["checked"]
    )
    (problem,) = found("up.toml", *settings[:1], f"rollout.reward=check_scores:{style}_typo")[
        "problems"
    ]
    assert "raises KeyError for an empty answer to the first prompt" in problem


def test_what_only_a_server_can_call_is_said() -> None:
    note = "it needs a server, so it was imported and not called"
    settings = ("rollout.style=slime", "rollout.reward=check_scores:slime")
    assert found("up.toml", *settings)["remarks"] == [
        f"--set rollout.reward: --reward check_scores:slime: {note}"
    ]


def test_memory_that_cannot_hold_the_weights_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "look", lambda: Machine("a CPU", 1_000_000))
    (problem,) = found()["problems"]
    assert problem == (
        "memory: the weights alone need 2.0 MB (the server 0.4 MB, the trainer 1.6 MB), and this "
        "machine has 1.0 MB: take a smaller model, or [model.lora]"
    )
    # The GPUs whose driver does not answer may have more.
    monkeypatch.setattr(command, "gpu_count", lambda: 1)
    assert not any("memory" in line for line in [*found()["problems"], *found()["checked"]])


def test_a_model_in_shards_is_whole_or_it_is_said_what_lacks(folder: Path) -> None:
    parts = folder / "parts"
    shutil.copytree(folder / "model", parts, dirs_exist_ok=True)
    (parts / "model.safetensors").rename(parts / "a.safetensors")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (parts / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelUnusable, match=r"parts lacks b\.safetensors"):
        find_model(str(parts))
    (parts / "b.safetensors").write_bytes(b"")
    with pytest.raises(ModelUnusable, match="cut off or broken"):
        find_model(str(parts))


def penstock(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        (sys.executable, "-m", "penstock.cli", *arguments),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_up_starts_nothing_if_the_reward_cannot_be_called(folder: Path) -> None:
    done = penstock("up", "up.toml", "--set", "rollout.reward=check_scores:nothing")
    assert (done.returncode, done.stderr) == (
        2,
        "a reward may print\n"
        "penstock up: --set rollout.reward: --reward check_scores:nothing: a reward must be a number, not "
        "NoneType\n",
    )
    assert not (folder / "out").exists()


def test_the_check_before_a_run_can_be_turned_off(folder: Path, capsys: Any) -> None:
    says_no = (sys.executable, "-c", 'print(\'{"problems": ["no"], "remarks": []}\')')
    fails = ("false",)
    programs = Programs(fails, fails, fails, fails, check=says_no)
    assert up(Path("up.toml"), ["up.out=off"], False, False, programs) == 2
    assert capsys.readouterr().err == "penstock up: no\n"
    # Without the check, the server is started, and fails.
    assert up(Path("up.toml"), ["up.out=off", "up.check=false"], False, False, programs) == 1
    assert (folder / "off").is_dir()


def test_a_check_that_a_function_ends_is_named() -> None:
    command = (sys.executable, "-m", "penstock.cli", "check", "--json")
    with pytest.raises(UpConfigInvalid, match=r"check up\.toml exited 7 without a result"):
        check_everything(command, Path("up.toml"), ["rollout.reward=check_scores:ends"])
    assert check_everything((), Path("up.toml"), []) == ()


def test_a_check_takes_little_and_loads_nothing_heavy() -> None:
    code = (
        "import sys, time; from penstock.cli.__main__ import main\n"
        "main(['check', 'up.toml'], standalone_mode=False)\n"
    )
    # exit_with ends the process with a status.
    heavy = "('torch', 'vllm', 'transformers', 'ray', 'pyarrow', 'reasoning_gym')"
    tail = f"finally: print([name for name in {heavy} if name in sys.modules], time.process_time())"
    script = "try:\n" + "".join(f"    {line}\n" for line in code.splitlines()) + tail
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    loaded, seconds = done.stdout.splitlines()[-1].split()
    assert loaded == "[]", done.stderr
    # Of a core, however many processes share it.
    assert float(seconds) < 5


def test_data_that_takes_long_is_left_to_the_trainer(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setattr(data, "DATA_SECONDS", 0.2)
    (folder / "check_rows.py").write_text("import time\ndef rows():\n    time.sleep(3)\n")
    (folder / "slow.toml").write_text(
        UP.replace("data.jsonl]", "data.python]").replace(
            'path = "train.jsonl"', 'function = "check_rows:rows"'
        )
    )
    told = found("slow.toml")
    assert (told["problems"], told["remarks"]) == (
        [],
        ["data: not read within 0.2 s, so the reward was not called; the trainer waits"],
    )
    (folder / "gym.toml").write_text(
        UP.replace("data.jsonl]", "data.reasoning_gym]").replace(
            'path = "train.jsonl"', 'name = "chain_sum"'
        )
    )
    assert found("gym.toml")["remarks"] == [
        "data: reasoning_gym is read when the trainer starts, and not now"
    ]
