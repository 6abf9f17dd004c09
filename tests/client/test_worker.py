"""The rollout worker: attempts in flight, failures as data, groups, and an orderly end."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable

import grpc
import pytest

from penstock.client import (
    BlockingTrajectory,
    Failed,
    Outcome,
    Patience,
    Task,
    Trajectory,
    WorkerSettings,
    connect,
    group_reward,
)
from penstock.client.groups import GroupBook
from penstock.client.leases import Attempt
from penstock.client.scoring import RewardInvalid, as_failed, as_outcome, as_outcomes, single_turn
from penstock.client.worker import Worker, WorkerMisconfigured
from tests.support.harness import until
from tests.support.scripted_server import Script, ScriptedServer, expected_tokens, status

ANSWER = str(expected_tokens(0)[-1])


@pytest.fixture
async def server():
    async with ScriptedServer(Script()) as scripted:
        yield scripted


@pytest.fixture
async def penstock(server):
    async with connect(server.address) as client:
        yield client


def add_tasks(server: ScriptedServer, count: int) -> None:
    for index in range(count):
        server.add_task(Task(f"task-{index}", "hello", {"answer": ANSWER}))


def add_group(server: ScriptedServer, size: int) -> None:
    for index in range(size):
        server.add_task(Task("group", "hello", group_size=size), index)


def rewards(server: ScriptedServer) -> list[float]:
    return [outcome.reward for _, outcome in server.outcomes if outcome.HasField("reward")]


def reasons(server: ScriptedServer) -> Counter[str]:
    failed = [outcome.failure for _, outcome in server.outcomes if outcome.HasField("failure")]
    return Counter(failure.reason for failure in failed)


async def test_the_ten_line_agent_scores_every_attempt(penstock, server):
    add_tasks(server, 20)

    async def agent(task, trajectory):
        turn = await trajectory.turn()
        return float(task.metadata["answer"] in turn.text)

    statistics = await penstock.work(agent, concurrency=4, attempts=20)
    assert rewards(server) == [1.0] * 20
    assert (statistics.scored_count, statistics.token_count) == (20, 200)


async def test_a_fixed_number_of_attempts_is_in_flight(penstock, server):
    add_tasks(server, 24)
    running = peak = 0

    async def agent(task, trajectory):
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        await trajectory.turn()
        running -= 1
        return 0

    await penstock.work(agent, concurrency=6, attempts=24)
    assert peak == server.in_flight_peak == 6


async def test_a_function_that_raises_fails_its_attempt_and_never_the_worker(penstock, server):
    add_tasks(server, 6)
    calls = Counter[str]()

    async def agent(task, trajectory):
        calls[task.task_id] += 1
        if task.task_id == "task-0":
            raise ZeroDivisionError("by zero")
        if task.task_id == "task-1" and calls["task-1"] == 1:
            raise SystemExit("a library that wants to exit")
        if task.task_id == "task-2" and calls["task-2"] == 1:
            raise asyncio.CancelledError
        return 0.5

    statistics = await penstock.work(agent, concurrency=2, attempts=10)
    # The server retries it up to the limit of three attempts. The others succeed on the first retry.
    assert calls["task-0"] == 3
    assert reasons(server) == {"ZERO_DIVISION_ERROR": 3, "SYSTEM_EXIT": 1, "CANCELLED": 1}
    assert rewards(server) == [0.5] * 5
    assert statistics.failures == reasons(server)
    assert server.outcomes[0][1].failure.message == "by zero"


@pytest.mark.parametrize(
    ("value", "reason"),
    [(None, "REWARD_INVALID"), ("1", "REWARD_INVALID"), (float("nan"), "REWARD_INVALID")],
)
async def test_what_is_no_finite_number_is_a_failure(penstock, server, value, reason):
    add_tasks(server, 1)
    server.script.max_attempts = 1

    async def agent(task, trajectory):
        return value

    await penstock.work(agent, attempts=1)
    assert reasons(server) == {reason: 1}


def nested(depth: int) -> list[object]:
    value: list[object] = []
    for _ in range(depth):
        value = [value]
    return value


ENDLESS: dict[str, object] = {}
ENDLESS["itself"] = ENDLESS


@pytest.mark.parametrize(
    "metadata",
    [
        *({"when": object()}, {"number": 10**400}, {"text": "\ud83d"}, None),
        *({"deep": nested(60)}, {"deep": nested(5000)}, ENDLESS),
    ],
    ids=["type", "number", "text", "none", "deep", "deeper", "endless"],
)
async def test_metadata_that_cannot_be_sent_fails_its_attempt_only(penstock, server, metadata):
    add_tasks(server, 2)
    server.script.max_attempts = 1

    async def agent(task, trajectory):
        if task.task_id == "task-0":
            return Outcome(1.0, metadata=metadata)
        await server.wait_until(lambda: bool(server.outcomes))
        return 0.5

    await penstock.work(agent, concurrency=2, attempts=2)
    assert reasons(server) == {"VALUE_ERROR": 1} and rewards(server) == [0.5]


async def test_a_failure_whose_texts_are_no_utf_8_is_sent_all_the_same(penstock, server):
    add_tasks(server, 1)
    server.script.max_attempts = 1

    async def agent(task, trajectory):
        return Failed("CUT \ud83d", "cut \ud83d")

    await penstock.work(agent, attempts=1)
    (failure,) = [outcome.failure for _, outcome in server.outcomes]
    assert (failure.reason, failure.message) == ("CUT ?", "cut ?")


async def test_plain_functions_run_in_threads_and_may_take_turns(penstock, server):
    add_tasks(server, 4)
    threads = set()

    def generate(task, trajectory):
        assert isinstance(trajectory, BlockingTrajectory)
        threads.add(threading.current_thread())
        assert trajectory.turn().text.endswith(ANSWER)
        trajectory.turn("more")

    def reward(task, trajectory):
        time.sleep(0.05)
        return len(trajectory.turns)

    worker = penstock.worker(WorkerSettings(concurrency=4, attempts=4), generate, reward)
    await worker.run()
    assert rewards(server) == [2.0] * 4
    assert threading.main_thread() not in threads and len(threads) == 4


async def test_an_attempt_that_takes_too_long_fails_and_its_turn_is_stopped(penstock, server):
    add_tasks(server, 1)
    server.script.max_attempts = 1
    server.script.hold_turns = asyncio.Event()
    settings = WorkerSettings(attempts=1, attempt_seconds=0.3)
    await penstock.worker(settings, single_turn, lambda task, trajectory: 1.0).run()
    assert reasons(server) == {"ATTEMPT_TIMEOUT": 1}
    assert server.calls.index("Abort") < server.calls.index("CompleteTrajectory")


async def test_a_group_reward_sees_all_siblings_once(penstock, server):
    add_group(server, 4)
    seen = []

    @group_reward
    async def reward(task, trajectories):
        seen.append([trajectory.sample_index for trajectory in trajectories])
        return [Outcome(0.1 * t.sample_index, {"length": 10.0}) for t in trajectories]

    await penstock.worker(WorkerSettings(concurrency=4, attempts=4), single_turn, reward).run()
    assert seen == [[0, 1, 2, 3]]
    assert sorted(rewards(server)) == pytest.approx([0.0, 0.1, 0.2, 0.3])
    lease = next(r for r in server.requests if r.DESCRIPTOR.name == "LeaseTasksRequest")
    assert lease.whole_groups


def group_of(fails: Callable[[Trajectory, int], bool]):
    """Functions for a group in which some attempts fail, each after its siblings have ended."""
    made = Counter[int]()
    ended = asyncio.Semaphore(0)
    scored: list[list[int]] = []

    async def generate(task, trajectory):
        made[trajectory.sample_index] += 1
        if fails(trajectory, made[trajectory.sample_index]):
            await ended.acquire()
            raise ValueError("as told")
        await trajectory.turn()
        ended.release()

    @group_reward
    async def reward(task, trajectories):
        scored.append([trajectory.sample_index for trajectory in trajectories])
        return [1.0 * trajectory.sample_index for trajectory in trajectories]

    return generate, reward, scored


async def test_a_failed_sibling_is_made_again_before_the_group_is_scored(penstock, server):
    add_group(server, 3)
    generate, reward, scored = group_of(lambda t, count: t.sample_index == 0 and count < 3)
    settings = WorkerSettings(concurrency=3, attempts=5)
    await asyncio.wait_for(penstock.worker(settings, generate, reward).run(), 20)
    assert scored == [[0, 1, 2]] and sorted(rewards(server)) == [0.0, 1.0, 2.0]
    assert reasons(server) == {"VALUE_ERROR": 2}


async def test_a_sibling_that_failed_for_good_is_left_out_and_not_waited_for(penstock, server):
    add_group(server, 3)
    server.script.max_attempts = 2
    generate, reward, scored = group_of(lambda t, count: t.sample_index == 1)
    worker = penstock.worker(WorkerSettings(concurrency=3), generate, reward)
    running = asyncio.create_task(worker.run())
    await asyncio.wait_for(server.wait_until(lambda: len(server.outcomes) == 4), 20)
    worker.stop()
    await running
    assert scored == [[0, 2]] and sorted(rewards(server)) == [0.0, 2.0]
    assert reasons(server) == {"VALUE_ERROR": 2}


async def test_a_group_of_failures_is_not_scored(penstock, server):
    add_group(server, 2)
    server.script.max_attempts = 1

    async def generate(task, trajectory):
        raise ValueError("always")

    settings = WorkerSettings(concurrency=2, attempts=2, group_reward=True)
    await penstock.worker(settings, generate, lambda task, trajectories: 1 / 0).run()
    assert reasons(server) == {"VALUE_ERROR": 2}


async def test_siblings_that_wait_for_a_retry_are_given_back_when_the_attempts_are_made(
    penstock, server
):
    add_group(server, 2)
    server.script.max_attempts = 2
    generate, reward, scored = group_of(lambda t, count: t.sample_index == 1)
    settings = WorkerSettings(concurrency=2, attempts=2)
    statistics = await penstock.worker(settings, generate, reward).run()
    assert not scored and reasons(server) == {"VALUE_ERROR": 1, "WORKER_STOPPED": 1}
    assert statistics.failed_count == 2


async def test_a_sibling_whose_score_failed_is_made_again_and_the_other_scores_stand(
    penstock, server
):
    add_group(server, 3)
    seen = []

    @group_reward
    async def reward(task, trajectories):
        seen.append([t.sample_index for t in trajectories])
        middle = Failed("JUDGE_SILENT") if len(seen) == 1 else 0.5
        return [float(len(seen)), middle, float(len(seen))]

    settings = WorkerSettings(concurrency=3, attempts=4)
    await asyncio.wait_for(penstock.worker(settings, single_turn, reward).run(), 20)
    assert seen == [[0, 1, 2]] * 2
    assert sorted(rewards(server)) == [0.5, 1.0, 1.0] and reasons(server) == {"JUDGE_SILENT": 1}


async def test_a_group_reward_that_raises_does_not_wait_for_a_sibling_out_of_retries(
    penstock, server
):
    add_group(server, 2)
    server.script.max_attempts = 2
    generate, reward, scored = group_of(lambda t, count: t.sample_index == 0 and count == 1)

    @group_reward
    async def raises_once(task, trajectories):
        scores = await reward(task, trajectories)
        if len(scored) == 1:
            raise RuntimeError("once")
        return scores

    # Attempts: 0 and 1, then 0 again. Scoring fails; 0 has no retries left, so 1 is scored alone.
    settings = WorkerSettings(concurrency=2, attempts=4)
    await asyncio.wait_for(penstock.worker(settings, generate, raises_once).run(), 20)
    assert scored == [[0, 1], [1]] and rewards(server) == [1.0]
    assert reasons(server) == {"VALUE_ERROR": 1, "RUNTIME_ERROR": 2}


async def test_a_sibling_that_its_function_failed_is_not_scored(penstock, server):
    add_group(server, 2)
    seen = []

    async def generate(task, trajectory):
        await trajectory.turn()
        if trajectory.sample_index == 0 and not server.retried:
            assert (await trajectory.fail("SANDBOX_SILENT")).retried

    @group_reward
    async def reward(task, trajectories):
        seen.append([t.trajectory_id for t in trajectories])
        return [1.0] * len(trajectories)

    settings = WorkerSettings(concurrency=2, attempts=3)
    statistics = await penstock.worker(settings, generate, reward).run()
    assert seen == [["group-0-1", "group-1-0"]] and rewards(server) == [1.0] * 2
    assert statistics.failures == {"SANDBOX_SILENT": 1}


async def test_a_group_reward_of_the_wrong_length_fails_every_sibling(penstock, server):
    add_group(server, 2)
    server.script.max_attempts = 1

    @group_reward
    def reward(task, trajectories):
        return [1.0]

    await penstock.worker(WorkerSettings(concurrency=2, attempts=2), single_turn, reward).run()
    assert reasons(server) == {"REWARD_INVALID": 2}


async def test_a_group_larger_than_the_concurrency_is_refused(penstock, server):
    add_group(server, 4)

    @group_reward
    def reward(task, trajectories):
        return [1.0] * len(trajectories)

    with pytest.raises(WorkerMisconfigured, match="set it to at least 4"):
        await penstock.worker(WorkerSettings(concurrency=2), single_turn, reward).run()


async def test_a_lost_server_is_spoken_of_and_found_again(penstock, server, caplog):
    caplog.set_level(logging.INFO, "penstock.rollout")
    add_tasks(server, 1)
    worker = penstock.worker(WorkerSettings(concurrency=2), single_turn, lambda t, j: 1.0)
    running = asyncio.create_task(worker.run())
    await server.wait_until(lambda: len(server.outcomes) == 1)
    await server.server.stop(None)
    await until(lambda: any("retrying" in message for message in caplog.messages))
    add_tasks(server, 3)
    await server.start(server.address)
    await asyncio.wait_for(server.wait_until(lambda: len(server.outcomes) == 4), 20)
    worker.stop()
    await running
    assert any("the server is back" in message for message in caplog.messages)


async def test_work_whose_lease_ran_out_is_stopped(penstock, server):
    add_tasks(server, 1)
    stopped = asyncio.Event()

    async def agent(task, trajectory):
        if task.task_id != "task-0":
            return 1.0
        server.script.expired.add(trajectory.trajectory_id)
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    working = asyncio.create_task(penstock.work(agent, concurrency=1, attempts=2))
    await asyncio.wait_for(stopped.wait(), 20)
    await server.lease_later(Task("next", "hello"))
    statistics = await working
    assert (statistics.lost_count, statistics.scored_count) == (1, 1)


async def test_a_stop_lets_attempts_finish(penstock, server):
    add_tasks(server, 4)
    server.script.hold_turns = asyncio.Event()
    worker = penstock.worker(WorkerSettings(concurrency=2), single_turn, lambda t, j: 1.0)
    running = asyncio.create_task(worker.run())
    await server.wait_until(lambda: server.calls.count("Generate") == 2)
    worker.stop()
    await asyncio.sleep(0.05)
    server.script.hold_turns.set()
    assert (await running).scored_count == 2
    assert server.calls.count("Generate") == 2


async def test_a_stop_gives_back_what_does_not_finish(penstock, server):
    add_tasks(server, 1)
    add_group(server, 1)

    async def generate(task, trajectory):
        await asyncio.Event().wait()

    settings = WorkerSettings(concurrency=2, drain_seconds=0.2)
    worker: Worker = penstock.worker(settings, generate, None)
    running = asyncio.create_task(worker.run())
    await server.wait_until(lambda: len(server.leased) == 2)
    worker.stop()
    await asyncio.wait_for(running, 20)
    assert reasons(server) == {"WORKER_STOPPED": 2}


async def test_a_stop_gives_back_siblings_that_wait_for_one_another(penstock, server):
    add_group(server, 2)
    server.script.max_attempts = 1

    second = asyncio.Event()

    async def generate(task, trajectory):
        if trajectory.sample_index == 1:
            second.set()
            await asyncio.Event().wait()
        await trajectory.turn()

    settings = WorkerSettings(concurrency=2, drain_seconds=0.2, group_reward=True)
    worker = penstock.worker(settings, generate, lambda task, trajectories: [1.0, 1.0])
    running = asyncio.create_task(worker.run())
    await server.wait_until(lambda: server.calls.count("Generate") == 1)
    await asyncio.wait_for(second.wait(), 20)
    worker.stop()
    await asyncio.wait_for(running, 20)
    assert reasons(server) == {"WORKER_STOPPED": 2}


async def test_a_group_reward_that_raises_fails_its_siblings_only(penstock, server):
    add_group(server, 2)
    raised = []

    @group_reward
    async def reward(task, trajectories):
        if not raised:
            raised.append(task)
            raise asyncio.CancelledError
        return [1.0, 0.0]

    await penstock.worker(WorkerSettings(concurrency=2, attempts=4), single_turn, reward).run()
    assert reasons(server) == {"CANCELLED": 2}
    assert sorted(rewards(server)) == [0.0, 1.0]


async def test_a_function_may_fail_its_attempt_in_so_many_words(penstock, server):
    add_tasks(server, 1)
    server.script.max_attempts = 1

    async def agent(task, trajectory):
        return Failed("SANDBOX_SILENT", "no answer")

    await penstock.work(agent, attempts=1)
    assert reasons(server) == {"SANDBOX_SILENT": 1}


async def test_a_close_that_is_refused_fails_or_loses_the_attempt_and_no_more(penstock, server):
    add_tasks(server, 3)
    server.script.max_attempts = 1
    large = status(grpc.StatusCode.RESOURCE_EXHAUSTED, "MESSAGE_TOO_LARGE")
    server.script.refuse["CompleteTrajectory"] = deque([large, large, large])

    async def agent(task, trajectory):
        return 1.0

    statistics = await penstock.work(agent, concurrency=2, attempts=3)
    # The first reward and the failure that replaces it are both refused, then only the second reward.
    assert reasons(server) == {"MESSAGE_TOO_LARGE": 1} and rewards(server) == [1.0]
    assert (statistics.lost_count, statistics.failed_count, statistics.scored_count) == (1, 1, 1)


@pytest.mark.parametrize("reason", ["MEMORY_BUDGET", ""])
async def test_a_close_that_a_server_stays_too_full_for_never_becomes_a_failure(reason):
    """The outcome was valid, so the attempt counts as lost, and the server retries it."""
    full = status(grpc.StatusCode.RESOURCE_EXHAUSTED, reason, retry_after=0.05 if reason else None)
    if not reason:
        full.trailing_metadata = ()

    async def agent(task, trajectory):
        return 1.0

    async with ScriptedServer(Script()) as server:
        add_tasks(server, 1)
        server.script.refuse["CompleteTrajectory"] = deque([full] * 1000)
        async with connect(server.address, patience=Patience(overload_seconds=0.3)) as penstock:
            statistics = await penstock.work(agent, attempts=1)
    assert not server.outcomes
    assert (statistics.lost_count, statistics.failed_count, statistics.scored_count) == (1, 0, 0)


async def test_the_low_level_iterator_leaves_closing_to_the_caller(penstock, server):
    add_tasks(server, 3)
    closed = 0
    async with penstock.lease_tasks(concurrency=1) as attempts:
        async for attempt in attempts:
            await attempt.trajectory.turn()
            assert (await attempt.trajectory.complete(1.0)).group_completed
            closed += 1
            if closed == 3:
                break
    assert rewards(server) == [1.0] * 3


def attempt(index: int, retry_count: int = 0, size: int = 3) -> Attempt:
    task = Task("t", group_size=size)
    return Attempt(task, None, "g", index, retry_count)  # type: ignore[arg-type]


def test_a_group_book_scores_a_late_retry_next_to_siblings_that_were_closed():
    book = GroupBook(4)
    first = [attempt(index) for index in range(3)]
    for one in first:
        book.begin(one)
    assert book.end(first[0]) is None
    assert book.end(first[1]) is None
    ready = book.end(first[2])
    assert ready is not None and ready.siblings == ready.unscored == first
    assert book.close(first[0], failed=False) is None
    book.lose(first[2])
    again = attempt(2, retry_count=1)
    book.begin(again)
    # The second close is still in flight.
    ready = book.end(again)
    assert ready is not None
    assert ready.siblings == [*first[:2], again] and ready.unscored == [again]
    assert book.close(again, failed=False) is None
    assert len(book._groups) == 1
    assert book.close(first[1], failed=True) is None
    assert not book._groups


def test_a_group_book_ignores_the_end_of_an_attempt_that_was_made_again():
    book = GroupBook(4)
    old, new = attempt(0, size=1), attempt(0, retry_count=1, size=1)
    book.begin(old)
    book.begin(new)
    book.lose(old)
    assert book.close(old, failed=True) is None
    ready = book.end(new)
    assert ready is not None and ready.unscored == [new]


def test_a_group_book_waits_anew_for_a_sibling_whose_lease_was_lost():
    book = GroupBook(4)
    a, b = attempt(0, size=2), attempt(1, size=2)
    book.begin(a)
    book.begin(b)
    assert book.end(a) is None
    book.lose(a)
    assert book.end(b) is None
    assert book.waiting() == [b]
    again = attempt(0, retry_count=1, size=2)
    book.begin(again)
    ready = book.end(again)
    assert ready is not None and ready.unscored == [again, b]


def test_a_group_book_forgets_groups_the_server_has_dropped():
    book = GroupBook(2)
    for number in range(10):
        one = Attempt(Task("t", group_size=2), None, f"g{number}", 0, 0)  # type: ignore[arg-type]
        book.begin(one)
        assert book.close(one, failed=True) is None
    assert len(book._groups) == 3


def test_failures_are_named_after_their_class():
    class HTTPTimeout(Exception):
        pass

    assert as_failed(HTTPTimeout("late")).reason == "HTTP_TIMEOUT"
    assert as_failed(KeyError("x")).reason == "KEY_ERROR"
    assert len(as_failed(ValueError("x" * 5000)).message) == 1000


def test_scores_may_be_numbers_of_any_kind():
    import numpy as np

    assert as_outcome(True).reward == 1.0
    assert as_outcome(np.float32(0.5)).reward == 0.5
    assert [o.reward for o in as_outcomes(np.array([1, 2]), 2)] == [1.0, 2.0]
    with pytest.raises(RewardInvalid, match="2 numbers for 3 siblings"):
        as_outcomes([1, 2], 3)


def test_trajectory_is_exported_for_annotations():
    assert Trajectory.turn.__doc__
