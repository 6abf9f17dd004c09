"""The client against the real services with the fake engine, whose every token can be recomputed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from penstock.client import (
    Client,
    Failed,
    FinishReason,
    InvalidRequest,
    Message,
    NotAllowedNow,
    NotFound,
    SamplingParams,
    Task,
    Trajectory,
    TrajectoryRecord,
    WorkerSettings,
    connect,
    group_reward,
    leases,
)
from penstock.client.scoring import Agent, single_turn
from penstock.server.core.errors import DomainError
from penstock.server.groups.attempts import Attempt
from penstock.v1 import rollout_service_pb2, task_service_pb2
from penstock.wire.reasons import Reason
from tests.support.fakes import ByteRenderer, expected_tokens
from tests.support.harness import Harness, hello, serve

CHAT = (Message("user", "What is 2 + 3?"),)


@pytest.fixture
async def penstock(harness: Harness):
    async with connect(harness.address) as client:
        yield client


@contextlib.asynccontextmanager
async def client_of(harness: Harness):
    async with connect(harness.address) as client:
        yield client


def assert_recomputes(record: TrajectoryRecord) -> None:
    """Check that every policy token follows from its prefix and its weight version."""
    context: list[int] = []
    for segment in record.segments:
        tokens = segment.token_ids.tolist()
        if segment.from_policy:
            wanted, logprobs = expected_tokens(context, [segment.weight_version] * len(tokens))
            assert tokens == wanted
            np.testing.assert_allclose(segment.logprobs, logprobs, rtol=1e-6)
        context += tokens


async def assert_turns_are_recorded(trajectory: Trajectory) -> TrajectoryRecord:
    """Check that the caller's turns are the record's turns, and that the record recomputes."""
    record = await trajectory.get()
    assert_recomputes(record)
    for turn in trajectory.turns:
        written = [s.token_ids for s in record.policy_segments(turn.index)]
        np.testing.assert_array_equal(turn.token_ids, np.concatenate(written))
        assert turn.weight_versions == tuple(
            s.weight_version for s in record.policy_segments(turn.index)
        )
    return record


async def test_text_messages_and_tokens_each_open_a_trajectory(penstock: Client):
    options = {"max_tokens": 12, "ignore_eos": True}
    for prompt in ("What is 2 + 3?", CHAT, {"role": "user", "content": "hi"}, [1, 2, 3]):
        trajectory = penstock.trajectory()
        turn = await trajectory.turn(prompt, **options)
        assert len(turn.token_ids) == 12 and turn.finish_reason is FinishReason.LENGTH
        await trajectory.turn([7, 8] if prompt == [1, 2, 3] else "and then?")
        record = await assert_turns_are_recorded(trajectory)
        assert record.turn_count == 2 and record.open
        if prompt is CHAT:
            assert turn.message == Message("assistant", turn.text)
            shown = bytes(t for t in record.segments[2].token_ids.tolist() if t < 256)
            assert shown.startswith(b"user\nand then?")
        if prompt != [1, 2, 3]:
            assert turn.text == ByteRenderer().decode(turn.token_ids)


async def test_turns_that_another_process_took_are_read_with_why_the_last_one_ended(
    penstock: Client,
):
    first = penstock.trajectory()
    prompt = [1, 2, 3]
    await first.turn(prompt, max_tokens=6, ignore_eos=True)
    context = [*prompt, *first.last_turn.token_ids, 4]
    (token,), _ = expected_tokens(context, [0])
    await first.turn([4], max_tokens=6, ignore_eos=True, stop_token_ids=[token])
    for full in (False, True):
        if full:
            turn = await first.turn([5] * 600, max_tokens=6)
            assert not len(turn.token_ids) and turn.finish_reason is FinishReason.LENGTH
        second = penstock.trajectory(trajectory_id=first.trajectory_id)
        await second.load()
        assert [len(turn.token_ids) for turn in second.turns] == [6, 1]
        assert second.last_turn.finish_reason is FinishReason.STOP

    words = penstock.trajectory()
    await words.turn("go", max_tokens=6, ignore_eos=True)
    again = penstock.trajectory(trajectory_id=words.trajectory_id)
    await again.load()
    assert again.text == words.text


def sampling_at(harness: Harness) -> int:
    """The number of tokens that the engine has sampled for its running request; 0 without one."""
    return max((running.count for running in harness.engine._running.values()), default=0)


async def test_a_turn_survives_weight_switches_with_a_segment_per_version(
    slow: Harness,
):
    async with client_of(slow) as penstock:
        trajectory = penstock.trajectory()
        taking = asyncio.create_task(trajectory.turn("go", max_tokens=120, ignore_eos=True))
        for version in (1, 2):
            # Some tokens under each version.
            await until(lambda count=20 * version: sampling_at(slow) >= count)
            await slow.upload(version)
        turn = await taking
        assert turn.weight_versions == (0, 1, 2) and len(turn.token_ids) == 120
        await assert_turns_are_recorded(trajectory)


async def test_aborts_and_resumes_give_the_tokens_of_an_uninterrupted_turn(slow: Harness):
    async with client_of(slow) as penstock:
        options = {"max_tokens": 60, "ignore_eos": True}
        whole = await penstock.trajectory().turn("go", **options)
        trajectory = penstock.trajectory()
        taking = asyncio.create_task(trajectory.turn("go", **options))
        pieces = 0
        while True:
            await until(lambda taking=taking: sampling_at(slow) >= 6 or taking.done())
            await penstock.abort(everything=True)
            if not (await taking).aborted:
                break
            pieces += 1
            taking = asyncio.create_task(trajectory.resume())
        assert pieces >= 2
        np.testing.assert_array_equal(trajectory.last_turn.token_ids, whole.token_ids)
        np.testing.assert_array_equal(trajectory.last_turn.logprobs, whole.logprobs)
        assert trajectory.text == whole.text


async def test_a_stream_left_early_aborts_and_resumes_exactly(slow: Harness):
    async with client_of(slow) as penstock:
        trajectory = penstock.trajectory()
        stream = trajectory.stream("go", max_tokens=60, ignore_eos=True, flush_seconds=0.0)
        seen = [await anext(stream) for _ in range(3)]
        await stream.aclose()
        turn = await trajectory.resume()
        assert len(turn.token_ids) == 60
        first = np.concatenate([segment.token_ids for segment in seen])
        np.testing.assert_array_equal(turn.token_ids[: len(first)], first)
        await assert_turns_are_recorded(trajectory)


async def test_a_bounded_turn_can_be_gone_on_with_after_its_deadline(slow: Harness):
    async with client_of(slow) as penstock:
        trajectory = penstock.trajectory()
        with pytest.raises(Exception, match="Deadline"):
            await trajectory.turn("go", max_tokens=100, ignore_eos=True, timeout=0.2)
        assert len((await trajectory.resume()).token_ids) == 100
        await assert_turns_are_recorded(trajectory)


async def test_refusals_are_typed_and_carry_their_reason(penstock: Client):
    with pytest.raises(NotFound) as unknown:
        await penstock.get_trajectory("nobody")
    assert unknown.value.reason == "TRAJECTORY_UNKNOWN"
    assert unknown.value.metadata == {"trajectory_id": "nobody"}
    with pytest.raises(InvalidRequest) as long:
        await penstock.trajectory().turn("x" * 600)
    assert long.value.reason == "PROMPT_TOO_LONG"
    trajectory = penstock.trajectory()
    await trajectory.turn("hi", max_tokens=2)
    await trajectory.complete(1.0)
    with pytest.raises(NotAllowedNow) as closed:
        await trajectory.turn("more")
    assert closed.value.reason == "TRAJECTORY_CLOSED"


async def test_a_branch_is_closed_with_its_parent(penstock: Client):
    trajectory = penstock.trajectory()
    await trajectory.turn("go", max_tokens=4)
    branch = trajectory.branch("sub-agent")
    await branch.turn("elsewhere", max_tokens=4)
    await trajectory.complete(1.0)
    assert not (await penstock.get_trajectory("sub-agent")).open


async def test_a_close_ends_turns_that_would_resume_by_themselves(slow: Harness, monkeypatch):
    async with client_of(slow) as penstock:
        trajectory = penstock.trajectory(resume_aborted=True)
        await trajectory.turn("go", max_tokens=4)
        branch = trajectory.branch("sub-agent")
        options = {"max_tokens": 400, "ignore_eos": True}
        turns = [
            asyncio.create_task(trajectory.turn("on", **options)),
            asyncio.create_task(branch.turn("elsewhere", **options)),
        ]
        await until(lambda: len(slow.serving.turns.in_flight) == 2)
        ask, answers = trajectory._calls.ask, []

        async def complete_late(request, response, **options):
            if response is task_service_pb2.CompleteTrajectoryResponse:
                # Longer than it takes to resume a turn.
                await asyncio.sleep(0.2)
                answers.append("late")
            return await ask(request, response, **options)

        monkeypatch.setattr(trajectory._calls, "ask", complete_late)
        await trajectory.complete(1.0)
        assert [(await turn).finish_reason for turn in turns] == [FinishReason.ABORTED] * 2
        assert answers == ["late"]


async def test_a_close_aborts_again_what_its_abort_overtook_and_not_without_end(
    slow: Harness, monkeypatch
):
    async with client_of(slow) as penstock:
        trajectory = penstock.trajectory()
        turn = asyncio.create_task(trajectory.turn("go", max_tokens=400, ignore_eos=True))
        await until(lambda: len(slow.serving.turns.in_flight) == 1)
        ask, overtaken = trajectory._calls.ask, 12

        async def abort_early(request, response, **options):
            nonlocal overtaken
            if response is rollout_service_pb2.AbortResponse:
                overtaken -= 1
                if overtaken > 0:
                    return rollout_service_pb2.AbortResponse()
            return await ask(request, response, **options)

        monkeypatch.setattr(trajectory._calls, "ask", abort_early)
        with pytest.raises(NotAllowedNow, match="TURN_IN_FLIGHT"):
            await trajectory.complete(1.0)
        assert not turn.done()
        await trajectory.complete(1.0)
        assert (await turn).aborted and overtaken < 1


async def test_work_fills_groups_that_a_trainer_is_sent(harness: Harness, penstock: Client):
    tasks = [
        Task(
            f"t{i}",
            CHAT,
            {"want": "a"},
            group_size=4,
            index=i,
            sampling=SamplingParams(max_tokens=16),
        )
        for i in range(4)
    ]
    submitted = await penstock.submit_tasks(tasks)
    assert (submitted.accepted_count, submitted.pending_count) == (4, 4)
    assert (await penstock.submit_tasks(tasks)).duplicate_count == 4
    exchange = await hello(harness.wire, groups_per_step=4)
    exchange.send(demand={"group_count": 4})

    async def agent(task, trajectory):
        turn = await trajectory.turn()
        return turn.text.count(task.metadata["want"])

    statistics = await penstock.work(agent, concurrency=8, attempts=16)
    assert statistics.scored_count == 16
    for _ in range(4):
        group = (await exchange.receive("delivery")).group
        assert len(group.trajectories) == 4
        assert all(t.outcome.HasField("reward") for t in group.trajectories)


async def test_failures_are_retried_within_the_bound_and_then_delivered(
    harness: Harness, penstock: Client
):
    await penstock.submit_tasks(
        [Task("t", "go", group_size=2, sampling=SamplingParams(max_tokens=4))]
    )
    exchange = await hello(harness.wire, groups_per_step=1)
    exchange.send(demand={"group_count": 1})

    async def agent(task, trajectory):
        if trajectory.sample_index == 0:
            raise ValueError("never")
        await trajectory.turn()
        return 1.0

    statistics = await penstock.work(agent, concurrency=2, attempts=4)
    assert statistics.failures == {"VALUE_ERROR": 3} and statistics.scored_count == 1
    group = (await exchange.receive("delivery")).group
    kinds = [t.outcome.WhichOneof("result") for t in group.trajectories]
    assert kinds == ["failure", "reward"]


async def test_group_rewards_compare_the_siblings_of_each_group(harness: Harness, penstock: Client):
    await penstock.submit_tasks(
        [Task(f"t{i}", "go", group_size=3, sampling=SamplingParams(max_tokens=8)) for i in range(4)]
    )
    failed = Counter[str]()
    sizes = []

    async def generate(task, trajectory):
        await single_turn(task, trajectory)
        always = task.task_id == "t0"
        if trajectory.sample_index == 1 and (always or not failed[task.task_id]):
            failed[task.task_id] += 1
            raise RuntimeError("once, or always")

    @group_reward
    def reward(task, trajectories):
        sizes.append(len(trajectories))
        return [float(t.sample_index) for t in trajectories]

    settings = WorkerSettings(concurrency=6, attempts=17)
    statistics = await asyncio.wait_for(penstock.worker(settings, generate, reward).run(), 30)
    assert statistics.failures == {"RUNTIME_ERROR": 6} and statistics.scored_count == 11
    assert sorted(sizes) == [2, 3, 3, 3]
    assert harness.serving.buffer.buffered_count == 4


def let_leases_last(
    harness: Harness, times: float = 20.0, but: Callable[[Attempt], bool] = lambda _: False
) -> None:
    """Make leases last `times` longer than agents expect, so that slow machines renew them in time.

    Leases of attempts for which `but` is true when they are renewed keep their length.
    """
    leases = harness.serving.queue.leases
    touch = leases.touch

    def longer(attempt: Attempt) -> None:
        touch(attempt)
        if not but(attempt):
            attempt.deadline += (times - 1) * leases.rules.seconds

    leases.touch = longer  # type: ignore[method-assign]


async def test_slow_attempts_keep_their_leases(tmp_path):
    async with serve(tmp_path, "leases.seconds=0.4") as harness, client_of(harness) as penstock:
        let_leases_last(harness)
        await penstock.submit_tasks([Task("t", "go", sampling=SamplingParams(max_tokens=2))])

        async def agent(task, trajectory):
            await trajectory.turn()
            attempt = harness.serving.queue.attempt_of(trajectory.trajectory_id)
            for _ in range(5):
                harness.pass_lease_time(5.0)
                left = attempt.deadline
                await until(lambda left=left: attempt.deadline > left)
            return 1.0

        statistics = await penstock.work(agent, attempts=1)
        assert (statistics.scored_count, statistics.lost_count) == (1, 0)


async def test_aborted_turns_of_a_worker_go_on_under_new_weights(tmp_path):
    settings = ("weights.in_flight=abort",)
    serving = serve(tmp_path, *settings, step_seconds=0.005)
    async with serving as harness, client_of(harness) as penstock:
        await penstock.submit_tasks([Task("t", "go", sampling=SamplingParams(max_tokens=100))])
        turns = []

        async def agent(task, trajectory):
            turns.append(await trajectory.turn(ignore_eos=True))
            await assert_turns_are_recorded(trajectory)
            return 1.0

        working = asyncio.create_task(penstock.work(agent, attempts=1))
        await until(lambda: sampling_at(harness) > 0)
        await harness.upload(1)
        await working
        assert len(turns[0].token_ids) == 100 and turns[0].weight_versions == (0, 1)


async def test_server_info_describes_the_server(penstock: Client):
    info = await penstock.server_info()
    assert (info.model, info.active_weight_version) == ("fake", 0)
    assert info.weight_dtype == "float32" and info.max_context_length == 512


class Proxy:
    """A TCP relay whose connections can be cut, and whose server can be muted."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.muted = False
        self.writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Proxy:
        self.server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.server.close()
        self.cut()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers += [writer, far_writer]
        await asyncio.gather(
            self._copy(reader, far_writer, mutes=False), self._copy(far_reader, writer, mutes=True)
        )

    async def _copy(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, mutes: bool
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                if not (mutes and self.muted):
                    writer.write(data)
                    await writer.drain()
        writer.close()

    def mute(self) -> None:
        """Drop everything that the server sends from now on, until the connections are cut."""
        self.muted = True

    def cut(self) -> None:
        self.muted = False
        for writer in self.writers:
            writer.transport.abort()
        self.writers.clear()


async def ended(client: Client, trajectory_id: str, turn_count: int) -> None:
    """Wait until the server has ended a turn whose caller may not be connected."""
    async with asyncio.timeout(20):
        while True:
            with contextlib.suppress(NotFound):
                record = await client.get_trajectory(trajectory_id)
                if record.turn_count == turn_count and record.finish_reason is not None:
                    return
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("prompt", ["go", CHAT, [1, 2, 3]], ids=["text", "chat", "tokens"])
async def test_turns_that_end_while_the_connection_is_lost_end_like_others(
    harness: Harness, prompt, detach
):
    options = {"max_tokens": 20, "detach": detach}
    more = [7, 8] if prompt == [1, 2, 3] else "and then?"
    async with (
        client_of(harness) as direct,
        Proxy(harness.port) as proxy,
        connect(proxy.address) as penstock,
    ):
        heard = direct.trajectory()
        await heard.turn(prompt, **options)
        await heard.turn(more, **options)
        unheard = penstock.trajectory()
        await penstock.server_info()
        for turn_count, shown in enumerate([prompt, more], 1):
            proxy.mute()
            taking = asyncio.create_task(unheard.turn(shown, **options))
            await ended(direct, unheard.trajectory_id, turn_count)
            proxy.cut()
            await taking
        for one, other in zip(unheard.turns, heard.turns, strict=True):
            np.testing.assert_array_equal(one.token_ids, other.token_ids)
            np.testing.assert_array_equal(one.logprobs, other.logprobs)
            assert (one.text, one.message) == (other.text, other.message)
            assert bool(one.text) == (prompt != [1, 2, 3])
            assert one.finish_reason is other.finish_reason is not FinishReason.ABORTED
            assert one.context_token_count == other.context_token_count
            assert one.cached_token_count == other.cached_token_count
        await assert_turns_are_recorded(unheard)


@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("prompt", ["go", CHAT], ids=["text", "chat"])
async def test_a_connection_cut_again_and_again_loses_and_doubles_no_token(
    slow: Harness, prompt, detach
):
    options = {"max_tokens": 150, "ignore_eos": True}
    async with client_of(slow) as direct:
        whole = await direct.trajectory().turn(prompt, **options)
    async with Proxy(slow.port) as proxy, connect(proxy.address) as penstock:
        trajectory = penstock.trajectory()
        seen = []
        cuts = [20, 60, 100]
        stream = trajectory.stream(prompt, detach=detach, flush_seconds=0.0, **options)
        async for segment in stream:
            seen += segment.token_ids.tolist()
            if cuts and len(seen) >= cuts[0]:
                cuts.pop(0)
                proxy.cut()
        assert not cuts
        assert seen == trajectory.last_turn.token_ids.tolist() == whole.token_ids.tolist()
        assert (trajectory.text, trajectory.last_turn.message) == (whole.text, whole.message)
        await assert_turns_are_recorded(trajectory)


async def test_a_worker_goes_on_with_a_server_that_was_restarted(tmp_path, caplog):
    caplog.set_level("INFO", "penstock.rollout")
    begun, scored = asyncio.Event(), asyncio.Semaphore(0)

    async def generate(task, trajectory):
        begun.set()
        await trajectory.turn()

    async def reward(task, trajectory):
        scored.release()
        return 1.0

    async with serve(tmp_path, step_seconds=0.005) as first, client_of(first) as penstock:
        await penstock.submit_tasks([Task("old", "go", sampling=SamplingParams(max_tokens=400))])
        worker = penstock.worker(WorkerSettings(concurrency=2), generate, reward)
        working = asyncio.create_task(worker.run())
        await begun.wait()
        await first.life.stop(0.0)
        async with (
            serve(tmp_path, f"listen={first.address}") as second,
            client_of(second) as submitter,
        ):
            short = SamplingParams(max_tokens=4)
            await submitter.submit_tasks([Task(f"new{i}", "go", sampling=short) for i in "abc"])
            async with asyncio.timeout(20):
                for _ in range(3):
                    await scored.acquire()
            worker.stop()
            statistics = await working
    assert (statistics.scored_count, statistics.lost_count) == (3, 1)
    assert any("the server is back" in message for message in caplog.messages)


async def test_group_rewards_survive_a_lost_stream(tmp_path):
    settings = ("leases.grace_seconds=0.3", "leases.max_attempts=5")
    sizes, scored = [], asyncio.Semaphore(0)

    async def generate(task, trajectory):
        await trajectory.turn(ignore_eos=True)

    @group_reward
    async def reward(task, trajectories):
        sizes.append(len(trajectories))
        scored.release()
        return [1.0] * len(trajectories)

    async with (
        serve(tmp_path, *settings, step_seconds=0.005) as harness,
        Proxy(harness.port) as proxy,
        client_of(harness) as submitter,
        connect(proxy.address) as penstock,
    ):
        short = SamplingParams(max_tokens=40)
        await submitter.submit_tasks(
            [Task(f"t{i}", "go", group_size=3, sampling=short) for i in range(6)]
        )
        worker = penstock.worker(WorkerSettings(concurrency=6), generate, reward)
        working = asyncio.create_task(worker.run())
        async with asyncio.timeout(30):
            for done in range(6):
                await scored.acquire()
                if done in (0, 2):
                    await asyncio.sleep(0.1)
                    proxy.cut()
        worker.stop()
        await working
        assert harness.serving.buffer.buffered_count == 6
        assert set(sizes) == {3}


async def until(condition: Callable[[], bool], seconds: float = 15.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


def run_out(harness: Harness, trajectory_id: str) -> None:
    """Expire the lease of an attempt, as if its agent had not renewed it in time."""
    attempt = harness.serving.queue.attempt_of(trajectory_id)
    assert attempt is not None
    attempt.deadline = 0.0
    harness.serving.queue.leases.sooner.notify()


def ran_out(harness: Harness, trajectory_id: str) -> bool:
    try:
        return harness.serving.queue.attempt_of(trajectory_id) is None
    except DomainError as error:
        return error.reason == Reason.LEASE_EXPIRED


def group_tasks(count: int, size: int) -> list[Task]:
    short = SamplingParams(max_tokens=4)
    return [Task(f"t{i}", "go", group_size=size, index=i, sampling=short) for i in range(count)]


async def delivered(harness: Harness, count: int) -> list[list[str]]:
    """For each of the next groups, the failure reason of each sibling, or "" if it was scored."""
    exchange = await hello(harness.wire, groups_per_step=count)
    exchange.send(demand={"group_count": count})
    groups = [(await exchange.receive("delivery")).group for _ in range(count)]
    return [[t.outcome.failure.reason for t in group.trajectories] for group in groups]


@contextlib.asynccontextmanager
async def group_worker(
    harness: Harness, penstock: Client, generate: Agent, reward: Agent, concurrency: int = 3
):
    """A worker that is stopped at the end of the block, and that must then end promptly."""
    worker = penstock.worker(WorkerSettings(concurrency=concurrency), generate, reward)
    working = asyncio.create_task(worker.run())
    try:
        yield worker
        worker.stop()
        await asyncio.wait_for(working, 20)
    finally:
        working.cancel()
    assert not worker._final and not worker._book._groups


LAST = ("leases.seconds=1.2", "leases.max_attempts=1")


@pytest.mark.parametrize("stage", ["running", "waiting", "scoring", "stubborn"])
async def test_a_group_does_not_wait_for_a_sibling_whose_lease_ran_out_for_the_last_time(
    tmp_path, stage
):
    ended, lost, sizes = asyncio.Semaphore(0), asyncio.Event(), []

    async def generate(task, trajectory):
        await trajectory.turn()
        if task.task_id == "t1":
            return
        if trajectory.sample_index == 1:
            if stage in ("running", "stubborn"):
                # By now the siblings are waiting for this attempt.
                await ended.acquire()
                await ended.acquire()
            if stage != "scoring":
                run_out(harness, trajectory.trajectory_id)
            if stage in ("running", "stubborn"):
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    if stage != "stubborn":
                        raise
        elif stage == "waiting":
            await lost.wait()
        ended.release()

    @group_reward
    async def reward(task, trajectories):
        sizes.append(len(trajectories))
        if stage == "scoring" and task.task_id == "t0":
            run_out(harness, trajectories[1].trajectory_id)
            await asyncio.sleep(1.0)
        return [1.0] * len(trajectories)

    async with serve(tmp_path, *LAST) as harness, client_of(harness) as penstock:
        let_leases_last(harness)
        await penstock.submit_tasks(group_tasks(2, 3))
        async with group_worker(harness, penstock, generate, reward) as worker:
            if stage == "waiting":
                await until(lambda: worker._statistics.lost_count == 1)
                lost.set()
            await until(lambda: harness.serving.buffer.buffered_count == 2)
        assert worker._statistics.lost_count == 1 and worker._statistics.scored_count == 5
        assert await delivered(harness, 2) == [["", "LEASE_EXPIRED", ""], [""] * 3]
    assert sorted(sizes) == ([3, 3] if stage == "scoring" else [2, 3])


async def test_a_sibling_whose_lease_ran_out_is_waited_for_while_it_is_made_again(tmp_path):
    sizes, begun = [], Counter[int]()

    async def generate(task, trajectory):
        await trajectory.turn()
        begun[trajectory.sample_index] += 1
        if trajectory.sample_index == 1 and begun[1] < 3:
            run_out(harness, trajectory.trajectory_id)
            await asyncio.Event().wait()

    @group_reward
    async def reward(task, trajectories):
        sizes.append(len(trajectories))
        return [1.0] * len(trajectories)

    settings = ("leases.seconds=1.2", "leases.max_attempts=3")
    async with serve(tmp_path, *settings) as harness, client_of(harness) as penstock:
        let_leases_last(harness)
        await penstock.submit_tasks(group_tasks(1, 3))
        async with group_worker(harness, penstock, generate, reward):
            await until(lambda: harness.serving.buffer.buffered_count == 1)
        assert sizes == [3] and begun == {0: 1, 1: 3, 2: 1}


async def test_a_turn_refused_after_the_last_lease_leaves_the_group_to_its_siblings(tmp_path):
    sizes = []

    async def generate(task, trajectory):
        if trajectory.sample_index == 1:
            run_out(harness, trajectory.trajectory_id)
            await until(lambda: ran_out(harness, trajectory.trajectory_id))
        await trajectory.turn()

    @group_reward
    async def reward(task, trajectories):
        sizes.append(len(trajectories))
        return [1.0] * len(trajectories)

    # The lease is so long that the refused turn reveals its loss before a renewal can.
    async with (
        serve(tmp_path, "leases.max_attempts=1") as harness,
        client_of(harness) as penstock,
    ):
        await penstock.submit_tasks(group_tasks(1, 3))
        async with group_worker(harness, penstock, generate, reward):
            await until(lambda: harness.serving.buffer.buffered_count == 1)
        assert sizes == [2]


@pytest.mark.parametrize("max_attempts", [1, 2])
async def test_a_sibling_whose_close_is_refused_is_known_to_be_lost_when_its_lease_runs_out(
    tmp_path, max_attempts
):
    sizes, begun = [], Counter[int]()

    async def generate(task, trajectory):
        await trajectory.turn()
        begun[trajectory.sample_index] += 1
        if trajectory.sample_index == 1 and begun[1] == 1:
            # A failure without a reason, which the server refuses.
            return Failed("")
        return None

    @group_reward
    async def reward(task, trajectories):
        sizes.append(len(trajectories))
        return [1.0] * len(trajectories)

    settings = ("leases.seconds=0.4", f"leases.max_attempts={max_attempts}")
    async with serve(tmp_path, *settings) as harness, client_of(harness) as penstock:
        # Short only once its turn is over: the refused close still renews it.
        let_leases_last(
            harness, but=lambda a: (a.sample_index, a.retry_count, begun[1]) == (1, 0, 1)
        )
        await penstock.submit_tasks(group_tasks(1, 3))
        async with group_worker(harness, penstock, generate, reward):
            await until(lambda: harness.serving.buffer.buffered_count == 1)
        assert begun[1] == max_attempts and sizes == [1 + max_attempts]


async def test_a_sibling_that_failed_itself_unheard_is_waited_for_while_it_is_made_again(tmp_path):
    sizes, begun = [], Counter[int]()

    async def generate(task, trajectory):
        await trajectory.turn()
        begun[trajectory.sample_index] += 1
        if trajectory.sample_index == 1 and begun[1] == 1:
            await trajectory.fail("SANDBOX_SILENT")
            # As if the answer had been lost.
            trajectory.closed = False
            raise RuntimeError("no answer")

    @group_reward
    async def reward(task, trajectories):
        sizes.append(len(trajectories))
        return [1.0] * len(trajectories)

    async with serve(tmp_path) as harness, client_of(harness) as penstock:
        await penstock.submit_tasks(group_tasks(1, 3))
        async with group_worker(harness, penstock, generate, reward):
            await until(lambda: harness.serving.buffer.buffered_count == 1)
        assert sizes == [3] and begun[1] == 2


async def test_an_attempt_whose_last_lease_ran_out_before_it_was_taken_is_not_waited_for(tmp_path):
    begun, sizes = [], []

    async def generate(task, trajectory):
        begun.append((task.task_id, trajectory.sample_index))
        if (task.task_id, trajectory.sample_index) == ("t0", 0):
            # The slot goes to the next group, for whose attempt this worker has no free slot.
            run_out(harness, trajectory.trajectory_id)
            await until(lambda: any(queue.attempt_of(i) for i in next_group()))
            run_out(harness, next_group()[0])
            await asyncio.Event().wait()
        if task.task_id == "t0":
            await until(lambda: worker._statistics.lost_count > 0)
        await trajectory.turn()

    def next_group() -> list[str]:
        return [
            f"{group.group_id}-0-0"
            for group in queue._groups.values()
            if group.task is not None and group.task.task_id == "t1"
        ]

    @group_reward
    async def reward(task, trajectories):
        sizes.append((task.task_id, len(trajectories)))
        return [1.0] * len(trajectories)

    async with serve(tmp_path, *LAST) as harness, client_of(harness) as penstock:
        queue = harness.serving.queue
        await penstock.submit_tasks(group_tasks(2, 2))
        async with group_worker(harness, penstock, generate, reward, 2) as worker:
            await until(lambda: harness.serving.buffer.buffered_count == 2)
        assert ("t1", 0) not in begun and sorted(sizes) == [("t0", 1), ("t1", 1)]
        assert await delivered(harness, 2) == [["LEASE_EXPIRED", ""]] * 2


async def test_a_group_that_the_server_dropped_is_neither_scored_nor_waited_for(tmp_path):
    seen, ended = [], asyncio.Semaphore(0)

    async def generate(task, trajectory):
        await trajectory.turn()
        if task.task_id == "t0" and trajectory.sample_index == 1:
            await ended.acquire()
            await ended.acquire()
            harness.serving.queue.drop_all()
            await penstock.submit_tasks(group_tasks(3, 3)[1:])
            await asyncio.Event().wait()
        ended.release()

    @group_reward
    async def reward(task, trajectories):
        seen.append((task.task_id, len(trajectories)))
        return [1.0] * len(trajectories)

    async with serve(tmp_path, *LAST) as harness, client_of(harness) as penstock:
        await penstock.submit_tasks(group_tasks(1, 3))
        async with group_worker(harness, penstock, generate, reward) as worker:
            await until(lambda: harness.serving.buffer.buffered_count == 2)
            await until(lambda: worker._statistics.lost_count == 3)
        assert sorted(seen) == [("t1", 3), ("t2", 3)]


async def test_one_trace_leads_from_the_attempt_to_the_turns_and_the_server(
    harness: Harness, penstock: Client, monkeypatch
):
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from penstock.client import turn_stream, worker
    from penstock.server.rollouts import start as opening

    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    for module in (turn_stream, worker, opening):
        monkeypatch.setattr(module, "tracer", provider.get_tracer(module.__name__))
    await penstock.submit_tasks([Task("t", "go", sampling=SamplingParams(max_tokens=4))])

    def agent(task, trajectory):
        trajectory.turn()
        return len(trajectory.turn("more").token_ids)

    await penstock.work(agent, attempts=1)
    spans = exporter.get_finished_spans()
    (attempt,) = [span for span in spans if span.name == "penstock.attempt"]
    clients = [
        span for span in spans if span.parent and span.parent.span_id == attempt.context.span_id
    ]
    assert len(clients) == 2 and {span.kind.name for span in clients} == {"CLIENT"}
    servers = [span for span in spans if span not in (attempt, *clients)]
    assert {span.parent.span_id for span in servers} == {span.context.span_id for span in clients}
    assert len({span.context.trace_id for span in spans}) == 1
    assert clients[0].attributes["gen_ai.usage.output_tokens"] == 4
    assert {span.attributes["gen_ai.provider.name"] for span in (*clients, *servers)} == {
        "penstock"
    }
    model = (await penstock.server_info()).model
    assert {span.attributes["gen_ai.request.model"] for span in servers} == {model}


async def test_a_worker_says_that_it_is_connected_and_that_no_task_comes(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(leases, "_IDLE_SECONDS", 0.05)
    caplog.set_level(logging.INFO, "penstock.client")
    async with (
        client_of(harness) as penstock,
        penstock.lease_tasks(concurrency=1, agent_id="idle") as attempts,
    ):
        waiting = asyncio.ensure_future(anext(attempts))
        async with asyncio.timeout(60):
            while "no task from" not in caplog.text:
                await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    address = penstock.address
    assert f"connected to {address}; waiting for tasks" in caplog.text
    assert f"no task from {address} for 0.05 s; is a trainer connected to it?" in caplog.text


async def hang(task, trajectory) -> float:
    await asyncio.Event().wait()
    return 1.0


def hang_in_thread(task, trajectory) -> float:
    threading.Event().wait(60)
    return 1.0


@pytest.mark.parametrize("function", [hang, hang_in_thread])
async def test_a_function_that_hangs_fails_its_attempt_within_the_leases_time(
    tmp_path, function, caplog: pytest.LogCaptureFixture
):
    settings = ("leases.attempt_seconds=0.3", "leases.grace_seconds=20", "leases.max_attempts=2")
    async with serve(tmp_path, *settings) as harness, client_of(harness) as penstock:
        await penstock.submit_tasks([Task("hung", prompt=CHAT)])
        worker = penstock.worker(WorkerSettings(concurrency=1, attempts=2), function, None)
        statistics = await asyncio.wait_for(worker.run(), 20)
        # The worker reports it before the server takes the attempt back.
        assert statistics.failures == {"ATTEMPT_TIMEOUT": 2}
        assert harness.serving.closing.failures == {"ATTEMPT_TIMEOUT": 2}
        assert "the server's time for an attempt" in caplog.text
        assert harness.serving.buffer.buffered_count == 1


async def test_a_group_reward_that_hangs_fails_within_the_leases_time(tmp_path):
    settings = ("leases.attempt_seconds=0.5", "leases.grace_seconds=20", "leases.max_attempts=1")

    @group_reward
    async def judge(task, trajectories) -> list[float]:
        return await asyncio.Event().wait()

    async with serve(tmp_path, *settings) as harness, client_of(harness) as penstock:
        await penstock.submit_tasks([Task("hung", prompt=CHAT, group_size=2)])
        worker = penstock.worker(WorkerSettings(concurrency=2, attempts=2), single_turn, judge)
        await asyncio.wait_for(worker.run(), 20)
        assert harness.serving.closing.failures == {"ATTEMPT_TIMEOUT": 2}
