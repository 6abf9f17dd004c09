"""Resuming: a run continues as if nothing had happened, or reports why it cannot.

Trainers are processes forked from a nursery that has already imported the slow modules. Server and
worker run in the test's process.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import itertools
import json
import os
import random
import shutil
import signal
from collections.abc import AsyncGenerator, Collection, Generator, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
import pytest_asyncio
import tomli_w
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from penstock.client import Task, Trajectory
from penstock.server.core.errors import DomainError
from penstock.server.engine.protocol import AdapterLimits
from penstock.trainer.core.errors import CheckpointUnusable, RunFolderInUse, StorageFailed
from penstock.trainer.exchange.stream import Exchange, RunFacts
from penstock.trainer.policy.random_states import load_random_states, save_random_states, seed_all
from penstock.trainer.state.checkpoint import TrainerState, restore, save_checkpoint, verify
from penstock.trainer.state.ledger import (
    Ledger,
    RefusedEntry,
    StepEntry,
    TrainedGroup,
    read_ledger,
)
from penstock.v1 import weights_pb2
from penstock.wire.channel import client_options
from penstock.wire.messages import StalenessContract as Contract
from penstock.wire.reasons import Reason
from tests.faults import trainers
from tests.faults.trainers import (
    GROUPS_PER_STEP,
    KILLED,
    Nursery,
    Stand,
    at_work,
    check_lineage,
    check_weights,
    model_of,
    moments_of,
    nursing,
    standing,
)
from tests.support.scripted_trainer_server import ScriptedServer, Session
from tests.support.tiny_model import make_tiny_model
from tests.support.trainer_walk import delivery, greet
from tests.trainer.test_end_to_end import letters, records, serving

# All tests here share one nursery of trainers.
one_loop = pytest.mark.asyncio(loop_scope="module")

STEPS = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), layers=1)


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with nursing() as running:
        yield running


@contextlib.asynccontextmanager
async def synchronous(
    folder: Path,
    model: Path,
    /,
    *,
    every_steps: int = 2,
    adapters: AdapterLimits | None = None,
    **sections: dict[str, Any],
) -> AsyncGenerator[Stand]:
    """A run whose every step is deterministic, with a learning rate that changes in every step."""
    schedule = {"schedule": "cosine", "warmup_steps": 2}
    async with (
        asyncio.timeout(150),
        standing(
            folder,
            model,
            steps=STEPS,
            max_lag=0,
            every_steps=every_steps,
            train=schedule,
            adapters=adapters,
            **sections,
        ) as stand,
    ):
        yield stand


async def go(nursery: Nursery, stand: Stand, *, resume: bool = True, failpoints: str = "") -> int:
    await nursery.begin(stand.config, stand.log, resume=resume, failpoints=failpoints)
    return await nursery.end()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def undisturbed(
    model: Path, nursery: Nursery, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, bytes], dict[str, np.ndarray[Any, Any]], list[dict[str, Any]]]:
    """The result of an uninterrupted run: model, optimizer and records."""
    folder = tmp_path_factory.mktemp("undisturbed")
    async with synchronous(folder, model) as stand:
        assert await go(nursery, stand, resume=False) == 0, stand.said
        return model_of(stand), moments_of(stand), records(folder)


def bits(moments: dict[str, np.ndarray[Any, Any]]) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in moments.items()}


FIGURES = ("step", "weight_version", "reward_mean", "loss", "grad_norm", "learning_rate", "lag_max")


@pytest.mark.parametrize(
    "points",
    [
        # At the first step, after the first checkpoint, and during a checkpoint.
        ["train.published=kill@1", "train.noted=kill@3", "checkpoint.before_rename=kill@1"],
        # Between switch and receipt, receipt and checkpoint, checkpoint and notice.
        [
            "exchange.after_switch_weights=kill@1",
            "exchange.after_receipt=kill@3",
            "checkpoint.before_notice=kill@1",
        ],
        # Repeatedly at the same step.
        ["exchange.after_switch_weights=kill@2", "train.published=kill@1", "train.computed=kill@2"],
    ],
    ids=["step", "messages", "again"],
)
@one_loop
async def test_an_interrupted_run_ends_bitwise_as_one_that_was_not(
    model: Path,
    nursery: Nursery,
    undisturbed: tuple[Any, dict[str, np.ndarray[Any, Any]], list[dict[str, Any]]],
    tmp_path: Path,
    points: list[str],
) -> None:
    async with synchronous(tmp_path, model) as stand:
        for place, point in enumerate(points):
            code = await go(nursery, stand, resume=place > 0, failpoints=point)
            assert code == KILLED, (point, stand.said)
        assert await go(nursery, stand) == 0, stand.said
        weights, moments, steps = undisturbed
        assert model_of(stand) == weights
        assert bits(moments_of(stand)) == bits(moments)
        check_lineage(stand)
        check_weights(stand)
        # Each version was sampled once, and none was made again under another number.
        assert stand.server.engine.versions == list(range(1, STEPS + 1))
    # A step's record is written when its switch is answered, which can be after its checkpoint.
    for record in records(tmp_path):
        expected = steps[record["step"] - 1]
        assert [record[name] for name in FIGURES] == [expected[name] for name in FIGURES]


@one_loop
async def test_an_interrupted_run_reaches_its_target_at_the_step_at_which_it_would_have(
    model: Path, nursery: Nursery, undisturbed: tuple[Any, Any, Any], tmp_path: Path
) -> None:
    means = [record["reward_mean"] for record in undisturbed[2]]
    # The window is two steps of four attempts.
    windows = [(one + other) / 2 for one, other in itertools.pairwise(means)]
    reward = max(windows[1:-1]) - 1e-9
    last = 2 + next(place for place, mean in enumerate(windows) if mean >= reward)
    assert 2 <= last < STEPS
    run = {"target": {"reward": reward, "attempts": 8}}
    async with synchronous(tmp_path, model, run=run) as stand:
        points = ["train.noted=kill@2", "train.published=kill@1", "checkpoint.before_notice=kill@1"]
        for place, point in enumerate(points):
            code = await go(nursery, stand, resume=place > 0, failpoints=point)
            assert code in (KILLED, 0), (point, stand.said)
        assert await go(nursery, stand) == 0, stand.said
        assert f"reached run.target.reward = {reward:g}; ending after step {last} of" in stand.said
        assert stand.server.engine.versions == list(range(1, last + 1))
        ended = model_of(stand)
        # Resumed once more, it has nothing left to do.
        assert await go(nursery, stand) == 0, stand.said
        assert stand.server.engine.versions == list(range(1, last + 1))
        assert model_of(stand) == ended
        # With a target out of reach, it continues to its last step as if it had never ended.
        stand.config.write_text(stand.config.read_text().replace(f"{reward!r}", "1e9"))
        assert await go(nursery, stand) == 0, stand.said
        assert stand.server.engine.versions == list(range(1, STEPS + 1))
        assert model_of(stand) == undisturbed[0]
    steps = records(tmp_path)
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert [step["reward_target_mean"] for step in steps] == [None, *map(pytest.approx, windows)]


@one_loop
async def test_a_run_with_nothing_saved_yet_begins_again_with_the_same_groups(
    model: Path, nursery: Nursery, undisturbed: tuple[Any, Any, Any], tmp_path: Path
) -> None:
    async with synchronous(tmp_path, model, every_steps=100) as stand:
        code = await go(nursery, stand, resume=False, failpoints="train.published=kill@4")
        assert code == KILLED
        assert await go(nursery, stand) == 0, stand.said
        assert "starting at step 1" in stand.said
        assert model_of(stand) == undisturbed[0]
        check_lineage(stand)
        assert stand.server.engine.versions == list(range(1, STEPS + 1))


@pytest.mark.parametrize(
    ("left", "every_steps", "resume"),
    [
        ("no_checkpoints", 0, False),
        ("no_checkpoints", 0, True),
        # Without a checkpoint interval, the first run's receipts were final.
        ("no_checkpoints", 2, True),
        ("no_folder", 2, False),
        ("no_folder", 2, True),
        # The checkpoints' groups are final, and the server has released them.
        ("checkpoints_removed", 2, True),
    ],
)
@one_loop
async def test_a_second_start_has_nothing_of_the_first(
    model: Path, nursery: Nursery, tmp_path: Path, left: str, every_steps: int, resume: bool
) -> None:
    """The server stays up, with the tasks, groups and weights of the first start."""
    every = 0 if left == "no_checkpoints" else 2
    tracker = {
        "kind": "custom",
        "function": "tests.support.file_tracker:FileTracker",
        "options": {"path": str(tmp_path / "tracked.jsonl")},
    }
    metrics = {"trackers": [tracker]}
    async with synchronous(tmp_path, model, every_steps=every, metrics=metrics) as stand:
        code = await go(nursery, stand, resume=False, failpoints="train.published=kill@4")
        assert code == KILLED
        tracked = stand.folder / "out" / "trackers" / "custom" / "id"
        first_tracked = tracked.read_text()
        if left == "no_folder":
            shutil.rmtree(stand.folder / "out")
        if left == "checkpoints_removed":
            shutil.rmtree(stand.folder / "out" / "checkpoints")
        if every_steps != every:
            text = stand.config.read_text()
            assert "every_steps = 0" in text
            stand.config.write_text(text.replace("every_steps = 0", f"every_steps = {every_steps}"))
        first = set(stand.accepted.tasks)
        assert first
        # One trainer that gets no further than this, and one that is killed before its first step.
        point = "exchange.before_hello=kill@1"
        assert await go(nursery, stand, resume=resume, failpoints=point) == KILLED
        assert "was restarted from scratch" not in stand.said
        point = "ledger.before_append=kill@1"
        assert await go(nursery, stand, resume=resume, failpoints=point) == KILLED
        assert stand.said.count("RUN_REPLACED: run run was restarted from scratch") == 1
        middle = set(stand.accepted.tasks) - first
        assert middle
        assert await go(nursery, stand, resume=resume) == 0, stand.said
        # If the middle run can be resumed, the last trainer continued with its tasks.
        resumed = resume and every_steps > 0
        assert stand.said.count("RUN_REPLACED: run run was restarted from scratch") == 1 + (
            not resumed
        )
        # No task was skipped, though the server had seen each of them before.
        check_once(stand)
        entries = read_ledger(stand.folder / "out" / "ledger.jsonl")
        steps = [entry for entry in entries if isinstance(entry, StepEntry)]
        trained = {group.group_id for entry in steps for group in entry.groups}
        assert trained <= set(stand.accepted.tasks) and not trained & first
        assert bool(trained & middle) == resumed
        indices = [int(g.task_id.rpartition("/")[2]) for entry in steps for g in entry.groups]
        assert min(indices) == 0 and len(indices) == STEPS * GROUPS_PER_STEP
        # Groups sampled from the first run's weights belong to none of the new versions.
        assert min(entry.weight_version for entry in steps) > 4
        check_weights(stand)
        # Trackers see another run, too.
        assert tracked.read_text() != first_tracked


@one_loop
async def test_a_run_with_checkpoints_does_not_go_on_without(
    model: Path, nursery: Nursery, tmp_path: Path
) -> None:
    async with synchronous(tmp_path, model) as stand:
        code = await go(nursery, stand, resume=False, failpoints="train.published=kill@4")
        assert code == KILLED
        text = stand.config.read_text()
        stand.config.write_text(text.replace("every_steps = 2", "every_steps = 0"))
        assert await go(nursery, stand) != 0
        assert "checkpoint.every_steps: 0 keeps no checkpoints" in stand.said
        stand.config.write_text(text)
        assert await go(nursery, stand) == 0, stand.said
        check_lineage(stand)


@one_loop
async def test_a_server_that_has_lost_everything_is_asked_for_what_is_outstanding(
    model: Path, nursery: Nursery, undisturbed: tuple[Any, Any, Any], tmp_path: Path
) -> None:
    async with synchronous(tmp_path, model) as stand:
        code = await go(nursery, stand, resume=False, failpoints="train.published=kill@4")
        assert code == KILLED
        address = stand.server.address
    async with (
        asyncio.timeout(150),
        serving(model, listen=address, step_seconds=0.0) as second,
        at_work(address),
    ):
        stand.server = second
        stand.accepted.watch(second)
        assert await go(nursery, stand) == 0, stand.said
        # Groups of steps after the checkpoint are gone; their tasks are sampled again.
        assert model_of(stand) == undisturbed[0]
        assert second.engine.versions == list(range(2, STEPS + 1))
        check_weights(stand)
    check_once(stand)


@pytest.mark.parametrize("lost", [False, True])
@one_loop
async def test_what_was_measured_stays_unless_its_step_comes_out_otherwise(
    model: Path, nursery: Nursery, tmp_path: Path, lost: bool
) -> None:
    async with synchronous(tmp_path, model, every_steps=100) as stand:
        prompts = tmp_path / "held-out.jsonl"
        prompts.write_text("".join(json.dumps({"prompt": f"Say {n}."}) + "\n" for n in range(3)))
        held_out = {"name": "held-out", "jsonl": {"path": str(prompts)}, "every_versions": 2}
        document = stand.config.read_text()
        stand.config.write_text(document + tomli_w.dumps({"evaluation": [held_out]}))
        code = await go(nursery, stand, resume=False, failpoints="train.published=kill@6")
        assert code == KILLED
        before = evaluations(tmp_path)
        assert [line["step"] for line in before] == [0, 2, 4]
        if not lost:
            # The groups of the repeated steps are in no checkpoint, but the server still has them.
            assert await go(nursery, stand) == 0, stand.said
        address = stand.server.address
    if lost:
        async with (
            asyncio.timeout(150),
            serving(model, listen=address, step_seconds=0.0),
            at_work(address),
        ):
            assert await go(nursery, stand) == 0, stand.said
        assert "step 1 came out differently than before; its measurements" in stand.said
    after = evaluations(tmp_path)
    assert [line["step"] for line in after] == [0, 2, 4, 6]
    stay = 1 if lost else 3
    assert after[:stay] == before[:stay] and not any(line in before for line in after[stay:])
    board = EventAccumulator(str(tmp_path / "out" / "tensorboard")).Reload()
    shown = [point.step for point in board.Scalars("eval/held-out/reward_mean")]
    assert shown == ([0, 2, 4, 2, 4, 6] if lost else [0, 2, 4, 6])


def evaluations(folder: Path) -> list[dict[str, Any]]:
    return [line for line in records(folder) if line.get("kind") == "evaluation"]


def check_once(stand: Stand, under_way: Collection[int] = ()) -> None:
    """Check that each task of the data was trained once or refused, and that none was skipped."""
    entries = read_ledger(stand.folder / "out" / "ledger.jsonl")
    steps = [entry for entry in entries if isinstance(entry, StepEntry)]
    assert [entry.step for entry in steps] == list(range(1, STEPS + 1))
    indices = sorted(
        int(group.task_id.rpartition("/")[2].partition("~")[0])
        for entry in steps
        for group in entry.groups
    )
    assert len(set(indices)) == len(indices) == STEPS * GROUPS_PER_STEP
    refused = {
        int(entry.task_id.rpartition("/")[2])
        for entry in entries
        if isinstance(entry, RefusedEntry)
    }
    assert set(range(indices[-1])) <= set(indices) | refused | set(under_way)


@one_loop
async def test_an_adapter_with_dropout_goes_on_bitwise_too(
    model: Path, nursery: Nursery, tmp_path: Path
) -> None:
    left: list[tuple[dict[str, bytes], dict[str, bytes]]] = []
    for name, points in (("whole", []), ("killed", ["train.published=kill@4"])):
        lora = {"rank": 4, "alpha": 8.0, "dropout": 0.3}
        async with synchronous(
            tmp_path / name, model, adapters=AdapterLimits(8, 2), model={"lora": lora}
        ) as stand:
            for point in points:
                assert await go(nursery, stand, resume=False, failpoints=point) == KILLED
            assert await go(nursery, stand, resume=bool(points)) == 0, stand.said
            left.append((model_of(stand), bits(moments_of(stand))))
            check_lineage(stand)
            assert stand.server.engine.versions == list(range(1, STEPS + 1))
    assert left[0] == left[1]


@one_loop
async def test_groups_that_were_dropped_stay_dropped(
    model: Path, nursery: Nursery, undisturbed: tuple[Any, Any, Any], tmp_path: Path
) -> None:
    usual = float(np.median([record["reward_mean"] for record in undisturbed[2]]))
    left: list[tuple[dict[str, bytes], list[dict[str, int]]]] = []
    # After a refusal is on disk but before the server learns of it; and during the steps that follow.
    points = ["ledger.after_fsync=kill@3", "train.gathered=kill@3", "ledger.after_fsync=kill@2"]
    for name, kills in (("whole", []), ("killed", points)):
        groups = {"min_mean_reward": usual}
        async with synchronous(tmp_path / name, model, groups=groups) as stand:
            for place, point in enumerate(kills):
                code = await go(nursery, stand, resume=place > 0, failpoints=point)
                assert code == KILLED, (point, stand.said)
            assert await go(nursery, stand, resume=bool(kills)) == 0, stand.said
            dropped = [record["groups_dropped"] for record in records(tmp_path / name)]
            left.append((model_of(stand), dropped))
            check_once(stand)
    assert left[0][0] == left[1][0] != undisturbed[0]
    assert sum(each.get("MEAN_TOO_LOW", 0) for each in left[0][1]) > 0


async def fails_at_first(task: Task, trajectory: Trajectory) -> float:
    """One sibling of every third prompt fails, until the prompt is asked again."""
    if task.index % 3 == 0 and trajectory.sample_index == 1 and "~" not in task.task_id:
        raise RuntimeError("not this time")
    return await letters(task, trajectory)


@one_loop
async def test_a_prompt_that_is_asked_again_is_trained_once_whoever_dies(
    model: Path, nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainers, "judge", fails_at_first)
    groups = {"failed_siblings": "replace"}
    # First with the refusal on disk and the prompt not yet resubmitted; then after resubmitting it.
    points = ["ledger.after_fsync=kill@1", "ledger.after_fsync=kill@2", "train.published=kill@4"]
    async with synchronous(tmp_path, model, groups=groups) as stand:
        for place, point in enumerate(points):
            code = await go(nursery, stand, resume=place > 0, failpoints=point)
            assert code == KILLED, (point, stand.said)
        assert await go(nursery, stand) == 0, stand.said
    entries = read_ledger(tmp_path / "out" / "ledger.jsonl")
    refused = {e.task_id for e in entries if isinstance(e, RefusedEntry)}
    assert {"run/0", "run/3"} <= refused
    assert all("~" not in task_id for task_id in refused)
    trained = [g.task_id for e in entries if isinstance(e, StepEntry) for g in e.groups]
    indices = [int(task_id.rpartition("/")[2].partition("~")[0]) for task_id in trained]
    assert len(set(indices)) == len(indices) == STEPS * GROUPS_PER_STEP
    assert "run/0~+1" in trained and not refused & set(trained)
    # A repeated prompt that is not trained yet is outstanding: no prompt was skipped.
    left = restore(tmp_path / "out" / "checkpoints")
    assert left is not None
    assert set(range(left.state.next_index)) == set(indices) | set(left.state.outstanding)


@one_loop
async def test_a_server_that_is_lost_while_the_trainer_catches_up_is_given_its_weights(
    model: Path, nursery: Nursery, undisturbed: tuple[Any, Any, Any], tmp_path: Path
) -> None:
    async with synchronous(tmp_path, model, every_steps=100) as stand:
        code = await go(nursery, stand, resume=False, failpoints="train.published=kill@5")
        assert code == KILLED
        address = stand.server.address
        # The trainer freezes in step 2 of those it repeats.
        await nursery.begin(
            stand.config, stand.log, resume=True, failpoints="train.computed=stop@2"
        )
        await stopped(nursery.pid)
    async with (
        asyncio.timeout(150),
        serving(model, listen=address, step_seconds=0.0) as second,
        at_work(address),
    ):
        stand.server = second
        stand.accepted.watch(second)
        weights = second.serving.weights
        hold = weights._hold

        async def late(*arguments: Any) -> None:
            # The server samples the version but still reads the payload, which the trainer must not
            # change.
            await asyncio.sleep(1.0)
            await hold(*arguments)

        weights._hold = late  # type: ignore[method-assign]
        os.kill(nursery.pid, signal.SIGCONT)
        assert await nursery.end() == 0, stand.said
        assert model_of(stand) == undisturbed[0]
        assert second.engine.versions[-1] == STEPS
        check_weights(stand)
    check_once(stand)


async def stopped(pid: int) -> None:
    process = psutil.Process(pid)
    while process.status() != psutil.STATUS_STOPPED:
        await asyncio.sleep(0.01)


@one_loop
async def test_a_group_whose_receipt_was_lost_is_refused_where_a_checkpoint_contains_it() -> None:
    answers: list[Any] = []
    done = asyncio.Event()

    async def session(session: Session) -> None:
        await greet(session, active=7)
        await session.receive("demand")
        await session.send(delivery=delivery(3))
        assert (await session.receive("demand")).group_count == 1
        answers.append(await session.receive("receipt"))
        done.set()
        async for _ in session.requests:
            pass

    async with (
        ScriptedServer(session) as server,
        grpc.aio.insecure_channel(server.address, options=client_options()) as channel,
    ):
        exchange = Exchange(
            channel,
            RunFacts(
                run_id="r",
                contract=Contract(max_lag=0, groups_per_step=1),
                in_flight=weights_pb2.IN_FLIGHT_POLICY_KEEP,
                weight_version=7,
                step=7,
                trained={"g3": 6},
            ),
            give_up_after_seconds=5.0,
            stopping=asyncio.Event(),
        )
        await exchange.open()

        async def restore(welcome: Any) -> None: ...

        reading = asyncio.create_task(exchange.run(restore))
        exchange.demand(1)
        await done.wait()
        await exchange.close()
        await reading
    (answer,) = answers
    assert (answer.step, answer.rejection.reason) == (0, "TRAINED_BEFORE")


# Broken checkpoints


def checkpoint_of(stand: Stand, step: int) -> Path:
    return stand.folder / "out" / "checkpoints" / f"step-{step:08d}"


@one_loop
async def test_a_broken_checkpoint_is_passed_over_loudly_and_no_prompt_with_it(
    model: Path, nursery: Nursery, tmp_path: Path
) -> None:
    async with synchronous(tmp_path, model) as stand:
        code = await go(nursery, stand, resume=False, failpoints="train.published=kill@5")
        assert code == KILLED
        file = checkpoint_of(stand, 4) / "model.safetensors"
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        assert await go(nursery, stand) == 0, stand.said
        assert "BROKEN CHECKPOINT, falling back to the previous one" in stand.said
        assert "resuming after step 2 from" in stand.said
        # The server had released the groups that only the broken checkpoint contained. Their tasks
        # are sampled again, after those that already wait.
        check_once(stand, under_way={4, 5, 6, 7})
        # Whether the tasks wait, are in flight or done.
        known = set(stand.server.serving.queue.pending.known)
        assert {f"run/{index}~4" for index in (4, 5, 6, 7)} <= known
        check_weights(stand)
    folders = sorted(path.name for path in checkpoint_of(stand, 4).parent.iterdir())
    assert folders == ["broken-step-00000004", "step-00000004", "step-00000006"]


@one_loop
async def test_a_run_whose_checkpoints_are_all_broken_ends_and_says_so(
    model: Path, nursery: Nursery, tmp_path: Path
) -> None:
    async with synchronous(tmp_path, model) as stand:
        code = await go(nursery, stand, resume=False, failpoints="train.published=kill@3")
        assert code == KILLED
        (checkpoint_of(stand, 2) / "optimizer.safetensors").unlink()
        assert await go(nursery, stand) == 1
    assert "none of the 1 checkpoints is complete" in stand.said


def state(step: int, **fields: Any) -> TrainerState:
    return TrainerState("run", step, step, next_index=9, outstanding=(4, 8), **fields)


def write_two(folder: Path) -> None:
    (folder / "inner").mkdir()
    (folder / "a").write_bytes(b"x" * 1000)
    (folder / "inner" / "b").write_bytes(b"y" * 1000)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


@pytest.mark.parametrize("spoil", [cut, flip, Path.unlink], ids=["cut", "flipped", "gone"])
@pytest.mark.parametrize("name", ["a", "inner/b", "state.json", "manifest.json"])
def test_what_was_changed_afterwards_is_never_taken(tmp_path: Path, name: str, spoil: Any) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path, state(step), write_two, keep=5)
    newest = restore(tmp_path)
    assert newest is not None and (newest.state, newest.passed_over) == (state(2), 0)
    spoil(tmp_path / "step-00000002" / name)
    if (name, spoil) == ("manifest.json", flip):
        # Not even one bit of a number or a name may differ.
        with pytest.raises(CheckpointUnusable):
            verify(tmp_path / "step-00000002")
    older = restore(tmp_path)
    assert older is not None and (older.state, older.passed_over) == (state(1), 2)
    assert (tmp_path / "broken-step-00000002").is_dir()


def test_a_checkpoint_has_its_name_durably_once_it_was_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The trainer that wrote the checkpoint may have been killed before it synced the folder."""
    assert restore(tmp_path) is None
    save_checkpoint(tmp_path, state(1), write_two, keep=5)
    synced: list[Path] = []
    monkeypatch.setattr("penstock.trainer.state.checkpoint.sync_folder", synced.append)
    assert restore(tmp_path) is not None
    assert synced == [tmp_path]


def test_as_many_checkpoints_are_kept_as_was_asked_for(tmp_path: Path) -> None:
    for step in range(1, 8):
        save_checkpoint(tmp_path, state(step), write_two, keep=3)
    kept = [path.name for path in sorted(tmp_path.iterdir())]
    assert kept == ["step-00000005", "step-00000006", "step-00000007"]
    # Each of them is enough to resume.
    for step in (7, 6):
        shutil.rmtree(tmp_path / f"step-{step:08d}")
        found = restore(tmp_path)
        assert found is not None and found.state.step == step - 1


# Disk full


@pytest.mark.parametrize(
    ("point", "said"),
    [
        ("checkpoint.policy_written=raise:ENOSPC@2", "the checkpoint of step 4 cannot be written"),
        ("ledger.before_fsync=raise:ENOSPC@5", "ledger.jsonl: No space left on device"),
        ("checkpoint.before_sync=raise:EIO@2", "Input/output error"),
    ],
)
@one_loop
async def test_a_full_disk_ends_the_run_and_costs_nothing(
    model: Path,
    nursery: Nursery,
    undisturbed: tuple[Any, Any, Any],
    tmp_path: Path,
    point: str,
    said: str,
) -> None:
    async with synchronous(tmp_path, model) as stand:
        assert await go(nursery, stand, resume=False, failpoints=point) == 1
        last = stand.said.strip().splitlines()[-1]
        assert last.startswith("penstock train: stopped: ") and said in last
        if "checkpoint" in point:
            folders = [path.name for path in checkpoint_of(stand, 2).parent.iterdir()]
            assert folders == ["step-00000002"]
        verify(checkpoint_of(stand, 2))
        # The disk has room again.
        assert await go(nursery, stand) == 0, stand.said
        assert model_of(stand) == undisturbed[0]
        check_lineage(stand)


@one_loop
async def test_a_checkpoint_that_does_not_fit_leaves_the_one_before_and_its_room(
    tmp_path: Path,
) -> None:
    mounting = await asyncio.create_subprocess_exec(
        "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path),
        stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    if await mounting.wait():
        pytest.skip("mounting a small file system takes root")

    def large(folder: Path) -> None:
        (folder / "model").write_bytes(b"x" * 600_000)

    try:
        save_checkpoint(tmp_path, state(1), large, keep=2)
        with pytest.raises(StorageFailed, match=r"step 2 cannot be written .*No space left"):
            save_checkpoint(tmp_path, state(2), large, keep=2)
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
        verify(tmp_path / "step-00000001")
    finally:
        unmounting = await asyncio.create_subprocess_exec("umount", str(tmp_path))
        assert await unmounting.wait() == 0


# Refused runs


@one_loop
async def test_it_goes_on_only_with_the_run_it_was(
    model: Path, nursery: Nursery, tmp_path: Path
) -> None:
    async with synchronous(tmp_path, model) as stand:
        code = await go(nursery, stand, resume=False, failpoints="train.published=kill@3")
        assert code == KILLED
        assert await go(nursery, stand, resume=False) == 2
        assert "resume from them with --resume, or choose another folder" in stand.said
        with (tmp_path / "prompts.jsonl").open("a") as file:
            file.write(json.dumps({"prompt": "One more?"}) + "\n")
        assert await go(nursery, stand) == 1
        assert "its data is 'jsonl " in stand.said
        lines = (tmp_path / "prompts.jsonl").read_text().splitlines(keepends=True)
        (tmp_path / "prompts.jsonl").write_text("".join(lines[:-1]))
        ledger = Ledger(tmp_path / "out")
        assert await go(nursery, stand) == 1
        assert "another trainer is writing to" in stand.said
        ledger.close()
        assert await go(nursery, stand) == 0, stand.said


# The ledger


def entry(step: int, *groups: str, weights: str = "w", version: int | None = None) -> StepEntry:
    trained = tuple(
        TrainedGroup(name, f"run/{name}", (f"{name}-0", f"{name}-1")) for name in groups
    )
    return StepEntry(step, step if version is None else version, weights, trained)


@contextlib.contextmanager
def resumed(folder: Path, step: int, length: int | None = None) -> Generator[Ledger]:
    with contextlib.closing(Ledger(folder)) as ledger:
        ledger.resume(step, length)
        yield ledger


def fill(folder: Path) -> list[int]:
    """Write three steps, and a refusal after the second; return the file length after each step."""
    with contextlib.closing(Ledger(folder)) as ledger:
        ledger.begin()
        ends: list[int] = []
        for step, name in ((1, "a"), (2, "b"), (3, "c")):
            ledger.write(entry(step, name))
            ends.append(ledger.length_bytes)
            if step == 2:
                ledger.refuse(RefusedEntry("r", "run/r", "ALL_FAILED"))
        return ends


def test_what_was_done_again_alike_stands_in_the_ledger(tmp_path: Path) -> None:
    ends = fill(tmp_path)
    before = (tmp_path / "ledger.jsonl").read_bytes()
    with resumed(tmp_path, 1, ends[0]) as ledger:
        assert ledger.trained == {"a": 1}
        assert list(ledger.ahead) == [2, 3]
        assert [refused.group_id for refused in ledger.refused] == ["r"]
        ledger.write(entry(2, "b"))
        assert ledger.length_bytes == ends[1]
        ledger.write(entry(3, "c"))
        assert (tmp_path / "ledger.jsonl").read_bytes() == before
        ledger.write(entry(4, "d"))
    assert [e.step for e in read_ledger(tmp_path / "ledger.jsonl") if isinstance(e, StepEntry)] == [
        1, 2, 3, 4,
    ]  # fmt: skip


@pytest.mark.parametrize(
    "other", [entry(2, "x"), entry(2, "b", weights="v"), entry(2, "b", version=9)]
)
def test_what_came_out_otherwise_ends_it_there_but_for_refusals(
    tmp_path: Path, other: StepEntry
) -> None:
    fill(tmp_path)
    with resumed(tmp_path, 1) as ledger:
        ledger.write(other)
        assert not ledger.ahead
        with pytest.raises(RunFolderInUse):
            Ledger(tmp_path)
    refused = RefusedEntry("r", "run/r", "ALL_FAILED")
    assert read_ledger(tmp_path / "ledger.jsonl") == [entry(1, "a"), refused, other]


class Killed(BaseException):
    """A kill: the files stay as they are."""


@pytest.mark.parametrize(
    ("error", "raised"), [(Killed, Killed), (OSError(errno.ENOSPC, "no room"), StorageFailed)]
)
@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
def test_a_ledger_that_cannot_be_cut_is_as_it_was(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, call: str, error: Any, raised: Any
) -> None:
    def fails(*_: object) -> None:
        raise error

    fill(tmp_path)
    before = (tmp_path / "ledger.jsonl").read_bytes()
    with resumed(tmp_path, 1) as ledger, monkeypatch.context() as patched:
        patched.setattr(os, call, fails)
        with pytest.raises(raised):
            ledger.write(entry(2, "x"))
    assert (tmp_path / "ledger.jsonl").read_bytes() == before
    with resumed(tmp_path, 1) as ledger:
        assert [path.name for path in tmp_path.iterdir()] == ["ledger.jsonl"]
        assert [refused.group_id for refused in ledger.refused] == ["r"]


def test_lines_that_may_stand_are_durable_once_they_were_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The trainer that wrote the entries may have been killed before it synced them."""
    fill(tmp_path)
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    with resumed(tmp_path, 1) as ledger:
        assert len(synced) == 1
        ledger.write(entry(2, "b"))
        assert len(synced) == 1


def test_half_a_line_is_none(tmp_path: Path) -> None:
    ends = fill(tmp_path)
    path = tmp_path / "ledger.jsonl"
    whole = path.read_bytes()
    for length in range(ends[1], len(whole) + 1):
        path.write_bytes(whole[:length])
        with resumed(tmp_path, 2, ends[1]) as ledger:
            assert set(ledger.ahead) == ({3} if length == len(whole) else set())
            assert path.read_bytes() in (
                whole,
                whole[: ends[1]],
                whole[: whole.rfind(b"\n", 0, -1) + 1],
            )


def test_the_ledger_of_another_run_is_refused(tmp_path: Path) -> None:
    ends = fill(tmp_path)
    with (
        pytest.raises(CheckpointUnusable, match="the line of step 2 ends at byte"),
        resumed(tmp_path, 2, ends[1] + 1),
    ):
        pass
    with pytest.raises(CheckpointUnusable), resumed(tmp_path, 4, ends[2] + 80):
        pass


def test_one_trainer_at_a_time_writes_to_a_folder(tmp_path: Path) -> None:
    first = Ledger(tmp_path)
    with pytest.raises(RunFolderInUse, match="another trainer is writing to"):
        Ledger(tmp_path)
    first.close()
    Ledger(tmp_path).close()


def test_who_opened_the_ledger_before_it_was_replaced_does_not_have_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def replaced(*arguments: Any, lock: Any = fcntl.flock) -> None:
        (tmp_path / "new").touch()
        (tmp_path / "new").rename(tmp_path / "ledger.jsonl")
        lock(*arguments)

    monkeypatch.setattr(fcntl, "flock", replaced)
    with pytest.raises(RunFolderInUse, match="another trainer is writing to"):
        Ledger(tmp_path)


# Random states


def test_every_random_state_goes_on_where_it_was(tmp_path: Path) -> None:
    def draw() -> list[object]:
        dropped = torch.nn.functional.dropout(torch.ones(64), 0.5)
        return [
            torch.rand(4).tolist(),
            dropped.tolist(),
            random.random(),
            random.gauss(0, 1),
            np.random.rand(3).tolist(),
            np.random.standard_normal(),
        ]

    seed_all(5)
    draw()
    save_random_states(tmp_path)
    expected = [draw(), draw()]
    seed_all(6)
    assert draw() != expected[0]
    load_random_states(tmp_path)
    assert [draw(), draw()] == expected
    seed_all(5)
    first = draw()
    seed_all(5)
    assert draw() == first


@one_loop
async def test_receipts_that_were_lost_with_the_stream_keep_no_places(
    model, nursery, tmp_path, undisturbed
) -> None:
    """The server delivers their groups again, and the step that is gathering must not use them."""
    async with asyncio.timeout(45), synchronous(tmp_path, model, every_steps=100) as stand:
        await nursery.begin(
            stand.config, stand.log, resume=False, failpoints="train.published=stop@1"
        )
        await stopped(nursery.pid)
        stand.server.serving.session.end(DomainError(Reason.DRAINING, "lost"))
        await asyncio.sleep(0.2)
        os.kill(nursery.pid, signal.SIGCONT)
        assert await nursery.end() == 0, stand.said
        check_lineage(stand)
        assert model_of(stand) == undisturbed[0]
