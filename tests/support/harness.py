"""A real server on a real port around the fake engine, and raw calls to each of its rpcs."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import xxhash
from google.protobuf.message_factory import GetMessageClass

from penstock.server.assembly import Serving
from penstock.server.config import settings as config
from penstock.server.engine.protocol import AdapterLimits
from penstock.server.http.server import open_http
from penstock.server.journal.protocol import EncodedRecord
from penstock.server.journals import open_journal
from penstock.server.lifecycle import Lifecycle, bind
from penstock.server.rpc.boundary import SERVICES
from penstock.server.security.gate import open_gate
from penstock.server.text.renderer import Renderer
from penstock.v1 import (
    conversation_pb2,
    rollout_service_pb2,
    task_service_pb2,
    trainer_service_pb2,
    trajectory_pb2,
    weights_pb2,
)
from penstock.wire import codec, sparse
from penstock.wire.security import Security, open_channel
from tests.support.fakes import TENSORS, ByteRenderer, FakeEngine

if TYPE_CHECKING:
    import pytest

ON_DISK = "PENSTOCK_TEST_JOURNAL"
"""If this environment variable is set, every test server keeps its journal on disk."""

T = codec.twin
GenerateRequest = T(rollout_service_pb2.GenerateRequest)
ContinueRequest = T(rollout_service_pb2.ContinueRequest)
AbortRequest = T(rollout_service_pb2.AbortRequest)
GetTrajectoryRequest = T(rollout_service_pb2.GetTrajectoryRequest)
GetServerInfoRequest = T(rollout_service_pb2.GetServerInfoRequest)
SamplingParams = T(rollout_service_pb2.SamplingParams)
StreamOptions = T(rollout_service_pb2.StreamOptions)
TokenSequence = T(trajectory_pb2.TokenSequence)
Outcome = T(trajectory_pb2.Outcome)
Failure = T(trajectory_pb2.Failure)
Conversation = T(conversation_pb2.Conversation)
ChatMessage = T(conversation_pb2.ChatMessage)
Task = T(task_service_pb2.Task)
SubmitTasksRequest = T(task_service_pb2.SubmitTasksRequest)
LeaseTasksRequest = T(task_service_pb2.LeaseTasksRequest)
RenewLeaseRequest = T(task_service_pb2.RenewLeaseRequest)
CompleteTrajectoryRequest = T(task_service_pb2.CompleteTrajectoryRequest)
ExchangeRequest = T(trainer_service_pb2.ExchangeRequest)
Hello = T(trainer_service_pb2.Hello)
Demand = T(trainer_service_pb2.Demand)
GroupReceipt = T(trainer_service_pb2.GroupReceipt)
SwitchWeights = T(trainer_service_pb2.SwitchWeights)
CheckpointNotice = T(trainer_service_pb2.CheckpointNotice)
StalenessContract = T(trainer_service_pb2.StalenessContract)
FetchWeightsRequest = T(weights_pb2.FetchWeightsRequest)
UpdateWeightsRequest = T(weights_pb2.UpdateWeightsRequest)
WeightHeader = T(weights_pb2.WeightHeader)
WeightChunk = T(weights_pb2.WeightChunk)
WeightCommit = T(weights_pb2.WeightCommit)
TensorSpec = T(weights_pb2.TensorSpec)
InlineSource = T(weights_pb2.InlineSource)
WeightProbe = T(weights_pb2.WeightProbe)


class Wire:
    """Each rpc as an attribute with its name. Messages are twins (see `codec.twin`)."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        for service in SERVICES:
            for method in service.methods:
                kind = {
                    (False, False): channel.unary_unary,
                    (False, True): channel.unary_stream,
                    (True, True): channel.stream_stream,
                }[method.client_streaming, method.server_streaming]
                call = kind(
                    f"/{service.full_name}/{method.name}",
                    request_serializer=codec.encode,
                    response_deserializer=codec.decoder(GetMessageClass(method.output_type)),
                )
                setattr(self, method.name, call)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


@dataclass
class Turn:
    """A turn as its caller saw it."""

    started: Any = None
    segments: list[Any] = field(default_factory=list)
    finished: Any = None

    @property
    def tokens(self) -> list[int]:
        return [int(t) for segment in self.segments for t in codec.token_ids(segment)]

    @property
    def logprobs(self) -> list[float]:
        return [float(p) for segment in self.segments for p in codec.logprobs(segment)]

    @property
    def versions(self) -> list[int]:
        return [
            segment.weight_version
            for segment in self.segments
            for _ in range(len(codec.token_ids(segment)))
        ]


async def collect(call: AsyncIterator[Any], turn: Turn | None = None) -> Turn:
    """Read a Generate or Continue stream to its end."""
    turn = turn or Turn()
    async for event in call:
        kind = event.WhichOneof("event")
        if kind == "segment":
            turn.segments.append(event.segment)
        else:
            setattr(turn, kind, getattr(event, kind))
    return turn


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Poll until the condition holds. The generous timeout is for busy machines."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)


async def begun(wire: Any, trajectory_id: str, least: int = 1) -> None:
    """Wait until the policy has written `least` tokens of a trajectory; works for any server."""
    request = GetTrajectoryRequest(trajectory_id=trajectory_id)
    count = 0
    async with asyncio.timeout(20):
        while count < least:
            with contextlib.suppress(grpc.aio.AioRpcError):
                found = (await wire.GetTrajectory(request)).trajectory
                written = [s for s in found.segments if s.author == trajectory_pb2.AUTHOR_POLICY]
                count = sum(len(codec.token_ids(segment)) for segment in written)
            await asyncio.sleep(0.005)


def sequence(tokens: Sequence[int]) -> Any:
    return TokenSequence(token_ids=codec.array_bytes(np.asarray(tokens, np.int32)))


def sampling(max_tokens: int = 16, **fields: Any) -> Any:
    return SamplingParams(max_tokens=max_tokens, **{"ignore_eos": True, **fields})


@dataclass
class Harness:
    """A running server and its internals."""

    life: Lifecycle
    engine: FakeEngine
    port: int
    wire: Any
    channel: grpc.aio.Channel

    @property
    def serving(self) -> Serving:
        return self.life.serving

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def http(self) -> str:
        """The base URL of the HTTP endpoints, including the version."""
        return f"http://127.0.0.1:{self.serving.info.http_port}/v1"

    async def generate(
        self, trajectory_id: str, prompt: Sequence[int] = (1, 2, 3), **fields: Any
    ) -> Turn:
        """Run one Generate call with a token prompt (unless `fields` give
        another prompt) to its end."""
        fields.setdefault("sampling_params", sampling())
        if not {"text", "conversation"} & set(fields):
            fields["tokens"] = sequence(prompt)
        return await collect(
            self.wire.Generate(GenerateRequest(trajectory_id=trajectory_id, **fields))
        )

    async def sampled(self, trajectory_id: str, least: int = 1) -> None:
        """Wait until the last turn has `least` tokens. Then the
        engine certainly has its request."""
        await until(lambda: self._token_count(trajectory_id) >= least)

    async def answers_read(self) -> None:
        """Wait until no answer is in flight. Callers may have theirs before the server knows."""
        await until(lambda: not self.serving.callers.unread_bytes)

    def _token_count(self, trajectory_id: str) -> int:
        record = self.serving.store.find(trajectory_id)
        return 0 if record is None or record.turn is None else record.turn.policy_token_count

    def pass_lease_time(self, seconds: float = 3600.0) -> None:
        """Shorten every lease by `seconds` at once, so that no test waits for one to expire."""
        queue = self.serving.queue
        for group in queue.groups:
            for attempt in group.attempts:
                attempt.deadline -= seconds
        queue.leases.sooner.notify()

    async def resume(self, trajectory_id: str, **fields: Any) -> Turn:
        return await collect(
            self.wire.Continue(ContinueRequest(trajectory_id=trajectory_id, **fields))
        )

    async def complete(self, trajectory_id: str, reward: float = 1.0) -> bool:
        answer = await self.wire.CompleteTrajectory(
            CompleteTrajectoryRequest(trajectory_id=trajectory_id, outcome=Outcome(reward=reward))
        )
        return bool(answer.group_completed)

    async def fail(self, trajectory_id: str, reason: str = "BROKEN") -> bool:
        answer = await self.wire.CompleteTrajectory(
            CompleteTrajectoryRequest(
                trajectory_id=trajectory_id, outcome=Outcome(failure=Failure(reason=reason))
            )
        )
        return bool(answer.group_completed)

    async def upload(self, version: int, *, staged: bool = False, **fields: Any) -> list[Any]:
        """Upload a version of the fake model inline, as the connected trainer if there is one; return
        the responses."""
        session = self.serving.session
        fields.setdefault("trainer_epoch", session.run[1] if session.connected else 1 << 62)
        return await upload(self.wire, version, staged=staged, **fields)


Tensors = dict[str, "np.ndarray[Any, np.dtype[np.float32]]"]


def weights_of(version: int) -> Tensors:
    """The fake model's weights at a version. From one version to another the first tensor changes
    everywhere, the second in two elements."""
    few = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)
    few.flat[version % 32] = version + 0.5
    shape = TENSORS["model.embed_tokens.weight"].shape
    return {
        "model.embed_tokens.weight": np.full(shape, version, np.float32),
        "model.layers.0.mlp.weight": few,
    }


def payload(version: int) -> tuple[bytes, list[Any]]:
    """Bytes and specs of a version of the fake model."""
    return payload_of(weights_of(version))


def payload_of(tensors: Tensors) -> tuple[bytes, list[Any]]:
    """Bytes and specs of tensors, as float32."""
    data = b""
    specs: list[Any] = []
    for name, tensor in tensors.items():
        values = tensor.tobytes()
        specs.append(
            TensorSpec(
                name=name,
                shape=tensor.shape,
                dtype="float32",
                offset_bytes=len(data),
                length_bytes=len(values),
                xxh3=xxhash.xxh3_64_intdigest(values),
            )
        )
        data += values
    return data, specs


def delta(
    version: int, base: int, new: Tensors | None = None, *, raw: bool = False, **fields: Any
) -> tuple[Any, bytes]:
    """Header and payload of a version (or of `new` weights), as a delta against version `base`."""
    data = b""
    specs: list[Any] = []
    before = weights_of(base)
    for name, tensor in (new or weights_of(version)).items():
        bits = tensor.ravel().view(np.uint32)
        encoded = sparse.encode(before[name].ravel().view(np.uint32), bits)
        spec = TensorSpec(
            name=name,
            shape=tensor.shape,
            dtype="float32",
            xxh3=xxhash.xxh3_64_intdigest(tensor.tobytes()),
            encoding=weights_pb2.TENSOR_ENCODING_RAW if raw else encoded.encoding,
        )
        part = tensor.tobytes() if raw else b"".join(encoded.parts)
        if encoded.coding is not None and not raw:
            spec.sparse.MergeFromString(encoded.coding.SerializeToString())
        spec.offset_bytes, spec.length_bytes = len(data), len(part)
        data += part
        specs.append(spec)
    head, _ = header(
        version,
        **{
            "tensors": specs,
            "base_weight_version": base,
            "inline": InlineSource(length_bytes=len(data)),
            **fields,
        },
    )
    return head, data


def header(version: int, *, staged: bool = False, **fields: Any) -> tuple[Any, bytes]:
    data, specs = payload(version)
    message = WeightHeader(
        **{
            "weight_version": version,
            "tensors": specs,
            "inline": InlineSource(length_bytes=len(data)),
            "activation": weights_pb2.ACTIVATION_STAGED
            if staged
            else weights_pb2.ACTIVATION_IMMEDIATE,
            "trainer_epoch": 1 << 62,
            **fields,
        }
    )
    return message, data


def hold_back_switches(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> asyncio.Future[list[Any]]:
    """Block the journal record of a switch; other records are written as usual. Set the returned
    future to make that record count as durable."""
    written: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
    journal = harness.serving.journal
    append = journal.append

    def held(records: Any, **options: Any) -> Any:
        kinds = [r.WhichOneof("record") for r in records if not isinstance(r, EncodedRecord)]
        return written if "weights_activated" in kinds else append(records, **options)

    monkeypatch.setattr(journal, "append", held)
    return written


@contextlib.contextmanager
def shared(head: Any, data: bytes) -> Iterator[tuple[Any, Path]]:
    """The same upload with its payload in shared memory, and the path of that file."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="penstock-test-") as file:
        path = Path(file.name)
        path.write_bytes(data)
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        copy = WeightHeader.FromString(head.SerializeToString())
        copy.shared_memory.name = file.name
        copy.shared_memory.host_namespace = f"{boot}:{path.stat().st_dev}"
        yield copy, path


def messages(head: Any, data: bytes, chunk_bytes: int = 4096) -> list[Any]:
    """The requests of an inline upload."""
    chunks = [
        WeightChunk(offset_bytes=at, data=piece, xxh3=xxhash.xxh3_64_intdigest(piece))
        for at in range(0, len(data), chunk_bytes)
        for piece in [data[at : at + chunk_bytes]]
    ]
    digest = hashlib.sha256(head.SerializeToString(deterministic=True)).digest()
    return [
        UpdateWeightsRequest(header=head),
        *(UpdateWeightsRequest(chunk=chunk) for chunk in chunks),
        UpdateWeightsRequest(commit=WeightCommit(header_sha256=digest)),
    ]


class _AfterTheFirstAnswer:
    """Requests, of which all but the first wait for an answer. What the server refuses while this
    side still sends ends with an error of gRPC's own in place of the server's."""

    def __init__(self, requests: Iterable[Any]) -> None:
        self._requests = iter(requests)
        self._begun = False
        self.answered = asyncio.Event()

    def __aiter__(self) -> _AfterTheFirstAnswer:
        return self

    async def __anext__(self) -> Any:
        """Not a generator, because gRPC would close a generator that it leaves."""
        if self._begun:
            await self.answered.wait()
        self._begun = True
        try:
            return next(self._requests)
        except StopIteration:
            raise StopAsyncIteration from None


async def _update(wire: Any, requests: Iterable[Any]) -> list[Any]:
    outgoing = _AfterTheFirstAnswer(requests)
    responses = []
    try:
        async for response in wire.UpdateWeights(outgoing):
            responses.append(response)
            outgoing.answered.set()
    finally:
        outgoing.answered.set()
    return responses


async def send(harness: Harness, requests: Sequence[Any]) -> list[Any]:
    """Run one UpdateWeights call to its end; return the responses."""
    return await _update(harness.wire, requests)


async def upload(wire: Any, version: int, *, staged: bool = False, **fields: Any) -> list[Any]:
    head, data = header(version, staged=staged, **fields)
    return await _update(wire, messages(head, data))


BROKE_WHILE_WRITING = "Internal error from Core"
"""gRPC's error on the caller's side for a call that ends while it sends a message."""


class Exchange:
    """The trainer's end of an Exchange stream, driven by hand."""

    def __init__(self, wire: Any) -> None:
        self.outgoing: asyncio.Queue[Any] = asyncio.Queue()
        self.welcome: Any = None
        self.call = wire.Exchange(self)

    def __aiter__(self) -> Exchange:
        return self

    async def __anext__(self) -> Any:
        """The next message to send. Not a generator, because gRPC would close
        a generator that it leaves."""
        if (message := await self.outgoing.get()) is None:
            raise StopAsyncIteration
        return message

    def send(self, **fields: Any) -> None:
        self.outgoing.put_nowait(ExchangeRequest(**fields))

    def half_close(self) -> None:
        self.outgoing.put_nowait(None)

    async def receive(self, kind: str, seconds: float = 20.0) -> Any:
        """The next message, which must be of this kind."""
        async with asyncio.timeout(seconds):
            response = await self.call.read()
        if response is grpc.aio.EOF:
            raise AssertionError(f"the stream ended: {await self.call.code()}")
        assert response.WhichOneof("message") == kind, response
        return getattr(response, kind)

    async def nothing(self, seconds: float = 0.2) -> None:
        """Check that no message arrives for a while."""
        reading = asyncio.ensure_future(self.call.read())
        done, _ = await asyncio.wait([reading], timeout=seconds)
        assert not done, reading.result()
        # A read cannot be undone, so the next receive gets the message that this read waits for.
        self._pending = reading
        original = self.call.read

        async def read_pending() -> Any:
            self.call.read = original
            return await reading

        self.call.read = read_pending


async def hello(wire: Any, epoch: int = 1, **fields: Any) -> Exchange:
    """Open a session and read the Welcome."""
    exchange = Exchange(wire)
    contract = {"max_lag": 4, "groups_per_step": 2}
    for name in ("max_lag", "groups_per_step", "late_policy"):
        if name in fields:
            contract[name] = fields.pop(name)
    exchange.send(
        hello=Hello(
            **{
                "run_id": "run",
                "trainer_epoch": epoch,
                "staleness": StalenessContract(**contract),
                **fields,
            }
        )
    )
    exchange.welcome = await exchange.receive("welcome")
    return exchange


@contextlib.asynccontextmanager
async def serve(
    folder: Path,
    *settings: str,
    step_seconds: float = 0.0,
    max_context: int = 512,
    checkpoint: Path | None = None,
    adapters: AdapterLimits | None = None,
    security: Security | None = None,
    renderer: Renderer | None = None,
    make_engine: Callable[..., FakeEngine] = FakeEngine,
) -> AsyncGenerator[Harness]:
    """A server around a fake engine, on a free port. Version 0 of its weights is in `checkpoint`.
    The harness calls it with `security`."""
    engine = make_engine(step_seconds, max_context, checkpoint, adapters)
    stage = folder / "stage"
    stage.mkdir(exist_ok=True)
    # No HTTP by default, because its endpoints import vllm.
    given = ["listen=127.0.0.1:0", "http.listen=", f"weights.stage_folder={stage}"]
    # Refer groups from the first byte, because test turns have only a few tokens.
    given += ["journal.refers_from_bytes=1", *settings]
    if os.environ.get(ON_DISK):
        given += [f"journal.folder={folder / 'journal'}", "journal.segment_bytes=1048576"]
    loaded = config.load(None, given)
    gate = open_gate(loaded)
    server, port = bind(loaded.listen, loaded.limits.concurrent_calls, gate)
    http = open_http(loaded, port, gate.credentials)
    journal = await open_journal(loaded.journal)
    life = Lifecycle(
        Serving(engine, renderer or ByteRenderer(), loaded, journal, gate, http), server
    )
    await life.start()
    # An earlier server may have had the port. A connection shared with its channels would still be failing.
    channel = open_channel(f"127.0.0.1:{port}", security, own_connection=True)
    try:
        yield Harness(life, engine, port, Wire(channel), channel)
    finally:
        await channel.close()
        await life.stop(0.0)
