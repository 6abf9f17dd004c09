"""Data source to `SubmitTasks`: keeps enough tasks waiting at the server, and knows where it is in
the data.

States of a data index:

    never submitted -> outstanding -> taken (a group of its task is in hand) -> settled (trained or refused)
                           ^              |
                           +--------------+   the trainer died: its checkpoint has it outstanding

Only outstanding indices are submitted again to a server that may have lost them. A task of which a second
group comes, because the server lost the first one and made another, is trained once all the same: `take`
says so.

Nothing polls. The server says how many tasks wait with each submission; between submissions every
group that arrives, or that the server reports as dropped, means one less.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import grpc
import xxhash
from google.protobuf import json_format

from penstock.trainer.config import DataConfig, JsonlConfig, ReasoningGymConfig, SamplingConfig
from penstock.trainer.errors import ConfigInvalid, ServerLost, SessionRefused
from penstock.v1 import conversation_pb2, rollout_service_pb2, task_service_pb2, trajectory_pb2
from penstock.wire import codec
from penstock.wire.failure import read_failure
from penstock.wire.reasons import Reason

SUBMIT_TASKS = "/penstock.v1.TaskService/SubmitTasks"
SUBMIT_TIMEOUT_SECONDS = 60.0
# Messages stay far below the limit of a message, and the server's reply comes soon.
MOST_TASKS_PER_CALL = 512

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


@dataclass(frozen=True, slots=True)
class Problem:
    """One entry of the data."""

    messages: tuple[tuple[str, str], ...]
    """(role, text), oldest first."""
    metadata: dict[str, object]
    """What a reward needs, as JSON."""
    data_source: str


class DataSource(Protocol):
    """Endless problems by index; the same index is always the same problem."""

    def problem(self, index: int) -> Problem: ...


class ReasoningGymSource:
    """A procedural data set. Metadata: `dataset`, `question`, `answer`, `metadata`, and `entry_json`,
    the whole entry as text, because numbers of a protobuf Struct lose their being integers."""

    def __init__(self, config: ReasoningGymConfig) -> None:
        """Raises ConfigInvalid for an unknown data set or setting."""
        import reasoning_gym

        self._name, self._size = config.name, config.size
        try:
            self._dataset = cast(
                "_Entries",
                reasoning_gym.create_dataset(  # pyright: ignore[reportUnknownMemberType]
                    config.name, size=config.size, seed=config.seed, **config.config
                ),
            )
        except (ValueError, TypeError, AssertionError) as error:
            raise ConfigInvalid(f"data.reasoning_gym: {config.name!r}: {error}") from error

    def problem(self, index: int) -> Problem:
        """One problem; after `size` of them they come again."""
        entry = self._dataset[index % self._size]
        text = json.dumps(entry, default=str)
        plain = cast("dict[str, object]", json.loads(text))
        metadata = {"dataset": self._name, "entry_json": text, **plain}
        return Problem((("user", str(entry["question"])),), metadata, self._name)


class JsonlSource:
    """A file of JSON objects; what is not the prompt is metadata."""

    def __init__(self, config: JsonlConfig, seed: int) -> None:
        """Raises ConfigInvalid, naming the line, where an object has no prompt."""
        try:
            lines = config.path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigInvalid(f"data.jsonl.path: {config.path}: {error}") from error
        self._problems = [
            _jsonl_problem(config, number, line)
            for number, line in enumerate(lines, 1)
            if line.strip()
        ]
        if not self._problems:
            raise ConfigInvalid(f"data.jsonl.path: {config.path} holds no line")
        self._seed, self._shuffle = seed, config.shuffle
        self._epoch, self._order = -1, list[int]()

    def problem(self, index: int) -> Problem:
        """One problem; each pass over the file has an order of its own."""
        epoch, place = divmod(index, len(self._problems))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(len(self._problems)))
            if self._shuffle:
                random.Random(f"{self._seed}/{epoch}").shuffle(self._order)
        return self._problems[self._order[place]]


class _Entries(Protocol):
    def __getitem__(self, index: int) -> Mapping[str, object]: ...


def open_source(config: DataConfig, seed: int) -> DataSource:
    """The configured source. Raises ConfigInvalid."""
    if config.reasoning_gym is not None:
        return ReasoningGymSource(config.reasoning_gym)
    if config.jsonl is not None:
        return JsonlSource(config.jsonl, seed)
    raise ConfigInvalid("data: no source")


def identify_data(config: DataConfig, seed: int) -> str:
    """Says which data the indices are of: the same text only where each is the same problem.

    Raises ConfigInvalid.
    """
    if config.jsonl is not None:
        try:
            content = xxhash.xxh3_128_hexdigest(config.jsonl.path.read_bytes())
        except OSError as error:
            raise ConfigInvalid(f"data.jsonl.path: {config.jsonl.path}: {error}") from error
        order = f"order {seed}" if config.jsonl.shuffle else "as written"
        return f"jsonl {content}, {order}"
    if config.reasoning_gym is not None:
        settings = json.dumps(config.reasoning_gym.model_dump(mode="json"), sort_keys=True)
        return f"reasoning_gym {settings}"
    raise ConfigInvalid("data: no source")


def build_task(
    problem: Problem, *, run_id: str, index: int, config: DataConfig, again: int = 0
) -> task_service_pb2.Task:
    """The task of one index: the same run and index always give the same task.

    `again` gives it an id of its own, under which a server takes it that knows the first one.
    """
    task = Task(
        task_id=f"{run_id}/{index}~{again}" if again else f"{run_id}/{index}",
        purpose=trajectory_pb2.PURPOSE_TRAIN,
        group_size=config.group_size,
        data_source=problem.data_source,
        index=index,
        sampling_params=_sampling(config.sampling),
    )
    messages = problem.messages
    if config.system_prompt:
        messages = (("system", config.system_prompt), *messages)
    for role, text in messages:
        task.conversation.messages.append(ChatMessage(role=ROLES[role], content=text))
    json_format.ParseDict(problem.metadata, task.metadata)
    return task


class TaskFeeder:
    """Keeps tasks waiting at the server."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        source: DataSource,
        config: DataConfig,
        *,
        run_id: str,
        pending_target: int,
        next_index: int = 0,
        outstanding: Sequence[int] = (),
    ) -> None:
        """`outstanding` are indices before `next_index` that were submitted and not trained."""
        self._channel = channel
        self._source = source
        self._config = config
        self._run_id = run_id
        self._target = pending_target
        self._next_index = next_index
        # In the order of the data, which a server that has lost everything then begins them in.
        self._outstanding = dict.fromkeys(sorted(outstanding))
        self._taken: set[int] = set()
        self._pending = 0
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

    def place(self, task_id: str) -> int:
        """Where a task is in the data; after all others where it is not of this run."""
        index = self._index(task_id)
        return sys.maxsize if index is None else index

    def _index(self, task_id: str) -> int | None:
        """Its place in the data, which is known to have been submitted from now on."""
        run_id, _, place = task_id.rpartition("/")
        number = place.partition("~")[0]
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
            await self._submit_all(lost, again)

    async def _submit_all(self, indices: Sequence[int], again: int = 0) -> None:
        for begin in range(0, len(indices), MOST_TASKS_PER_CALL):
            await self._submit(indices[begin : begin + MOST_TASKS_PER_CALL], again)

    async def fill(self) -> None:
        """Submits until enough tasks wait, or the server's queue is full."""
        async with self._filling:
            while self._pending < self._target:
                count = min(self._target - self._pending, MOST_TASKS_PER_CALL)
                indices = range(self._next_index, self._next_index + count)
                if not await self._submit(indices):
                    return
                # While it was asked, groups of theirs may have come, and been trained.
                fresh = range(self._next_index, indices.stop)
                self._next_index = max(self._next_index, indices.stop)
                self._outstanding.update(dict.fromkeys(fresh))

    async def _submit(self, indices: Sequence[int], again: int = 0) -> bool:
        """Whether the server took them. Raises ServerLost and SessionRefused."""
        tasks = [
            build_task(
                self._source.problem(index),
                run_id=self._run_id,
                index=index,
                config=self._config,
                again=again,
            )
            for index in indices
        ]
        call: grpc.aio.UnaryUnaryMultiCallable[
            task_service_pb2.SubmitTasksRequest, task_service_pb2.SubmitTasksResponse
        ] = self._channel.unary_unary(
            SUBMIT_TASKS,
            request_serializer=codec.encode,
            response_deserializer=codec.decoder(task_service_pb2.SubmitTasksResponse),
        )
        try:
            response = await call(SubmitTasksRequest(tasks=tasks), timeout=SUBMIT_TIMEOUT_SECONDS)
        except grpc.aio.AioRpcError as error:
            failure = read_failure(error)
            if failure.reason == Reason.QUEUE_FULL:
                return False
            text = f"SubmitTasks: {failure.reason or failure.code.name}: {failure.message}"
            if failure.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise ServerLost(text) from error
            raise SessionRefused(text) from error
        self._pending = response.pending_count
        return True


def _sampling(config: SamplingConfig) -> rollout_service_pb2.SamplingParams:
    return SamplingParams(
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        max_tokens=config.max_tokens,
        stop=config.stop,
    )


def _jsonl_problem(config: JsonlConfig, number: int, line: str) -> Problem:
    place = f"{config.path}:{number}"
    try:
        entry: object = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigInvalid(f"{place}: {error}") from error
    if not isinstance(entry, dict):
        raise ConfigInvalid(f"{place}: an object is needed, got {line[:80]!r}")
    fields = cast("dict[str, object]", entry)
    if config.messages_field in fields:
        messages = _messages(fields.pop(config.messages_field), place)
    elif isinstance(prompt := fields.pop(config.prompt_field, None), str):
        messages = (("user", prompt),)
    else:
        raise ConfigInvalid(
            f"{place}: needs {config.messages_field!r}, or a text in {config.prompt_field!r}"
        )
    return Problem(messages, fields, config.path.stem)


def _messages(value: object, place: str) -> tuple[tuple[str, str], ...]:
    items = cast("list[object]", value) if isinstance(value, list) else []
    messages: list[tuple[str, str]] = []
    for item in items:
        fields = cast("dict[str, object]", item) if isinstance(item, dict) else {}
        role, content = fields.get("role"), fields.get("content")
        if role not in ROLES or not isinstance(content, str):
            raise ConfigInvalid(f"{place}: a message is a role and a content, got {item!r}")
        messages.append((str(role), content))
    if not messages:
        raise ConfigInvalid(f"{place}: a list of messages is needed, got {value!r}")
    return tuple(messages)
