"""Tasks: their contents, and keeping enough of them waiting at the server."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import reasoning_gym
from google.protobuf import json_format

from penstock.trainer.config.data import DataConfig, ReasoningGymConfig, SamplingConfig
from penstock.trainer.core.errors import ServerLost, SessionRefused
from penstock.trainer.data.feeder import ServerTasks, TaskFeeder
from penstock.trainer.data.indices import DataIndices
from penstock.trainer.data.shards import Division
from penstock.trainer.data.sources.factory import open_source
from penstock.trainer.data.sources.problem import Problem, Source
from penstock.trainer.data.sources.procedural import ReasoningGymSource
from penstock.trainer.data.submission import MOST_TASKS_PER_CALL, submit_tasks
from penstock.trainer.data.tasks import Task, build_task
from penstock.trainer.gather.batch import settle_refused
from penstock.trainer.state.ledger import Ledger, RefusedEntry
from penstock.wire.channel import client_options
from penstock.wire.messages import Notice, SubmitTasksResponse
from tests.support.scripted_server import status
from tests.support.scripted_trainer_server import ScriptedServer, Session, refuse, unanswering
from tests.support.trainer_walk import greet, running

DATA = DataConfig(
    group_size=3,
    system_prompt="Be brief.",
    sampling=SamplingConfig(max_tokens=9, temperature=0.5),
    reasoning_gym=ReasoningGymConfig(name="chain_sum", size=5, seed=3),
)


class Numbers:
    """Problem n is the number n as text."""

    name = identity = "numbers"

    def problem(self, index: int) -> Problem:
        return Problem((("user", str(index)),), {"answer": index}, "numbers")


def feeder(
    channel: grpc.aio.Channel,
    target: int,
    next_index: int = 0,
    outstanding: tuple[int, ...] = (),
    source: Source | None = None,
) -> TaskFeeder:
    return TaskFeeder(
        [ServerTasks(channel, target)],
        source or Numbers(),
        DATA,
        DataIndices(Division(1), next_index, outstanding),
        run_id="r",
    )


@contextlib.asynccontextmanager
async def connected(server: ScriptedServer) -> AsyncGenerator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(server.address, options=client_options()) as channel:
        yield channel


def test_a_reasoning_gym_task_carries_what_its_reward_needs() -> None:
    source = open_source(DATA, seed=0)
    task = build_task(source.problem(1), run_id="r", index=1, config=DATA)
    metadata = json_format.MessageToDict(task.metadata)
    assert metadata["dataset"] == "chain_sum"
    entry = json.loads(metadata["entry_json"])
    assert metadata["answer"] == entry["answer"]
    assert task.conversation.messages[1].content == entry["question"]
    scorer = reasoning_gym.get_score_answer_fn(metadata["dataset"])
    assert scorer(answer=entry["answer"], entry=entry) == 1.0
    assert scorer(answer="no", entry=entry) < 1.0


def test_a_task_is_the_same_whenever_it_is_built() -> None:
    first, second = (ReasoningGymSource(DATA.reasoning_gym) for _ in range(2))  # type: ignore[arg-type]
    for index in (0, 4, 7):
        tasks = [
            build_task(source.problem(index), run_id="r", index=index, config=DATA)
            for source in (first, second)
        ]
        assert tasks[0].SerializeToString(deterministic=True) == tasks[1].SerializeToString(
            deterministic=True
        )
    task = build_task(first.problem(7), run_id="r", index=7, config=DATA)
    assert (task.task_id, task.index, task.group_size) == ("r/7", 7, 3)
    assert task.sampling_params.max_tokens == 9
    assert task.sampling_params.temperature == 0.5
    # Past its size the data starts over, under new ids.
    assert first.problem(7).messages == first.problem(2).messages


def test_a_task_says_which_source_it_is_of() -> None:
    task = build_task(Numbers().problem(3), run_id="r", index=3, config=DATA)
    assert task.data_source == "numbers" == task.metadata["data_source"]
    # Rows of some data sets have their own `data_source` field, which their rewards read.
    own = Problem((("user", "?"),), {"data_source": "gsm8k"}, "train")
    task = build_task(own, run_id="r", index=3, config=DATA)
    assert (task.data_source, task.metadata["data_source"]) == ("train", "gsm8k")


async def test_a_task_is_found_again_by_its_id() -> None:
    async with ScriptedServer() as server, connected(server) as channel:
        tasks = feeder(channel, 4)
        asked = build_task(Numbers().problem(3), run_id="r", index=3, config=DATA)
        assert tasks.task("r/3") == asked
        again = tasks.task("r/3~+1")
        assert again is not None and (again.task_id, again.index) == ("r/3~+1", 3)
        assert tasks.task("other/3") is None


async def test_tasks_are_topped_up_as_groups_arrive() -> None:
    async with ScriptedServer() as server, connected(server) as channel:
        taken = 0
        server.pending = lambda submitted: submitted - taken
        tasks = feeder(channel, 6)
        await tasks.fill(0)
        assert [task.task_id for task in server.tasks] == [f"r/{n}" for n in range(6)]
        await tasks.fill(0)
        assert len(server.tasks) == 6
        for _ in range(2):
            taken += 1
            tasks.arrived(0)
        await tasks.fill(0)
        assert len(server.tasks) == 8


async def test_what_arrives_while_the_server_replies_is_counted() -> None:
    async with ScriptedServer() as server, connected(server) as channel:
        tasks = feeder(channel, 4)

        def pending(submitted: int) -> int:
            # Every task is gone and reported before the trainer reads that all four wait.
            if submitted == 4:
                for _ in range(4):
                    tasks.arrived(0)
            return 4

        server.pending = pending
        await tasks.fill(0)
        assert [task.index for task in server.tasks] == list(range(8))
        await tasks.fill(0)
        assert len(server.tasks) == 8


async def test_problems_that_take_their_time_let_others_in() -> None:
    ticks, seen = 0, list[int]()

    class Slow(Numbers):
        def problem(self, index: int) -> Problem:
            seen.append(ticks)
            return super().problem(index)

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    async with ScriptedServer() as server, connected(server) as channel:
        server.pending = lambda submitted: submitted
        tasks = feeder(channel, 20, source=Slow())
        ticking = asyncio.create_task(tick())
        await tasks.fill(0)
        ticking.cancel()
        await asyncio.wait([ticking])
    assert len(seen) == len(set(seen)) == 20


async def test_known_tasks_are_passed_over_until_enough_wait() -> None:
    # A trainer that starts over on a server that has seen this run: the first ten are duplicates.
    async with ScriptedServer() as server, connected(server) as channel:
        server.pending = lambda submitted: max(0, submitted - 10)
        tasks = feeder(channel, 4)
        await tasks.fill(0)
        assert tasks.indices.next_index >= 14


async def test_what_is_outstanding_is_submitted_again() -> None:
    async with ScriptedServer() as server, connected(server) as channel:
        server.pending = lambda _: 3
        tasks = feeder(channel, 3, next_index=9, outstanding=(4, 7))
        await tasks.submit_again(0)
        assert [task.index for task in server.tasks] == [4, 7]
        tasks.settled("r/4")
        tasks.settled("another/7")
        assert (tasks.indices.outstanding, tasks.indices.next_index) == ((7,), 9)


async def test_a_task_is_taken_once() -> None:
    async with ScriptedServer() as server, connected(server) as channel:
        server.pending = lambda _: 3
        tasks = feeder(channel, 3, next_index=9, outstanding=(7, 4))
        # The trainer knows nothing about the tasks of other runs.
        assert tasks.take("another/3") and tasks.take("another/3") and tasks.take("r/x")
        # 3 was trained earlier; 4 is new and becomes in hand.
        assert not tasks.take("r/3")
        assert tasks.take("r/4") and not tasks.take("r/4")
        assert tasks.indices.outstanding == (4, 7)
        # The trainer has the group of 4 in hand, so a server that lost its task need not make it again.
        await tasks.submit_again(0)
        assert [task.index for task in server.tasks] == [7]
        tasks.settled("r/4")
        assert not tasks.take("r/4")
        assert tasks.indices.outstanding == (7,)


async def test_a_trainer_that_went_back_learns_what_was_submitted_after_its_checkpoint() -> None:
    async with ScriptedServer() as server, connected(server) as channel:
        server.pending = lambda submitted: max(0, submitted - 2)
        tasks = feeder(channel, 3, next_index=5)
        assert tasks.take("r/7")
        assert (tasks.indices.next_index, tasks.indices.outstanding) == (8, (5, 6, 7))
        tasks.settled("r/7")
        await tasks.fill(0)
        # A server that had these tasks from the previous trainer ignores them as duplicates.
        assert [task.index for task in server.tasks] == [5, 6, 8, 9, 10]
        await tasks.submit_again(0)
        assert [task.index for task in server.tasks][5:] == [5, 6, 8, 9, 10]


async def test_a_task_whose_groups_are_forgotten_gets_an_id_that_the_server_does_not_know() -> None:
    async with ScriptedServer() as server, connected(server) as channel:
        server.pending = lambda _: 3
        tasks = feeder(channel, 3, next_index=9, outstanding=(4, 7))
        await tasks.submit_anew(0, ["r/4", "r/3", "another/4"], again=12)
        assert [(task.task_id, task.index) for task in server.tasks] == [("r/4~12", 4)]
        assert tasks.take("r/4~12") and not tasks.take("r/4")
        tasks.settled("r/4~12")
        assert tasks.indices.outstanding == (7,)
        assert tasks.place("r/7") < tasks.place("r/8~2") < tasks.place("another/1")


async def test_a_full_queue_is_enough() -> None:
    async def full(request: Any, context: Any) -> Any:
        await refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")

    server = ScriptedServer()
    server._submit = full  # type: ignore[method-assign]
    async with server, connected(server) as channel:
        tasks = feeder(channel, 5)
        await tasks.fill(0)
        assert (tasks.indices.next_index, tasks.indices.outstanding) == (0, ())


@pytest.mark.parametrize("reason", ["MEMORY_BUDGET", "DISK_FULL", "CALLER_LIMIT", "QUEUE_FULL", ""])
async def test_a_server_that_is_full_for_a_while_is_filled_when_it_has_room(reason: str) -> None:
    """Tasks that the server may have lost are resubmitted too. Without a reason, gRPC itself refuses."""
    refusals = 3

    async def full(request: Any, context: Any) -> Any:
        nonlocal refusals
        if refusals:
            refusals -= 1
            if not reason:
                await context.abort(
                    grpc.StatusCode.RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!"
                )
            delay = 0.01 if reason != "QUEUE_FULL" or refusals else None
            await context.abort_with_status(
                status(grpc.StatusCode.RESOURCE_EXHAUSTED, reason, retry_after=delay)
            )
        return await take(request, context)

    async def ask(attempt: Callable[[], Awaitable[None]]) -> None:
        await attempt()

    server = ScriptedServer()
    take, server._submit = server._submit, full  # type: ignore[method-assign]
    async with server, connected(server) as channel:
        tasks = feeder(channel, 5, next_index=3, outstanding=(1, 2))
        # The call returns so that the caller can continue: receiving groups may be what makes room.
        await tasks.submit_again(0)
        assert not server.tasks and tasks.indices.outstanding == (1, 2)
        keeper = asyncio.create_task(tasks.keep_filled(0, ask))
        async with asyncio.timeout(20):
            while len(server.tasks) < 5:
                assert not keeper.done()
                await asyncio.sleep(0.01)
        assert [task.index for task in server.tasks] == [1, 2, 3, 4, 5]
        keeper.cancel()


async def test_a_server_that_has_room_for_less_than_a_call_is_given_that() -> None:
    """The server accepts a call as a whole or not at all."""
    room, calls = 3, list[int]()

    async def full(request: Any, context: Any) -> Any:
        new = {task.task_id for task in request.tasks} - {task.task_id for task in server.tasks}
        calls.append(len(request.tasks))
        if len(server.tasks) + len(new) > room:
            await refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        server.tasks.extend(task for task in request.tasks if task.task_id in new)
        return SubmitTasksResponse(pending_count=len(server.tasks))

    server = ScriptedServer()
    server._submit = full  # type: ignore[method-assign]
    async with server, connected(server) as channel:
        tasks = feeder(channel, 12)
        await tasks.fill(0)
        assert [task.index for task in server.tasks] == [0, 1, 2]
        assert calls[:3] == [12, 6, 3]
        room = 20
        await tasks.fill(0)
        assert [task.index for task in server.tasks] == list(range(12))
        assert tasks.indices.outstanding == tuple(range(12))


async def test_a_call_has_as_many_tasks_as_a_message_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[int]] = []

    class Long(Numbers):
        def problem(self, index: int) -> Problem:
            text = "x" * (1000 if index == 4 else 100)
            return Problem((("user", text),), {"answer": index}, "numbers")

    async def take(request: Any, context: Any) -> Any:
        calls.append([task.index for task in request.tasks])
        return SubmitTasksResponse(pending_count=sum(map(len, calls)))

    server = ScriptedServer()
    server._submit = take  # type: ignore[method-assign]
    monkeypatch.setattr("penstock.trainer.data.submission.MOST_BYTES_PER_CALL", 500)
    async with server, connected(server) as channel:
        await feeder(channel, 7, source=Long()).fill(0)
        assert [index for call in calls for index in call] == list(range(7))
        assert [4] in calls and 2 < len(calls) < 7
        calls.clear()
        monkeypatch.setattr("penstock.trainer.data.submission.MOST_BYTES_PER_CALL", 1 << 20)
        many = [Task(task_id=f"r/{n}", index=n) for n in range(MOST_TASKS_PER_CALL + 1)]
        assert await submit_tasks(channel, many) == len(many)
        assert [len(call) for call in calls] == [MOST_TASKS_PER_CALL, 1]


async def test_what_is_too_large_is_not_asked_again() -> None:
    async def large(request: Any, context: Any) -> Any:
        await refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "MESSAGE_TOO_LARGE")

    server = ScriptedServer()
    server._submit = large  # type: ignore[method-assign]
    async with server, connected(server) as channel:
        with pytest.raises(SessionRefused, match="SubmitTasks: MESSAGE_TOO_LARGE"):
            await feeder(channel, 5).fill(0)


async def test_what_grpc_itself_finds_too_large_is_not_asked_again() -> None:
    options = (("grpc.max_send_message_length", 10),)
    async with (
        ScriptedServer() as server,
        grpc.aio.insecure_channel(server.address, options=options) as channel,
    ):
        with pytest.raises(SessionRefused, match="larger than max"):
            await feeder(channel, 5).fill(0)


@pytest.mark.parametrize(
    "code",
    [
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.UNKNOWN,
    ],
    ids=lambda code: code.name,
)
async def test_a_server_that_gives_no_answer_is_asked_again(code: grpc.StatusCode) -> None:
    async def unanswered(request: Any, context: Any) -> Any:
        await context.abort(code, "gone")

    server = ScriptedServer()
    server._submit = unanswered  # type: ignore[method-assign]
    async with server, connected(server) as channel:
        with pytest.raises(ServerLost, match=f"SubmitTasks: {code.name}"):
            await submit_tasks(channel, [])


async def test_a_server_that_stops_in_the_middle_of_an_answer_is_asked_again() -> None:
    asked = asyncio.Event()

    async def slow(request: Any, context: Any) -> Any:
        asked.set()
        await asyncio.Event().wait()

    server = ScriptedServer()
    server._submit = slow  # type: ignore[method-assign]
    async with server, connected(server) as channel:
        submitting = asyncio.create_task(submit_tasks(channel, []))
        await asked.wait()
        await server.server.stop(0)
        with pytest.raises(ServerLost):
            await submitting


async def test_a_submission_names_the_live_session_and_is_made_again_by_the_next() -> None:
    asked: list[tuple[str, int]] = []
    epochs = iter((3, 4))

    async def stale_at_first(request: Any, context: Any) -> Any:
        asked.append((request.run_id, request.trainer_epoch))
        if request.trainer_epoch == 3:
            await refuse(context, grpc.StatusCode.FAILED_PRECONDITION, "STALE_EPOCH")
        return SubmitTasksResponse(pending_count=len(request.tasks))

    server = ScriptedServer()
    server._submit = stale_at_first  # type: ignore[method-assign]
    async with server, connected(server) as channel:
        tasks = feeder(channel, 2)
        tasks.servers[0].trainer_epoch = lambda: next(epochs)
        with pytest.raises(ServerLost, match="STALE_EPOCH"):
            await tasks.fill(0)
        assert tasks.indices.next_index == 0
        await tasks.fill(0)
    assert asked == [("r", 3), ("r", 4)]
    assert tasks.indices.next_index == 2


async def test_a_server_that_says_no_is_not_asked_again() -> None:
    async def wrong(request: Any, context: Any) -> Any:
        await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "FIELD_INVALID", "it is odd")

    server = ScriptedServer()
    server._submit = wrong  # type: ignore[method-assign]
    async with server, connected(server) as channel:
        with pytest.raises(SessionRefused, match="SubmitTasks: FIELD_INVALID: it is odd"):
            await submit_tasks(channel, [])


# Several servers


async def test_each_server_is_given_its_own_indices_and_as_many_as_it_uses_up() -> None:
    used = [0, 0]
    async with contextlib.AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(ScriptedServer()) for _ in used]
        queues: list[ServerTasks] = []
        division = Division(3, 2)
        for place, (server, part) in enumerate(zip(servers, division.parts, strict=True)):
            server.pending = lambda submitted, place=place: submitted - used[place]
            queues.append(ServerTasks(await stack.enter_async_context(connected(server)), 2 * part))
        indices = DataIndices(division)
        tasks = TaskFeeder(queues, Numbers(), DATA, indices, run_id="r")
        await asyncio.gather(tasks.fill(0), tasks.fill(1))
        given = [[task.index for task in server.tasks] for server in servers]
        assert given == [[0, 2, 3, 5], [1, 4]]
        # The second server's groups are dropped repeatedly.
        for _ in range(3):
            used[1] += 2
            tasks.arrived(1)
            tasks.arrived(1)
            await tasks.fill(1)
        assert [task.index for task in servers[1].tasks] == [1, 4, 7, 10, 13, 16, 19, 22]
        assert len(servers[0].tasks) == 4
        assert tasks.indices.next_index == 23
        assert tasks.indices.unasked == (6, 8, 9, 11, 12, 14, 15, 17, 18, 20, 21)
        used[0] += 1
        tasks.arrived(0)
        await tasks.fill(0)
        assert [task.index for task in servers[0].tasks][4:] == [6]
        # A repeated task stays with its server, and so does a lost one.
        tasks.ask_again("r/4")
        await tasks.fill(0)
        await tasks.fill(1)
        assert servers[1].tasks[-1].task_id == "r/4~+1"
        servers[0].tasks.clear()
        await tasks.submit_again(0)
        assert [task.index for task in servers[0].tasks] == [0, 2, 3, 5, 6]
        # A forgotten task gets another id, and keeps the count of how often it was asked.
        await tasks.submit_anew(1, ["r/4~+1"], again=12)
        assert servers[1].tasks[-1].task_id == "r/4~12+1"
        tasks.ask_again("r/4~12+1")
        await tasks.fill(1)
        assert servers[1].tasks[-1].task_id == "r/4~12+2"


async def test_what_a_server_took_along_that_is_gone_for_good_is_asked_of_the_others() -> None:
    """Of two servers, the second one had the odd indices. No checkpoint records how far either had
    come.
    """
    async with ScriptedServer() as server, connected(server) as channel:
        had = {index for index in range(8) if index % 2 == 0}

        def pending(_: int) -> int:
            return len({task.index for task in server.tasks} | had) - len(settled)

        server.pending, settled = pending, list[str]()
        division = Division(2, 1)
        tasks = TaskFeeder(
            [ServerTasks(channel, 4)],
            Numbers(),
            DATA,
            DataIndices(division, 2, (0,)),
            run_id="r",
        )
        await tasks.submit_again(0)
        # First come the groups that the first server had made, in order, then those submitted since.
        while len(settled) < 12:
            waiting = sorted(had | {task.index for task in server.tasks})
            task_id = next(f"r/{i}" for i in waiting if f"r/{i}" not in settled)
            assert tasks.take(task_id)
            tasks.settled(task_id)
            settled.append(task_id)
            tasks.arrived(0)
            await tasks.fill(0)
        # The checkpoint already contains 1.
        found = sorted(int(task_id.removeprefix("r/")) for task_id in settled)
        assert found == [0, *range(2, 13)]


async def test_a_server_that_is_away_keeps_no_other_from_having_tasks() -> None:
    async with (
        ScriptedServer() as there,
        connected(there) as channel,
        unanswering() as (address, reached),
        grpc.aio.insecure_channel(address, options=client_options()) as silent,
    ):
        queues = [ServerTasks(channel, 2), ServerTasks(silent, 2)]
        division = Division(2, 2)
        tasks = TaskFeeder(queues, Numbers(), DATA, DataIndices(division), run_id="r")
        waiting = asyncio.create_task(tasks.fill(1))
        await reached.wait()
        await tasks.fill(0)
        assert [task.index for task in there.tasks] == [0, 2]
        # The silent server has no task yet.
        indices = tasks.indices
        assert (indices.outstanding, indices.unasked, indices.next_index) == ((0, 2), (1,), 3)
        waiting.cancel()
        await asyncio.wait([waiting])


@pytest.mark.parametrize("reason", ["GROUP_DROPPED", "GROUP_TOO_LARGE"])
@pytest.mark.parametrize("named", [True, False], ids=["named", "of_an_older_server"])
async def test_what_a_server_drops_makes_room_for_another_task(
    tmp_path: Path, reason: str, named: bool
) -> None:
    begun, dropped = asyncio.Event(), 0

    async def drops(session: Session) -> None:
        nonlocal dropped
        await greet(session)
        await session.receive("demand")
        await begun.wait()
        # A task that is not from the data takes no prompt's place.
        foreign = Notice(reason=reason, group_id="theirs", task_id="another/1")
        await session.send(notice=foreign)
        for task in server.tasks[:3]:
            dropped += 1
            group_id, task_id = f"g{task.index}", task.task_id if named else ""
            # If the stream is lost while the trainer handles a notice, the next stream may repeat it.
            for _ in range(1 + named):
                await session.send(notice=Notice(reason=reason, group_id=group_id, task_id=task_id))
        with contextlib.suppress(StopAsyncIteration):
            await anext(session.requests)

    def pending(submitted: int) -> int:
        begun.set()
        return submitted - dropped

    async with ScriptedServer(drops) as server:
        server.pending = pending
        async with running(tmp_path, server.address) as run, asyncio.timeout(30):
            ledger = tmp_path / "ledger.jsonl"
            while len(server.tasks) < 7 or len(ledger.read_text().splitlines()) < 3:
                await asyncio.sleep(0.01)
            # A checkpoint lists no task that will never yield a group. The trainer learns shortly
            # afterwards which tasks the server has. There may be more than seven: a reply that counts
            # the dropped tasks may be read before the notices, each of which counts one less.
            first = 3 if named else 0
            while run.tasks.indices.outstanding != tuple(range(first, len(server.tasks))):
                await asyncio.sleep(0.01)
        # A trainer that resumes from an older checkpoint does not list them either.
        reopened = Ledger(tmp_path)
        reopened.resume(0)
        reopened.close()
        assert reopened.refused == [
            RefusedEntry(f"g{index}", f"r/{index}" if named else "", reason) for index in range(3)
        ]
        async with connected(server) as channel:
            resumed = feeder(channel, 4, 7, tuple(range(7)))
            settle_refused(resumed, reopened.refused)
            assert resumed.indices.outstanding == ((3, 4, 5, 6) if named else tuple(range(7)))
    assert [task.index for task in server.tasks] == list(range(len(server.tasks)))
