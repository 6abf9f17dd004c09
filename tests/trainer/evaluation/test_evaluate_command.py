"""`penstock eval`: alone, next to a trainer, and with a separate server around the fake engine."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from penstock.client import FinishReason, Patience, Task, Trajectory, group_reward
from penstock.client.calls import Calls
from penstock.client.sampling import SamplingParams
from penstock.client.scoring import single_turn
from penstock.demo.evaluate import main as serve_and_evaluate
from penstock.trainer.commands import evaluate as evaluate_command
from penstock.trainer.commands.evaluate import main
from penstock.trainer.commands.evaluate_alone import Extent, Functions, Measuring
from penstock.trainer.commands.evaluate_sets import Given, open_sets
from penstock.trainer.config.data import DataConfig
from penstock.trainer.config.trainer import load_config
from penstock.trainer.data.sources.factory import open_source
from penstock.trainer.evaluation.record import EvaluationRecord
from penstock.trainer.evaluation.sets import EvaluationSet
from tests.support.harness import Harness, hello
from tests.support.tiny_model import make_tiny_model

PROMPTS = 7


def data(folder: Path) -> Path:
    path = folder / "held-out.jsonl"
    rows: list[dict[str, Any]] = [{"prompt": f"p{n}", "n": n, "answer": n} for n in range(PROMPTS)]
    rows[0]["data_source"] = "named"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


async def measure(
    harness: Harness,
    folder: Path,
    reward: Any,
    *,
    generate: Any = single_turn,
    per_group: bool = False,
    **fields: Any,
) -> EvaluationRecord:
    config = DataConfig.model_validate({"jsonl": {"path": str(data(folder))}})
    extent = Extent(
        **{
            "name": "held-out",
            "prompts": PROMPTS,
            "samples_per_prompt": 2,
            "concurrency": 3,
            "attempts": 2,
            "sampling": SamplingParams(max_tokens=5),
            **fields,
        }
    )
    calls = Calls(f"127.0.0.1:{harness.port}", Patience())
    try:
        functions = Functions(generate, reward, per_group)
        return await Measuring(calls, open_source(config, 0), functions, extent).run()
    finally:
        await calls.close()


async def test_a_trainer_of_the_same_server_notices_nothing(
    tmp_path: Path, harness: Harness
) -> None:
    exchange = await hello(harness.wire, 1 << 62)
    exchange.send(demand={"group_count": 5})
    exchange.send(demand={"group_count": 5, "purpose": 2})
    active: list[int] = []

    async def reward(task: Task, trajectory: Trajectory) -> float:
        active.append(harness.engine.max_running)
        return float(task.metadata["n"] % 2)

    record = await measure(harness, tmp_path, reward)
    assert (record.figures.prompts, record.figures.samples) == (7, 14)
    assert record.figures.reward_mean == pytest.approx(3 / 7)
    assert record.figures.pass_at == {"1": pytest.approx(3 / 7), "2": pytest.approx(3 / 7)}
    assert (record.weight_version, record.mixed_groups, record.lag) == (0, 0, 0)
    assert record.by_source.keys() == {"held-out", "named"}
    assert harness.engine.max_running <= 3 * 2
    # The trainer's session neither ended nor received anything, and it can still switch weights.
    await exchange.nothing()
    await harness.upload(1, staged=True)
    exchange.send(switch_weights={"weight_version": 1})
    assert (await exchange.receive("weight_receipt")).active_weight_version == 1
    assert harness.serving.store.open_count == 0


async def test_a_function_that_cancels_itself_is_a_failure_and_ends_nothing(
    tmp_path: Path, harness: Harness
) -> None:
    async def cancels(task: Task, trajectory: Trajectory) -> None:
        await trajectory.turn()
        if task.metadata["n"] % 2:
            sleeping = asyncio.create_task(asyncio.sleep(60))
            sleeping.cancel()
            await sleeping

    async def reward(task: Task, trajectory: Trajectory) -> float:
        return 1.0

    @group_reward
    async def together(task: Task, trajectories: list[Trajectory]) -> list[float]:
        return [1.0] * len(trajectories)

    for each, per_group in ((reward, False), (together, True)):
        record = await measure(harness, tmp_path, each, generate=cancels, per_group=per_group)
        assert (record.figures.prompts, record.prompts_missing) == (4, 0)
        assert record.failure_reasons == {"CANCELLED": 6}
        assert record.figures.samples == 8


async def test_an_async_function_behind_a_plain_one_is_refused_by_name(
    tmp_path: Path, harness: Harness
) -> None:
    async def reward(task: Task, trajectory: Trajectory) -> float:
        return 1.0

    def generate(task: Task, trajectory: Trajectory) -> Any:
        return reward(task, trajectory)

    record = await measure(harness, tmp_path, reward, generate=generate)
    assert record.failure_reasons == {"TYPE_ERROR": 2 * PROMPTS}


async def test_a_function_sees_its_task_and_its_place_as_a_worker_s_does(
    tmp_path: Path, harness: Harness
) -> None:
    seen: list[tuple[int, int]] = []

    async def reward(task: Task, trajectory: Trajectory) -> float:
        assert trajectory.task is task
        seen.append((task.index, trajectory.sample_index))
        return 0.0

    await measure(harness, tmp_path, reward)
    assert sorted(seen) == [(index, sample) for index in range(PROMPTS) for sample in range(2)]


async def test_the_versions_of_branches_are_an_attempt_s_too(
    tmp_path: Path, harness: Harness
) -> None:
    async def generate(task: Task, trajectory: Trajectory) -> None:
        await trajectory.turn()
        if task.metadata["n"] == 3 and harness.engine.version == 0:
            await harness.upload(1)
            branch = trajectory.branch(f"{trajectory.trajectory_id}-branch")
            await branch.turn("aside", max_tokens=3)

    async def reward(task: Task, trajectory: Trajectory) -> float:
        return 0.0

    fields = {"concurrency": 1, "samples_per_prompt": 1}
    record = await measure(harness, tmp_path, reward, generate=generate, **fields)
    assert record.mixed_groups == 1


async def test_the_table_says_which_versions_sampled(
    tmp_path: Path, harness: Harness, capsys: pytest.CaptureFixture[str]
) -> None:
    async def reward(task: Task, trajectory: Trajectory) -> float:
        if task.metadata["n"] == 3 and harness.engine.version == 0:
            await harness.upload(1)
        return 0.0

    record = await measure(harness, tmp_path, reward, concurrency=1)
    assert (record.oldest_weight_version, record.newest_weight_version) == (0, 1)
    evaluate_command._report(record)
    assert "held-out, version 0 to 1" in capsys.readouterr().out
    # Names are printed literally, whatever markup they resemble.
    figures = dict.fromkeys(("gsm8k [main]", "[/hard]"), record.figures)
    odd = dataclasses.replace(record, name="[b]", by_source=figures)
    evaluate_command._report(odd)
    said = capsys.readouterr().out
    assert "[b], version 0 to 1" in said and "gsm8k [main]" in said and "[/hard]" in said


async def test_what_fails_is_made_again_and_then_counted(tmp_path: Path, harness: Harness) -> None:
    tried: dict[int, int] = {}

    async def fragile(task: Task, trajectory: Trajectory) -> float:
        tried[task.index] = tried.get(task.index, 0) + 1
        if task.metadata["n"] == 3 or tried[task.index] == 1:
            raise RuntimeError("no")
        return 1.0

    record = await measure(harness, tmp_path, fragile, samples_per_prompt=1)
    assert set(tried.values()) == {2}
    assert (record.figures.prompts, record.figures.failures) == (6, 1)
    assert record.failure_reasons == {"RUNTIME_ERROR": 1}


async def test_samples_of_a_prompt_can_be_scored_together(tmp_path: Path, harness: Harness) -> None:
    @group_reward
    def longest(task: Task, trajectories: Any) -> list[float]:
        lengths = [len(one.text) for one in trajectories]
        return [float(length == max(lengths)) for length in lengths]

    record = await measure(harness, tmp_path, longest, per_group=True)
    assert record.figures.samples == 14 and record.figures.failures == 0
    assert record.figures.pass_at["2"] == 1.0


async def test_an_agent_of_several_turns_is_measured_over_all_of_them(
    tmp_path: Path, harness: Harness
) -> None:
    async def twice(task: Task, trajectory: Trajectory) -> float:
        await trajectory.turn(max_tokens=4, ignore_eos=True)
        await trajectory.turn("Again.", max_tokens=2)
        return 1.0

    record = await measure(harness, tmp_path, None, generate=twice)
    assert record.figures.tokens_mean == 6.0 and record.figures.truncated_share == 1.0


async def test_an_answer_is_not_cut_off_because_nothing_more_has_room(
    tmp_path: Path, harness: Harness
) -> None:
    ends: dict[int, int] = {}

    async def full(task: Task, trajectory: Trajectory) -> float:
        n = cast("int", task.metadata["n"])
        options: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True}
        if n in ends:
            options["stop_token_ids"] = [ends[n]]
        written = await trajectory.turn(**options)
        if n % 2:
            # In the next turn of this task, stop at the first token. The other tasks are truncated
            # then, too.
            ends[n] = int(written.token_ids[0])
        turn = await trajectory.turn("x" * 2_000, max_tokens=2)
        assert not len(turn.token_ids) and turn.finish_reason is FinishReason.LENGTH
        return 1.0

    fields = {"generate": full, "samples_per_prompt": 1}
    record = await measure(harness, tmp_path, None, **fields)
    assert record.figures.truncated_share == 1.0
    record = await measure(harness, tmp_path, None, **fields)
    assert record.figures.truncated_share == pytest.approx(1 - len(ends) / PROMPTS)


async def run(*arguments: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(110):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def test_a_command_line_that_cannot_be_used_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(data(tmp_path))
    reward = ("--reward", "penstock.demo.rewards:printable_share")
    server = ("--server", "127.0.0.1:1")
    wrong: list[tuple[tuple[str, ...], str]] = [
        (("--data", path, *reward), "give --server"),
        ((*server, *reward), "either --data or --task"),
        ((*server, "--data", path), "give --reward"),
        ((*server, "--data", path, "--reward", "nowhere:f"), "--reward nowhere:f"),
        ((*server, "--data", "x.txt", *reward), "expected a *.jsonl"),
        ((*server, "--data", str(tmp_path / "none.jsonl"), *reward), "none.jsonl"),
        ((*server, "--data", "s3://bucket/x.csv", *reward), "x.csv: expected a *.jsonl"),
        ((*server, "--task", "", *reward), "--task : "),
        ((*server, "--task", "sums", "--max-model-len", "9"), "requires --model"),
        ((*server, "--task", "sums", "--passes-from", "nan"), "nan is not a finite number"),
        ((*server, "--task", "sums", "--temperature", "nan"), "nan is not a finite number"),
        ((*server, "--task", "sums", "--temperature", "-1"), "range"),
    ]
    for arguments, said in wrong:
        assert main(list(arguments)) == 2
        assert said in capsys.readouterr().err
    assert main([*server, "--data", path, *reward, "--dry-run"]) == 0
    assert main([*server, "--task", "sums", "--dry-run"]) == 0
    assert serve_and_evaluate(["--model", "m", *server, "--task", "sums"]) == 2
    assert "leave --server out" in capsys.readouterr().err


TRAINER = """
[server]
address = "{address}"
[model]
path = "nobody/reads-it"
[data]
system_prompt = "Of all."
sampling = {{ temperature = 0.5, max_tokens = 9 }}
jsonl = {{ path = "{data}" }}
[algorithm]
advantage = {{ kind = "grpo" }}
[[evaluation]]
name = "mixed"
prompts = 6
samples_per_prompt = 2
concurrency = 2
sampling = {{ stop = ["never"], max_tokens = 4, top_k = 7 }}
[[evaluation.mixture]]
name = "rows"
weight = 1.0
jsonl = {{ path = "{data}" }}
[[evaluation.mixture]]
name = "sums"
weight = 1.0
python = {{ function = "penstock.demo.tasks:sums" }}
[[evaluation]]
name = "rows-alone"
system_prompt = ""
passes_from = 0.5
jsonl = {{ path = "{data}" }}
[[evaluation]]
name = "game"
environment = {{ name = "textarena:GuessTheNumber-v0" }}
"""


def trainer_file(folder: Path, address: str = "127.0.0.1:1") -> Path:
    path = folder / "trainer.toml"
    path.write_text(TRAINER.format(address=address, data=data(folder)))
    return path


def test_the_sets_of_a_trainers_file_are_asked_as_the_trainer_asks_them(tmp_path: Path) -> None:
    path = trainer_file(tmp_path)
    config = load_config(path)
    mixed, rows, _ = open_sets(config, path, (), Given(), attempts=3)
    assert mixed.extent == Extent(
        name="mixed",
        prompts=6,
        samples_per_prompt=2,
        concurrency=2,
        attempts=3,
        sampling=SamplingParams(temperature=0.5, top_p=1.0, top_k=7, max_tokens=4, stop=("never",)),
        system_prompt="Of all.",
    )
    assert (rows.extent.prompts, rows.extent.system_prompt, rows.extent.passes_from) == (7, "", 0.5)
    for evaluation, measured in zip(config.evaluation, (mixed, rows), strict=False):
        trainers = EvaluationSet(evaluation, config.data)
        for index in range(measured.extent.prompts):
            assert trainers.source.problem(index) == measured.source.problem(index)
    # Options of the command line override the file.
    given = Given(prompts=3, samples=1, temperature=0.0, stop=("a",), system_prompt="Mine.")
    (over,) = open_sets(config, path, ("mixed",), given, attempts=1)
    assert (over.extent.prompts, over.extent.samples_per_prompt) == (3, 1)
    assert over.extent.sampling == SamplingParams(
        temperature=0.0, top_p=1.0, top_k=7, max_tokens=4, stop=("a",)
    )
    assert (over.extent.system_prompt, over.extent.concurrency) == ("Mine.", 2)


def test_a_trainers_file_that_does_not_say_what_to_measure_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, reward = trainer_file(tmp_path), ("--reward", "penstock.demo.rewards:printable_share")
    none = tmp_path / "none.toml"
    none.write_text(
        TRAINER.format(address="h:1", data=data(tmp_path)).partition("[[evaluation]]")[0]
    )
    several = tmp_path / "several.toml"
    several.write_text(file.read_text().replace('"127.0.0.1:1"', '["127.0.0.1:1", "127.0.0.1:2"]'))
    wrong: list[tuple[tuple[str, ...], str]] = [
        (("--config", str(file), "--task", "sums"), "or --config"),
        (("--config", str(file), *reward, "--only", "other"), "--only other"),
        (("--task", "sums", "--only", "mixed", "--server", "h:1"), "--only requires --config"),
        (("--config", str(none), *reward), "has no [[evaluation]]"),
        (("--config", str(several), *reward), "several servers"),
        (("--config", str(file), *reward), "the prompts of game come from an environment"),
        (("--config", str(file), "--only", "mixed"), "give --reward"),
        (("--config", str(file), *reward, "--args", str(file)), "--args requires a --style"),
        (("--config", str(file), "--style", "verl"), "--style verl requires --reward"),
    ]
    for arguments, said in wrong:
        assert main(list(arguments)) == 2
        assert said in capsys.readouterr().err
    assert main(["--config", str(file), *reward, "--only", "mixed", "--dry-run"]) == 0
    assert main(["--config", str(file), "--environment", "textarena", "--dry-run"]) == 0


def test_a_worker_s_token_counts_over_that_of_a_trainers_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, token = trainer_file(tmp_path), tmp_path / "worker-token"
    address = 'address = "127.0.0.1:1"'
    assert address in file.read_text()
    file.write_text(file.read_text().replace(address, f'{address}\ntoken_file = "not-mine"'))
    reward = ("--reward", "penstock.demo.rewards:printable_share", "--only", "mixed")
    arguments = ["--config", str(file), *reward, "--dry-run"]
    assert main(arguments) == 2
    assert "not-mine" in capsys.readouterr().err
    token.write_text("abcdefgh" * 5)
    assert main([*arguments, "--token-file", str(token)]) == 0
    monkeypatch.setenv("PENSTOCK_TOKEN", token.read_text())
    assert main(arguments) == 0


async def test_every_set_of_a_file_has_a_table_and_a_line_and_functions_of_another_system_score_it(
    tmp_path: Path, harness: Harness
) -> None:
    file = trainer_file(tmp_path, f"127.0.0.1:{harness.port}")
    status, out, err = await run(
        *("-m", "penstock.cli", "eval", "--config", str(file), "--style", "verl"),
        *("--reward", "tests.support.verl_reward:score_row", "--prompts", "4"),
        *("--only", "mixed", "--only", "rows-alone", "--attempts", "1"),
    )
    assert status == 0, err
    mixed, rows = (json.loads(line) for line in out.splitlines() if line.startswith("{"))
    # The reward function does not know the source "sums".
    assert (mixed["name"], mixed["prompts"], mixed["failures"]) == ("mixed", 2, 4)
    assert mixed["failure_reasons"] == {"KEY_ERROR": 4}
    assert (rows["name"], rows["samples"], rows["reward_mean"]) == ("rows-alone", 4, 1.5)
    assert "rows-alone, version 0" in out


def test_a_server_that_is_not_there_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--server", "127.0.0.1:1", "--task", "sums", "--reconnect-timeout", "0.1"]
    assert main(arguments) == 1
    assert "penstock eval: " in capsys.readouterr().err


async def test_with_a_model_it_serves_that_itself_and_ends_with_json(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", layers=1)
    program = (
        "import sys; from penstock.demo.evaluate import main; "
        "sys.exit(main(sys.argv[1:], (sys.executable, '-m', 'tests.support.fake_serve')))"
    )
    status, out, err = await run(
        *("-c", program, "--model", str(model), "--data", str(data(tmp_path))),
        *("--reward", "penstock.demo.rewards:printable_share", "--max-tokens", "8"),
        *("--samples", "2", "--prompts", "5"),
    )
    assert status == 0, err
    line = json.loads(out.splitlines()[-1])
    assert (line["kind"], line["prompts"], line["samples"]) == ("evaluation", 5, 10)
    assert "pass@2" in out
