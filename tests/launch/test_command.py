"""`penstock train --model`: what it chooses and writes, and how it answers each mistake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from penstock.cli.__main__ import main
from penstock.launch import command
from penstock.launch.choices import Data, Launch, choose, render
from penstock.launch.errors import LaunchInvalid
from penstock.launch.layout import Layout, lay_out
from penstock.launch.model import Model, longest_prompt, read_model
from penstock.machine.devices import Machine
from penstock.machine.gpus import Gpu
from penstock.up.config import load
from tests.support.tiny_model import make_tiny_model

GB = 10**9
ROWS = [{"prompt": "6 times 7?", "answer": "42"}, {"prompt": "a" * 300, "answer": "1"}]
REWARD = """def score(task, trajectory):
    return float(task.metadata["answer"] in trajectory.text)

def typo(task, trajectory):
    return float(task.metadata["anwser"])

def graded(completions, **columns):
    return [0.0 for _ in completions]
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name in ("my.py", "json.py"):
        (tmp_path / name).write_text(REWARD)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("my", None)


Train = Callable[..., Result]


@pytest.fixture
def train(here: Path, tiny: Path) -> Train:
    """Calls the command; an option that is None is left out."""

    def call(*more: str, **options: str | None) -> Result:
        given = {"model": str(tiny), "data": "train.jsonl", "reward": "my.py:score", **options}
        words = [word for name, v in given.items() if v is not None for word in (f"--{name}", v)]
        return CliRunner().invoke(main, ["train", *words, *more])

    return call


def test_a_dry_run_prints_the_file_and_leaves_nothing(train: Train, here: Path, tiny: Path) -> None:
    done = train("--dry-run", "--steps", "7", "--set", "train.run.seed=3")
    assert done.exit_code == 0, done.output
    file = tomllib.loads(done.stdout)
    assert file["serve"]["engine"]["model"] == str(tiny)
    assert file["rollout"]["reward"] == f"{here}/my.py:score"
    assert file["train"]["data"]["jsonl"] == {"path": f"{here}/train.jsonl"}
    assert file["train"]["run"] == {"steps": 7, "seed": 3}
    assert file["train"]["checkpoint"]["every_steps"] == 1
    # A byte is a token: 300, and what the chat template adds at most.
    longest, answer = 300 + 64 + 8, file["train"]["data"]["sampling"]["max_tokens"]
    assert answer == 256
    assert longest + answer <= file["serve"]["engine"]["max-model-len"] < longest + answer + 64
    assert "# 56 prompts, 28 passes of the data" in done.stdout
    assert not (here / "runs").exists()


def test_every_option_has_its_place(train: Train, here: Path) -> None:
    options = ["--group-size", "4", "--max-tokens", "16", "--learning-rate", "0.001", "--lora"]
    options += ["--style", "trl", "--out", "first", "--ranks", "2"]
    options += ["--columns", "prompt=prompt,answer=answer"]
    done = train(*options, "--dry-run", reward="my.py:graded")
    assert done.exit_code == 0, done.output
    file = tomllib.loads(done.stdout)
    assert file["up"] == {"out": str(here / "first"), "trainer_ranks": 2}
    assert file["train"]["data"]["group_size"] == 4
    assert file["train"]["data"]["sampling"] == {"max_tokens": 16}
    assert file["train"]["data"]["jsonl"]["columns"] == {"prompt": "prompt", "answer": "answer"}
    assert file["train"]["train"]["learning_rate"] == 0.001
    assert file["train"]["model"]["lora"] == {"rank": 32, "alpha": 64.0}
    assert file["serve"]["engine"]["enable-lora"]
    assert file["rollout"] == {
        "reward": f"{here}/my.py:graded",
        "style": "trl",
        "concurrency": 32,
    }


def test_a_setting_replaces_a_choice(train: Train) -> None:
    done = train("--dry-run", "--set", "train.data.sampling={max_tokens=9,temperature=0.5}")
    assert done.exit_code == 0, done.output
    assert tomllib.loads(done.stdout)["train"]["data"]["sampling"] == {
        "max_tokens": 9,
        "temperature": 0.5,
    }


def test_the_check_can_be_turned_off(train: Train) -> None:
    done = train("--dry-run", "--set", "up.check=false", reward="my.py:typo")
    assert done.exit_code == 0, done.output
    assert tomllib.loads(done.stdout)["up"]["check"] is False


def test_a_function_may_give_the_data(train: Train, here: Path) -> None:
    (here / "rows.py").write_text(
        "def make():\n    while True:\n        yield {'prompt': 'x?', 'answer': 'x'}\n"
    )
    done = train("--dry-run", data="rows.py:make")
    assert done.exit_code == 0, done.output
    assert tomllib.loads(done.stdout)["train"]["data"]["python"] == {
        "function": f"{here}/rows.py:make"
    }


@pytest.mark.parametrize(
    ("more", "options", "said"),
    [
        ([], {"model": None}, "give --model too: training needs all three"),
        ([], {"data": None, "reward": None}, "give --data and --reward too: training needs all three"),
        ([], {"model": None, "data": None, "reward": None}, "give --model, --data and --reward, or CONFIG"),
        (["run.toml"], {}, "--model and CONFIG are two ways to train"),
        (["--resume"], {}, "--resume requires CONFIG; a run of --model resumes"),
        (["--steps", "0"], {}, "--steps': 0 is not in the range"),
        ([], {"model": "./nowhere"}, "there is no folder ./nowhere"),
        ([], {"model": "."}, ". is a folder without a config.json"),
        ([], {"data": "trian.jsonl"}, "--data: trian.jsonl: No such file or directory (in {here})"),
        ([], {"data": "train.csv"}, "--data train.csv: expected a *.jsonl or *.parquet file"),
        ([], {"columns": "prompt=promt"}, "train.jsonl:1: no prompt in 'promt'; the row has prompt"),
        ([], {"columns": "pormpt=x"}, "unknown setting; did you mean prompt?"),
        ([], {"reward": "my.py:scor"}, "--reward my.py:scor: my has no scor; did you mean score?"),
        ([], {"reward": "me.py:score"}, "--reward me.py:score: me.py: No such file or directory"),
        ([], {"reward": "json.py:score"}, "json.py: its name is that of another module,"),
        ([], {"reward": "my.score"}, "write it as pkg.module:function; did you mean my:score?"),
        ([], {"reward": "my.py:typo"}, "train: --reward {here}/my.py:typo: it raises KeyError for an"),
        ([], {"reward": "my.py:graded"}, "for functions of trl give --style trl"),
        (["--max-tokens", "4000"], {}, "the longest prompt has 372 tokens, and the model's context 2048"),
        (["--set", "train.run.steps"], {}, "--set train.run.steps: a setting is written section.key=value"),
        (["--set", "train.run.stepz=5", "--dry-run"], {}, "unknown setting; did you mean train.run.steps?"),
        (["--set", "up.out.x=5"], {}, "--set: a value is set as a table too"),
        (["--out", "my.py"], {}, "--out my.py: "),
        (["--lora", "run.toml"], {"model": None, "data": None, "reward": None}, "--lora and CONFIG"),
    ],
)  # fmt: skip
def test_a_mistake_is_answered_before_anything_starts(
    train: Train, here: Path, more: list[str], options: dict[str, Any], said: str
) -> None:
    done = train(*more, **options)
    assert done.exit_code == 2, done.output
    assert said.format(here=here) in " ".join(done.output.split()), done.output
    assert not (here / "runs").exists()


def test_several_mistakes_are_told_at_once(train: Train, here: Path) -> None:
    done = train(model="./nowhere", data="trian.jsonl", reward="my.py:scor")
    assert (done.exit_code, done.output.splitlines()) == (
        2,
        [
            "penstock train: --model: there is no folder ./nowhere",
            f"penstock train: --data: trian.jsonl: No such file or directory (in {here}); did you mean "
            "train.jsonl?",
            "penstock train: --reward my.py:scor: my has no scor; did you mean score? "
            f"({here}/my.py)",
        ],
    )


def test_a_folder_that_holds_a_run_is_left_alone(train: Train, here: Path) -> None:
    (here / "out").mkdir()
    (here / "out" / "run.toml").write_text("mine")
    done = train("--out", "out")
    assert done.exit_code == 2
    assert "--out out: it holds a run already; to continue: penstock up out/run.toml" in done.output
    assert (here / "out" / "run.toml").read_text() == "mine"


def test_a_prompt_that_leaves_no_room_is_shown(train: Train, here: Path) -> None:
    (here / "train.jsonl").write_text(json.dumps({"prompt": "once upon " * 300}) + "\n")
    done = train()
    assert done.exit_code == 2
    assert "--data: a prompt has about 3072 tokens, and the model's context is 2048" in done.output
    assert "'once upon once" in done.output


def test_a_system_prompt_counts(train: Train) -> None:
    plain, asked = (
        tomllib.loads(train("--dry-run", *more).stdout)["serve"]["engine"]["max-model-len"]
        for more in ([], ["--set", f"train.data.system_prompt={'s' * 640}"])
    )
    assert asked - plain >= 640


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda folder: (folder / "config.json").write_text("{"), "config.json: Expecting property name"),
        (lambda folder: (folder / "config.json").write_text("{}"), "has no max_position_embeddings"),
        (
            lambda folder: (folder / "config.json").write_text('{"quantization_config": {}}'),
            "is quantized; use the model that it was quantized from",
        ),
        (lambda folder: os.truncate(folder / "model.safetensors", 2000), "safetensors: .*copy it again"),
        (lambda folder: (folder / "model.safetensors").unlink(), "has no weights, such as model"),
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
            r"has no \*\.safetensors; save the model in that format",
        ),
    ],
)  # fmt: skip
def test_a_broken_model_is_refused(
    tmp_path: Path, change: Callable[[Path], object], said: str
) -> None:
    folder = make_tiny_model(tmp_path / "m")
    change(folder)
    with pytest.raises(command.ModelUnavailable, match=said):
        read_model(str(folder), print)


def test_tokens_are_those_of_the_tokenizer_or_an_upper_bound(tiny: Path, tmp_path: Path) -> None:
    model = read_model(str(tiny), print)
    assert (model.context, model.parameters) == (2048, model.parameters)
    assert 50_000 < model.parameters < 500_000
    prompts = [[("user", "ab")], [("user", "abcdef"), ("assistant", "x"), ("user", "y")], []]
    assert longest_prompt(model, prompts, "") == (64 + 3 * 8 + 8, 1)
    without = replace(model, folder=tmp_path)
    assert longest_prompt(without, prompts, "") == (64 + 3 * 8 + 3 + 1 + 1, 1)


DATA = Data({"jsonl": {"path": "/d/train.jsonl"}}, 100, 200)
GIVEN = Launch("Qwen/Qwen3-0.6B", "train.jsonl", "my:score")


@pytest.mark.parametrize(
    ("count", "parameters"), [(1, 6e8), (1, 8e9), (2, 6e8), (8, 6e8), (8, 8e9)]
)
def test_the_file_for_gpus_is_one_that_up_takes(
    tmp_path: Path, count: int, parameters: float
) -> None:
    gpu = Gpu("GPU", 80 * GB, 80 * GB, 9.0, "580")
    machine = Machine("16 cores", 200 * GB, (gpu,) * count, bfloat16=True)
    layout = lay_out(machine, int(parameters), lora=False, ranks=None)
    model = Model(Path("/m"), int(parameters), 40_960)
    path = tmp_path / "run.toml"
    path.write_text(render(choose(GIVEN, tmp_path / "o", machine, model, layout, DATA), ["a"]))
    config = load(path, [])
    assert config.train is not None
    assert config.train["train"]["groups_per_step"] == 32
    assert ("lora" in config.train["model"]) == (parameters > 1e9 and count == 1)
    engine = config.engines["engine"] if config.engine_count else config.serve["engine"]
    assert engine["max-model-len"] == 1280
    assert ("gpu-memory-utilization" in engine) == (count == 1)
    gpus = config.cluster.engine.gpus * max(1, config.engine_count)
    assert gpus + config.cluster.trainer.gpus * config.up.trainer_ranks == (
        0 if count == 1 else count
    )


def test_the_answer_has_what_the_prompt_leaves() -> None:
    machine, model = Machine("2 cores", 16 * GB), Model(Path("/m"), 10**8, 400)
    layout = Layout(1, 1, lora=False)
    choices = choose(GIVEN, Path("/o"), machine, model, layout, DATA)
    assert choices["train.data.sampling.max_tokens"].value == 200
    assert choices["serve.engine.max-model-len"].value == 400
    with pytest.raises(LaunchInvalid, match="at most 200 remain"):
        choose(replace(GIVEN, max_tokens=201), Path("/o"), machine, model, layout, DATA)


def test_help_of_the_command_loads_nothing_heavy() -> None:
    look = (
        "import sys; from penstock.cli.__main__ import main; "
        "main(['train', '-h'], standalone_mode=False); "
        "sys.exit(bool({'torch', 'penstock.trainer', 'penstock.launch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "--model" in done.stdout
