"""Data source to `SubmitTasks`: keeps enough tasks waiting at the server, and knows where it is in
the data.

States of a data index:

    never submitted -> outstanding -> taken (a group of its task is in hand) -> settled (trained or refused)
                           ^              |
                           +--------------+   the trainer died: its checkpoint has it outstanding;
                                              or the group was of no use, and its prompt is asked again

Only outstanding indices are submitted again to a server that may have lost them. A task of which a second
group comes, because the server lost the first one and made another, is trained once all the same: `take`
says so.

Nothing polls. The server says how many tasks wait with each submission; between submissions every
group that arrives, or that the server reports as dropped, means one less.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable, Sequence

import grpc
from google.protobuf import json_format

from penstock.trainer.data_config import DataConfig, SamplingConfig
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


class TaskFeeder:
    """Keeps tasks waiting at the server."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        source: Source,
        config: DataConfig,
        *,
        run_id: str,
        pending_target: int,
        attempts: int | None = None,
        next_index: int = 0,
        outstanding: Sequence[int] = (),
    ) -> None:
        """`attempts` are begun for each group (`groups.attempts`); `outstanding` are indices before
        `next_index` that were submitted and not trained."""
        self._channel = channel
        self._source = source
        self._config = config
        self._attempts = attempts
        self._run_id = run_id
        self._target = pending_target
        self._next_index = next_index
        # In the order of the data, which a server that has lost everything then begins them in.
        self._outstanding = dict.fromkeys(sorted(outstanding))
        self._taken: set[int] = set()
        # Of indices that are asked again: what sets their ids apart from now on.
        self._again: dict[int, str] = {}
        self._to_ask_again: dict[int, str] = {}
        self._pending = 0
        self._data_sources: dict[int, str] = {}
        """Of indices that this process submitted and that are not settled."""
        # Two fillers at once would submit the same indices.
        self._filling = asyncio.Lock()

    @property
    def next_index(self) -> int:
        """First index that was never submitted."""
        return self._next_index

    @property
    def outstanding(self) -> tuple[int, ...]:
        """Indices submitted and neither trained nor refused, those taken included."""
        return tuple(self._outstanding)

    def arrived(self) -> None:
        """A group arrived, or was dropped by the server: one task less waits there."""
        self._pending -= 1

    def take(self, task_id: str) -> bool:
        """A group of this task is in hand; False where another one of it is, or was trained or refused.

        Of tasks that are not of this run nothing is known: true.
        """
        index = self._index(task_id)
        if index is None:
            return True
        if index in self._taken or index not in self._outstanding:
            return False
        self._taken.add(index)
        return True

    def settled(self, task_id: str) -> None:
        """A group of this task was trained or refused; it need not be asked for again."""
        index = self._index(task_id)
        if index is not None:
            self._outstanding.pop(index, None)
            self._taken.discard(index)
            self._again.pop(index, None)
            self._to_ask_again.pop(index, None)
            self._data_sources.pop(index, None)

    def ask_again(self, task_id: str) -> None:
        """A group of this task was refused, and its prompt is to be answered by another one: the next
        `fill` submits it, under an id of its own. Not where it is trained already."""
        index = self._index(task_id)
        if index is None or index not in self._outstanding:
            return
        suffix = task_id.rpartition("/")[2].partition(AGAIN)[2].partition(TIMES)[0]
        self._taken.discard(index)
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
        # A trainer of before went on further than the state it left: so the server knows more.
        self._outstanding.update(dict.fromkeys(range(self._next_index, index + 1)))
        self._next_index = max(self._next_index, index + 1)
        return index

    async def submit_again(self) -> None:
        """Submits what is outstanding and not in hand to a server that may have lost it; what it knows
        is unharmed."""
        async with self._filling:
            await self._submit_all([i for i in self._outstanding if i not in self._taken])
        await self.fill()

    async def submit_anew(self, task_ids: Iterable[str], again: int) -> None:
        """Submits tasks whose groups the server has forgotten, but whose ids it still knows."""
        async with self._filling:
            known = (self._index(task_id) for task_id in task_ids)
            lost = [index for index in known if index is not None and index in self._outstanding]
            await self._submit_all(lost, str(again))

    async def _submit_all(self, indices: Sequence[int], again: str = "") -> None:
        for begin in range(0, len(indices), MOST_TASKS_PER_CALL):
            await self._submit(indices[begin : begin + MOST_TASKS_PER_CALL], again)

    async def fill(self) -> None:
        """Submits until enough tasks wait, or the server's queue is full."""
        async with self._filling:
            while self._to_ask_again:
                asked = list(self._to_ask_again.items())[:MOST_TASKS_PER_CALL]
                if not await self._submit([index for index, _ in asked]):
                    return
                for index, suffix in asked:
                    # While the server was asked, it may have become another one.
                    if self._to_ask_again.get(index) == suffix:
                        del self._to_ask_again[index]
            while self._pending < self._target:
                count = min(self._target - self._pending, MOST_TASKS_PER_CALL)
                indices = range(self._next_index, self._next_index + count)
                if not await self._submit(indices):
                    return
                # While it was asked, groups of theirs may have come, and been trained.
                fresh = range(self._next_index, indices.stop)
                self._next_index = max(self._next_index, indices.stop)
                self._outstanding.update(dict.fromkeys(fresh))

    async def _submit(self, indices: Sequence[int], again: str = "") -> bool:
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
        pending = await submit_tasks(self._channel, tasks)
        if pending is None:
            return False
        self._pending = pending
        return True


def _name_of(problem: Problem) -> str:
    """Of where a problem is from; what a row says itself stands."""
    said = problem.metadata.get("data_source")
    return said if isinstance(said, str) else problem.data_source


async def submit_tasks(
    channel: grpc.aio.Channel, tasks: Sequence[task_service_pb2.Task]
) -> int | None:
    """How many tasks wait at the server once it has taken these; None where its queue is full.

    Raises ServerLost and SessionRefused.
    """
    call: grpc.aio.UnaryUnaryMultiCallable[
        task_service_pb2.SubmitTasksRequest, task_service_pb2.SubmitTasksResponse
    ] = channel.unary_unary(
        SUBMIT_TASKS,
        request_serializer=codec.encode,
        response_deserializer=codec.decoder(task_service_pb2.SubmitTasksResponse),
    )
    try:
        response = await call(SubmitTasksRequest(tasks=tasks), timeout=SUBMIT_TIMEOUT_SECONDS)
    except grpc.aio.AioRpcError as error:
        failure = read_failure(error)
        if failure.reason == Reason.QUEUE_FULL:
            return None
        text = f"SubmitTasks: {failure.reason or failure.code.name}: {failure.message}"
        if failure.is_unanswered:
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
