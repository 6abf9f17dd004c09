"""Data source to `SubmitTasks`: keeps enough tasks waiting at every server.

Which index of the data is where, and of which server, is in `data_indices`. Only outstanding ones are
submitted again to a server that may have lost them. A task of which a second group comes, because the
server lost the first one and made another, is trained once all the same: `take` says so.

Nothing polls. A server says how many tasks wait with each submission; between submissions every group that
arrives from it, or that it reports as dropped, means one less. Each is filled by itself: one that is away
keeps no other from having tasks.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import grpc
from google.protobuf import json_format

from penstock.trainer.data_config import DataConfig, SamplingConfig
from penstock.trainer.data_indices import DataIndices
from penstock.trainer.division import Division
from penstock.trainer.errors import ServerLost, SessionRefused
from penstock.trainer.sources.problem import Problem, Source
from penstock.v1 import conversation_pb2, rollout_service_pb2, task_service_pb2, trajectory_pb2
from penstock.wire import codec
from penstock.wire.failure import read_failure
from penstock.wire.reasons import Reason

SUBMIT_TASKS = "/penstock.v1.TaskService/SubmitTasks"
SUBMIT_TIMEOUT_SECONDS = 60.0
# Messages stay far below the limit of a message, and the server's reply comes soon.
MOST_TASKS_PER_CALL = 512

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
    # For agents, which see no other field of where a problem is from; what a row says itself stands.
    metadata = {"data_source": problem.data_source, **problem.metadata}
    json_format.ParseDict(metadata, task.metadata)
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
        return _name_of(self._source.problem(index)) if found is None else found

    def _index(self, task_id: str) -> int | None:
        """Its place in the data, which is known to have been submitted from now on."""
        run_id, _, place = task_id.rpartition("/")
        number = place.partition(AGAIN)[0]
        if run_id != self._run_id or not number.isdecimal():
            return None
        index = int(number)
        self._indices.known(index)
        return index

    async def submit_again(self, server: int) -> None:
        """Submits what is outstanding and not in hand to a server that may have lost it; what it knows
        is unharmed. Raises ServerLost and SessionRefused."""
        async with self._servers[server].filling:
            await self._submit_all(server, self._indices.waiting(server))
        await self.fill(server)

    async def submit_anew(self, server: int, task_ids: Iterable[str], again: int) -> None:
        """Submits tasks whose groups a server has forgotten, but whose ids it still knows; those of other
        servers are passed over. Raises ServerLost and SessionRefused."""
        async with self._servers[server].filling:
            known = (self._index(task_id) for task_id in task_ids)
            lost = [
                index
                for index in known
                if index is not None
                and self._indices.is_outstanding(index)
                and self._division.server_of(index) == server
            ]
            await self._submit_all(server, lost, str(again))

    async def _submit_all(self, server: int, indices: Sequence[int], again: str = "") -> None:
        for begin in range(0, len(indices), MOST_TASKS_PER_CALL):
            await self._submit(server, indices[begin : begin + MOST_TASKS_PER_CALL], again)

    async def fill(self, server: int) -> None:
        """Submits until enough tasks wait at a server, or its queue is full. Raises ServerLost and
        SessionRefused."""
        tasks = self._servers[server]
        async with tasks.filling:
            while asked := self._asked_again(server):
                if not await self._submit(server, [index for index, _ in asked]):
                    return
                for index, suffix in asked:
                    # While the server was asked, it may have become another one.
                    if self._to_ask_again.get(index) == suffix:
                        del self._to_ask_again[index]
            while tasks.pending < tasks.target:
                count = min(tasks.target - tasks.pending, MOST_TASKS_PER_CALL)
                indices = self._indices.upcoming(server, count)
                if not await self._submit(server, indices):
                    return
                self._indices.submitted(indices)

    def _asked_again(self, server: int) -> list[tuple[int, str]]:
        """What is to be asked again of a server, as much as one call takes."""
        own = (
            (index, suffix)
            for index, suffix in self._to_ask_again.items()
            if self._division.server_of(index) == server
        )
        return list(islice(own, MOST_TASKS_PER_CALL))

    async def _submit(self, server: int, indices: Sequence[int], again: str = "") -> bool:
        """Whether the server took them. Raises ServerLost and SessionRefused."""
        tasks: list[task_service_pb2.Task] = []
        for index in indices:
            problem = self._source.problem(index)
            self._data_sources[index] = _name_of(problem)
            tasks.append(
                build_task(
                    problem,
                    run_id=self._run_id,
                    index=index,
                    config=self._config,
                    attempts=self._attempts,
                    again=again or self._again.get(index, ""),
                )
            )
        at = self._servers[server]
        pending = await submit_tasks(at.channel, tasks, self._run_id, at.trainer_epoch)
        if pending is None:
            return False
        self._servers[server].pending = pending
        return True


def _name_of(problem: Problem) -> str:
    """Of where a problem is from; what a row says itself stands."""
    said = problem.metadata.get("data_source")
    return said if isinstance(said, str) else problem.data_source


async def submit_tasks(
    channel: grpc.aio.Channel,
    tasks: Sequence[task_service_pb2.Task],
    run_id: str = "",
    trainer_epoch: Callable[[], int] = lambda: 0,
) -> int | None:
    """How many tasks wait at the server once it has taken these; None where its queue is full.

    They are of this run, and of the trainer whose epoch that is by now. Where a newer one took over, the
    stream of `Exchange` ends for good: here it is a server that is away.

    Raises ServerLost and SessionRefused.
    """
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
        if failure.reason == Reason.QUEUE_FULL:
            return None
        text = f"SubmitTasks: {failure.reason or failure.code.name}: {failure.message}"
        if failure.is_unanswered or failure.reason == Reason.STALE_EPOCH:
            raise ServerLost(text) from error
        raise SessionRefused(text) from error
    return response.pending_count


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
