"""Every rpc, found by walking the descriptors, with missing, absurd and malformed input."""

from __future__ import annotations

import asyncio
import contextlib
import random
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf import struct_pb2
from google.protobuf.descriptor import (
    Descriptor,
    FieldDescriptor,
    MethodDescriptor,
    ServiceDescriptor,
)
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2, status_pb2
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.server.core.errors import STATUS_CODES, DomainError, FieldInvalid, to_status
from penstock.server.http.errors import headers_of, status_of
from penstock.server.rpc.boundary import SERVICES, refuse
from penstock.v1 import conversation_pb2
from penstock.wire import codec
from penstock.wire.channel import client_options
from penstock.wire.failure import read_failure
from penstock.wire.reasons import Reason
from tests.support.fakes import expected_tokens
from tests.support.harness import (
    BROKE_WHILE_WRITING,
    ChatMessage,
    CompleteTrajectoryRequest,
    ContinueRequest,
    Conversation,
    ExchangeRequest,
    FetchWeightsRequest,
    GenerateRequest,
    GetServerInfoRequest,
    GetTrajectoryRequest,
    Harness,
    Hello,
    LeaseTasksRequest,
    Outcome,
    RenewLeaseRequest,
    StalenessContract,
    SubmitTasksRequest,
    Task,
    UpdateWeightsRequest,
    Wire,
    header,
    sampling,
    sequence,
)

RPCS = [(service, method) for service in SERVICES for method in service.methods]
NAMES = [method.name for _, method in RPCS]
REASONS = {reason.value: code for reason, code in STATUS_CODES.items()}

INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), -1, 0, 1, 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), -1, 0, 1, 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 1, 2**64 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
}
FLOATS = (float("nan"), float("inf"), -float("inf"), -1.0, 0.0, 1e38)
KNOWN_IDS = ("open", "closed", "grouped", "group")
TEXTS = ("", "x", "\x00", "../../etc/passwd", "é" * 3000, "a" * 300)


def absurd(message: Message, random: random.Random, depth: int = 0) -> Message:
    """Fill a message with extreme values. Random fields stay unset;
    google's messages are filled too."""
    for field in message.DESCRIPTOR.fields:
        if random.random() < 0.3 or depth > 8:
            continue
        holder = getattr(message, field.name)
        kind = field.message_type
        if kind is not None and kind.GetOptions().map_entry:
            value = kind.fields_by_name["value"]
            for key in random.sample(TEXTS, random.choice((1, 1, 3))):
                if value.message_type is None:
                    holder[key] = _value(value, random)
                else:
                    absurd(holder[key], random, depth + 1)
        elif kind is not None:
            parts = (
                [holder.add() for _ in range(random.choice((1, 1, 3)))]
                if field.is_repeated
                else [holder]
            )
            for part in parts:
                if not field.is_repeated:
                    part.SetInParent()
                absurd(part, random, depth + 1)
        elif field.is_repeated:
            holder.extend(_value(field, random) for _ in range(random.choice((1, 1, 3))))
        else:
            setattr(message, field.name, _value(field, random))
    return message


def _value(field: FieldDescriptor, random: random.Random) -> Any:
    return random.choice(extremes(field))


def extremes(field: FieldDescriptor) -> tuple[Any, ...]:
    """Extreme values for a field, and known ids."""
    if field.cpp_type in INTEGERS:
        return INTEGERS[field.cpp_type]
    if field.cpp_type in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return FLOATS
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return (True, False)
    if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
        return (-1, 0, 1, 2, 99)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return (b"", b"\x00", b"x" * 1000)
    return (*TEXTS, *KNOWN_IDS) if field.name.endswith(("_id", "_ids")) else TEXTS


Path = tuple[FieldDescriptor, ...]


def scalar_fields(descriptor: Descriptor, path: Path = ()) -> Iterator[Path]:
    """The path of each scalar field below a message. No path contains a message type twice."""
    for field in descriptor.fields:
        way, kind = (*path, field), field.message_type
        if kind is not None and kind.GetOptions().map_entry:
            way = (*way, kind.fields_by_name["value"])
            kind = way[-1].message_type
        if kind is None:
            yield way
        elif kind not in {step.containing_type for step in way}:
            yield from scalar_fields(kind, way)


def put(message: Any, path: Path, value: Any) -> None:
    """Set one field, creating the messages on its path."""
    field, *rest = path
    holder = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        if rest[1:]:
            put(holder["é"], tuple(rest[1:]), value)
        else:
            holder["é"] = value
    elif rest:
        part = (holder[0] if len(holder) else holder.add()) if field.is_repeated else holder
        put(part, tuple(rest), value)
    elif field.is_repeated:
        holder.append(value)
    else:
        setattr(message, field.name, value)


async def call(
    harness: Harness,
    service: ServiceDescriptor,
    method: MethodDescriptor,
    *bodies: bytes,
    seconds: float = 20.0,
    first_only: bool = False,
) -> tuple[grpc.StatusCode, str]:
    """Call a method with raw bytes; return its status and reason. With `first_only`, a stream that
    would never end counts as OK after its first message."""
    path = f"/{service.full_name}/{method.name}"
    channel = harness.channel
    try:
        if method.client_streaming:
            stream = channel.stream_stream(path)(iter(bodies), timeout=seconds)
            async for _ in stream:
                pass
        elif method.server_streaming:
            answer = channel.unary_stream(path)(bodies[0], timeout=seconds)
            async for _ in answer:
                if first_only:
                    answer.cancel()
                    break
        else:
            await channel.unary_unary(path)(bodies[0], timeout=seconds)
    except grpc.aio.AioRpcError as error:
        if error.details() == BROKE_WHILE_WRITING:
            # This side's own words if the deadline has passed before it could begin the call.
            return grpc.StatusCode.DEADLINE_EXCEEDED, ""
        failure = read_failure(error)
        return failure.code, failure.reason
    return grpc.StatusCode.OK, ""


def in_table(code: grpc.StatusCode, reason: str) -> bool:
    if code in (grpc.StatusCode.OK, grpc.StatusCode.DEADLINE_EXCEEDED):
        return True
    return code != grpc.StatusCode.INTERNAL and REASONS.get(reason) == code


async def still_serving(harness: Harness, name: str) -> None:
    turn = await harness.generate(name)
    assert turn.tokens == expected_tokens([1, 2, 3], [0] * 16)[0]


@pytest.mark.parametrize("rpc", RPCS, ids=NAMES)
async def test_malformed_bytes_are_an_invalid_argument(harness: Harness, rpc: Any) -> None:
    for body in (b"\xff", b"\x0a\xff\xff\xff\xff\x0f", b"\x08", b"not a message at all"):
        code, reason = await call(harness, *rpc, body)
        assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_MESSAGE"), body
    await still_serving(harness, "after")


@pytest.mark.parametrize("rpc", RPCS, ids=NAMES)
async def test_an_empty_message_is_answered_from_the_table(harness: Harness, rpc: Any) -> None:
    code, reason = await call(harness, *rpc, b"")
    if rpc[1].name in ("GetServerInfo", "SubmitTasks", "RenewLease"):
        assert code == grpc.StatusCode.OK
    else:
        assert code == grpc.StatusCode.INVALID_ARGUMENT, reason
        assert reason in ("FIELD_INVALID", "HELLO_EXPECTED")
    if rpc[1].client_streaming:
        code, reason = await call(harness, *rpc)
        assert code == grpc.StatusCode.INVALID_ARGUMENT
    await still_serving(harness, "after")


async def with_known_ids(harness: Harness) -> None:
    """Create what `KNOWN_IDS` names, so that some calls get past the lookup."""
    for name in ("open", "closed"):
        await harness.generate(name)
    await harness.complete("closed")
    await harness.generate("grouped", group_id="group", group_size=2)


def own_name(seed: int) -> str:
    """The id of a trajectory or task. Its checksum ensures that flipping a bit
    never produces another valid id."""
    return f"t{seed}-{zlib.crc32(str(seed).encode()):08x}"


def valid(method: MethodDescriptor, seed: int) -> Message:
    """A valid request. Absurd values put into it are checked, instead of
    hidden behind an earlier refusal."""
    conversation = Conversation(
        messages=[ChatMessage(role=conversation_pb2.ROLE_USER, content="hi")],
        tools=[codec.twin(conversation_pb2.Tool)(name="f", parameters={"a": 1})],
    )
    params = sampling(4)
    requests: dict[str, Message] = {
        "Generate": GenerateRequest(
            trajectory_id=own_name(seed), conversation=conversation, sampling_params=params
        ),
        "Continue": ContinueRequest(
            trajectory_id="open", tokens=sequence([1]), sampling_params=params
        ),
        "GetTrajectory": GetTrajectoryRequest(trajectory_id="open"),
        "SubmitTasks": SubmitTasksRequest(
            tasks=[Task(task_id=own_name(seed), group_size=1, conversation=conversation)]
        ),
        "LeaseTasks": LeaseTasksRequest(agent_id="a", concurrency=1),
        "RenewLease": RenewLeaseRequest(trajectory_ids=["grouped"]),
        "CompleteTrajectory": CompleteTrajectoryRequest(
            trajectory_id="closed", outcome=Outcome(reward=1.0)
        ),
    }
    if method.name == "Exchange":
        contract = StalenessContract(max_lag=seed % 3, groups_per_step=2, late_policy=seed % 5)
        hello = Hello(run_id="run", trainer_epoch=seed + 1, staleness=contract)
        requests["Exchange"] = ExchangeRequest(hello=hello)
    if method.name == "FetchWeights":
        head, _ = header(seed)
        requests["FetchWeights"] = FetchWeightsRequest(weight_version=seed, tensors=head.tensors)
    if method.name == "UpdateWeights":
        head, _ = header(seed + 1, staged=bool(seed % 2))
        requests["UpdateWeights"] = UpdateWeightsRequest(header=head)
    typed = GetMessageClass(method.input_type)
    found = requests.get(method.name)
    return typed() if found is None else typed.FromString(found.SerializeToString())


@pytest.mark.parametrize("rpc", RPCS, ids=NAMES)
async def test_absurd_messages_are_answered_from_the_table(harness: Harness, rpc: Any) -> None:
    service, method = rpc
    request_class = GetMessageClass(method.input_type)
    await with_known_ids(harness)
    seed = 0
    for seed in range(60):
        chooser = random.Random(seed)
        bodies = [
            absurd(request_class(), chooser).SerializeToString()
            for _ in range(chooser.choice((1, 2)) if method.client_streaming else 1)
        ]
        code, reason = await call(harness, service, method, *bodies, seconds=0.05)
        assert in_table(code, reason), (method.name, seed, code, reason)
    await still_serving(harness, f"after-{seed}")


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
async def test_a_number_json_does_not_know_is_an_invalid_field(
    harness: Harness, number: float
) -> None:
    parameters = struct_pb2.Struct()
    parameters["properties"] = {"a": [1, {"b": number}]}
    conversation = Conversation(
        messages=[ChatMessage(role=conversation_pb2.ROLE_USER, content="hi")],
        tools=[codec.twin(conversation_pb2.Tool)(name="f", parameters=parameters)],
    )
    task = Task(task_id="t", group_size=1, conversation=conversation)
    for refused, field in (
        (harness.generate("t", conversation=conversation), "conversation.tools[0].parameters"),
        (
            harness.wire.SubmitTasks(SubmitTasksRequest(tasks=[task])),
            "tasks[0].conversation.tools[0].parameters",
        ),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await refused
        failure = read_failure(caught.value)
        assert (failure.reason, failure.metadata["field"]) == ("FIELD_INVALID", field)
    await still_serving(harness, "t")


@pytest.mark.parametrize("rpc", RPCS, ids=NAMES)
async def test_each_field_at_its_extremes_is_answered_from_the_table(
    harness: Harness, rpc: Any
) -> None:
    service, method = rpc
    await with_known_ids(harness)
    ways = scalar_fields(method.input_type)
    changes = [(way, value) for way in ways for value in extremes(way[-1])]
    for seed, (way, value) in enumerate(changes):
        request = valid(method, seed)
        put(request, way, value)
        body = request.SerializeToString()
        code, reason = await call(harness, service, method, body, seconds=0.05)
        assert in_table(code, reason), ([step.name for step in way], value, code, reason)
    await still_serving(harness, "after")


STREAMS = [rpc for rpc in RPCS if rpc[1].client_streaming]


@pytest.mark.parametrize("rpc", STREAMS, ids=[method.name for _, method in STREAMS])
async def test_absurd_messages_after_a_valid_first_are_answered_from_the_table(
    harness: Harness, rpc: Any
) -> None:
    service, method = rpc
    request_class = GetMessageClass(method.input_type)
    seed = 0
    for seed in range(60):
        chooser = random.Random(seed)
        later = [absurd(request_class(), chooser) for _ in range(chooser.choice((1, 2, 3)))]
        bodies = [message.SerializeToString() for message in (valid(method, seed), *later)]
        code, reason = await call(harness, service, method, *bodies, seconds=0.2)
        assert in_table(code, reason), (method.name, seed, code, reason, later)
    await still_serving(harness, f"after-{seed}")


def test_every_reason_has_one_code_and_no_other_is_used() -> None:
    assert set(STATUS_CODES) == set(Reason)
    for reason in Reason:
        assert DomainError(reason, "x").code == STATUS_CODES[reason]


def test_a_status_carries_what_its_message_says() -> None:
    status = to_status(FieldInvalid("max_tokens", "must not be negative", -1))
    assert status.code == grpc.StatusCode.INVALID_ARGUMENT

    class Raised:
        def trailing_metadata(self) -> Any:
            return status.trailing_metadata

        def code(self) -> grpc.StatusCode:
            return status.code

        def details(self) -> str:
            return status.details

    failure = read_failure(Raised())  # type: ignore[arg-type]
    assert failure.reason == "FIELD_INVALID"
    assert failure.metadata == {"field": "max_tokens", "got": "-1"}
    assert "-1" in failure.message


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(body=st.binary(max_size=200), which=st.integers(0, len(RPCS) - 1))
def test_raw_bytes_never_reach_unknown_or_internal(body: bytes, which: int) -> None:
    from penstock.server.rpc.boundary import _checked, _deserializer

    service, method = RPCS[which]
    name = f"{service.full_name}/{method.name}"
    try:
        _checked(_deserializer(name, GetMessageClass(method.input_type))(body))
    except DomainError as error:
        assert error.reason is Reason.MALFORMED_MESSAGE


async def test_a_message_over_the_limit_is_refused_and_the_server_lives(harness: Harness) -> None:
    service, method = next(rpc for rpc in RPCS if rpc[1].name == "Abort")
    big = b"\x22" + b"\x80\x80\x80\x28" + b"x" * (80 * 1024 * 1024)
    unlimited = grpc.aio.insecure_channel(
        harness.address, options=[("grpc.max_send_message_length", -1)]
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await unlimited.unary_unary(f"/{service.full_name}/{method.name}")(big)
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    await unlimited.close()
    await still_serving(harness, "after")


async def test_concurrent_garbage_does_not_disturb_turns(slow: Harness) -> None:
    turns = [asyncio.ensure_future(slow.generate(f"t{i}")) for i in range(8)]
    garbage = [call(slow, *rpc, b"\xff\xff", seconds=2.0) for rpc in RPCS for _ in range(5)]
    for code, reason in await asyncio.gather(*garbage):
        assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_MESSAGE")
    for turn in turns:
        assert (await turn).tokens == expected_tokens([1, 2, 3], [0] * 16)[0]


# Input that is not a request


def http2_request(path: bytes) -> bytes:
    """The first bytes of a connection: one complete request with this path and an empty message."""

    def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
        head = struct.pack(">I", len(payload))[1:] + bytes((kind, flags))
        return head + struct.pack(">I", stream) + payload

    def field(name: bytes, value: bytes) -> bytes:
        return b"\0" + bytes((len(name),)) + name + bytes((len(value),)) + value

    fields = {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": path,
        b":authority": b"localhost",
        b"content-type": b"application/grpc",
        b"te": b"trailers",
    }
    headers = b"".join(field(name, value) for name, value in fields.items())
    return (
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        + frame(4, 0, 0, b"")
        + frame(1, 4, 1, headers)
        + frame(0, 1, 1, bytes(5))
    )


@pytest.mark.parametrize("path", [b"/penstock.v1.RolloutService/Generat\xe8", b"\xff", b"/\xc3"])
async def test_a_path_that_is_no_text_stops_nobody(harness: Harness, path: bytes) -> None:
    # First send a valid path, to prove that these bytes form a request.
    for sent, known in ((b"/nobody/Knows", True), (path, False)):
        reader, writer = await asyncio.open_connection("127.0.0.1", harness.port)
        writer.write(http2_request(sent))
        found = b""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(20.0 if known else 0.5):
                while b"grpc-status" not in found and (more := await reader.read(4096)):
                    found += more
        assert not known or b"grpc-status" in found
        writer.close()
    assert (await harness.generate("after")).tokens
    options = client_options(own_connection=True)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{harness.port}", options=options) as channel:
        await Wire(channel).GetServerInfo(GetServerInfoRequest(), timeout=20)


async def test_a_grpc_server_that_ends_by_itself_ends_everything(harness: Harness) -> None:
    failed = asyncio.ensure_future(harness.life.failed())
    await harness.generate("before")
    assert not failed.done()
    await harness.life._server.stop(0)
    assert "gRPC server ended" in await asyncio.wait_for(failed, 20)


EXHAUSTED = [r for r, code in STATUS_CODES.items() if code is grpc.StatusCode.RESOURCE_EXHAUSTED]


@pytest.mark.parametrize("reason", EXHAUSTED)
def test_who_is_refused_for_want_of_room_is_told_when_to_come_back(reason: Reason) -> None:
    for error in (DomainError(reason, "full"), DomainError(reason, "full", retry_after_seconds=7)):
        status, retry = status_pb2.Status(), error_details_pb2.RetryInfo()
        status.ParseFromString(to_status(error).trailing_metadata[0][1])
        told = [retry for detail in status.details if detail.Unpack(retry)]
        headers = headers_of(error)
        if error.retry_after_seconds is None:
            # A message that is too large will always be too large.
            assert reason is Reason.MESSAGE_TOO_LARGE
            assert (told, headers, status_of(error)) == ([], {}, 413)
            continue
        assert status_of(error) == 429 or reason is Reason.MESSAGE_TOO_LARGE
        assert told[0].retry_delay.ToTimedelta().total_seconds() == error.retry_after_seconds > 0
        assert int(headers["retry-after"]) >= error.retry_after_seconds
        assert int(headers["retry-after-ms"]) == error.retry_after_seconds * 1000


async def test_a_caller_that_is_gone_as_it_is_refused_is_no_defect() -> None:
    class Gone:
        async def abort_with_status(self, status: object) -> None:
            raise grpc.aio.InternalError('Failed "execute_batch"')

    # Ends a call without a log line.
    with pytest.raises(asyncio.CancelledError):
        await refuse(Gone(), DomainError(Reason.FIELD_INVALID, "x"))  # type: ignore[arg-type]
