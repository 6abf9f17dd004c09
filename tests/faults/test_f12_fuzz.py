"""F12: whatever any rpc is sent, its answer is in the table, and the server keeps running.

    make fuzz EXAMPLES=10000

hypothesis makes requests from the descriptors (`grammar`). They are sent over real gRPC to a server
process around the fake engine. An answer is OK or a reason with its status code; never UNKNOWN or
INTERNAL. Only a stream that waits for work may have no answer. Afterwards the server has logged no
unexpected error. It holds no more memory and no more files than after the first fifth.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Generator
from typing import Any, cast

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from penstock.wire.channel import client_options
from tests.faults.fake_server import ServerProcess, fake_server
from tests.faults.footprint import Footprint
from tests.faults.grammar import OWN_TRAJECTORY, SEEDS, Bodies, messages, raw
from tests.faults.report import Report
from tests.server.rpc.test_wire_errors import (
    NAMES,
    RPCS,
    STREAMS,
    call,
    in_table,
    own_name,
    with_known_ids,
)
from tests.support.fakes import expected_tokens
from tests.support.harness import (
    CompleteTrajectoryRequest,
    Failure,
    Harness,
    Outcome,
    SubmitTasksRequest,
    Task,
    Wire,
    hello,
    sampling,
    sequence,
    upload,
)

QUICK = 18
"""Examples of each rpc without an option."""
SWEEP = 250
"""Number of examples after which their remains are cleared."""
SECONDS = 20.0
"""After this an rpc hangs. Long enough for two cores that are busy with something else."""
LEASE_SECONDS = 0.01
TRIES = 3
GROWTH_BYTES = 32 << 20
FILES = 4
GROWN = 2_000
"""With fewer examples than this, growth is not judged."""
WAITING = ("LeaseTasks",)
"""Rpcs that may wait without an answer."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[ServerProcess]:
    with fake_server(tmp_path_factory.mktemp("fuzz"), "leases.seconds=2") as process:
        yield process


@pytest.fixture(scope="module")
def runner() -> Generator[asyncio.Runner]:
    with asyncio.Runner() as running:
        yield running


class Fuzzed:
    """A server under fuzzing."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        # One connection for all calls, because every channel would be a connection.
        self.channel = grpc.aio.insecure_channel(server.address, options=client_options())
        wire = Wire(self.channel)
        self.harness = Harness(
            cast("Any", None), cast("Any", None), server.port, wire, self.channel
        )
        self.answers: Counter[str] = Counter()
        self.examples = 0
        self.footprints: list[Footprint] = []
        self.own_errors = 0

    async def example(self, rpc: Any, case: Bodies) -> None:
        """Send one example and check the answer."""
        async with asyncio.timeout(2 * SECONDS):
            await self._example(rpc, case)

    async def _example(self, rpc: Any, case: Bodies) -> None:
        service, method = rpc
        if self.examples % SWEEP == 0:
            await self.sweep()
        self.examples += 1
        bodies = case.bodies
        if case.seed:
            await self.prepare(method, case.seed)
        waits = method.name in WAITING
        seconds = LEASE_SECONDS if waits else SECONDS
        for _ in range(TRIES):
            code, reason = await call(
                self.harness, service, method, *bodies, seconds=seconds, first_only=waits
            )
            if code is not grpc.StatusCode.INTERNAL or reason or len(bodies) == 1:
                break
            # grpcio's client raises this itself if the answer arrives during its next write.
            self.own_errors += 1
        self.answers[f"{code.name} {reason}"] += 1
        hung = code is grpc.StatusCode.DEADLINE_EXCEEDED and not waits
        assert in_table(code, reason) and not hung, (method.name, code, reason, bodies)
        if case.seed and method.name in ("Generate", *OWN_TRAJECTORY):
            await self.close(own_name(case.seed))

    async def prepare(self, method: MethodDescriptor, seed: int) -> None:
        """Make what the valid request with this number refers to."""
        wire = self.harness.wire
        if method.name == "LeaseTasks":
            task = Task(task_id=f"lease{seed}", group_size=1, tokens=sequence([1]))
            await wire.SubmitTasks(SubmitTasksRequest(tasks=[task]))
        elif method.name == "FetchWeights":
            await upload(wire, seed)
        elif method.name in OWN_TRAJECTORY:
            await self.harness.generate(own_name(seed), sampling_params=sampling(1))

    async def close(self, trajectory_id: str) -> None:
        outcome = Outcome(failure=Failure(reason="FUZZED"))
        request = CompleteTrajectoryRequest(trajectory_id=trajectory_id, outcome=outcome)
        with contextlib.suppress(grpc.aio.AioRpcError):
            await self.harness.wire.CompleteTrajectory(request)

    async def sweep(self) -> None:
        """Start another run, so that the server drops its tasks and groups."""
        seed = next(SEEDS)
        with contextlib.suppress(grpc.aio.AioRpcError, AssertionError):
            exchange = await hello(self.harness.wire, seed + 1, run_id=f"sweep{seed}")
            exchange.half_close()
            while await exchange.call.read() is not grpc.aio.EOF:
                pass
        with contextlib.suppress(grpc.aio.AioRpcError):
            await with_known_ids(self.harness)
        self.footprints.append(self.server.footprint())

    async def finish(self) -> None:
        """Check that the server still serves, and has not grown."""
        await still_serving(self.harness)
        await self.channel.close()
        self.server.check_alive()
        if self.examples < GROWN:
            return
        first, last = self.footprints[len(self.footprints) // 5], self.server.footprint()
        assert last.resident_bytes - first.resident_bytes < GROWTH_BYTES, (first, last)
        assert last.files <= first.files + FILES, (first, last)


async def still_serving(harness: Harness) -> None:
    """Check that a turn's tokens are those of the version on its label."""
    name = f"after-{next(SEEDS)}"
    turn = await harness.generate(name)
    assert turn.tokens == expected_tokens([1, 2, 3], turn.versions)[0]
    await harness.complete(name)


def fuzz(
    server: ServerProcess,
    runner: asyncio.Runner,
    rpc: Any,
    cases: st.SearchStrategy[Bodies],
    report: Report,
    name: str,
    test: str,
    examples: int,
) -> None:
    """Send `examples` requests of one rpc."""

    async def begin() -> Fuzzed:
        return Fuzzed(server)

    fuzzed = runner.run(begin())

    @seeded(report.seed)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    @given(case=cases)
    def check(case: Bodies) -> None:
        runner.run(fuzzed.example(rpc, case))

    try:
        check()
        runner.run(fuzzed.finish())
    except BaseException as error:
        again = report.failed("F12 fake", name, report.seed, test, fuzzed.examples, examples)
        error.add_note(f"again: {again}")
        raise
    refused = sum(n for answer, n in fuzzed.answers.items() if not answer.startswith("OK"))
    figures = f"{len(fuzzed.answers)} different answers, {refused} refusals"
    if fuzzed.examples < examples:
        # hypothesis repeats none, so fewer ran.
        figures += f"; {fuzzed.examples} are all the different requests there are"
    report.survived("F12 fake", name, fuzzed.examples, "examples", figures)


@pytest.mark.parametrize("rpc", RPCS, ids=NAMES)
def test_messages(
    server: ServerProcess,
    runner: asyncio.Runner,
    rpc: Any,
    report: Report,
    request: pytest.FixtureRequest,
) -> None:
    name, test = f"{rpc[1].name}, messages", request.node.nodeid
    count = report.count or QUICK
    fuzz(server, runner, rpc, messages(rpc[1]), report, name, test, count)


@pytest.mark.parametrize("rpc", RPCS, ids=NAMES)
def test_bytes(
    server: ServerProcess,
    runner: asyncio.Runner,
    rpc: Any,
    report: Report,
    request: pytest.FixtureRequest,
) -> None:
    name, test = f"{rpc[1].name}, bytes", request.node.nodeid
    count = report.count or QUICK // 3
    fuzz(server, runner, rpc, raw(rpc[1]), report, name, test, count)


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS_FRAME = b"\0\0\0\4\0\0\0\0\0"


def frames(rng: random.Random) -> bytes:
    """Bytes that no HTTP/2 peer would send, after a random part of a valid beginning."""
    data = rng.choice((b"", PREFACE[: rng.randrange(24)], PREFACE, PREFACE + SETTINGS_FRAME))
    for _ in range(rng.randint(1, 6)):
        length = rng.choice((0, 1, 5, 100, 16_384, 0xFFFFFF))
        body = rng.randbytes(rng.choice((0, length, min(length, 64)))) if length < 1 << 16 else b""
        head = length.to_bytes(3, "big") + bytes((rng.randrange(16), rng.randrange(256)))
        data += head + rng.choice((0, 1, 3, 1 << 31, (1 << 31) - 1)).to_bytes(4, "big") + body
    return rng.choice((data, rng.randbytes(rng.randint(1, 300))))


async def test_frames(
    server: ServerProcess, report: Report, request: pytest.FixtureRequest
) -> None:
    """Bytes on the port itself, below gRPC."""
    count = min(report.count or QUICK, 2_000)
    files = server.footprint().files

    async def happen(rng: random.Random) -> None:
        async with asyncio.timeout(SECONDS):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            with contextlib.suppress(OSError):
                writer.write(frames(rng))
                await writer.drain()
                if rng.random() < 0.5:
                    await asyncio.sleep(0.001)
                    reader.feed_eof()
            writer.transport.abort()

    await report.repeat("F12 fake", "HTTP/2 frames", request.node.nodeid, count, happen)
    async with grpc.aio.insecure_channel(server.address, options=client_options()) as channel:
        wire = Wire(channel)
        harness = Harness(cast("Any", None), cast("Any", None), server.port, wire, channel)
        await still_serving(harness)
    async with asyncio.timeout(SECONDS):
        while server.footprint().files > files + FILES:
            await asyncio.sleep(0.05)
    server.check_alive()
    report.survived("F12 fake", "HTTP/2 frames", count, "connections")


def test_every_rpc_is_fuzzed() -> None:
    assert len(set(NAMES)) == len(RPCS) == 12
    assert len(STREAMS) == 2
