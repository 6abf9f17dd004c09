"""F11: a nonsensical request is refused with the right reason, and other callers notice nothing.

While each request is answered, another caller makes small requests, which must not have to wait.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Generator
from dataclasses import dataclass
from typing import Any, cast

import grpc
import pytest
import pytest_asyncio

from penstock.v1 import conversation_pb2
from penstock.wire import codec
from penstock.wire.channel import client_options
from penstock.wire.failure import read_failure
from tests.faults.fake_server import ServerProcess, fake_server
from tests.faults.lateness import watched_lateness
from tests.faults.report import Report, report_of
from tests.support.fakes import VOCAB_SIZE, expected_tokens
from tests.support.harness import (
    AbortRequest,
    ChatMessage,
    CompleteTrajectoryRequest,
    ContinueRequest,
    Conversation,
    Demand,
    ExchangeRequest,
    Failure,
    GenerateRequest,
    GetServerInfoRequest,
    GroupReceipt,
    Harness,
    Hello,
    LeaseTasksRequest,
    Outcome,
    RenewLeaseRequest,
    StalenessContract,
    SubmitTasksRequest,
    Task,
    Wire,
    header,
    messages,
    sampling,
    sequence,
)

MILLION = 1_000_000
INVALID = grpc.StatusCode.INVALID_ARGUMENT
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
MISSING = grpc.StatusCode.NOT_FOUND
OK = grpc.StatusCode.OK
PATIENCE_SECONDS = 5.0
"""The longest wait allowed for another caller. Parsing sixty megabytes on two cores takes some of it."""
NUMBERS = itertools.count()
BROKEN = b"\xff\xfe"
EPOCH = 1 << 40


@dataclass(frozen=True)
class Absurd:
    """A request and its expected answer."""

    rpc: str
    requests: tuple[Any, ...]
    """Messages, or raw bytes."""
    code: grpc.StatusCode
    reason: str = ""


def generate(**fields: Any) -> Any:
    fields = {"trajectory_id": f"t{next(NUMBERS)}", "sampling_params": sampling(1), **fields}
    if not {"text", "conversation"} & set(fields):
        fields.setdefault("tokens", sequence([1]))
    return GenerateRequest(**fields)


def hi(content: str = "hi", role: int = conversation_pb2.ROLE_USER) -> Any:
    return ChatMessage(role=cast("Any", role), content=content)


def exchange(*later: Any) -> tuple[Any, ...]:
    contract = StalenessContract(max_lag=1, groups_per_step=1)
    hello = Hello(run_id="run", trainer_epoch=time.time_ns(), staleness=contract)
    return ExchangeRequest(hello=hello), *(ExchangeRequest(**fields) for fields in later)


def broken(field: int, data: bytes = BROKEN) -> bytes:
    """A message in which one string field is not UTF-8."""
    return bytes((field << 3 | 2, len(data))) + data


def ids(count: int) -> list[str]:
    return [str(number) for number in range(count)]


def small_requests() -> dict[str, Absurd]:
    """The requests, by name."""
    task = Task(task_id="a", group_size=1, tokens=sequence([1]))
    reward = Outcome(reward=1.0)
    nan, infinite = float("nan"), float("inf")
    return {
        # Empty
        "generate nothing": Absurd("Generate", (b"",), INVALID, "FIELD_INVALID"),
        "generate without a prompt": Absurd(
            "Generate", (GenerateRequest(trajectory_id="t"),), INVALID, "FIELD_INVALID"
        ),
        "an empty prompt": Absurd(
            "Generate", (generate(tokens=sequence([])),), INVALID, "FIELD_INVALID"
        ),
        "an empty text": Absurd("Generate", (generate(text=""),), INVALID, "FIELD_INVALID"),
        "an empty conversation": Absurd(
            "Generate", (generate(conversation=Conversation()),), INVALID, "FIELD_INVALID"
        ),
        "continue nothing": Absurd("Continue", (b"",), INVALID, "FIELD_INVALID"),
        "abort nothing": Absurd("Abort", (b"",), INVALID, "FIELD_INVALID"),
        "lease for nobody": Absurd("LeaseTasks", (b"",), INVALID, "FIELD_INVALID"),
        "complete nothing": Absurd("CompleteTrajectory", (b"",), INVALID, "FIELD_INVALID"),
        "submit nothing": Absurd("SubmitTasks", (b"",), OK),
        "upload nothing": Absurd("UpdateWeights", (), INVALID, "FIELD_INVALID"),
        "exchange nothing": Absurd("Exchange", (), INVALID, "HELLO_EXPECTED"),
        # Outside the vocabulary
        "a token above": Absurd(
            "Generate", (generate(tokens=sequence([VOCAB_SIZE])),), INVALID, "TOKEN_OUT_OF_RANGE"
        ),
        "a token below": Absurd(
            "Generate", (generate(tokens=sequence([1, -1])),), INVALID, "TOKEN_OUT_OF_RANGE"
        ),
        "an observation above": Absurd(
            "Continue",
            (ContinueRequest(trajectory_id="open", tokens=sequence([2**31 - 1])),),
            INVALID,
            "TOKEN_OUT_OF_RANGE",
        ),
        "a task's token above": Absurd(
            "SubmitTasks",
            (
                SubmitTasksRequest(
                    tasks=[task, Task(task_id="b", group_size=1, tokens=sequence([99_999]))]
                ),
            ),
            INVALID,
            "TOKEN_OUT_OF_RANGE",
        ),
        "a stop token above": Absurd(
            "Generate",
            (generate(sampling_params=sampling(1, stop_token_ids=[VOCAB_SIZE])),),
            INVALID,
            "TOKEN_OUT_OF_RANGE",
        ),
        "half a token": Absurd(
            "Generate",
            (generate(tokens=codec.twin(type_of_tokens())(token_ids=b"\1\0\0")),),
            INVALID,
            "MALFORMED_MESSAGE",
        ),
        # Negative, not a number, too large
        "tokens below zero": negative(max_tokens=-1),
        "top_k below zero": negative(top_k=-1),
        "top_p below zero": negative(top_p=-0.5),
        "a temperature below zero": negative(temperature=-1.0),
        "a temperature that is none": negative(temperature=nan),
        "an infinite temperature": negative(temperature=infinite),
        "a top_p that is none": negative(top_p=nan),
        "two billion tokens": Absurd(
            "Generate", (generate(sampling_params=sampling(2**31 - 1)),), OK
        ),
        "a negative version": Absurd(
            "Generate", (generate(required_weight_version=-1),), INVALID, "FIELD_INVALID"
        ),
        "a negative group": Absurd(
            "Generate", (generate(group_id="g", group_size=-1),), INVALID, "FIELD_INVALID"
        ),
        "a group of two billion": Absurd(
            "Generate", (generate(group_id="g", group_size=2**31 - 1),), INVALID, "FIELD_INVALID"
        ),
        "a task of two billion": Absurd(
            "SubmitTasks",
            (SubmitTasksRequest(tasks=[Task(task_id="a", group_size=2**31 - 1)]),),
            INVALID,
            "FIELD_INVALID",
        ),
        "minus one agent": Absurd(
            "LeaseTasks",
            (LeaseTasksRequest(agent_id="a", concurrency=-1),),
            INVALID,
            "FIELD_INVALID",
        ),
        "two billion agents": Absurd(
            "LeaseTasks",
            (LeaseTasksRequest(agent_id="a", concurrency=2**31 - 1),),
            INVALID,
            "FIELD_INVALID",
        ),
        "a reward that is none": outcome(Outcome(reward=nan)),
        "an infinite reward": outcome(Outcome(reward=-infinite)),
        "a turn's reward that is none": outcome(Outcome(reward=1, turn_rewards=[nan])),
        "a metric that is none": outcome(Outcome(reward=1, metrics={"a": infinite})),
        "no outcome": outcome(Outcome()),
        "a failure without a reason": outcome(Outcome(failure=Failure())),
        "a negative demand": Absurd(
            "Exchange", exchange({"demand": Demand(group_count=-1)}), INVALID, "FIELD_INVALID"
        ),
        "a negative step": Absurd(
            "Exchange", exchange({"checkpoint": {"step": -1}}), INVALID, "FIELD_INVALID"
        ),
        "a negative receipt": Absurd(
            "Exchange", exchange({"receipt": {"step": -1}}), INVALID, "FIELD_INVALID"
        ),
        "a switch back in time": Absurd(
            "Exchange",
            exchange({"switch_weights": {"weight_version": -1}}),
            INVALID,
            "FIELD_INVALID",
        ),
        "a Hello without an epoch": Absurd(
            "Exchange",
            (ExchangeRequest(hello=Hello(run_id="run")),),
            INVALID,
            "FIELD_INVALID",
        ),
        "a second Hello": Absurd("Exchange", (*exchange(), *exchange()), INVALID, "FIELD_INVALID"),
        # UTF-8
        "an id that is no text": Absurd("Generate", (broken(1),), INVALID, "MALFORMED_MESSAGE"),
        "a prompt that is no text": Absurd(
            "Generate", (broken(1, b"t") + broken(6),), INVALID, "MALFORMED_MESSAGE"
        ),
        "an agent that is no text": Absurd(
            "LeaseTasks", (broken(1),), INVALID, "MALFORMED_MESSAGE"
        ),
        "an outcome of no text": Absurd(
            "CompleteTrajectory", (broken(1),), INVALID, "MALFORMED_MESSAGE"
        ),
        "a header of no text": Absurd(
            "UpdateWeights", (b"\x0a\x06\x1a\x04" + broken(1),), INVALID, "MALFORMED_MESSAGE"
        ),
        # Unknown enums
        "an unknown role": Absurd(
            "Generate",
            (generate(conversation=Conversation(messages=[hi(role=99)])),),
            INVALID,
            "FIELD_INVALID",
        ),
        "an unknown purpose": Absurd(
            "LeaseTasks",
            (LeaseTasksRequest(agent_id="a", concurrency=1, purpose=99),),
            INVALID,
            "FIELD_INVALID",
        ),
        "an unknown late policy": Absurd(
            "Exchange",
            (
                ExchangeRequest(
                    hello=Hello(
                        run_id="run",
                        trainer_epoch=EPOCH,
                        staleness=StalenessContract(groups_per_step=1, late_policy=99),
                    )
                ),
            ),
            INVALID,
            "FIELD_INVALID",
        ),
        "an unknown activation": weights(activation=99),
        "an unknown in-flight policy": weights(in_flight=99),
        "an unknown demand": Absurd(
            "Exchange",
            exchange({"demand": Demand(group_count=1, purpose=99)}),
            INVALID,
            "FIELD_INVALID",
        ),
        # Ids
        "an id of a megabyte": Absurd(
            "Generate", (generate(trajectory_id="a" * MILLION),), INVALID, "FIELD_INVALID"
        ),
        "nobody's trajectory": Absurd(
            "Continue",
            (ContinueRequest(trajectory_id="nobody's", tokens=sequence([1])),),
            MISSING,
            "TRAJECTORY_UNKNOWN",
        ),
        "nobody's outcome": Absurd(
            "CompleteTrajectory",
            (CompleteTrajectoryRequest(trajectory_id="nobody's", outcome=reward),),
            MISSING,
            "TRAJECTORY_UNKNOWN",
        ),
    }


def large_requests() -> dict[str, Callable[[], Absurd]]:
    """Each is made only when it is sent, because together they take seconds and gigabytes."""
    return {
        "abort a million": lambda: Absurd(
            "Abort",
            (AbortRequest(trajectories={"trajectory_ids": ids(MILLION)}),),
            INVALID,
            "FIELD_INVALID",
        ),
        "renew a million": lambda: Absurd(
            "RenewLease",
            (RenewLeaseRequest(trajectory_ids=ids(MILLION)),),
            INVALID,
            "FIELD_INVALID",
        ),
        "submit a million": lambda: Absurd(
            "SubmitTasks",
            (SubmitTasksRequest(tasks=tasks(MILLION)),),
            EXHAUSTED,
            "QUEUE_FULL",
        ),
        "a million messages": lambda: Absurd(
            "Generate",
            (generate(conversation=Conversation(messages=[hi()] * MILLION)),),
            INVALID,
            "FIELD_INVALID",
        ),
        "a million tokens": lambda: Absurd(
            "Generate", (generate(tokens=sequence([1] * MILLION)),), INVALID, "PROMPT_TOO_LONG"
        ),
        "a million characters": lambda: Absurd(
            "Generate", (generate(text="a" * MILLION),), INVALID, "PROMPT_TOO_LONG"
        ),
        "a million stops": lambda: Absurd(
            "Generate",
            (generate(sampling_params=sampling(1, stop=["x"] * MILLION)),),
            INVALID,
            "FIELD_INVALID",
        ),
        "a million stop tokens": lambda: Absurd(
            "Generate",
            (generate(sampling_params=sampling(1, stop_token_ids=[1] * MILLION)),),
            INVALID,
            "FIELD_INVALID",
        ),
        "a million turn rewards": lambda: Absurd(
            "CompleteTrajectory",
            (
                CompleteTrajectoryRequest(
                    trajectory_id="open", outcome=Outcome(reward=1, turn_rewards=[1.0] * MILLION)
                ),
            ),
            EXHAUSTED,
            "MESSAGE_TOO_LARGE",
        ),
        "a million metrics": lambda: Absurd(
            "CompleteTrajectory",
            (
                CompleteTrajectoryRequest(
                    trajectory_id="open",
                    outcome=Outcome(reward=1, metrics=dict.fromkeys(ids(MILLION), 1.0)),
                ),
            ),
            EXHAUSTED,
            "MESSAGE_TOO_LARGE",
        ),
        "receipts for a million": lambda: Absurd(
            "Exchange",
            exchange({"receipt": GroupReceipt(delivery_ids=range(MILLION), step=1)}),
            OK,
        ),
        "a million tensors": lambda: Absurd(
            "UpdateWeights", (huge_header(200_000),), INVALID, "TENSOR_UNKNOWN"
        ),
        "a message of 80 MiB": lambda: Absurd("Generate", (bytes(80 << 20),), EXHAUSTED),
    }


def type_of_tokens() -> Any:
    from penstock.v1 import trajectory_pb2

    return trajectory_pb2.TokenSequence


def tasks(count: int) -> list[Any]:
    """The smallest possible tasks."""
    return [Task(task_id=str(number), group_size=1) for number in range(count)]


def negative(**fields: Any) -> Absurd:
    request = generate(sampling_params=sampling(**{"max_tokens": 1, **fields}))
    return Absurd("Generate", (request,), INVALID, "FIELD_INVALID")


def outcome(found: Any) -> Absurd:
    request = CompleteTrajectoryRequest(trajectory_id="open", outcome=found)
    return Absurd("CompleteTrajectory", (request,), INVALID, "FIELD_INVALID")


def weights(**fields: Any) -> Absurd:
    head, data = header(1, trainer_epoch=1 << 62, **fields)
    return Absurd("UpdateWeights", tuple(messages(head, data)), INVALID, "FIELD_INVALID")


def huge_header(count: int) -> Any:
    head, data = header(1, trainer_epoch=1 << 62)
    spec = head.tensors[0]
    extra = type(spec).FromString(spec.SerializeToString())
    extra.name = "nobody's"
    head.tensors.extend([extra] * count)
    return messages(head, data)[0]


LARGE = large_requests()
QUICK = ("a million tokens", "a million characters", "a million stops", "abort a million")
"""The large requests that every test run makes."""
REQUESTS: dict[str, Callable[[], Absurd]] = {
    name: lambda found=found: found for name, found in small_requests().items()
} | LARGE


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[ServerProcess]:
    with fake_server(tmp_path_factory.mktemp("requests")) as process:
        yield process


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def harness(server: ServerProcess) -> AsyncGenerator[Harness]:
    options = [*client_options(), ("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(server.address, options=options) as channel:
        unused = cast("Any", None)
        made = Harness(unused, unused, server.port, Wire(channel), channel)
        await made.generate("open")
        yield made


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "name" in metafunc.fixturenames:
        everything = report_of(metafunc.config).count is not None
        names = [n for n in REQUESTS if everything or n not in LARGE or n in QUICK]
        metafunc.parametrize("name", names)


@pytest.mark.asyncio(loop_scope="module")
async def test_refused(
    server: ServerProcess, harness: Harness, name: str, report: Report, request: Any
) -> None:
    absurd = REQUESTS[name]()
    asking, stopping = asyncio.Event(), asyncio.Event()
    other = asyncio.create_task(longest_wait(server, asking, stopping))
    await asking.wait()
    try:
        code, reason = await send(harness, absurd)
        stopping.set()
        assert (code, reason) == (absurd.code, absurd.reason)
        waited = await other
        # The wait means nothing on a machine that runs other tests at the same time.
        assert report.count is None or waited < PATIENCE_SECONDS, "another caller had to wait"
        turn = await harness.generate(f"after {name}")
        assert turn.tokens == expected_tokens([1, 2, 3], [0] * 16)[0]
        await harness.complete(f"after {name}")
        server.check_alive()
    except BaseException as error:
        again = report.failed("F11 fake", name, report.seed, request.node.nodeid, 0, 1)
        error.add_note(f"again: {again}")
        raise
    finally:
        other.cancel()
    report.survived(
        "F11 fake", name, 1, figures=f"{code.name} {reason}; others waited {waited:.2f} s at most"
    )


async def send(harness: Harness, absurd: Absurd) -> tuple[grpc.StatusCode, str]:
    """Make the call; return its status and reason."""
    call = getattr(harness.wire, absurd.rpc)
    bodies = [r if isinstance(r, bytes) else r.SerializeToString() for r in absurd.requests]
    path = call._method.decode()
    try:
        async with asyncio.timeout(30):
            if absurd.rpc in ("Exchange", "UpdateWeights"):
                async for _ in harness.channel.stream_stream(path)(iter(bodies)):
                    pass
            elif absurd.rpc in ("Generate", "Continue", "LeaseTasks"):
                async for _ in harness.channel.unary_stream(path)(bodies[0]):
                    pass
            else:
                await harness.channel.unary_unary(path)(bodies[0])
    except grpc.aio.AioRpcError as error:
        failure = read_failure(error)
        return failure.code, failure.reason
    return OK, ""


async def longest_wait(
    server: ServerProcess, asking: asyncio.Event, stopping: asyncio.Event
) -> float:
    """Make small requests repeatedly, on a separate connection.

    Returns the longest wait, without the lateness of this process.
    """
    longest = 0.0
    options = client_options(own_connection=True)
    async with (
        grpc.aio.insecure_channel(server.address, options=options) as channel,
        watched_lateness() as lateness,
    ):
        wire = Wire(channel)
        await wire.GetServerInfo(GetServerInfoRequest())
        asking.set()
        late = await lateness.seconds()
        while not stopping.is_set():
            begun = time.perf_counter()
            await wire.GetServerInfo(GetServerInfoRequest())
            waited = time.perf_counter() - begun
            late, before = await lateness.seconds(), late
            longest = max(longest, waited - (late - before))
    return longest
