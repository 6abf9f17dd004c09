"""Evaluation during training, without a server: when prompts are asked, what is recorded, how
failures count.
"""

from __future__ import annotations

import asyncio
import io
import json
import math
import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from penstock.trainer.config.data import DataConfig
from penstock.trainer.config.evaluation import EvaluationConfig
from penstock.trainer.config.trainer import load_config, render_config
from penstock.trainer.core.errors import ConfigInvalid, ServerFull, ServerLost
from penstock.trainer.evaluation.evaluation import Evaluator
from penstock.trainer.evaluation.prompts import Prompts, Schedule, Verdict
from penstock.trainer.evaluation.record import (
    EvaluationRecord,
    MeasuredPrompt,
    make_record,
    read_measured,
    take_figures,
)
from penstock.trainer.evaluation.sets import EvaluationSet
from penstock.trainer.evaluation.writer import EvaluationWriter, last_steps, lines_from, show
from penstock.trainer.exchange import retrying
from penstock.trainer.exchange.evaluation_stream import EvaluationStream
from penstock.trainer.metrics.metrics import keep_until
from penstock.v1 import trajectory_pb2
from penstock.wire import codec
from penstock.wire.messages import GroupDelivery, Outcome, Segment, Trajectory, TrajectoryGroup

EVAL = trajectory_pb2.PURPOSE_EVAL
ROOT = Path(__file__).resolve().parents[3]


def prompt(*rewards: float, source: str = "s", failures: int = 0, **fields: Any) -> MeasuredPrompt:
    return MeasuredPrompt(
        source, rewards, (3,) * len(rewards), 0, ("BAD",) * failures, fields.get("versions", (1,))
    )


def test_the_standard_error_is_that_of_prompts_not_of_samples() -> None:
    prompts = [prompt(0, 0, 0, 0), prompt(1, 1, 1, 1), prompt(0, 1, 0, 1)]
    figures = take_figures(prompts, samples_per_prompt=4, passes_from=1.0)
    assert figures.reward_mean == pytest.approx(0.5)
    assert figures.reward_stderr == pytest.approx(np.std([0, 1, 0.5], ddof=1) / math.sqrt(3))
    assert (figures.prompts, figures.samples) == (3, 12)


def test_pass_at_k_is_the_share_of_choices_with_a_right_one() -> None:
    rewards = (1.0, 0.0, 0.0, 1.0, 0.5, 0.0)
    figures = take_figures([prompt(*rewards)], samples_per_prompt=6, passes_from=1.0)
    assert set(figures.pass_at) == {"1", "2", "4", "6"}
    for k, share in figures.pass_at.items():
        choices = list(combinations(rewards, int(k)))
        assert share == pytest.approx(np.mean([max(choice) >= 1.0 for choice in choices]))


def test_failed_samples_are_in_no_figure_and_counted() -> None:
    record = make_record(
        [prompt(1.0, failures=1), prompt(failures=2), prompt(0.0, 0.0)],
        name="n",
        step=3,
        weight_version=3,
        mode="pinned",
        samples_per_prompt=2,
        passes_from=1.0,
        prompts_asked=4,
    )
    assert (record.figures.reward_mean, record.figures.prompts, record.figures.samples) == (
        0.5,
        2,
        3,
    )
    assert record.figures.pass_at == {"1": 0.5, "2": 0.0}
    assert (record.figures.failures, record.failure_reasons) == (3, {"BAD": 3})
    assert record.prompts_missing == 1


def test_a_set_is_due_at_the_start_on_its_grid_and_at_the_end() -> None:
    schedule = Schedule(every=4, at_start=True, at_end=True)
    begun = []
    for step in range(11):
        if schedule.due(step):
            schedule.begin(step)
            begun.append(step)
    assert begun == [0, 4, 8]
    assert schedule.due_at_end(10) and not schedule.due_at_end(8)
    assert not Schedule(every=4, at_start=False, at_end=True).due(3)
    assert not Schedule(every=0, at_start=False, at_end=True).due(100)
    assert schedule.ends_with(10)
    grid = Schedule(every=4, at_start=True, at_end=False)
    assert grid.ends_with(8) and not grid.ends_with(10)
    assert not Schedule(every=0, at_start=True, at_end=False).ends_with(8)


def test_what_was_due_and_has_no_result_begins_with_the_first_weights_there_are() -> None:
    # Killed between 8 and 12; resumed at 10 with the result of 4.
    schedule = Schedule(every=4, at_start=True, at_end=True, last_step=4)
    assert schedule.due(10)
    schedule.begin(10)
    assert not schedule.due(11) and schedule.due(12)
    schedule.skip(12)
    assert not schedule.due(13) and schedule.due_at_end(12)
    assert schedule.begin(16) == 1 and schedule.skipped == 0
    # The evaluation was complete before the trainer was killed.
    done = Schedule(every=4, at_start=True, at_end=True, last_step=12)
    assert not done.due_at_end(12)
    # A step before the last result is computed again and comes out differently.
    assert not done.forget(13) and not done.due(12)
    assert done.forget(10) and not done.forget(10)
    assert not done.due(10) and done.due(12) and done.due_at_end(12)


def test_a_prompt_of_another_version_is_asked_again_and_then_counts_as_failed() -> None:
    prompts = Prompts("p", 1, concurrency=4, pinned_version=2, max_other_version=1)
    (first,) = prompts.next()
    assert prompts.take(first.task_id, prompt(1.0, versions=(1, 2))) is Verdict.AGAIN
    assert prompts.take(first.task_id, prompt(1.0, versions=(2,))) is Verdict.UNKNOWN
    (second,) = prompts.next()
    assert second.task_id != first.task_id and second.index == first.index
    assert prompts.take(second.task_id, prompt(1.0, 0.0, versions=(0,))) is Verdict.MEASURED
    (measured,) = prompts.measured
    assert prompts.done and measured.rewards == ()
    assert measured.failure_reasons == ("OTHER_VERSION",) * 2
    # These samples enter no figure, so their versions do not count as measured.
    record = make_record(
        [measured, prompt(1.0, versions=(2,))],
        name="n",
        step=2,
        weight_version=2,
        mode="pinned",
        samples_per_prompt=1,
        passes_from=1.0,
        prompts_asked=2,
    )
    assert (record.oldest_weight_version, record.newest_weight_version) == (2, 2)
    assert (record.mixed_groups, record.mixed_share) == (0, 0.0)


def test_versions_of_what_failed_are_not_measured_and_yet_of_another_version() -> None:
    def one(name: str, version: int, parent: str = "", **outcome: Any) -> Any:
        ids = codec.array_bytes(np.array([1, 2], np.int32))
        author = trajectory_pb2.AUTHOR_POLICY
        return Trajectory(
            trajectory_id=name,
            segments=[Segment(author=author, token_ids=ids, weight_version=version)],
            outcome=Outcome(**outcome),
            parent_trajectory_id=parent,
        )

    failure = {"reason": "BAD"}
    group = TrajectoryGroup(
        trajectories=[
            one("a", 3, reward=1.0),
            one("b", 1, failure=failure),
            # A branch is measured together with its attempt, or not at all.
            one("c", 4, parent="a", reward=1.0),
            one("d", 2, parent="b", reward=1.0),
        ]
    )
    measured = read_measured(group, "s")
    assert (measured.versions, measured.failed_versions) == ((3, 4), (1, 2))
    assert (measured.rewards, measured.failure_reasons) == ((1.0,), ("BAD",))
    # The failure rate of a pinned evaluation belongs to that version, too.
    prompts = Prompts("p", 1, concurrency=1, pinned_version=3, max_other_version=1)
    (asked,) = prompts.next()
    of_two = MeasuredPrompt("s", (1.0,), (2,), 0, ("BAD",), (3,), (1,))
    assert prompts.take(asked.task_id, of_two) is Verdict.AGAIN


@dataclass
class FakeExchange:
    """A server that holds the submitted tasks, and delivers as many groups as were demanded."""

    held_version: int = 1
    trainer_epoch: int = 7
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: dict[str, Any] = field(default_factory=dict[str, Any])
    """Tasks that were submitted, and neither received nor refused."""
    known: set[str] = field(default_factory=set[str])
    delivered: dict[int, str] = field(default_factory=dict[int, str])
    """Delivery id -> task id, of deliveries without a receipt."""
    received: list[str] = field(default_factory=list[str])
    refused: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    credit: int = 0
    most_open: int = 0
    active: int = 1
    full: bool = False
    """Whether it refuses tasks that it does not already have."""
    rewards: Any = lambda index: [1.0]
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.stream = EvaluationStream(self.ready, self.send)
        self.evaluations = (self.stream,)
        self.ready.set()

    def send(self, request: Any) -> None:
        if not self.ready.is_set():
            return  # Lost with the stream.
        if request.WhichOneof("message") == "demand":
            assert request.demand.purpose == EVAL
            self.credit += request.demand.group_count
            self.changed.set()
            return
        for delivery_id in request.receipt.delivery_ids:
            task_id = self.delivered.pop(delivery_id, None)
            if task_id is None:
                continue
            self.tasks.pop(task_id, None)
            if request.receipt.HasField("rejection"):
                self.refused.append((task_id, request.receipt.rejection.reason))
            else:
                assert request.receipt.step > 0
                self.received.append(task_id)

    async def submit(self, server: int, tasks: Sequence[Any]) -> int:
        await asyncio.sleep(0)
        if not self.ready.is_set():
            raise ServerLost("away")
        if self.full:
            raise ServerFull("QUEUE_FULL", 0.01)
        for task in tasks:
            assert task.purpose == EVAL
            if task.task_id not in self.known:
                self.known.add(task.task_id)
                self.tasks[task.task_id] = task
        self.most_open = max(self.most_open, len(self.tasks))
        self.changed.set()
        return 0

    def deliver(self, task_id: str, versions: Sequence[int] | None = None) -> None:
        """Deliver one group, which uses one credit."""
        assert self.credit > 0
        self.credit -= 1
        task = self.tasks[task_id]
        delivery_id = len(self.delivered) + len(self.received) + len(self.refused) + 1
        while delivery_id in self.delivered:
            delivery_id += 1
        self.delivered[delivery_id] = task_id
        rewards = self.rewards(task.index)
        trajectories = [
            Trajectory(
                trajectory_id=f"{task_id}-{place}",
                segments=[
                    Segment(
                        author=trajectory_pb2.AUTHOR_POLICY,
                        token_ids=codec.array_bytes(np.array([1, 2], np.int32)),
                        weight_version=version,
                    )
                    for version in versions or [self.active]
                ],
                outcome=Outcome(reward=reward)
                if reward is not None
                else Outcome(failure={"reason": "BAD"}),
            )
            for place, reward in enumerate(rewards)
        ]
        group = TrajectoryGroup(
            group_id=f"g{task_id}", task_id=task_id, purpose=EVAL, trajectories=trajectories
        )
        self.stream.take(GroupDelivery(delivery_id=delivery_id, group=group))

    @property
    def waiting(self) -> list[str]:
        """Tasks whose group could be delivered."""
        return [t for t in self.tasks if t not in self.delivered.values()]


@dataclass
class Run:
    exchange: FakeExchange
    evaluator: Evaluator
    stopping: asyncio.Event
    records: list[EvaluationRecord]

    async def settle(self) -> None:
        # More iterations than prompts are asked at a time, so that the server has all of them.
        for _ in range(40):
            await asyncio.sleep(0)

    async def serve(self, count: int = 1_000_000) -> None:
        """Deliver groups until no evaluation is running."""
        while count and (self.exchange.waiting or self.running):
            await self.settle()
            for task_id in self.exchange.waiting[: self.exchange.credit]:
                if not count:
                    return
                self.exchange.deliver(task_id)
                count -= 1

    @property
    def running(self) -> bool:
        return any(one.current is not None for one in self.evaluator.sets)


def rows() -> list[str]:
    return [f"What is {n}?" for n in range(1000)]


def evaluation(**fields: Any) -> EvaluationConfig:
    return EvaluationConfig.model_validate(
        {
            "name": "sums",
            "python": {"function": "tests.trainer.evaluation.test_evaluation:rows"},
            "prompts": 20,
            "concurrency": 4,
            **fields,
        }
    )


@asynccontextmanager
async def measuring(
    *configs: EvaluationConfig, last_step: int | None = None, **fields: Any
) -> AsyncGenerator[Run]:
    data = DataConfig.model_validate({"reasoning_gym": {"name": "chain_sum"}})
    exchange, stopping = FakeExchange(**fields), asyncio.Event()
    records: list[EvaluationRecord] = []
    evaluator = Evaluator(
        [EvaluationSet(config, data, last_step) for config in configs],
        exchange,
        run_id="r",
        submit=exchange.submit,
        write=records.append,
        stopping=stopping,
    )
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        evaluator.open(group)
        yield Run(exchange, evaluator, stopping, records)
        stopping.set()


async def test_no_more_prompts_are_asked_at_a_time_than_may_be() -> None:
    async with measuring(evaluation(prompts=50)) as run:
        run.evaluator.version_active(0, 1)
        await run.serve()
        assert run.exchange.most_open == 4
        assert len(run.exchange.received) == len(set(run.exchange.received)) == 50
    (record,) = run.records
    assert (record.figures.prompts, record.prompts_missing) == (50, 0)
    assert (record.weight_version, record.oldest_weight_version, record.lag) == (1, 1, 0)


async def test_a_pinned_evaluation_holds_the_switch_and_one_on_the_fly_does_not() -> None:
    for mode, waits in (("pinned", True), ("on_the_fly", False)):
        async with measuring(evaluation(mode={"kind": mode})) as run:
            run.evaluator.version_active(0, 1)
            await run.settle()
            switching = asyncio.ensure_future(run.evaluator.may_switch())
            await run.settle()
            assert switching.done() is not waits
            await run.serve()
            await switching
        assert (run.records[0].seconds_held > 0) is waits


async def test_a_version_that_a_server_lost_is_waited_for_no_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pinned = evaluation(name="pinned")
    on_the_fly = evaluation(name="on_the_fly", mode={"kind": "on_the_fly"})
    async with measuring(pinned, on_the_fly) as run:
        run.evaluator.version_active(0, 1)
        await run.settle()
        switch = asyncio.create_task(run.evaluator.may_switch())
        for task_id in [t for t in run.exchange.waiting if "~pinned" in t][:3]:
            run.exchange.deliver(task_id)
            await run.settle()
        assert not switch.done()
        run.exchange.known.clear()
        run.evaluator.version_gone()
        await run.evaluator.submit_again(0)
        assert {task_id.split("/")[1] for task_id in run.exchange.known} == {"~on_the_fly"}
        await switch
        (record,) = run.records
        assert (record.name, record.figures.prompts, record.prompts_missing) == ("pinned", 3, 17)
        await run.serve()
    assert [(r.name, r.prompts_missing) for r in run.records[1:]] == [("on_the_fly", 0)]
    assert "pinned of version 1 ends with 3 of 20 prompts: a server lost that" in caplog.text
    # Groups that still arrive are refused, because their evaluation is over.
    assert {reason for _, reason in run.exchange.refused} == {"EVALUATION_OVER"}


async def test_a_stop_lets_the_switch_go_and_leaves_no_record() -> None:
    async with measuring(evaluation()) as run:
        run.evaluator.version_active(0, 1)
        await run.settle()
        switching = asyncio.ensure_future(run.evaluator.may_switch())
        await run.settle()
        run.stopping.set()
        await switching
        await run.evaluator.finish(5, 5)
    assert run.records == []


async def test_what_comes_due_while_one_runs_is_skipped_and_the_last_weights_are_measured() -> None:
    fly = evaluation(mode={"kind": "on_the_fly"}, every_versions=1)
    async with measuring(fly) as run:
        run.evaluator.version_active(0, 0)
        await run.serve(3)
        for step in (1, 2, 3):
            run.exchange.held_version = run.exchange.active = step
            run.evaluator.version_active(step, step)
        finishing = asyncio.ensure_future(run.evaluator.finish(3, 3))
        await run.serve()
        await run.settle()
        await run.serve()
        await finishing
    first, last = run.records
    assert (first.step, first.oldest_weight_version, first.newest_weight_version) == (0, 1, 3)
    assert (first.lag, first.skipped) == (2, 0)
    assert (last.step, last.weight_version, last.skipped) == (3, 3, 3)


async def test_what_the_last_one_will_take_is_what_it_took_before() -> None:
    sums, more = evaluation(prompts=4), evaluation(name="more", prompts=4, at_end=False)
    async with measuring(sums, more) as run:
        # Both evaluations measure every tenth version.
        assert run.evaluator.seconds_after(10) is run.evaluator.seconds_after(11) is None
        run.evaluator.version_active(0, 1)
        await run.serve()
        took = {record.name: record.seconds for record in run.records}
        assert run.evaluator.seconds_after(10) == max(took.values()) > 0.0
        assert run.evaluator.seconds_after(11) == took["sums"]
    async with measuring(evaluation(at_end=False, every_versions=0)) as run:
        assert run.evaluator.seconds_after(10) == 0.0


async def test_mixed_groups_are_counted_on_the_fly() -> None:
    fly = evaluation(mode={"kind": "on_the_fly"}, prompts=4, at_end=False)
    async with measuring(fly) as run:
        run.evaluator.version_active(0, 1)
        await run.settle()
        first, *_ = run.exchange.waiting
        run.exchange.deliver(first, versions=[1, 2])
        await run.serve()
    assert (run.records[0].mixed_groups, run.records[0].mixed_share) == (1, 0.25)


async def test_prompts_that_failed_are_neither_mixed_nor_not() -> None:
    fly = evaluation(mode={"kind": "on_the_fly"}, prompts=4, at_end=False)
    async with measuring(fly, rewards=lambda index: [1.0 if index < 2 else None]) as run:
        run.evaluator.version_active(0, 1)
        await run.settle()
        first, *_ = run.exchange.waiting
        run.exchange.deliver(first, versions=[1, 2])
        await run.serve()
    assert (run.records[0].mixed_groups, run.records[0].mixed_share) == (1, 0.5)


async def test_everything_failing_ends_with_a_record_that_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with measuring(
        evaluation(samples_per_prompt=2), rewards=lambda index: [None, None]
    ) as run:
        run.evaluator.version_active(0, 1)
        await run.serve()
    (record,) = run.records
    assert record.figures.reward_mean is None and record.figures.failures == 40
    assert "every trajectory failed: BAD 40" in caplog.text


@pytest.mark.parametrize("mode", ["pinned", "on_the_fly"])
async def test_a_group_that_its_server_dropped_is_measured_as_failed(mode: str) -> None:
    async with measuring(evaluation(samples_per_prompt=2, mode={"kind": mode})) as run:
        run.evaluator.version_active(0, 1)
        for _ in range(3):
            await run.settle()
            task_id = run.exchange.waiting[0]
            run.exchange.tasks.pop(task_id)
            # A repeated notice counts once.
            for _ in range(2):
                assert run.evaluator.dropped(task_id, "GROUP_TOO_LARGE")
        assert not run.evaluator.dropped("r/17", "GROUP_TOO_LARGE")
        await run.serve()
        assert not run.evaluator.dropped(task_id, "GROUP_TOO_LARGE")
    (record,) = run.records
    assert (record.figures.prompts, record.figures.failures, record.prompts_missing) == (17, 6, 0)
    assert len(run.exchange.received) == 17


async def test_where_nothing_comes_it_ends_with_what_it_has() -> None:
    async with measuring(evaluation(patience_seconds=0.05)) as run:
        run.evaluator.version_active(0, 1)
        await run.settle()
        run.exchange.deliver(run.exchange.waiting[0])
        await run.evaluator.may_switch()
        # Late groups are refused, and use no credit of the next evaluation.
        run.evaluator.version_active(10, 1)
        await run.serve()
    first, second = run.records
    assert (first.figures.prompts, first.prompts_missing) == (1, 19)
    assert (second.figures.prompts, second.prompts_missing) == (20, 0)
    assert {reason for _, reason in run.exchange.refused} == {"EVALUATION_OVER"}


@pytest.mark.parametrize("away_until", [9.0, 30.0])
async def test_the_time_that_a_server_is_away_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, away_until: float
) -> None:
    loop = asyncio.get_running_loop()
    begun, passed = loop.time(), 0.0
    monkeypatch.setattr(loop, "time", lambda: begun + passed)
    async with measuring(evaluation(patience_seconds=10.0)) as run:
        exchange = run.exchange
        run.evaluator.version_active(0, 1)
        await run.settle()
        exchange.ready.clear()
        passed = away_until
        await run.settle()
        exchange.ready.set()
        exchange.stream.resume()
        await run.settle()
        passed = away_until + 9.0
        await run.settle()
        assert run.running
        passed = away_until + 11.0
        await run.settle()
        assert not run.running
    (record,) = run.records
    assert record.prompts_missing == 20


async def test_room_is_waited_for_anew_where_the_server_was_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(retrying, "RETRY_SECONDS", 0.01)
    full, away = ServerFull("QUEUE_FULL", 0.04), ServerLost("away")
    said = [full, full, away, full, None]
    ready = asyncio.Event()
    ready.set()

    async def attempt() -> str:
        if (error := said.pop(0)) is not None:
            raise error
        return "there"

    assert await retrying.keep_trying(ready, attempt, full_seconds=0.06) == "there"
    said = [full, full, full, None]
    with pytest.raises(ServerFull):
        await retrying.keep_trying(ready, attempt, full_seconds=0.06)


async def test_where_a_server_stays_full_it_ends_with_what_it_has(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retrying, "RETRY_SECONDS", 0.01)
    async with measuring(evaluation(patience_seconds=0.1)) as run:
        run.evaluator.version_active(0, 1)
        await run.settle()
        run.exchange.full = True
        run.exchange.deliver(run.exchange.waiting[0])
        # The time during which the server is away does not count.
        run.exchange.ready.clear()
        async with asyncio.timeout(10):
            switching = asyncio.ensure_future(run.evaluator.may_switch())
            await asyncio.sleep(0.3)
            assert not switching.done()
            run.exchange.ready.set()
            await switching
        # A server that has room in time is waited for.
        run.evaluator.version_active(10, 1)
        await run.settle()
        run.exchange.full = False
        await run.serve()
    first, second = run.records
    assert (first.figures.prompts, first.prompts_missing) == (1, 19)
    assert "ends with 1 of 20 prompts: for 0.1 s a server was full" in caplog.text
    assert (second.figures.prompts, second.prompts_missing) == (20, 0)


@pytest.mark.parametrize("seed", range(12))
async def test_whatever_is_lost_each_prompt_is_measured_once(seed: int) -> None:
    chance = random.Random(seed)
    pinned = chance.random() < 0.5
    mode = {"kind": "pinned", "max_other_version": 1000} if pinned else {"kind": "on_the_fly"}
    count, concurrency = chance.randint(1, 40), chance.randint(1, 9)
    config = evaluation(prompts=count, concurrency=concurrency, mode=mode)
    async with measuring(config) as run:
        exchange, stream = run.exchange, run.exchange.stream
        run.evaluator.version_active(0, 1)
        for _ in range(10_000):
            await run.settle()
            if not run.running:
                break
            event = chance.random()
            if event < 0.8 and exchange.waiting and exchange.credit:
                wrong = chance.random() < 0.2
                exchange.deliver(chance.choice(exchange.waiting), [0] if wrong else None)
            elif event < 0.9:
                # The stream is lost, with its credit and some receipts. Groups without a receipt
                # wait again.
                exchange.ready.clear()
                exchange.credit = 0
                await run.settle()
                if chance.random() < 0.5:
                    # The server loses its tasks as well, and their ids, except those of received groups.
                    exchange.tasks.clear()
                    exchange.known = set(exchange.received)
                exchange.delivered.clear()
                exchange.ready.set()
                await run.evaluator.submit_again(0)
                stream.resume()
        assert not run.running
        assert exchange.most_open <= concurrency
    (record,) = run.records
    assert record.figures.prompts + record.figures.failures == count
    assert len(run.exchange.received) == len(set(run.exchange.received)) == count
    if pinned:
        assert (record.oldest_weight_version, record.newest_weight_version) == (1, 1)
    assert record.prompts_missing == 0


def test_the_example_is_one_that_the_trainer_reads_and_writes(tmp_path: Path) -> None:
    config = load_config(ROOT / "examples" / "evaluated.toml")
    held_out, harder = config.evaluation
    assert held_out.pinned and not harder.pinned
    greedy = held_out.sampling_over(config.data)
    assert (greedy.temperature, greedy.max_tokens) == (0.0, 48)
    assert harder.sampling_over(config.data) == config.data.sampling
    (tmp_path / "again.toml").write_text(render_config(config))
    assert load_config(tmp_path / "again.toml") == config


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ('evaluation=[{name="a", prompts=0, reasoning_gym={name="chain_sum"}}]', "prompts"),
        ('evaluation=[{name="a"}]', "exactly one of"),
        ('evaluation=[{name="a b", reasoning_gym={name="chain_sum"}}]', "name"),
        (
            'evaluation=[{name="a", reasoning_gym={name="x"}}, {name="a", reasoning_gym={name="x"}}]',
            "two evaluations are named 'a'",
        ),
        (
            'evaluation=[{name="a", mode={kind="on_the_fly", max_other_version=1}, '
            'reasoning_gym={name="x"}}]',
            "max_other_version",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(setting: str, said: str) -> None:
    with pytest.raises(ConfigInvalid, match=said):
        load_config(ROOT / "examples" / "arithmetic.toml", [setting])


def test_the_prompts_are_the_first_of_a_set_and_no_more_than_it_has(tmp_path: Path) -> None:
    path = tmp_path / "few.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"p{n}"}) + "\n" for n in range(3)))
    data = DataConfig.model_validate({"jsonl": {"path": str(path)}, "system_prompt": "Think."})
    few = EvaluationConfig.model_validate({"name": "few", "jsonl": {"path": str(path)}})
    one = EvaluationSet(few, data)
    assert one.prompt_count == 3
    tasks = [
        one.build_task(asked, one.source.problem(asked.index))
        for asked in Prompts("p", 3, concurrency=3).next()
    ]
    texts = [[message.content for message in task.conversation.messages] for task in tasks]
    assert sorted(text for _, text in texts) == ["p0", "p1", "p2"]
    assert {system for system, _ in texts} == {"Think."}
    assert [task.task_id for task in tasks] == ["p/0", "p/1", "p/2"]


async def test_a_row_that_names_its_source_is_counted_under_that(tmp_path: Path) -> None:
    path = tmp_path / "sums.jsonl"
    named = [{"prompt": "a", "data_source": "gsm8k"}, {"prompt": "b"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in named))
    config = EvaluationConfig.model_validate({"name": "sums", "jsonl": {"path": str(path)}})
    async with measuring(config) as run:
        run.evaluator.version_active(0, 1)
        await run.serve()
    assert run.records[0].by_source.keys() == {"gsm8k", "sums"}


def test_a_record_is_a_line_of_its_own_that_a_resumed_run_finds(tmp_path: Path) -> None:
    record = make_record(
        [prompt(1.0, 0.0), prompt(0.0, 0.0, source="t", versions=(1, 2))],
        name="n",
        step=4,
        weight_version=4,
        mode="on_the_fly",
        samples_per_prompt=2,
        passes_from=1.0,
        prompts_asked=2,
    )
    tags: dict[str, float] = {}

    class Board:
        def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
            assert global_step == 4
            tags[tag] = scalar_value

        def flush(self) -> None: ...

    shown = io.StringIO()
    writer = EvaluationWriter(tmp_path, Board(), Console(file=shown))
    writer.write(record)
    assert last_steps(tmp_path) == {"n": 4}
    (line,) = [json.loads(one) for one in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert (line["kind"], line["reward_mean"], line["mixed_groups"]) == ("evaluation", 0.25, 1)
    assert line["by_source"]["t"]["reward_mean"] == 0.0
    assert tags["eval/n/reward_mean"] == 0.25 and tags["eval/n/pass_at/2"] == 0.5
    assert tags["eval/n/source/s/reward_mean"] == 0.5
    assert "eval n  version 1 to 2  reward 0.250" in shown.getvalue()
    # A run that starts over has no evaluations; one that resumes after this one keeps it.
    keep_until(tmp_path, 4)
    assert last_steps(tmp_path) == {"n": 4}
    # So does a run that repeats the step with the same groups: it shows the recorded result.
    keep_until(tmp_path, 3, 4)
    assert last_steps(tmp_path) == {"n": 4}
    written = dict(tags)
    tags.clear()
    for found in lines_from(tmp_path, 4):
        show(found, Board())
    assert tags == written and not lines_from(tmp_path, 5)
    keep_until(tmp_path, 3, 3)
    assert last_steps(tmp_path) == {}
