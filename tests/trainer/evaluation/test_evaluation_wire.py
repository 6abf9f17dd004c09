"""Evaluation during a whole run, with the real server around the fake engine, and a worker."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from penstock.client import Patience, Task, Trajectory, Worker, WorkerSettings
from penstock.client.calls import Calls
from penstock.client.scoring import single_turn
from penstock.client.tasks import Purpose
from penstock.server.assembly import Serving
from penstock.server.config import settings as server_config
from penstock.server.config.limits import LeasesSection
from penstock.server.core.aio import Broadcast
from penstock.server.engine.protocol import TensorMeta
from penstock.server.groups.admission import Admission
from penstock.server.groups.attempts import Holder
from penstock.server.groups.task_queue import TaskQueue
from penstock.server.lifecycle import Lifecycle, bind
from penstock.trainer.policy.protocol import StepResult
from penstock.trainer.weights.sender import Sender
from penstock.v1 import trajectory_pb2
from penstock.wire.messages import Task as ServerTask
from tests.support.fakes import ByteRenderer, FakeEngine
from tests.support.harness import (
    Exchange,
    LeaseTasksRequest,
    SubmitTasksRequest,
    hello,
    sequence,
    serve,
)
from tests.support.trainer_walk import StillPolicy, running

PROMPTS = 6
EVAL = trajectory_pb2.PURPOSE_EVAL


@dataclass
class Server:
    life: Lifecycle
    engine: FakeEngine
    address: str

    @property
    def serving(self) -> Serving:
        return self.life.serving


@contextlib.asynccontextmanager
async def serving(folder: Path, listen: str = "127.0.0.1:0") -> AsyncGenerator[Server]:
    engine = FakeEngine(0.001, tensors={"a.weight": TensorMeta((3,))})
    loaded = server_config.load(None, [f"listen={listen}", f"weights.stage_folder={folder}"])
    server, port = bind(loaded.listen, loaded.limits.concurrent_calls)
    life = Lifecycle(Serving(engine, ByteRenderer(), loaded), server)
    await life.start()
    try:
        yield Server(life, engine, f"127.0.0.1:{port}")
    finally:
        await life.stop(0.0)


async def lengths(task: Task, trajectory: Trajectory) -> float:
    return float(len(trajectory.text))


@contextlib.asynccontextmanager
async def working(address: str, reward: Any = lengths) -> AsyncGenerator[None]:
    calls = Calls(address, Patience())
    worker = Worker(calls, single_turn, reward, WorkerSettings(concurrency=6, drain_seconds=0.0))
    task = asyncio.create_task(worker.run())
    try:
        yield
    finally:
        worker.stop()
        await task
        await calls.close()


def evaluation(folder: Path, **fields: object) -> dict[str, object]:
    path = folder / "held-out.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"p{n}", "n": n}) + "\n" for n in range(PROMPTS)))
    return {
        "name": "held-out",
        "jsonl": {"path": str(path)},
        "concurrency": 2,
        "every_versions": 1,
        "sampling": {"max_tokens": 6},
        **fields,
    }


def lines(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Evaluations, and training steps."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return (
        [line for line in found if line.get("kind") == "evaluation"],
        [line for line in found if "kind" not in line],
    )


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("max_lag", [0, 4])
async def test_every_version_is_measured_whole_and_training_goes_on(
    tmp_path: Path, max_lag: int
) -> None:
    sets = [evaluation(tmp_path, samples_per_prompt=2)]
    async with serving(tmp_path) as server, working(server.address):
        async with running(
            tmp_path, server.address, steps=3, evaluation=sets, max_lag=max_lag
        ) as run:
            await run.ends(60)
        assert all(group.training for group in server.serving.buffer.groups)
        assert not server.serving.buffer.drops
    measured, steps = lines(tmp_path)
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert [line["step"] for line in measured] == [0, 1, 2, 3]
    for line in measured:
        versions = line["oldest_weight_version"], line["newest_weight_version"]
        assert versions == (line["weight_version"],) * 2 == (line["step"],) * 2
        assert (line["prompts"], line["samples"], line["failures"]) == (6, 12, 0)
        assert (line["prompts_missing"], line["mixed_share"], line["lag"]) == (0, 0.0, 0)
        assert set(line["pass_at"]) == {"1", "2"} and list(line["by_source"]) == ["held-out"]
    ledger = (tmp_path / "ledger.jsonl").read_text()
    assert ledger.count('"r/') == 3 and "held-out" not in ledger


async def test_a_pinned_evaluation_holds_the_switch_and_not_the_step(tmp_path: Path) -> None:
    sets = [evaluation(tmp_path, sampling={"max_tokens": 60}, every_versions=0, at_end=False)]
    async with serving(tmp_path) as server, working(server.address):
        # Only evaluation turns reach this length. Training turns end earlier.
        server.engine.freeze_at = 20
        async with running(
            tmp_path, server.address, steps=2, evaluation=sets, data={"sampling": {"max_tokens": 4}}
        ) as run:
            weights = server.serving.weights
            await until(lambda: weights.staged_versions)
            assert run.policy.steps == 1 and server.engine.version == 0
            server.engine.freeze_at = None
            await run.ends(60)
    (line,), steps = lines(tmp_path)
    assert (line["oldest_weight_version"], line["newest_weight_version"]) == (0, 0)
    assert line["seconds_held"] > 0
    assert [step["seconds_held"] > 0 for step in steps] == [True, False]


async def test_on_the_fly_says_what_was_mixed_and_how_far_the_trainer_is_ahead(
    tmp_path: Path,
) -> None:
    sets = [
        evaluation(
            tmp_path,
            sampling={"max_tokens": 60},
            every_versions=1,
            at_end=False,
            mode={"kind": "on_the_fly"},
        )
    ]
    async with serving(tmp_path) as server, working(server.address):
        server.engine.freeze_at = 20
        async with running(
            tmp_path, server.address, steps=3, evaluation=sets, data={"sampling": {"max_tokens": 4}}
        ) as run:
            await until(lambda: server.engine.version == 3)
            server.engine.freeze_at = None
            await run.ends(60)
    (line,), _ = lines(tmp_path)
    assert (line["weight_version"], line["oldest_weight_version"]) == (0, 0)
    assert line["newest_weight_version"] == 3 and line["mixed_groups"] >= 1
    assert line["lag"] == 3 and line["prompts"] == PROMPTS


async def test_a_server_lost_in_the_middle_costs_no_prompt_and_mixes_no_version(
    tmp_path: Path,
) -> None:
    sets = [evaluation(tmp_path, at_start=False, every_versions=1)]
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(serving(tmp_path))
        scored: list[int] = []

        async def reward(task: Task, trajectory: Trajectory) -> float:
            if task.purpose is Purpose.EVAL:
                scored.append(trajectory.last_turn.segments[0].weight_version)
            return 1.0

        async with (
            working(server.address, reward),
            running(tmp_path, server.address, steps=1, evaluation=sets) as run,
        ):
            await until(lambda: len(scored) >= 3)
            await stack.aclose()
            server = await stack.enter_async_context(serving(tmp_path, server.address))
            await run.ends(60)
    (line,), _ = lines(tmp_path)
    assert (line["oldest_weight_version"], line["newest_weight_version"]) == (1, 1)
    assert (line["prompts"], line["failures"], line["prompts_missing"]) == (PROMPTS, 0, 0)


class Held(StillPolicy):
    """Its second step ends only when the test allows it."""

    def step(self, plan: Any) -> StepResult:
        result = super().step(plan)
        if self.steps == 1:
            self.may_end.clear()
        return result


@pytest.mark.parametrize("made", ["before", "meanwhile"])
async def test_a_version_that_a_server_lost_and_is_not_given_again_is_waited_for_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, made: str
) -> None:
    sets = [
        evaluation(tmp_path, sampling={"max_tokens": 60}, at_start=False, mode={"kind": "pinned"})
    ]
    policy = StillPolicy() if made == "before" else Held()
    upload = Sender.upload

    async def overtaken(*_: Any, **__: Any) -> None:
        """Acts as if the next version had replaced the payload since the trainer last checked."""
        monkeypatch.setattr(Sender, "upload", upload)
        policy.may_end.set()

    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(serving(tmp_path))
        queue, weights = server.serving.queue, server.serving.weights
        # After the end of training turns, and before the end of the first two evaluation prompts.
        server.engine.freeze_at = 10
        async with (
            working(server.address),
            running(
                tmp_path,
                server.address,
                steps=2,
                policy=policy,
                evaluation=sets,
                data={"sampling": {"max_tokens": 4}},
            ) as run,
        ):
            if made == "before":
                await until(lambda: 2 in weights.staged_versions)
            else:
                groups = queue._groups.values()
                await until(lambda: any(g.task and g.task.purpose == EVAL for g in groups))
                monkeypatch.setattr(Sender, "upload", overtaken)
            await stack.aclose()
            await stack.enter_async_context(serving(tmp_path, server.address))
            await run.ends(60)
    (lost, last), steps = lines(tmp_path)
    assert [line["step"] for line in steps] == [1, 2]
    assert (lost["weight_version"], lost["prompts_missing"]) == (1, PROMPTS)
    # No prompt was asked of the server that holds other weights.
    assert (lost["asked_again"], lost["failures"]) == (0, 0)
    assert (last["weight_version"], last["prompts"]) == (2, PROMPTS)
    assert "0 of 6 prompts: a server lost that version, and the next one is ready" in caplog.text


async def test_one_that_did_not_end_is_begun_anew_by_the_trainer_that_resumes(
    tmp_path: Path,
) -> None:
    sets = [evaluation(tmp_path, sampling={"max_tokens": 60}, every_versions=0, at_end=False)]
    async with serving(tmp_path) as server, working(server.address):
        server.engine.freeze_at = 20
        async with running(tmp_path, server.address, steps=1, evaluation=sets) as run:
            await until(lambda: len(server.serving.queue.groups) >= 2)
            run.walk.cancel()
            await asyncio.wait([run.walk])
        assert lines(tmp_path)[0] == []
        server.engine.freeze_at = None
        async with running(tmp_path, server.address, steps=1, evaluation=sets) as run:
            await run.ends(60)
        async with running(tmp_path, server.address, steps=1, step=1, evaluation=sets) as run:
            await run.ends(60)
    (line,), _ = lines(tmp_path)
    assert (line["step"], line["prompts"], line["prompts_missing"]) == (0, PROMPTS, 0)


async def test_attempts_that_fail_are_made_again_and_counted(tmp_path: Path) -> None:
    tried: list[str] = []

    async def fragile(task: Task, trajectory: Trajectory) -> float:
        if task.purpose is Purpose.EVAL and task.metadata["n"] == 2:
            tried.append(trajectory.trajectory_id)
            raise RuntimeError("no")
        return 1.0

    sets = [evaluation(tmp_path, every_versions=0, at_end=False)]
    async with (
        serving(tmp_path) as server,
        working(server.address, fragile),
        running(tmp_path, server.address, steps=1, evaluation=sets) as run,
    ):
        await run.ends(60)
    (line,), steps = lines(tmp_path)
    assert len(tried) == 3 and len(steps) == 1
    assert (line["prompts"], line["failures"], line["reward_mean"]) == (PROMPTS - 1, 1, 1.0)
    assert line["failure_reasons"] == {"RUNTIME_ERROR": 1}


def test_an_agent_that_takes_anything_begins_evaluations_first() -> None:
    changed = Broadcast()
    queue = TaskQueue(changed, Admission(changed, lambda: 0.0, 100), LeasesSection(), lambda: 0.0)
    training = [ServerTask(task_id=f"t{n}", group_size=1) for n in range(3)]
    queue.pending.submit([*training, ServerTask(task_id="e", group_size=1, purpose=EVAL)])
    assert queue.pending.count_of(training) == 3
    lease = queue.lease(Holder("a", 8, trajectory_pb2.PURPOSE_UNSPECIFIED), 0)
    assert lease is not None and lease.group.task is not None
    assert lease.group.task.task_id == "e"


async def test_what_was_measured_is_gone_and_counts_nowhere(tmp_path: Path) -> None:
    folder = f"journal.folder={tmp_path / 'journal'}"
    async with serve(tmp_path, folder) as harness:
        tasks = [
            ServerTask(task_id=f"e{n}", group_size=1, purpose=EVAL, tokens=sequence([1]))
            for n in range(2)
        ]
        answer = await harness.wire.SubmitTasks(SubmitTasksRequest(tasks=tasks))
        assert answer.pending_count == 2
        training = [ServerTask(task_id="t", group_size=1, tokens=sequence([1]))]
        answer = await harness.wire.SubmitTasks(SubmitTasksRequest(tasks=training))
        assert answer.pending_count == 1
        call = harness.wire.LeaseTasks(LeaseTasksRequest(agent_id="a", concurrency=2, purpose=EVAL))
        for _ in tasks:
            await harness.complete((await call.read()).trajectory_id)
        call.cancel()
        exchange = Exchange(harness.wire)
        contract = {"max_lag": 4, "groups_per_step": 2}
        exchange.send(hello={"run_id": "run", "trainer_epoch": 1, "staleness": contract})
        # A resuming trainer does not count evaluation groups among those it waits for.
        assert (await exchange.receive("welcome")).buffered_group_count == 0
        exchange.send(demand={"group_count": 2, "purpose": EVAL})
        first = await exchange.receive("delivery")
        await exchange.receive("delivery")
        exchange.send(receipt={"delivery_ids": [first.delivery_id], "step": 1})
        exchange.half_close()
        assert await exchange.call.code() is grpc.StatusCode.OK
        assert harness.serving.buffer.held_count == 1
    async with serve(tmp_path, folder) as harness:
        assert harness.serving.buffer.held_count == 1
        exchange = await hello(harness.wire, epoch=2)
        exchange.send(demand={"group_count": 2, "purpose": EVAL})
        again = await exchange.receive("delivery")
        assert again.group.task_id != first.group.task_id
        await exchange.nothing()
