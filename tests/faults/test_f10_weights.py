"""F10: whatever is wrong with an upload, the refusal is precise and the serving state is unchanged.

    make faults FAULTS=20

Each fault happens at random moments and places, with turns in flight under random policies. One
server is around the fake engine, the other around real vLLM in fp32. Afterwards every turn is
whole, and the active version is the same as before. A fixed set of prompts gives the same tokens
and log-probabilities bit for bit. The upload's memory is released, and the next upload is accepted.

The engine process is also killed in the middle of a load. That ends the server too, so this fault
has a separate server, which is restarted each time. After the next upload, its output is bit for
bit that of an undisturbed server.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.common.failpoints import VARIABLE
from penstock.v1 import rollout_service_pb2
from penstock.wire.channel import client_options
from penstock.wire.failure import read_failure
from tests.faults.attempts import POLICIES, Attempt, Source
from tests.faults.report import COUNT, Report, report_of
from tests.faults.sites import EPOCH, OPTIONS, Site, Tensors, versions_of
from tests.faults.trajectories import Trajectories
from tests.faults.weight_faults import FAULTS
from tests.support.harness import (
    GenerateRequest,
    GetServerInfoRequest,
    InlineSource,
    Turn,
    Wire,
    collect,
    header,
    messages,
    payload_of,
    sampling,
    sequence,
    until,
)
from tests.support.processes import Server
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="package")

UNAVAILABLE = rollout_service_pb2.REPLICA_STATE_UNAVAILABLE
TURNS = 4
LIMIT_SECONDS = 60
DESCRIPTORS = 6
"""How many more files may be open after a fault than before, for connections that are being closed."""

MOMENTS = (
    "while it makes it ready",
    "before it puts it in place",
    "while it loads it in the pause",
)
"""When the engine process is killed."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    report = report_of(metafunc.config)
    if "moment" in metafunc.fixturenames:
        metafunc.parametrize("moment", MOMENTS)
    if "fault" not in metafunc.fixturenames:
        return
    pairs = [(name, source) for name, (_, sources) in FAULTS.items() for source in sources]
    if report.count is None:
        # Each fault a few times, with as many sources. Over many runs, all sources are used. With
        # vLLM, where each takes seconds, every second fault once.
        vllm = metafunc.function is test_vllm
        pairs = [
            (name, sources[(report.seed // 2 + place + index) % len(sources)])
            for place, (name, (_, sources)) in enumerate(FAULTS.items())
            if not vllm or (report.seed + place) % 2 == 0
            for index in range(min(1 if vllm else COUNT, len(sources)))
        ]
    ids = [f"{name}-{source.value}" for name, source in pairs]
    metafunc.parametrize(("fault", "source"), pairs, ids=ids)


async def test_fake(
    fake: Site, fault: str, source: Source, report: Report, request: pytest.FixtureRequest
) -> None:
    await survive(fake, fault, source, report, request.node.nodeid)


async def test_vllm(
    vllm: Site, fault: str, source: Source, report: Report, request: pytest.FixtureRequest
) -> None:
    await survive(vllm, fault, source, report, request.node.nodeid)


async def test_who_cannot_go_back_serves_nothing_until_a_full_upload(
    fake: Site, vllm: Site, report: Report
) -> None:
    for site in (fake, vllm):
        rng = random.Random(f"{report.seed} {site.name}")
        await good_upload(site, rng)
        whole = [source for source in Source if not source.is_delta]
        with contextlib.closing(Attempt(site, rng.choice(whole), rng)) as attempt:
            attempt.staged = False
            site.loads.break_next(2)
            await attempt.refused("WEIGHTS_INCONSISTENT")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await site.trajectories.turn([1, 2, 3], 4)
        assert read_failure(caught.value).reason == "WEIGHTS_INCONSISTENT"
        info = await site.wire.GetServerInfo(GetServerInfoRequest())
        assert {replica.state for replica in info.replicas} == {UNAVAILABLE}
        assert info.delta_base_weight_version == 0
        await good_upload(site, rng)
        # The uploaded weights must explain them, token by token.
        await site.outputs(site.active)


async def survive(site: Site, name: str, source: Source, report: Report, test: str) -> None:
    """Make one fault happen as often as requested."""
    count = report.count or 1
    where, what = f"F10 {site.name}", f"{name}, {source.value}"
    await good_upload(site, random.Random(report.seed))
    descriptors = psutil.Process().num_fds()
    for case in range(count):
        seed = report.seed + case
        try:
            async with asyncio.timeout(LIMIT_SECONDS):
                await happen(site, name, source, random.Random(f"{seed} {name} {source.value}"))
        except BaseException as error:
            again = report.failed(where, what, seed, test, case, count)
            error.add_note(f"again: {again}")
            raise
    assert psutil.Process().num_fds() <= descriptors + DESCRIPTORS
    report.survived(where, what, count)


async def happen(site: Site, name: str, source: Source, rng: random.Random) -> None:
    """Make one fault happen once, with turns in flight, and check the state it leaves."""
    before = await site.state()
    turns = [
        asyncio.ensure_future(site.trajectories.run(random.Random(rng.random()), 24))
        for _ in range(TURNS)
    ]
    try:
        await asyncio.sleep(rng.uniform(0.0, 0.05))
        with contextlib.closing(Attempt(site, source, rng)) as attempt:
            await FAULTS[name][0](attempt)
            await site.idle()
        for seen in await asyncio.gather(*turns):
            # A refused version cannot have sampled any of them.
            allowed = {before.active} | ({attempt.version} if attempt.takes_effect else set())
            assert set(seen.sampled) <= allowed
            site.explain(seen)
    finally:
        for turn in turns:
            turn.cancel()
    after = await site.state()
    if attempt.takes_effect:
        assert after.active == attempt.version
        assert after.staged == ()
    else:
        assert after == before
    site.check_held(after.active)
    await good_upload(site, rng)


async def good_upload(site: Site, rng: random.Random) -> None:
    """Check that the next version is accepted, whichever way it travels."""
    base = site.serving.weights.delta_base_version == site.active > 0
    source = rng.choice(list(Source) if base else [s for s in Source if not s.is_delta])
    with contextlib.closing(Attempt(site, source, rng)) as attempt:
        await attempt.accepted()
    assert site.active == attempt.version
    site.check_held(site.active)
    site.forget()


class Doomed:
    """`penstock serve` around real vLLM, whose engine process kills itself in its second load."""

    def __init__(self, folder: Path, moment: str, seed: int) -> None:
        model = make_tiny_model(folder / "model", tied=True)
        ahead = str(moment != MOMENTS[2]).lower()
        self.tensors = versions_of(model)
        self._point = "weights.place" if moment == MOMENTS[1] else "weights.tensor"
        self._moment, self._seed = moment, seed
        self._server = Server(
            folder,
            (
                *("--model", str(model), "--http-listen", "", *OPTIONS),
                *("--set", f"weights.prepare_ahead={ahead}"),
            ),
            command=("-m", "penstock.cli", "serve"),
        )
        self.address = ""

    async def start(self, case: int) -> None:
        """Start or restart it, with the point at which this case kills the engine."""
        at = 2
        if self._point == "weights.tensor":
            # The first load meets each tensor once.
            count = len(self.tensors(1))
            at = count + random.Random(f"{self._seed + case} {self._moment}").randint(1, count)
        self._server.environment[VARIABLE] = f"{self._point}=kill@{at}"
        async with asyncio.timeout(4 * LIMIT_SECONDS):
            await self._server.start()
        self.address = self._server.address

    async def ended(self) -> None:
        """Check that the server ends with its engine, without being killed."""
        assert await self._server.wait() == 1
        assert self._server.log.count("penstock serve: the engine is lost") == len(
            self._server.processes
        )

    async def kill(self) -> None:
        for process in self._server.processes:
            process.kill()
            await process.wait()


async def test_an_engine_that_is_killed_in_a_load_has_served_none_of_it(
    tmp_path: Path, report: Report, moment: str, request: pytest.FixtureRequest
) -> None:
    if report.count is None:
        pytest.skip("vLLM has to start twice for each; `make faults` does it")
    pytest.importorskip("vllm")
    count = report.count
    server = Doomed(tmp_path, moment, report.seed)
    cases = iter(range(count))
    outputs: list[Any] = []

    async def serve(case: int) -> None:
        await server.start(case)
        async with grpc.aio.insecure_channel(server.address, options=client_options()) as channel:
            outputs.append(await upload_and_sample(Wire(channel), server.tensors(1)))
        # The first output is that of an undisturbed server.
        assert outputs[-1] == outputs[0]

    async def happen(rng: random.Random) -> None:
        case = next(cases)
        await killed_in_load(server, rng)
        await serve(case + 1)

    name = f"engine_killed, {moment}"
    try:
        await serve(0)
        await report.repeat("F10 vllm", name, request.node.nodeid, count, happen)
    finally:
        await server.kill()
    report.survived("F10 vllm", name, count)


async def upload_and_sample(wire: Any, tensors: Tensors) -> list[tuple[list[int], list[float]]]:
    """Upload these as version 1 to a server that has just started; return tokens and
    log-probabilities.
    """
    states = [response async for response in wire.UpdateWeights(dense(1, tensors))]
    assert states[-1].active_weight_version == 1
    trajectories = Trajectories(wire)
    found: list[tuple[list[int], list[float]]] = []
    for prompt, fields in (
        ([1, 2, 3], {"temperature": 0.0}),
        (list(b"a fixed seed"), {"temperature": 1.0, "seed": 7}),
    ):
        turn = await trajectories.turn(prompt, 40, **fields)
        assert set(turn.versions) == {1}
        found.append((turn.tokens, turn.logprobs))
    assert not np.isnan([p for _, logprobs in found for p in logprobs]).any()
    return found


async def killed_in_load(server: Doomed, rng: random.Random) -> None:
    """Upload version 2, during whose load the engine dies, with turns in flight."""
    turns: list[Turn] = []
    policy = rng.choice(list(POLICIES))
    async with grpc.aio.insecure_channel(server.address, options=client_options()) as channel:
        wire = Wire(channel)
        health = asyncio.ensure_future(health_of(channel))
        running = [asyncio.ensure_future(sample(wire, turns, f"{i}")) for i in range(TURNS)]
        await until(lambda: len(turns) == TURNS and all(turn.segments for turn in turns))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for response in wire.UpdateWeights(dense(2, server.tensors(2), in_flight=policy)):
                assert response.active_weight_version == 1
        failure = read_failure(caught.value)
        assert (failure.reason, failure.code) == ("ENGINE_LOST", grpc.StatusCode.UNAVAILABLE)
        async with asyncio.timeout(LIMIT_SECONDS):
            assert set(await asyncio.gather(*running)) == {"ENGINE_LOST"}
            await server.ended()
            assert await health == [
                health_pb2.HealthCheckResponse.SERVING,
                health_pb2.HealthCheckResponse.NOT_SERVING,
            ]
    assert {version for turn in turns for version in turn.versions} == {1}


def dense(version: int, tensors: Tensors, **fields: Any) -> Any:
    """The requests of a full upload."""
    data, specs = payload_of(tensors)
    source = InlineSource(length_bytes=len(data))
    head, _ = header(version, tensors=specs, inline=source, trainer_epoch=EPOCH, **fields)
    return iter(messages(head, data, 1 << 20))


async def sample(wire: Any, turns: list[Turn], name: str) -> str:
    """Take long turns until one fails; return its reason."""
    for count in range(1_000):
        turns.append(turn := Turn())
        request = GenerateRequest(
            trajectory_id=f"{name}-{count}",
            tokens=sequence([1, 2, 3]),
            sampling_params=sampling(480, temperature=1.0),
            stream_options={"flush_interval": {"nanos": 1_000_000}},
        )
        try:
            await collect(wire.Generate(request), turn)
        except grpc.aio.AioRpcError as error:
            return read_failure(error).reason
    raise AssertionError("nothing has happened")


async def health_of(channel: grpc.aio.Channel) -> list[int]:
    """The health states that a server reports until it is gone."""
    said: list[int] = []
    watching = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
    with contextlib.suppress(grpc.aio.AioRpcError):
        async for response in watching:
            said.append(response.status)  # noqa: PERF401 - What came before the end is kept.
    return said
