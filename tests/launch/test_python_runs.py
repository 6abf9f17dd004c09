"""Runs that Python code starts, whole and by steps, with functions that nobody can import."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import penstock
from penstock.launch import python
from penstock.up.cast import Programs
from tests.support.forked_command import NURSERY
from tests.support.tiny_model import make_tiny_model
from tests.support.trainer_processes import nursery
from tests.support.up_with_fakes import FAKE_SERVE, FORKED

ROWS = [{"question": f"{n} plus 1?", "answer": str(n + 1)} for n in range(12)]
SETTINGS = {
    "train.train.groups_per_step": 2,
    "train.model.threads": 1,
    "train.checkpoint.every_steps": 1,
    "train.metrics.sample_every_steps": 0,
    "up.restarts": 0,
}


def programs(**others: tuple[str, ...]) -> Programs:
    # The options of the fake engine are none of vLLM's, which a check would say.
    own = {"serve": FAKE_SERVE, "train": (*FORKED, "train"), "check": ()}
    return Programs(**{**own, **others})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def options(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(python, "PROGRAMS", programs())
    monkeypatch.setenv(NURSERY, str(nursery()))
    monkeypatch.chdir(Path(__file__).parents[2])
    own = {"model": model, "data": ROWS, "reward": length, "out": tmp_path / "run", "steps": 2}
    return {**own, "group_size": 2, "max_tokens": 8, "settings": SETTINGS}


def length(task: Any, trajectory: Any) -> float:
    return len(trajectory.text) / 8


def steps(run: penstock.Run) -> list[int]:
    return [line["step"] for line in run.metrics]


def started_here() -> list[str]:
    """The servers and trainers that this process has started and that are still there."""
    children = psutil.Process().children(recursive=True)
    lines = [" ".join(child.cmdline()) for child in children]
    ours = ("fake_serve", "forked_command", "penstock.cli")
    return [line for line in lines if any(name in line for name in ours)]


@pytest.mark.timeout(300)
async def test_a_whole_run_in_a_loop_that_runs_and_its_continuation(
    options: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[int, str]] = []

    async def score(task: Any, trajectory: Any) -> float:
        seen.append((os.getpid(), task.metadata["answer"]))
        return length(task, trajectory)

    run = penstock.train(**{**options, "reward": score})
    assert steps(run) == [1, 2]
    assert {pid for pid, _ in seen} == {os.getpid()}
    assert {answer for _, answer in seen} <= {row["answer"] for row in ROWS}
    assert [line["reward_mean"] for line in run.metrics] == [1.0, 1.0]
    assert (run.model / "model.safetensors").exists()
    assert "trainer  done" in capfd.readouterr().out
    assert penstock.resume(run.folder, reward=score, steps=3) == run
    assert steps(run) == [1, 2, 3]
    assert started_here() == []
    with pytest.raises(
        penstock.RunInvalid, match=r"out: .*/run holds a run already; continue it with"
    ):
        penstock.train(**options)


@pytest.mark.timeout(300)
async def test_the_caller_stands_between_a_batch_and_its_training(options: dict[str, Any]) -> None:
    async with penstock.open_run(**{**options, "steps": 9}) as run:
        async for batch in run.batches():
            assert len(batch.groups) == 2
            for trajectory in (t for group in batch.groups for t in group.trajectories):
                assert "plus 1?" in trajectory.prompt
                assert trajectory.reward == pytest.approx(len(trajectory.text) / 8, abs=1)
                assert trajectory.trained.sum() <= len(trajectory.token_ids)
                assert trajectory.lag <= batch.step - 1
            del batch.groups[1:]
            first, second = batch.groups[0].trajectories
            first.reward, second.reward = 1.0, 0.0
            figures = await run.train(batch)
            assert (figures["step"], figures["groups"]) == (batch.step, 1)
            assert figures["reward_mean"] == batch.reward == 0.5
            if batch.step == 2:
                break
    assert steps(run) == [1, 2]
    assert (run.model / "model.safetensors").exists()
    assert started_here() == []
    ledger = [json.loads(line) for line in (run.folder / "ledger.jsonl").read_text().splitlines()]
    assert len(ledger) == 2
    penstock.resume(run.folder, reward=length, steps=3)
    assert steps(run) == [1, 2, 3]


@pytest.mark.timeout(300)
async def test_a_batch_is_trained_before_the_next_and_an_error_of_the_caller_is_its_own(
    options: dict[str, Any],
) -> None:
    with pytest.raises(ZeroDivisionError):
        async with penstock.open_run(**options) as run:
            async for batch in run.batches():
                with pytest.raises(RuntimeError, match="the batch of step 1 is not trained"):
                    await anext(run.batches())
                batch.groups[0].trajectories[0].reward = float("nan")
                with pytest.raises(ValueError, match="a reward must be finite, not nan"):
                    await run.train(batch)
                batch.groups.clear()
                with pytest.raises(ValueError, match="step 1: no trajectory is left to train"):
                    await run.train(batch)
                _ = 1 // len(batch.groups)
    assert started_here() == []


@pytest.mark.timeout(300)
def test_an_interruption_ends_everything_and_leaves_what_resumes(options: dict[str, Any]) -> None:
    scored = threading.Semaphore(6)

    def interrupting(task: Any, trajectory: Any) -> float:
        if not scored.acquire(blocking=False):
            signal.raise_signal(signal.SIGINT)
        return length(task, trajectory)

    caught = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            penstock.train(**{**options, "reward": interrupting, "steps": 1000})
    finally:
        signal.signal(signal.SIGINT, caught)
    assert started_here() == []
    run = penstock.Run(options["out"])
    done = len(steps(run))
    penstock.resume(run.folder, reward=length, steps=done + 1)
    assert steps(run) == list(range(1, done + 2))


ENDS = (sys.executable, "-c", "import sys; print('no room here', flush=True); sys.exit(1)")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("part", "name"), [("serve", "server"), ("train", "trainer")])
def test_a_part_that_fails_ends_all_with_its_last_words(
    part: str, name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(python, "PROGRAMS", programs(**{part: ENDS}))
    with pytest.raises(penstock.RunFailed, match=rf"the {name} .*exited 1; .*\n  \| no room here"):
        penstock.train(**options)
    assert started_here() == []


@pytest.mark.timeout(300)
async def test_a_server_that_fails_ends_a_run_by_steps(
    options: dict[str, Any],
) -> None:
    with pytest.raises(penstock.RunFailed, match="the server ended 1 times"):
        async with penstock.open_run(**{**options, "steps": 1000}) as run:
            async for batch in run.batches():
                await run.train(batch)
                for child in psutil.Process().children():
                    if "fake_serve" in " ".join(child.cmdline()):
                        child.kill()
    assert started_here() == []


def raising(task: Any, trajectory: Any) -> float:
    return float(task.metadata["anwser"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"reward": "my.py:score"}, r"reward: give the function itself, not 'my.py:score'"),
        ({"reward": lambda text: 1.0}, r"reward: it is called with \(task, trajectory\)"),
        ({"reward": raising}, r"reward: it raises KeyError .*did you mean answer\?"),
        ({"reward": lambda task, trajectory: "1"}, "reward: a reward must be a number, not str"),
        ({"step": 3}, "step: no such argument; did you mean steps?"),
        ({"data": "none.jsonl"}, r"data: none\.jsonl"),
        ({"data": "data.csv"}, r"data data\.csv: expected a \*\.jsonl"),
        ({"data": []}, "data"),
        ({"data": [{"question": {1, 2}}]}, "data: .*set is not JSON serializable; give rows"),
        ({"data": [{"foo": "a"}]}, "foo"),
        ({"columns": {"promt": "question"}}, r"columns: .*did you mean prompt\?"),
        ({"max_tokens": 5000}, "max_tokens 5000: the longest prompt has"),
        ({"model": "./none"}, "none"),
        ({"settings": {"train.train.learning_rat": 1}}, r"did you mean train\.learning_rate"),
    ],
)
def test_an_argument_that_cannot_be_is_refused_before_anything_starts(
    change: dict[str, Any], said: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(python, "run_in_thread", unreachable)
    with pytest.raises(penstock.RunInvalid, match=said):
        penstock.train(**{**options, **change})


def unreachable(work: Callable[..., object]) -> None:
    raise AssertionError("it started")


def test_only_a_folder_of_a_run_resumes(tmp_path: Path) -> None:
    with pytest.raises(penstock.RunInvalid, match=r"folder: there is no .*run\.toml"):
        penstock.resume(tmp_path, reward=length)


def test_every_name_of_the_package_is_there() -> None:
    assert set(penstock.__all__) <= set(dir(penstock))
    assert all(getattr(penstock, name) is not None for name in penstock.__all__)
    with pytest.raises(AttributeError, match="module 'penstock' has no attribute 'trian'"):
        _ = penstock.trian  # pyright: ignore
