"""Data source to `SubmitTasks`: keeps enough tasks waiting at every server.

Which index of the data is where, and of which server, is in `data_indices`. Only outstanding ones are
submitted again to a server that may have lost them. A task of which a second group comes, because the
server lost the first one and made another, is trained once all the same: `take` says so.

A server says how many tasks wait with each submission; between submissions every group that
arrives from it, or that it reports as dropped, means one less. Each is filled by itself: one that is away
keeps no other from having tasks.

A server that is full, of tasks or of anything else, is left for now: what makes room there may be this
trainer, which takes its groups and trains them. `keep_filled` asks it again, after as long as it said.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

import grpc
from google.protobuf import json_format

from penstock.trainer.config.data import DataConfig, SamplingConfig
from penstock.trainer.core.errors import ServerFull, ServerLost, SessionRefused
from penstock.trainer.data.indices import DataIndices
from penstock.trainer.data.shards import Division
from penstock.trainer.data.sources.problem import Problem, Source
from penstock.v1 import conversation_pb2, rollout_service_pb2, task_service_pb2, trajectory_pb2
from penstock.wire import codec
from penstock.wire.failure import read_failure
from penstock.wire.reasons import Reason

log = logging.getLogger(__name__)

SUBMIT_TASKS = "/penstock.v1.TaskService/SubmitTasks"
SUBMIT_TIMEOUT_SECONDS = 60.0
# Until a server that is full is asked again, where it does not say.
FULL_SECONDS = 1.0
# Messages stay far below the limit of a message, and the server's reply comes soon.
MOST_TASKS_PER_CALL = 512
MOST_BYTES_PER_CALL = 8 << 20

# Before what sets an id apart from others of the same index.
AGAIN = "~"
# Before how often a prompt was asked again because a group of it was of no use.
TIMES = "+"

# What rewards are counted under whose task is of another run.
UNKNOWN_SOURCE = "unknown"

# Reason for which a group is refused whose task is settled by that.
ALL_FAILED = "ALL_FAILED"

ROLES = {
    "system": conversation_pb2.ROLE_SYSTEM,
    "user": conversation_pb2.ROLE_USER,
    "assistant": conversation_pb2.ROLE_ASSISTANT,
    "tool": conversation_pb2.ROLE_TOOL,
}

Task = codec.twin(task_service_pb2.Task)
SubmitTasksRequest = codec.twin(task_service_pb2.SubmitTasksRequest)
ChatMessage = codec.twin(conversation_pb2.ChatMessage)
SamplingParams = codec.twin(rollout_service_pb2.SamplingParams)


def build_task(
    problem: Problem,
    *,
    run_id: str,
    index: int,
    config: DataConfig,
    attempts: int | None = None,
    again: str = "",
) -> task_service_pb2.Task:
    """The task of one index: the same run and index always give the same task.

    `attempts` are begun, where that is more than make a group; `again` gives it an id of its own, under
    which a server takes it that knows the first one.
    """
    task = describe_problem(problem, config.system_prompt, config.sampling)
    task.task_id = f"{run_id}/{index}{AGAIN}{again}" if again else f"{run_id}/{index}"
    task.purpose, task.index = trajectory_pb2.PURPOSE_TRAIN, index
    task.group_size = attempts or config.group_size
    task.finish_count = config.group_size if attempts else 0
    return task


def describe_problem(
    problem: Problem, system_prompt: str, sampling: SamplingConfig
) -> task_service_pb2.Task:
    """What an agent is to know of a problem, and how to sample: a task without its id, purpose, size and
    place in the data."""
    task = Task(data_source=problem.data_source, sampling_params=_sampling(sampling))
    messages = problem.messages
    if system_prompt:
        messages = (("system", system_prompt), *messages)
    for role, text in messages:
        task.conversation.messages.append(ChatMessage(role=ROLES[role], content=text))
    json_format.ParseDict(problem.for_agents, task.metadata)
    return task


@dataclass(slots=True, eq=False)
class ServerTasks:
    """The tasks that wait at one server."""

    channel: grpc.aio.Channel
    target: int
    """How many are to wait."""
    pending: int = 0
    """How many do, as far as is known."""
    trainer_epoch: Callable[[], int] = lambda: 0
    """Of the live session with that server; zero where there is none to name."""
    filling: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Two fillers at once would submit the same indices."""
    lacking: deque[tuple[Sequence[int], str]] = field(
        default_factory=deque[tuple[Sequence[int], str]]
    )
    """What it may have lost and has not been given since: indices, and what sets their ids apart."""
    full: asyncio.Event = field(default_factory=asyncio.Event)
    """It was full when it was last filled."""
    full_seconds: float = 0.0
    """What it asked to be waited for then."""


class TaskFeeder:
    """Keeps tasks waiting at the servers."""

    def __init__(
        self,
        servers: Sequence[ServerTasks],
        source: Source,
        config: DataConfig,
        indices: DataIndices,
        *,
        run_id: str,
        division: Division,
        attempts: int | None = None,
    ) -> None:
        """`attempts` are begun for each group (`groups.attempts`)."""
        self._servers = servers
        self._source = source
        self._config = config
        self._indices = indices
        self._division = division
        self._attempts = attempts
        self._run_id = run_id
        # Of indices that are asked again: what sets their ids apart from now on.
        self._again: dict[int, str] = {}
        self._to_ask_again: dict[int, str] = {}
        self._data_sources: dict[int, str] = {}
        """Of indices that this process submitted and that are not settled."""

    @property
    def next_index(self) -> int:
        """First index after all that were submitted."""
        return self._indices.next_index

    @property
    def outstanding(self) -> tuple[int, ...]:
        """Indices submitted and neither trained nor refused, those taken included."""
        return self._indices.outstanding

    @property
    def unasked(self) -> tuple[int, ...]:
        """Indices before `next_index` that were never submitted."""
        return self._indices.unasked

    def arrived(self, server: int) -> None:
        """A group arrived, or was dropped by its server: one task less waits there."""
        self._servers[server].pending -= 1

    def take(self, task_id: str) -> bool:
        """A group of this task is in hand; False where another one of it is, or was trained or refused.

        Of tasks that are not of this run nothing is known: true.
        """
        index = self._index(task_id)
        return True if index is None else self._indices.take(index)

    def awaits(self, task_id: str) -> bool:
        """Whether a group of this task may still come: it is of this run's data, and not settled."""
        index = self._index(task_id)
        return index is not None and self._indices.is_outstanding(index)

    def settled(self, task_id: str) -> None:
        """A group of this task was trained or refused; it need not be asked for again."""
        index = self._index(task_id)
        if index is not None:
            self._indices.settle(index)
            self._again.pop(index, None)
            self._to_ask_again.pop(index, None)
            self._data_sources.pop(index, None)

    def ask_again(self, task_id: str) -> None:
        """A group of this task was refused, and its prompt is to be answered by another one: the next
        `fill` submits it, under an id of its own. Not where it is trained already."""
        index = self._index(task_id)
        if index is None or not self._indices.is_outstanding(index):
            return
        suffix = task_id.rpartition("/")[2].partition(AGAIN)[2].partition(TIMES)[0]
        self._indices.give_back(index)
        suffix = f"{suffix}{TIMES}{times_asked_again(task_id) + 1}"
        self._again[index] = self._to_ask_again[index] = suffix

    def place(self, task_id: str) -> int:
        """Where a task is in the data; after all others where it is not of this run."""
        index = self._index(task_id)
        return sys.maxsize if index is None else index

    def data_source(self, task_id: str) -> str:
        """What a task's rewards are counted under: what agents are told as `data_source`. It follows
        from the index alone, so a trainer that resumes knows it too; of a task that is not of this run
        nothing is known."""
        index = self._index(task_id)
        if index is None:
            return UNKNOWN_SOURCE
        found = self._data_sources.get(index)
        return self._source.problem(index).counted_under if found is None else found

    def task(self, task_id: str) -> task_service_pb2.Task | None:
        """What is asked by a task, as agents are told it; None where it is not of this run. Raises
        ConfigInvalid where the data cannot be read."""
        index = self._index(task_id)
        if index is None:
            return None
        task = build_task(
            self._source.problem(index),
            run_id=self._run_id,
            index=index,
            config=self._config,
            attempts=self._attempts,
        )
        task.task_id = task_id
        return task

    def _index(self, task_id: str) -> int | None:
        """Its place in the data, which is known to have been submitted from now on."""
        run_id, _, place = task_id.rpartition("/")
        number = place.partition(AGAIN)[0]
        if run_id != self._run_id or not number.isdecimal():
            return None
        index = int(number)
        before = self._indices.known(index)
        if before:
            # Of a trainer that was killed. Other servers than now may have been given them, of which one is
            # gone for good: to who has them already they are no news.
            server = self._division.server_of(index)
            self._servers[server].lacking.extend(_calls(before))
        return index

    async def submit_again(self, server: int) -> None:
        """Submits what is outstanding and not in hand to a server that may have lost it; what it knows
        is unharmed. Raises ServerLost and SessionRefused."""
        tasks = self._servers[server]
        async with tasks.filling:
            tasks.lacking.clear()
            tasks.lacking.extend(_calls(self._indices.waiting(server)))
        await self.fill(server)

    async def submit_anew(self, server: int, task_ids: Iterable[str], again: int) -> None:
        """Submits tasks whose groups a server has forgotten, but whose ids it still knows; those of other
        servers are passed over. Raises ServerLost and SessionRefused."""
        tasks = self._servers[server]
        async with tasks.filling:
            known = (self._index(task_id) for task_id in task_ids)
            lost = [
                index
                for index in known
                if index is not None
                and self._indices.is_outstanding(index)
                and self._division.server_of(index) == server
            ]
            tasks.lacking.extend(_calls(lost, str(again)))
        await self.fill(server)

    async def fill(self, server: int) -> None:
        """Submits what a server lacks, and then until enough tasks wait there or it is full. Raises
        ServerLost and SessionRefused."""
        tasks = self._servers[server]
        async with tasks.filling:
            try:
                await self._give_back(server)
                await self._fill(server)
            except ServerFull as error:
                if not tasks.full.is_set():
                    log.warning("%s; asking again until there is room", error)
                tasks.full_seconds = error.retry_after_seconds
                tasks.full.set()
                return
            tasks.full.clear()

    async def keep_filled(
        self, server: int, ask: Callable[[Callable[[], Awaitable[None]]], Awaitable[object]]
    ) -> None:
        """Waits until a server is full, and fills it by `ask` until it is not; for as long as groups are
        taken. Raises as `fill` does."""
        tasks = self._servers[server]
        while True:
            await tasks.full.wait()
            await asyncio.sleep(tasks.full_seconds)
            await ask(lambda: self.fill(server))

    async def _give_back(self, server: int) -> None:
        lacking = self._servers[server].lacking
        while lacking:
            indices, again = lacking[0]
            still = [index for index in indices if self._indices.is_outstanding(index)]
            if still:
                await self._submit(server, still, again)
            lacking.popleft()

    async def _fill(self, server: int) -> None:
        tasks = self._servers[server]
        while asked := self._asked_again(server):
            await self._submit(server, [index for index, _ in asked])
            for index, suffix in asked:
                # While the server was asked, it may have become another one.
                if self._to_ask_again.get(index) == suffix:
                    del self._to_ask_again[index]
        while tasks.pending < tasks.target:
            count = min(tasks.target - tasks.pending, MOST_TASKS_PER_CALL)
            indices = self._indices.upcoming(server, count)
            await self._submit(server, indices)
            self._indices.submitted(indices)

    def _asked_again(self, server: int) -> list[tuple[int, str]]:
        """What is to be asked again of a server, as much as one call takes."""
        own = (
            (index, suffix)
            for index, suffix in self._to_ask_again.items()
            if self._division.server_of(index) == server
        )
        return list(islice(own, MOST_TASKS_PER_CALL))

    async def _submit(self, server: int, indices: Sequence[int], again: str = "") -> None:
        """Raises ServerFull, ServerLost and SessionRefused."""
        tasks: list[task_service_pb2.Task] = []
        for index in indices:
            problem = self._source.problem(index)
            self._data_sources[index] = problem.counted_under
            tasks.append(
                build_task(
                    problem,
                    run_id=self._run_id,
                    index=index,
                    config=self._config,
                    attempts=self._attempts,
                    again=_renamed(self._again.get(index, ""), again),
                )
            )
            # A problem may take its time to be computed, and streams and uploads go on.
            await asyncio.sleep(0)
        at = self._servers[server]
        at.pending = await submit_tasks(at.channel, tasks, self._run_id, at.trainer_epoch)


def _calls(indices: Sequence[int], again: str = "") -> Iterable[tuple[Sequence[int], str]]:
    """As many as one call takes, together."""
    for begin in range(0, len(indices), MOST_TASKS_PER_CALL):
        yield indices[begin : begin + MOST_TASKS_PER_CALL], again


async def submit_tasks(
    channel: grpc.aio.Channel,
    tasks: Sequence[task_service_pb2.Task],
    run_id: str = "",
    trainer_epoch: Callable[[], int] = lambda: 0,
) -> int:
    """How many tasks wait at the server once it has taken these, in as many calls as they need.

    They are of this run, and of the trainer whose epoch that is by now. Where a newer one took over, the
    stream of `Exchange` ends for good: here it is a server that is away. One that has room for fewer than a
    call has is given as many as it has room for: those are known when all are submitted again.

    Raises ServerFull, ServerLost and SessionRefused.
    """
    pending = 0
    call = partial(_call_submit, channel, run_id=run_id, trainer_epoch=trainer_epoch)
    for some in _parts(tasks):
        pending = await _submit_some(call, some)
    return pending


def _parts(
    tasks: Sequence[task_service_pb2.Task],
) -> Iterator[Sequence[task_service_pb2.Task]]:
    """As many as one call takes, together; where there are none, none."""
    begin = size = 0
    for end, task in enumerate(tasks):
        count = task.ByteSize()
        full = end - begin == MOST_TASKS_PER_CALL or size + count > MOST_BYTES_PER_CALL
        if end > begin and full:
            yield tasks[begin:end]
            begin, size = end, 0
        size += count
    yield tasks[begin:]


async def _submit_some(
    call: Callable[[Sequence[task_service_pb2.Task]], Awaitable[int]],
    tasks: Sequence[task_service_pb2.Task],
) -> int:
    try:
        return await call(tasks)
    except ServerFull:
        if len(tasks) < 2:
            raise
    half = len(tasks) // 2
    await _submit_some(call, tasks[:half])
    return await _submit_some(call, tasks[half:])


async def _call_submit(
    channel: grpc.aio.Channel,
    tasks: Sequence[task_service_pb2.Task],
    run_id: str,
    trainer_epoch: Callable[[], int],
) -> int:
    call: grpc.aio.UnaryUnaryMultiCallable[
        task_service_pb2.SubmitTasksRequest, task_service_pb2.SubmitTasksResponse
    ] = channel.unary_unary(
        SUBMIT_TASKS,
        request_serializer=codec.encode,
        response_deserializer=codec.decoder(task_service_pb2.SubmitTasksResponse),
    )
    epoch = trainer_epoch()
    request = SubmitTasksRequest(tasks=tasks, run_id=run_id, trainer_epoch=epoch)
    try:
        response = await call(request, timeout=SUBMIT_TIMEOUT_SECONDS)
    except grpc.aio.AioRpcError as error:
        failure = read_failure(error)
        text = f"SubmitTasks: {failure.reason or failure.code.name}: {failure.message}"
        if failure.is_full or failure.reason == Reason.QUEUE_FULL:
            raise ServerFull(text, failure.retry_after_seconds or FULL_SECONDS) from error
        if failure.is_unanswered or failure.reason == Reason.STALE_EPOCH:
            raise ServerLost(text) from error
        raise SessionRefused(text) from error
    return response.pending_count


def _renamed(before: str, again: str) -> str:
    """What sets a task's id apart, with a part of it anew; how often it was asked again stays counted."""
    part, plus, times = before.partition(TIMES)
    return f"{again or part}{plus}{times}"


def times_asked_again(task_id: str) -> int:
    """How often its prompt was asked again before, because a group of it was of no use."""
    times = task_id.rpartition("/")[2].partition(TIMES)[2]
    return int(times) if times.isdecimal() else 0


def _sampling(config: SamplingConfig) -> rollout_service_pb2.SamplingParams:
    return SamplingParams(
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        max_tokens=config.max_tokens,
        stop=config.stop,
    )
