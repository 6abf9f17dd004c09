"""The demo's parts: rewards, the tiny model, model sources, and processes."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import astuple, fields, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from rich.console import Console

from penstock.client import Message, connect
from penstock.client.tasks import Task
from penstock.demo import answers, model, rewards, run, settings, tasks
from penstock.demo.answers import Answers, ask
from penstock.demo.command import (
    check_gpus,
    check_task,
    demo,
    last_line,
    main,
    next_commands,
    read_target,
)
from penstock.demo.summary import Run, Step, summarize
from penstock.demo.tiny import END_OF_TURN_ID, write_model
from penstock.machine.devices import Machine
from penstock.machine.gpus import Gpu
from penstock.up.processes import (
    LONGEST_LINE_BYTES,
    Command,
    FirstMatch,
    Process,
    ProcessFailed,
    going_on,
    log_writer,
    write_files,
)
from tests.support.harness import serve


class Answer:
    """The part of a trajectory that a reward function uses: the last turn, its text and its tokens."""

    def __init__(self, text: str, token_count: int = 0) -> None:
        self.text = text
        self.last_turn = self
        self.token_ids = np.zeros(token_count, np.int32)


def shell(tmp_path: Path, name: str, script: str) -> Command:
    return Command(name, ("/bin/sh", "-c", script), tmp_path / f"{name}.log")


def is_alive(pid: int) -> bool:
    """Whether a process runs. A zombie does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def until_gone(pid: int) -> None:
    deadline = time.monotonic() + 10
    while is_alive(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        await asyncio.sleep(0.01)


def test_importing_the_demo_loads_neither_torch_nor_the_other_sides() -> None:
    modules = "penstock.demo, penstock.demo.command, penstock.demo.rewards, penstock.demo.tiny"
    heavy = "('torch', 'vllm', 'transformers', 'penstock.server', 'penstock.trainer')"
    code = f"import sys, {modules}; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr


@pytest.mark.parametrize(
    ("text", "reward"),
    [("17", 1), ("3 + 14 = 17.", 1), ("17 or 18", 0), ("", 0), ("-17", 0), ("seventeen", 0)],
)
def test_a_sum_is_right_where_its_last_integer_is(text: str, reward: float) -> None:
    task = Task("t", prompt="What is 3 + 14?", metadata={"answer": 17})
    assert rewards.last_integer_is_answer(task, Answer(text)) == reward


@pytest.mark.parametrize(
    ("text", "expected", "answer"),
    [
        ("so it is <answer> 12 </answer>", "12", "12"),
        ("first 11, then 12.", "12", "12"),
        ("I do not know", "12", "I do not know"),
        ("olleh 5", "olleh", "olleh 5"),
    ],
)
def test_the_answer_is_found_in_a_reply(text: str, expected: str, answer: str) -> None:
    assert rewards.extract_answer(text, expected) == answer


@pytest.mark.parametrize("name", ["chain_sum", "spell_backward", "letter_counting", "leg_counting"])
def test_the_right_answer_to_any_data_set_is_rewarded(name: str) -> None:
    from penstock.trainer.config.data import ReasoningGymConfig
    from penstock.trainer.data.sources.procedural import ReasoningGymSource

    problem = ReasoningGymSource(ReasoningGymConfig(name=name)).problem(3)
    task = Task("t", prompt=problem.messages[-1][1], metadata=problem.metadata)
    right = f"Let me see. <answer>{problem.metadata['answer']}</answer>"
    assert rewards.reasoning_gym_score(task, Answer(right)) == 1.0
    assert rewards.reasoning_gym_score(task, Answer("I would rather not say")) < 0.5


def test_printable_characters_are_a_share_of_the_tokens() -> None:
    task = Task("t", prompt="x")
    assert rewards.printable_share(task, Answer("ab\n\ufffd", token_count=8)) == 0.25
    assert rewards.printable_share(task, Answer("", token_count=0)) == 0.0


def test_the_sums_are_all_there_with_their_answers(tmp_path: Path) -> None:
    tasks.write_sums(tmp_path / "tasks.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "tasks.jsonl").read_text().splitlines()]
    trained, held_out = {line["prompt"] for line in lines}, set(tasks.held_out(settings.SUMS))
    assert len(trained) == len(lines) == 397
    assert len(held_out) == 3
    assert trained | held_out == {line["prompt"] for line in tasks.sums()}
    assert len(tasks.sums()) == 400
    for line in tasks.sums():
        a, b = map(int, re.findall(r"\d+", line["prompt"]))
        assert line["answer"] == a + b


@pytest.mark.parametrize("task", ["chain_sum", settings.PRINTABLE])
def test_what_is_held_out_is_not_trained(task: str, tmp_path: Path) -> None:
    from penstock.trainer.config.data import ReasoningGymConfig
    from penstock.trainer.data.sources.procedural import ReasoningGymSource

    held_out = tasks.held_out(task)
    assert len(set(held_out)) == 3
    if task == settings.PRINTABLE:
        tasks.write_printable(tmp_path / "tasks.jsonl")
        lines = (tmp_path / "tasks.jsonl").read_text().splitlines()
        trained = {json.loads(line)["prompt"] for line in lines}
    else:
        source = ReasoningGymSource(ReasoningGymConfig(name=task))
        trained = {source.problem(number).messages[-1][1] for number in range(200)}
    assert not trained & set(held_out)


def test_the_tiny_model_is_one_that_transformers_loads(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    write_model(tmp_path / "model")
    network = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert network.config.eos_token_id == tokenizer.eos_token_id == END_OF_TURN_ID
    assert len(tokenizer) == network.config.vocab_size
    text = "digits 0123, ünïcödé 漢字 🙂\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_the_tiny_model_is_the_same_for_the_same_seed(tmp_path: Path) -> None:
    write_model(tmp_path / "first")
    write_model(tmp_path / "second")
    for path in (tmp_path / "first").iterdir():
        assert path.read_bytes() == (tmp_path / "second" / path.name).read_bytes()


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    assert model.prepare_model(str(tmp_path / "model"), print) == tmp_path / "model"


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(model.ModelUnavailable, match=r"config\.json"):
        model.prepare_model(str(tmp_path), print)


def test_the_converted_model_is_found_without_asking_anyone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    model.converted_folder().mkdir(parents=True)
    said: list[str] = []
    assert model.prepare_model(None, said.append) == model.converted_folder()
    assert said == []


def test_the_model_is_kept_with_the_virtual_environment_or_else_in_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    assert model.cache_folder() == tmp_path / "venv" / "share" / "penstock"
    monkeypatch.setattr(sys, "base_prefix", sys.prefix)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert model.cache_folder() == tmp_path / "cache" / "penstock"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--task", "no_such_data_set"], "chain_sum"),
        (["--steps", "0"], "steps"),
        (["--tiny", "--model", "x"], "--tiny"),
        (["--target", "high"], "--target high: give a reward, such as 0.8, or none"),
        (["--target", "nan"], "--target nan: give a reward"),
        (["--patience", "0"], "patience"),
        (["--setup-seconds", "-1"], "setup-seconds"),
        (["--tensor-parallel", "2", "--ranks", "2"], "--backend megatron"),
        (["--backend", "megatron", "--pipeline-parallel", "2"], "--ranks 1"),
        (["--backend", "megatron", "--ranks", "6", "--tensor-parallel", "4"], "--ranks 6"),
    ],
)
def test_a_bad_option_is_explained_before_anything_starts(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert complaint in capsys.readouterr().err


def plan_of(out: Path, **choices: Any) -> settings.Plan:
    scale = settings.SMALL_MODEL
    chosen = {"task": settings.SUMS, "steps": 90, "seed": 0, "listen": "127.0.0.1:0", **choices}
    return settings.Plan(model=out, model_name="a model", out=out, scale=scale, **chosen)


@pytest.mark.parametrize(
    ("target", "task", "expected"),
    [
        (None, settings.SUMS, 0.8),
        (None, "chain_sum", None),
        (None, settings.PRINTABLE, None),
        ("none", settings.SUMS, None),
        ("0", settings.SUMS, 0.0),
        ("-1.5", "chain_sum", -1.5),
    ],
)
def test_a_run_ends_at_the_target_that_the_command_line_names(
    tmp_path: Path, target: str | None, task: str, expected: float | None
) -> None:
    from penstock.trainer.config.trainer import TargetConfig, load_config

    assert read_target(target, task) == expected
    plan = plan_of(tmp_path, task=task, target=expected, patience=3)
    plan.trainer_config_file.write_text(settings.trainer_config(plan, "127.0.0.1:1"))
    found = load_config(plan.trainer_config_file).run.target
    wanted = None if expected is None else TargetConfig(reward=expected, attempts=256, patience=3)
    assert found == wanted


@pytest.mark.parametrize(
    ("gpus", "ranks", "visible", "expected"),
    [
        (0, 1, None, {}),
        (1, 1, None, {"server": "0", "trainer": "0"}),
        (1, 1, ["GPU-7"], {"server": "GPU-7", "trainer": "GPU-7"}),
        (2, 1, None, {"server": "0", "trainer": "1"}),
        (4, 3, ["4", "5", "6", "7"], {"server": "4", "trainer": "5,6,7"}),
    ],
)
def test_gpus_are_divided_between_server_and_trainer(
    tmp_path: Path, gpus: int, ranks: int, visible: list[str] | None, expected: dict[str, str]
) -> None:
    plan = plan_of(tmp_path, gpus=gpus, ranks=ranks)
    told = settings.devices(plan, visible)
    assert {name: each["CUDA_VISIBLE_DEVICES"] for name, each in told.items()} == expected
    shared = "--gpu-memory-utilization" in settings.serve_command(plan, None)
    assert shared == (gpus == 1) == (len(expected) > 0 and len(set(expected.values())) == 1)


def test_more_ranks_than_gpus_beside_the_servers_are_refused() -> None:
    gpu = Gpu("a GPU", 80 << 30, 80 << 30, 9.0, "580")
    check_gpus(Machine("a CPU", 1 << 30), 8)
    check_gpus(Machine("a CPU", 1 << 30, (gpu,)), 1)
    check_gpus(Machine("a CPU", 1 << 30, (gpu,) * 3), 2)
    with pytest.raises(click.UsageError, match=r"--ranks 2 needs 3 GPUs, .* there are 2"):
        check_gpus(Machine("a CPU", 1 << 30, (gpu,) * 2), 2)


@pytest.mark.parametrize(
    ("torch", "said"),
    [
        ("raise ImportError('libcudart.so.13: no such file')", "ImportError: libcudart.so.13"),
        ("import os; os._exit(3)", "cannot be imported: the import ended with 3"),
    ],
)  # fmt: skip
def test_a_torch_that_is_broken_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    torch: str,
    said: str,
) -> None:
    (tmp_path / "torch.py").write_text(torch)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert main(["--out", str(tmp_path / "out")]) == 1
    assert said in capfd.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("task", "last"), [(settings.SUMS, "train"), ("chain_sum", "demo")])
def test_every_command_that_is_proposed_next_can_be_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str, last: str
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = replace(plan_of(tmp_path, task=task), model=tmp_path / "model")
    write_model(plan.model)
    tasks.write_sums(plan.tasks_file)
    commands = [shlex.split(line) for line, _ in next_commands(plan)]
    assert all(shutil.which(program) is not None for program, *_ in commands)
    named = [arguments for program, *arguments in commands if Path(program).name == "penstock"]
    assert [name for name, *_ in named] == ["demo", last]
    for name, *options in named:
        if name == "demo":
            check_task(demo.make_context(name, options).params["task"] or settings.SUMS)
        else:
            subprocess.run([*commands[-1], "--dry-run"], check=True)


async def test_prompts_are_asked_as_messages_and_without_randomness(tmp_path: Path) -> None:
    async with serve(tmp_path) as harness, connect(harness.address) as client:
        found = await ask(harness.address, ("one", "two"), 5)
        chat, text = client.trajectory(), client.trajectory()
        message = await chat.turn((Message("user", "one"),), temperature=0.0, max_tokens=5)
        plain = await text.turn("one", temperature=0.0, max_tokens=5)
    assert found.weight_version == 0
    assert len(found.texts) == 2
    assert found.texts[0] == message.text.strip() != plain.text.strip()


async def test_a_run_whose_server_does_not_answer_says_so_and_shows_no_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "RECONNECT_SECONDS", 0.1)
    console = Console(file=io.StringIO(), width=500)
    assert await run._ask(plan_of(tmp_path), "127.0.0.1:1", console) is None
    assert isinstance(console.file, io.StringIO)
    assert "does not answer the held-out prompts" in console.file.getvalue()


def step_of(number: int, **figures: Any) -> Step:
    blank = {field.name: 0 for field in fields(Step)}
    return Step(**{**blank, "step": number, "seconds": 1.0, "tokens": 10, **figures})


@pytest.mark.parametrize(
    ("means", "patience", "reached"),
    [
        ([None, 0.5, 0.9], 1, True),
        ([None, 0.9, 0.5], 1, False),
        ([None, 0.7, 0.9], 2, False),
        ([None, 0.8, 0.8], 2, True),
        ([None, None, None], 1, False),
    ],
)
def test_the_last_line_is_for_programs(
    tmp_path: Path, means: list[float | None], patience: int, reached: bool
) -> None:
    steps = tuple(
        step_of(number, reward_mean=0.25, reward_target_mean=mean, time=1000.0 + number)
        for number, mean in enumerate(means, 1)
    )
    plan = plan_of(tmp_path, target=0.8, patience=patience)
    before, after = Answers(("17 is", "a", "b"), 0), Answers(("17", "c", "d"), 3)
    found = Run(steps, ())
    summary = summarize(found, plan, run.Ended(9.0, before, after))
    assert summary.target_reached == reached
    assert astuple(summary.answers[0]) == ("What is 3 + 14?", "17 is", "17")
    assert summarize(found, plan, run.Ended(9.0, None, after)).answers == ()
    cpu = Machine("a CPU", 1 << 30)
    known = {"setup": 61.26, "model": 0.0}
    line = json.loads(last_line(found, summary, 990.0, known, cpu, plan.scale))
    assert line.pop("end_seconds") > 0
    assert line == {
        "setup_seconds": 61.3,
        "model_seconds": 0.0,
        "start_seconds": -990.0,
        "target_seconds": 13.0 if reached else None,
        "reward": 0.25 if means[-1] is None else means[-1],
        "steps": 3,
        "dtype": None,
        "cpu": "a CPU",
        "gpus": [],
    }


def test_the_help_names_the_steps_of_every_scale(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    scales = (settings.SMALL_MODEL, settings.SMALL_MODEL_LONG_TASK, settings.TINY_MODEL)
    short, long, tiny = (scale.steps for scale in scales)
    assert f"{short}; {long} with a data set of reasoning-gym, {tiny} with --tiny" in said


def test_the_backend_is_divided_as_the_command_line_says(tmp_path: Path) -> None:
    from penstock.trainer.config.trainer import MegatronBackend, load_config

    folder = tmp_path / "model"
    write_model(folder)
    scale = settings.TINY_MODEL
    for tensor, pipeline in ((1, 1), (2, 1), (1, 2)):
        plan = settings.Plan(
            *(folder, "a model", tmp_path, settings.PRINTABLE, 1, 0, "127.0.0.1:0", scale),
            ranks=2,
            backend="megatron",
            tensor_parallel=tensor,
            pipeline_parallel=pipeline,
        )
        path = tmp_path / "trainer.toml"
        path.write_text(settings.trainer_config(plan, "127.0.0.1:1"))
        backend = load_config(path).model.backend
        assert isinstance(backend, MegatronBackend)
        assert (backend.tensor_parallel, backend.pipeline_parallel) == (tensor, pipeline)


def test_the_trainers_configuration_is_one_that_the_trainer_reads(tmp_path: Path) -> None:
    from penstock.trainer.config.trainer import load_config

    for task in (settings.SUMS, "chain_sum"):
        plan = settings.Plan(
            model=tmp_path,
            model_name="a model",
            out=tmp_path,
            task=task,
            steps=3,
            seed=1,
            listen="127.0.0.1:0",
            scale=settings.choose_scale(task, tiny=False),
        )
        plan.trainer_config_file.write_text(settings.trainer_config(plan, "127.0.0.1:1234"))
        config = load_config(plan.trainer_config_file)
        assert config.run.steps == 3
        assert (config.data.jsonl is None) == (task == "chain_sum")


async def test_a_line_is_waited_for_and_everything_printed_is_logged(tmp_path: Path) -> None:
    serves = FirstMatch(re.compile(r"at (\S+)"))
    command = shell(tmp_path, "server", "echo loading; echo serving at 10.0.0.1:77; echo bad >&2")
    process = Process.start(command, serves)
    assert await serves.wait(process) == "10.0.0.1:77"
    assert await process.wait() == 0
    logged = command.log.read_text()
    assert "loading" in logged
    assert "bad" in logged


async def test_a_line_of_any_length_is_told_in_parts_and_what_follows_it_too(
    tmp_path: Path,
) -> None:
    length = 2 * LONGEST_LINE_BYTES + 5
    code = f"print('x' * {length}); print('y' * 100_000); print('the end', end='')"
    lines: list[str] = []
    command = Command("worker", (sys.executable, "-c", code), tmp_path / "worker.log")
    process = Process.start(command, lines.append)
    async with asyncio.timeout(20):
        assert await process.wait() == 0
    whole = "x" * LONGEST_LINE_BYTES
    assert lines == [whole, whole, "x" * 5, "y" * 100_000, "the end"]
    assert command.log.read_text() == "\n".join(lines)


async def test_a_log_without_room_holds_no_process_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    code = "for number in range(40):\n    print(number, 'y' * 100_000)"
    lines: list[str] = []
    command = Command("worker", (sys.executable, "-c", code), Path("/dev/full"))
    process = Process.start(command, lines.append)
    async with asyncio.timeout(20):
        assert await process.wait() == 0
    assert [line.split()[0] for line in lines] == [str(number) for number in range(40)]
    assert [record.message for record in caplog.records] == [
        "/dev/full: [Errno 28] No space left on device; dropping output until this is resolved"
    ]


def test_what_nothing_depends_on_is_done_again_as_soon_as_it_can_be(
    caplog: pytest.LogCaptureFixture,
) -> None:
    full, done = True, list[int]()

    def act(number: int) -> None:
        if full:
            raise OSError("full")
        done.append(number)

    going = going_on(act, "the log")
    for number in range(6):
        full = number in (1, 2, 4)
        going(number)
    assert done == [0, 3, 5]
    assert len(caplog.records) == 2


def test_a_log_takes_all_that_it_is_given_however_little_at_a_time() -> None:
    class Slow(io.BytesIO):
        def write(self, data: Any) -> int:
            return super().write(data[:2])

    log = Slow()
    log_writer(log)(b"a line\n")
    assert log.getvalue() == b"a line\n"


def test_files_of_a_process_are_nobody_else_s_to_read(tmp_path: Path) -> None:
    path = tmp_path / "run" / "engine.toml"
    write_files({path: "a secret"})
    assert path.read_text() == "a secret"
    assert path.stat().st_mode & 0o777 == 0o600


async def test_a_process_that_ends_before_it_serves_is_explained(tmp_path: Path) -> None:
    serves = FirstMatch(re.compile("(serving)"))
    process = Process.start(shell(tmp_path, "server", "echo the port is taken >&2; exit 3"), serves)
    with pytest.raises(ProcessFailed, match=r"(?s)server exited 3.*the port is taken"):
        await serves.wait(process)


async def test_stopping_a_process_takes_its_children_along(tmp_path: Path) -> None:
    child = FirstMatch(re.compile(r"child (\d+)"))
    process = Process.start(shell(tmp_path, "server", "sleep 60 & echo child $!; wait"), child)
    pid = int(await child.wait(process))
    await process.stop(patience=10)
    await until_gone(pid)


async def test_a_process_that_ignores_the_request_to_end_is_killed(tmp_path: Path) -> None:
    ready = FirstMatch(re.compile("(ready)"))
    script = "trap '' TERM; echo ready now; while :; do sleep 1; done"
    process = Process.start(shell(tmp_path, "server", script), ready)
    await ready.wait(process)
    await process.stop(patience=0.2)
    assert await process.wait() == -signal.SIGKILL


async def test_what_has_ended_is_not_killed_again_for_its_id_may_be_anothers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda group, _: killed.append(group))
    process = Process.start(shell(tmp_path, "server", "exit 3"))
    assert await process.wait() == 3
    # The kill reaches leftover children, at a time when no other process can have the group id.
    assert killed == [process.pid]
    process.kill()
    await process.stop(patience=0.1)
    assert killed == [process.pid]


async def test_a_demo_that_is_killed_takes_its_processes_along(tmp_path: Path) -> None:
    code = (
        "import asyncio, sys; from pathlib import Path\n"
        "from penstock.up.processes import Command, Process\n"
        "async def main():\n"
        f"    command = Command('server', ('sleep', '60'), Path({str(tmp_path / 'log')!r}))\n"
        "    process = Process.start(command)\n"
        "    print(process.pid, flush=True)\n"
        "    await process.wait()\n"
        "asyncio.run(main())\n"
    )
    demo = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE
    )
    assert demo.stdout is not None
    pid = int(await demo.stdout.readline())
    assert is_alive(pid)
    os.kill(demo.pid, signal.SIGKILL)
    await demo.wait()
    await until_gone(pid)
