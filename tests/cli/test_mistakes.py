"""Mistakes of people who are new to Penstock: each is answered in a line, as docs/guides/mistakes.md shows.

The answers are compared in full, so that a change of one is a change of the page.
"""

from __future__ import annotations

import importlib
import logging
import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from huggingface_hub import constants

from penstock.cli.__main__ import main
from penstock.client.scoring import RewardInvalid, as_failed, to_log
from penstock.common.settings import line_of
from penstock.server.preflight import known_options

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "mistakes.md"
RUN = """[model]
path = "org/model"

[data.jsonl]
path = "train.jsonl"

[train]
groups_per_step = 8
"""
UP = """[up]
out = "out"

[serve.engine]
model = "org/model"

[rollout]
reward = "score:reward"

[train.data.jsonl]
path = "train.jsonl"
"""
SCORE = """def reward(task, trajectory):
    return task.metadata["anwser"]


def graded(completions, **columns):
    return [0.0] * len(completions)
"""
UNKNOWN_REWARD = "rollout --server 127.0.0.1:9 --reward"


def replaced(old: str, new: str) -> dict[str, str]:
    assert old in RUN
    return {"run.toml": RUN.replace(old, new)}


CONFIGURATION = {
    "key": (
        "train run.toml",
        replaced("[train]\n", "[train]\nlearning_rat = 2e-5\n"),
        "penstock train: run.toml:8: train.learning_rat: unknown setting; did you mean "
        "train.learning_rate?",
    ),
    "section": (
        "train run.toml",
        replaced("[train]", "[trian]"),
        "penstock train: run.toml:7: trian: unknown table; did you mean train?",
    ),
    "elsewhere": (
        "train run.toml",
        replaced("[train]\n", "[train]\nsteps = 5\n"),
        "penstock train: run.toml:8: train.steps: unknown setting; did you mean run.steps?",
    ),
    "text for a number": (
        "train run.toml",
        replaced("groups_per_step = 8", 'groups_per_step = "many"'),
        "penstock train: run.toml:8: train.groups_per_step: expected a whole number, got 'many'",
    ),
    "bound": (
        "train run.toml",
        replaced("groups_per_step = 8", "groups_per_step = -8"),
        "penstock train: run.toml:8: train.groups_per_step: must be at least 1, got -8",
    ),
    "no file": (
        "train rum.toml",
        {},
        "penstock train: rum.toml: No such file or directory (in {here}); did you mean run.toml?",
    ),
    "syntax": (
        "train run.toml",
        replaced("[train]", "[train"),
        "penstock train: run.toml: Expected ']' at the end of a table declaration (at line 7, column 7)",
    ),
    "set": (
        "train run.toml --set train.lr=1e-5",
        {},
        "penstock train: --set train.lr: unknown setting; did you mean train.learning_rate?",
    ),
    "set without value": (
        "train run.toml --set train.learning_rate",
        {},
        "penstock train: --set train.learning_rate: a setting is written section.key=value, got "
        "'train.learning_rate'",
    ),
    "required": (
        "train run.toml",
        replaced('path = "train.jsonl"\n', ""),
        "penstock train: run.toml:4: data.jsonl.path: is required: path of the file",
    ),
    "no such data": (
        "train run.toml --dry-run",
        replaced("train.jsonl", "trian.jsonl"),
        "penstock train: run.toml:5: data.jsonl.path: trian.jsonl: No such file or directory (in {here}); "
        "did you mean train.jsonl?",
    ),
    "no such model": (
        "train run.toml --dry-run",
        replaced("org/model", "./model"),
        "penstock train: run.toml:2: model.path: there is no folder ./model",
    ),
    "kind": (
        "train run.toml --set algorithm.loss.kind=gsppo",
        {},
        "penstock train: --set algorithm.loss.kind: algorithm.loss: there is no kind 'gsppo'; did you mean "
        "gspo? It is one of ppo_clip, gspo, cispo, reinforce, custom",
    ),
    "of another kind": (
        "train run.toml --set algorithm.advantage.discount=0.9",
        {},
        "penstock train: --set algorithm.advantage.discount: unknown setting of grpo; gae has it",
    ),
    "no data": (
        "train run.toml",
        replaced('[data.jsonl]\npath = "train.jsonl"\n', ""),
        "penstock train: run.toml: data: is required: where prompts come from, and how they are sampled; "
        "it holds one of [data.reasoning_gym], [data.jsonl], [data.parquet], [data.huggingface], "
        "[data.python], [data.environment] or [[data.mixture]]",
    ),
    "yaml": (
        "train run.yaml",
        {"run.yaml": "train:\n  steps: 3\n"},
        "penstock train: run.yaml: Expected '=' after a key in a key/value pair (at line 1, column 6); a "
        "configuration is TOML",
    ),
    "boolean for a table": (
        "train run.toml --set model.lora=true",
        {},
        "penstock train: --set model.lora: expected a table: [model.lora] with rank and alpha, got true",
    ),
    "boolean for a number": (
        "train run.toml --set run.steps=true",
        {},
        "penstock train: --set run.steps: expected a whole number, got true",
    ),
    "text for a list of tables": (
        "train run.toml --set metrics.trackers=wandb",
        {},
        "penstock train: --set metrics.trackers: expected a list of tables: [[metrics.trackers]] with "
        "kind = \"wandb\", got 'wandb'",
    ),
    "three at once": (
        "train run.toml",
        replaced("groups_per_step = 8", "groups_per_step = 0\nlr = 1\n[lora]\nrank = 8"),
        "penstock train: run.toml:8: train.groups_per_step: must be at least 1, got 0\n"
        "penstock train: run.toml:9: train.lr: unknown setting; did you mean train.learning_rate?\n"
        "penstock train: run.toml:10: lora: unknown table; did you mean model.lora?",
    ),
    "in concert": (
        "train run.toml --set train.updates_per_step=9",
        {},
        "penstock train: run.toml:7 with --set train.updates_per_step: train: updates_per_step must be at "
        "most groups_per_step = 8, got 9: each update needs whole groups",
    ),
    "server": (
        "serve --model org/model --set lease.seconds=3",
        {},
        "penstock serve: --set lease.seconds: lease: unknown table; did you mean leases?",
    ),
    "up": (
        "up up.toml",
        {"up.toml": UP.replace('out = "out"', 'out = "out"\nrestart = 3')},
        "penstock up: up.toml:3: up.restart: unknown setting; did you mean up.restarts?",
    ),
    "up, of the server": (
        "up up.toml",
        {"up.toml": f"{UP}[serve.lease]\nseconds = 3\n"},
        "penstock up: up.toml:12: [serve]: lease: unknown table; did you mean serve.leases?",
    ),
    "up, of the workers": (
        "up up.toml --set rollout.concurency=8",
        {},
        "penstock up: --set rollout.concurency: rollout: No such option '--concurency'. Did you mean "
        "'--concurrency'?",
    ),
    "another name of a kind": (
        "train run.toml --set algorithm.advantage.kind=ppo",
        {},
        "penstock train: --set algorithm.advantage.kind: algorithm.advantage: there is no kind 'ppo'; did "
        "you mean gae? It is one of grpo, dr_grpo, rloo, reinforce_plus_plus, "
        "reinforce_plus_plus_baseline, gae, custom",
    ),
}
MODELS = {
    "no hub": (
        "train run.toml",
        {},
        "penstock train: run.toml:2: model.path: org/model is not in {here}/hub, and the hub cannot be "
        "asked: [Errno 111] Connection refused; give the path of a folder, or connect this machine",
    ),
    "a model that the cache nearly has": (
        "train run.toml --set model.path=org/modle",
        {"hub/models--org--model/snapshots/1/config.json": "{}"},
        "penstock train: --set model.path: org/modle is not in {here}/hub, and the hub cannot be asked: "
        "[Errno 111] Connection refused; did you mean org/model?",
    ),
    "no hub for the server": (
        "serve --model org/model --listen 127.0.0.1:0",
        {},
        "penstock serve: model: org/model is not in {here}/hub, and the hub cannot be asked: [Errno 111] "
        "Connection refused; give the path of a folder, or connect this machine",
    ),
    "no folder": (
        "serve --model /not/there",
        {},
        "penstock serve: --model: there is no folder /not/there",
    ),
    "no weights": (
        "serve --model ./model",
        {"model/config.json": "{}"},
        "penstock serve: --model: the folder ./model has no weights, such as model.safetensors",
    ),
    "too many GPUs": (
        "serve --model org/model --tensor-parallel-size 800",
        {},
        "penstock serve: --tensor-parallel-size: 800 processes of the engine, but this machine has ",
    ),
}
ADDRESSES = {
    "URL": (
        "rollout --server http://localhost:8000 --reward score:reward",
        {},
        "Error: Invalid value for '--server': an address reads HOST:PORT, got 'http://localhost:8000'; "
        "without scheme and path it is localhost:8000",
    ),
    "URL of the trainer": (
        "train run.toml --set server.address=http://localhost:8000/v1",
        {},
        "penstock train: --set server.address: an address reads HOST:PORT, got 'http://localhost:8000/v1'; "
        "without scheme and path it is localhost:8000",
    ),
    "URL to listen on": (
        "serve --model org/model --listen http://0.0.0.0",
        {},
        "penstock serve: --listen: an address reads HOST:PORT, got 'http://0.0.0.0'; "
        "without scheme and path it is 0.0.0.0:PORT",
    ),
    "no port": (
        "rollout --server localhost --reward score:reward",
        {},
        "Error: Invalid value for '--server': an address reads HOST:PORT, got 'localhost'",
    ),
    "no server": (
        "health 127.0.0.1:9",
        {},
        "penstock health: 127.0.0.1:9: connection refused; is a server running there?",
    ),
    "no such host": (
        "health penstock.invalid:9",
        {},
        "penstock health: penstock.invalid:9: there is no host of this name",
    ),
}
FUNCTIONS = {
    "no function": (
        f"{UNKNOWN_REWARD} score:rewrd",
        {},
        "--reward score:rewrd: score has no rewrd; did you mean reward? ({here}/score.py)",
    ),
    "no module": (
        f"{UNKNOWN_REWARD} scor:reward",
        {},
        "--reward scor:reward: cannot import scor: ModuleNotFoundError: No module named 'scor'; looked in "
        "{here} and among the installed packages; did you mean score?",
    ),
    "a dot": (
        f"{UNKNOWN_REWARD} score.reward",
        {},
        "--reward score.reward: write it as pkg.module:function; did you mean score:reward?",
    ),
    "another system's": (
        f"{UNKNOWN_REWARD} score:graded",
        {},
        "--reward score:graded: it is called with (task, trajectory): too many positional arguments; it is "
        "written as score:graded(completions, columns); for functions of trl give --style trl",
    ),
    "a reward of slime's own": (
        "rollout --server 127.0.0.1:9 --style slime --args args.toml",
        {"args.toml": 'rm_type = "deepscaler"\n'},
        "penstock rollout: --args sets rm_type = 'deepscaler', and Penstock has none of slime's own "
        "rewards; give a function with --reward, or custom_rm_path in --args",
    ),
    "a reward that raises": (
        "check up.toml",
        {"train.jsonl": '{"prompt": "1+1", "answer": "2"}\n'},
        "penstock check: up.toml:8: --reward score:reward: it raises KeyError for an empty answer to the "
        "first prompt: 'anwser'; the task's metadata has answer, data_source; did you mean answer?; try it "
        "with `penstock reward try`",
    ),
    "no reward": (
        "rollout --server 127.0.0.1:9",
        {},
        "give --reward, or a --generate, --environment or --command that returns the reward",
    ),
}
DATA = {
    "no prompt": (
        "eval --server 127.0.0.1:9 --data train.jsonl --reward score:reward",
        {"train.jsonl": '{"instruction": "1+1", "answer": "2"}\n'},
        "penstock eval: train.jsonl:1: no prompt in messages, prompt, question, problem; the row has "
        'instruction, answer; name it with columns = { prompt = "instruction" }, or --columns '
        "prompt=instruction",
    ),
    "a misspelt column": (
        "eval --server 127.0.0.1:9 --data train.jsonl --columns prompt=qestion --reward score:reward",
        {"train.jsonl": '{"question": "1+1"}\n'},
        "penstock eval: train.jsonl:1: no prompt in 'qestion'; the row has question; "
        "did you mean question?",
    ),
    "no such file": (
        "eval --server 127.0.0.1:9 --data trian.jsonl --reward score:reward",
        {},
        "penstock eval: --data: trian.jsonl: No such file or directory (in {here}); did you mean "
        "train.jsonl?",
    ),
    "no such set": (
        "eval --server 127.0.0.1:9 --task chian_sum --reward score:reward",
        {},
        "penstock eval: --task: 'chian_sum': Dataset 'chian_sum' not registered; did you mean chain_sum?",
    ),
}
LAUNCHING = {
    "reward forgotten": (
        "train --model ./model --data train.jsonl",
        {},
        "Error: give --reward too: training needs all three",
    ),
    "both ways": (
        "train run.toml --model ./model",
        {},
        "Error: --model and CONFIG are two ways to train: with --model, --data and --reward everything "
        "starts on this machine; with CONFIG, the trainer alone. Leave --model or run.toml out",
    ),
    "no file of the reward": (
        "train --model ./model --data train.jsonl --reward scor.py:reward",
        {},
        "penstock train: --reward scor.py:reward: scor.py: No such file or directory (in {here}); did "
        "you mean score.py?",
    ),
    "no model": (
        "train --model ./model --data train.jsonl --reward score.py:reward",
        {},
        "penstock train: --model: there is no folder ./model",
    ),
    "no recipe": (
        "init --recipe defalt",
        {},
        "penstock init: --recipe defalt: no such recipe; did you mean default?",
    ),
}
COMMANDS = {
    "no option of the engine": (
        "serve --model org/model --max-modellen 3",
        {},
        "penstock serve: --max-modellen: neither Penstock nor the engine has this option; did you mean "
        "--max-model-len?",
    ),
    "a beginning of two": (
        "serve --model org/model --device cuda",
        {},
        "penstock serve: --device: no option of the engine; it may begin --device-ids or "
        "--device-memory-utilization",
    ),
    "no option in the file": (
        "serve --config serve.toml",
        {"serve.toml": '[engine]\nmodel = "org/model"\nmax_modellen = 3\n'},
        "penstock serve: serve.toml:3: engine.max_modellen: neither Penstock nor the engine has this "
        "option; did you mean max_model_len?",
    ),
    "no command": ("help weigts", {}, "Error: there is no command 'weigts'; did you mean weights?"),
    "folder": (
        "up .",
        {},
        "Error: . is a folder, and CONFIG a TOML file; --status shows the run in a folder",
    ),
}
PLACES = {
    ("a",): 2,
    ("a", "b"): 2,
    ("text",): 3,
    ("train",): 8,
    ("train", "betas"): 9,
    ("train", "betas", 1): 9,
    ("train", "lr"): 13,
    ("evaluation",): 14,
    ("evaluation", 0, "name"): 15,
    ("evaluation", 1): 17,
    ("evaluation", 1, "name"): 18,
    ("evaluation", 1, "jsonl", "path"): 19,
    ("evaluation", 2): None,
    ("train", "steps"): None,
}
"""Lines of a text, below, by the place of a value."""
CASES = {**CONFIGURATION, **MODELS, **ADDRESSES, **FUNCTIONS, **DATA, **LAUNCHING, **COMMANDS}
NEEDS_VLLM = ("no option of the engine", "a beginning of two", "no option in the file")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    # Nothing listens there.
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    write({"run.toml": RUN, "up.toml": UP, "score.py": SCORE, "train.jsonl": '{"prompt": "1+1"}\n'})
    path = list(sys.path)
    yield tmp_path
    sys.path[:] = path
    sys.modules.pop("score", None)


def write(files: dict[str, str]) -> None:
    for name, text in files.items():
        Path(name).parent.mkdir(exist_ok=True, parents=True)
        Path(name).write_text(text)


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_answered(here: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    if name in NEEDS_VLLM and not known_options():
        pytest.skip("vLLM is not installed")
    command, files, answer = CASES[name]
    write(files)
    caplog.set_level(logging.INFO)
    done = CliRunner().invoke(main, command.split())
    said = done.output + "\n".join(record.getMessage() for record in caplog.records)
    assert answer.replace("{here}", str(here)) in said
    assert "Traceback" not in said and "pydantic" not in said and "Input should" not in said
    # A server that does not answer is a failure, all others are misuse.
    assert done.exit_code == (1 if name in ("no server", "no such host") else 2), said


@pytest.mark.parametrize("name", CASES)
def test_the_page_shows_the_command_and_the_answer(name: str) -> None:
    command, _, answer = CASES[name]
    text = " ".join(PAGE.read_text().split())
    assert f"`penstock {command}`" in text
    for line in answer.replace("{here}", "FOLDER").splitlines():
        assert " ".join(line.split()) in text


def test_a_list_of_mistakes_has_a_line_each() -> None:
    command, files, answer = CASES["three at once"]
    write(files)
    done = CliRunner().invoke(main, command.split())
    assert sorted(done.output.splitlines()) == sorted(answer.splitlines())


def test_a_key_that_a_reward_misses_is_answered_with_those_that_there_are() -> None:
    task: Any = SimpleNamespace(metadata={"answer": "2", "data_source": "sums"})
    sys.path.insert(0, str(Path.cwd()))
    try:
        importlib.import_module("score").reward(task, None)
    except KeyError as error:
        failed, logged = as_failed(error, task), to_log(error)
    assert failed.reason == "KEY_ERROR"
    assert failed.message == (
        "'anwser'; the task's metadata has answer, data_source; did you mean answer?"
    )
    assert logged is not None
    # Nothing of Penstock's own is in the traceback.
    files = [frame.filename for frame in traceback.extract_tb(logged[2])]
    assert files[-1].endswith("score.py")
    # A key of something else says what the metadata has, too; one that is there is left alone.
    assert as_failed(KeyError("answer"), task).message == "'answer'"
    assert as_failed(KeyError(3), task).message == "3"
    assert to_log(RewardInvalid("a reward must be a number, not str")) is None


def test_the_line_of_a_value_is_found_in_any_toml() -> None:
    text = """# [train] in a comment
a.b = 1
text = '''
[train]
lr = 1
'''

[train]
betas = [
  0.1,
  0.2,
]
"lr" = 3
[[evaluation]]
name = "x"

[[evaluation]]
name = "y"
jsonl = { path = "z" }
"""
    found = {place: line_of(text, place) for place in PLACES}
    assert found == PLACES


def penstock(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        (sys.executable, "-m", "penstock.cli", *arguments),
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
        check=False,
    )


def test_up_names_its_own_file_for_what_the_trainer_refuses() -> None:
    write({"up.toml": f"{UP}[train.run]\nstepz = 3\n"})
    done = penstock("up", "up.toml")
    assert (done.returncode, done.stderr) == (
        2,
        "penstock up: up.toml:13: [train]: run.stepz: unknown setting; did you mean train.run.steps?\n",
    )


def test_a_port_in_use_is_found_before_the_engine_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        # Importing it would fail.
        write({"vllm/__init__.py": "raise SystemExit('vllm was imported')\n"})
        done = penstock(
            "serve", "--model", "org/model", "--listen", address, PYTHONPATH=str(Path.cwd())
        )
    assert (done.returncode, done.stderr) == (
        1,
        f"penstock serve: cannot listen on {address}: address already in use; set listen or "
        "http.listen to another, or to port 0 for a free one\n",
    )


@pytest.mark.parametrize("words", [["-h"], ["help"], ["help", "weights", "push"], ["-V"]])
def test_help_and_version_are_where_people_look(words: list[str]) -> None:
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0
    assert ("version" if words == ["-V"] else "Usage:") in done.output


@pytest.mark.parametrize("command", list(main.commands))
def test_every_command_takes_h(command: str) -> None:
    # click keeps the help option that this makes without the group's settings.
    CliRunner().invoke(main.commands[command], ["--help"])
    done = CliRunner().invoke(main, [command, "-h"])
    assert (done.exit_code, "Usage:" in done.output) == (0, True), done.output
