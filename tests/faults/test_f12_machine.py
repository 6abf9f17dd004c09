"""F12: a model of tasks, leases, outcomes, deliveries, receipts and checkpoints, against the
server.

    make fuzz MACHINES=2000

hypothesis chooses the actions of trainer and agents. Agents lease, take turns, complete, fail, or
are lost. The trainer submits tasks, asks for groups, uses them and writes checkpoints. It restarts
from the last checkpoint, or only loses its stream. The model determines what each answer must be.

In the end everything is finished and delivered. `history` then checks, from the agents' answers and
the trainer's steps alone, that each group was trained once.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from penstock.wire.failure import read_failure
from tests.faults.history import (
    Answer,
    Group,
    History,
    Step,
    explain_fake,
    read_group,
    read_outcome,
    read_runs,
    violations,
)
from tests.faults.report import Report
from tests.support.fakes import expected_tokens
from tests.support.harness import (
    CompleteTrajectoryRequest,
    Exchange,
    Failure,
    GenerateRequest,
    GetServerInfoRequest,
    Harness,
    Hello,
    LeaseTasksRequest,
    Outcome,
    StalenessContract,
    SubmitTasksRequest,
    Task,
    collect,
    sampling,
    sequence,
    serve,
)

QUICK = 6
STEPS = 40
SECONDS = 20.0
"""Time limit for an expected event, even on a busy machine."""
MAX_ATTEMPTS = 3
PLACES = {"max_lag": 1_000, "groups_per_step": 64}
"""Lets everything through the staleness gate, which has its own tests."""


@dataclass
class Place:
    """One sample of a group, as the model tracks it."""

    group: ModelGroup
    index: int
    retries: int = 0
    trajectory_id: str = ""
    """Empty while it waits for a lease."""
    final: bool = False
    """Whether it is closed for good."""
    turns: int = 0


@dataclass
class ModelGroup:
    """A task and its state."""

    task_id: str
    size: int
    prompt: list[int]
    group_id: str = ""
    places: list[Place] = field(default_factory=list)
    deliveries: int = 0
    step: int = 0
    """The step that used it; 0 before."""

    @property
    def complete(self) -> bool:
        return all(place.final for place in self.places)


class Walk(RuleBasedStateMachine):
    """Drives the server and checks it against the model."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.stack = AsyncExitStack()
        self.server = AsyncExitStack()
        self.folder: Path
        self.starts = 0
        self.harness: Harness
        self.groups: dict[str, ModelGroup] = {}
        """By task id."""
        self.leases: asyncio.Queue[Any] = asyncio.Queue()
        self.stream: asyncio.Task[None] | None = None
        self.exchange: Exchange | None = None
        self.epoch = 0
        self.credit = 0
        self.in_hand: dict[int, ModelGroup] = {}
        """By delivery id."""
        self.trained_step = 0
        self.final_step = 0
        self.answers: list[Answer] = []
        self.ledger: list[Step] = []
        self.delivered: dict[str, Group] = {}
        self.turn_runs: dict[str, list[Any]] = {}

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        async def bounded() -> Any:
            async with asyncio.timeout(SECONDS):
                return await work

        return self.runner.run(bounded())

    # The model's view

    @property
    def leased(self) -> list[Place]:
        return [
            place
            for group in self.groups.values()
            for place in group.places
            if place.trajectory_id and not place.final
        ]

    @property
    def waiting(self) -> list[Place]:
        return [
            place
            for group in self.groups.values()
            for place in group.places
            if not place.trajectory_id and not place.final
        ]

    @property
    def deliverable(self) -> list[ModelGroup]:
        held = {id(group) for group in self.in_hand.values()}
        return [
            group
            for group in self.groups.values()
            if group.complete and not group.step and id(group) not in held
        ]

    # The agents' side

    @initialize()
    def start(self) -> None:
        self.do(self._start())

    async def _start(self) -> None:
        self.folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        await self._serve()
        await self._hello(0)
        self._open_stream()

    async def _serve(self) -> None:
        settings = (
            "leases.grace_seconds=0.005",
            f"journal.folder={self.folder / f'journal-{self.starts}'}",
            "journal.segment_bytes=1048576",
            "journal.durability=process",
        )
        self.harness = await self.server.enter_async_context(serve(self.folder, *settings))

    def _open_stream(self) -> None:
        self.stream = asyncio.get_running_loop().create_task(self._read_leases())

    async def _read_leases(self) -> None:
        request = LeaseTasksRequest(agent_id="agent", concurrency=1_000)
        async for lease in self.harness.wire.LeaseTasks(request):
            self.leases.put_nowait(lease)

    async def _take_leases(self) -> None:
        """Check that every waiting attempt is leased once, as the model expects."""
        while self.waiting:
            lease = await self.leases.get()
            group = self.groups[lease.task.task_id]
            place = group.places[lease.sample_index]
            assert not group.group_id or group.group_id == lease.group_id
            assert place in self.waiting
            assert lease.retry_count == place.retries
            group.group_id = lease.group_id
            place.trajectory_id = lease.trajectory_id
        assert self.leases.empty()

    @rule(sizes=st.lists(st.integers(1, 3), min_size=1, max_size=3), again=st.booleans())
    @precondition(lambda self: len(self.groups) < 40)
    def submit(self, sizes: list[int], again: bool) -> None:
        self.do(self._submit(sizes, again))

    async def _submit(self, sizes: list[int], again: bool) -> None:
        fresh: list[ModelGroup] = []
        for size in sizes:
            number = len(self.groups) + len(fresh)
            fresh.append(ModelGroup(f"task-{number}", size, [1 + number % 200, 2]))
        tasks = [self._task(group) for group in fresh]
        known = list(self.groups.values())[:2] if again else []
        tasks += [self._task(group) for group in known]
        answer = await self.harness.wire.SubmitTasks(SubmitTasksRequest(tasks=tasks))
        assert (answer.accepted_count, answer.duplicate_count) == (len(fresh), len(known))
        for group in fresh:
            group.places = [Place(group, index) for index in range(group.size)]
            self.groups[group.task_id] = group
        await self._take_leases()

    def _task(self, group: ModelGroup) -> Any:
        return Task(
            task_id=group.task_id,
            group_size=group.size,
            tokens=sequence(group.prompt),
            index=int(group.task_id.removeprefix("task-")),
            sampling_params=sampling(3),
        )

    @rule(data=st.data())
    @precondition(lambda self: self.leased)
    def take_a_turn(self, data: st.DataObject) -> None:
        self.do(self._take_turn(data.draw(st.sampled_from(self.leased))))

    async def _take_turn(self, place: Place) -> None:
        name = place.trajectory_id
        if place.turns:
            turn = await self.harness.resume(name, tokens=sequence([7]))
        else:
            request = GenerateRequest(trajectory_id=name)
            turn = await collect(self.harness.wire.Generate(request))
            assert turn.tokens == expected_tokens(place.group.prompt, [0] * 3)[0]
        assert len(turn.tokens) == 3
        self.turn_runs.setdefault(name, []).extend(read_runs(turn.segments))
        place.turns += 1

    @rule(data=st.data(), reward=st.integers(0, 9))
    @precondition(lambda self: self.leased)
    def complete(self, data: st.DataObject, reward: int) -> None:
        place = data.draw(st.sampled_from(self.leased))
        self.do(self._close(place, Outcome(reward=float(reward))))

    @rule(data=st.data())
    @precondition(lambda self: self.leased)
    def fail(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from(self.leased))
        self.do(self._close(place, Outcome(failure=Failure(reason="TOLD_TO"))))

    async def _close(self, place: Place, outcome: Any) -> None:
        name = place.trajectory_id
        retried = outcome.HasField("failure") and place.retries + 1 < MAX_ATTEMPTS
        answer = await self._complete(name, outcome)
        runs = tuple(self.turn_runs.get(name, ()))
        found = Answer(
            name,
            place.group.group_id,
            read_outcome(outcome),
            answer.group_completed,
            answer.retried,
            runs,
        )
        self.answers.append(found)
        assert answer.retried == retried
        if retried:
            self._again(place)
        else:
            place.final = True
        assert answer.group_completed == (not retried and place.group.complete)
        repeated = await self._complete(name, outcome)
        assert (repeated.group_completed, repeated.retried) == (
            answer.group_completed,
            answer.retried,
        )
        reason = await self._refused(name, Outcome(reward=77.0))
        assert reason == "OUTCOME_DIFFERS"
        await self._settle()

    def _again(self, place: Place) -> None:
        place.retries += 1
        place.trajectory_id, place.turns = "", 0

    async def _complete(self, name: str, outcome: Any) -> Any:
        request = CompleteTrajectoryRequest(trajectory_id=name, outcome=outcome)
        return await self.harness.wire.CompleteTrajectory(request)

    async def _refused(self, name: str, outcome: Any) -> str:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self._complete(name, outcome)
        return read_failure(caught.value).reason

    @rule()
    @precondition(lambda self: self.leased)
    def lose_the_agent(self) -> None:
        """Other agents make its attempts again, until their retries run out."""
        self.do(self._lose_agent())

    async def _lose_agent(self) -> None:
        assert self.stream is not None
        lost = [(place, place.trajectory_id) for place in self.leased]
        before = self.harness.serving.closing.failures["LEASE_EXPIRED"]
        self.stream.cancel()
        await asyncio.wait([self.stream])
        await self._expire(lost, before)
        self._open_stream()
        await self._settle()
        await self._refuses(lost)

    async def _expire(self, lost: list[tuple[Place, str]], before: int) -> None:
        """Wait until these leases have expired, in addition to the `before` that had already."""
        failures = self.harness.serving.closing.failures
        while failures["LEASE_EXPIRED"] < before + len(lost):
            await asyncio.sleep(0.002)  # A call about it would renew the lease.
        for place, name in lost:
            self._again(place)
            if place.retries == MAX_ATTEMPTS:
                place.trajectory_id, place.final = name, True

    async def _refuses(self, lost: list[tuple[Place, str]]) -> None:
        for _, name in lost:
            assert await self._refused(name, Outcome(reward=1.0)) == "LEASE_EXPIRED"

    @rule(forgetful=st.booleans())
    def kill_the_server(self, forgetful: bool) -> None:
        """Another server starts from the journal's bytes at this moment. No agent calls within the
        grace, so every leased attempt is retried.
        """
        self.do(self._kill_server(forgetful))

    async def _kill_server(self, forgetful: bool) -> None:
        assert self.stream is not None
        assert self.exchange is not None
        before = self.folder / f"journal-{self.starts}"
        self.starts += 1
        shutil.copytree(before, self.folder / f"journal-{self.starts}")
        for call in (self.stream, self.exchange.call):
            call.cancel()
        await self.server.aclose()
        shutil.rmtree(before)
        lost = [(place, place.trajectory_id) for place in self.leased]
        for group in self.groups.values():
            group.deliveries = (
                0  # The journal records that groups were used, but not that they were delivered.
            )
        self.server = AsyncExitStack()
        await self._serve()
        self._lose_session(forgetful=False)
        await self._expire(lost, 0)
        # The last group that this completed is offered once it is in the journal.
        await self._offered()
        self._lose_session(forgetful)
        await self._hello(self.trained_step)
        self._open_stream()
        await self._settle()
        await self._refuses(lost)

    async def _settle(self) -> None:
        """Wait until the effects of the last event have happened, and check that there are no others."""
        await self._take_leases()
        await self._take_deliveries()
        await self._offered()

    async def _offered(self) -> None:
        while await self._buffered() != len(self.deliverable):
            await asyncio.sleep(0.002)

    async def _buffered(self) -> int:
        info = await self.harness.wire.GetServerInfo(GetServerInfoRequest())
        return int(info.load.buffered_group_count)

    # The trainer's side

    async def _hello(self, resume_step: int) -> None:
        self.epoch += 1
        self.exchange = Exchange(self.harness.wire)
        contract = StalenessContract(**PLACES)
        self.exchange.send(
            hello=Hello(
                run_id="run",
                trainer_epoch=self.epoch,
                staleness=contract,
                resume_step=resume_step,
            )
        )
        welcome = await self.exchange.receive("welcome")
        assert welcome.buffered_group_count == len(self.deliverable)

    @rule(count=st.integers(1, 4))
    def demand(self, count: int) -> None:
        self.do(self._demand(count))

    async def _demand(self, count: int) -> None:
        assert self.exchange is not None
        self.credit += count
        self.exchange.send(demand={"group_count": count})
        await self._take_deliveries()

    async def _take_deliveries(self) -> None:
        """Check that as many groups arrive as are demanded and available, whole and as they were
        closed.
        """
        assert self.exchange is not None
        while self.credit and self.deliverable:
            delivery = await self.exchange.receive("delivery")
            group = self.groups[delivery.group.task_id]
            assert group in self.deliverable
            assert delivery.redelivery_count == group.deliveries
            found = read_group(delivery.group)
            assert found.group_id == group.group_id
            assert [t.sample_index for t in found.trajectories] == list(range(group.size))
            assert self.delivered.setdefault(group.group_id, found) == found
            group.deliveries += 1
            self.in_hand[delivery.delivery_id] = group
            self.credit -= 1

    @rule(data=st.data())
    @precondition(lambda self: self.in_hand)
    def train(self, data: st.DataObject) -> None:
        ids = st.lists(st.sampled_from(sorted(self.in_hand)), min_size=1, unique=True)
        self.do(self._train(data.draw(ids)))

    async def _train(self, delivery_ids: list[int]) -> None:
        assert self.exchange is not None
        self.trained_step += 1
        groups = [self.in_hand.pop(delivery_id) for delivery_id in delivery_ids]
        trajectories = [self.delivered[group.group_id].trajectories for group in groups]
        self.ledger.append(
            Step(
                self.trained_step,
                tuple(group.group_id for group in groups),
                tuple(group.task_id for group in groups),
                tuple(t.trajectory_id for found in trajectories for t in found),
            )
        )
        for group in groups:
            group.step = self.trained_step
        self.exchange.send(receipt={"delivery_ids": delivery_ids, "step": self.trained_step})
        await self._heard()

    async def _heard(self) -> None:
        """Wait until the server has handled everything sent on the stream. The answer to a switch
        shows it.
        """
        assert self.exchange is not None
        self.exchange.send(switch_weights={"weight_version": 999})
        receipt = await self.exchange.receive("weight_receipt")
        assert receipt.rejection.reason == "WEIGHT_VERSION_NOT_STAGED", receipt

    @rule()
    @precondition(lambda self: self.trained_step > self.final_step)
    def write_a_checkpoint(self) -> None:
        self.do(self._checkpoint())

    async def _checkpoint(self) -> None:
        assert self.exchange is not None
        self.final_step = self.trained_step
        self.exchange.send(checkpoint={"step": self.final_step})
        await self._heard()

    @rule(forgetful=st.booleans(), polite=st.booleans())
    def restart_the_trainer(self, forgetful: bool, polite: bool) -> None:
        """Restart with the state of the last checkpoint. Unless `forgetful`, keep all: only the
        stream was lost.
        """
        self.do(self._restart(forgetful, polite))

    async def _restart(self, forgetful: bool, polite: bool) -> None:
        assert self.exchange is not None
        old = self.exchange
        if polite:
            old.call.cancel()
        self._lose_session(forgetful)
        await self._hello(self.trained_step)
        if not polite:
            # The replaced session ends with the reason that another took over.
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await old.receive("nothing")
            assert read_failure(caught.value).reason == "SESSION_REPLACED"

    def _lose_session(self, forgetful: bool) -> None:
        self.credit = 0
        self.in_hand.clear()
        if forgetful:
            self.trained_step = self.final_step
            for group in self.groups.values():
                if group.step > self.final_step:
                    group.step = 0

    @invariant()
    def nothing_else_came(self) -> None:
        assert self.leases.empty()

    def teardown(self) -> None:
        try:
            if hasattr(self, "harness"):
                self.do(self._finish())
        finally:
            self.runner.run(self._stop())
            self.runner.close()

    async def _finish(self) -> None:
        """Finish and train everything, then check the history."""
        while self.leased:
            await self._close(self.leased[0], Outcome(reward=1.0))
        await self._demand(1 + len(self.deliverable))
        if self.in_hand:
            await self._train(sorted(self.in_hand))
        assert not self.deliverable
        history = History(self.answers, self.ledger, self.delivered)
        assert violations(history, explain_fake) == []
        trained = {name for step in self.ledger for name in step.task_ids}
        assert trained == set(self.groups)

    async def _stop(self) -> None:
        if self.exchange is not None:
            self.exchange.call.cancel()
        if self.stream is not None:
            self.stream.cancel()
            await asyncio.wait([self.stream])
        await self.server.aclose()
        await self.stack.aclose()


def test_the_server_is_as_its_model(report: Report, request: pytest.FixtureRequest) -> None:
    count = QUICK
    if report.count is not None:
        wanted = request.config.getoption("machine_examples")
        count = min(report.count, wanted) if report.said else wanted
    name, node = "model of the walk", request.node.nodeid
    machine = seeded(report.seed)(Walk)
    try:
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=count,
                stateful_step_count=STEPS,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
                phases=(Phase.generate,),
            ),
        )
    except BaseException as error:
        again = report.failed("F12 fake", name, report.seed, node, 0, count)
        error.add_note(f"again: {again}")
        raise
    report.survived("F12 fake", name, count, "runs", f"of up to {STEPS} steps")
