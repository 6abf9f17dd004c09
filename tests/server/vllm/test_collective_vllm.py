"""Weights sent over gloo from a trainer in its own process into real
vLLM; either side is killed."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
import torch
import xxhash
from transformers import AutoModelForCausalLM

from penstock.v1 import weights_pb2
from penstock.wire.channel import KEEPALIVE_TIMEOUT_MS, client_options
from tests.support.engines import SMALL_CACHE, ForkedProcess, forking
from tests.support.harness import (
    GenerateRequest,
    GetServerInfoRequest,
    InlineSource,
    SamplingParams,
    TensorSpec,
    Turn,
    WeightHeader,
    Wire,
    begun,
    collect,
    messages,
    sequence,
)
from tests.support.tiny_model import make_tiny_model

pytest.importorskip("vllm")
pytestmark = pytest.mark.asyncio(loop_scope="module")

DEADLINE_SECONDS = 4.0
GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
PROMPT = list(b"weights in flight")
COUNTER = iter(range(1_000_000))


class Spoken:
    """A process and the lines it prints."""

    def __init__(self, process: ForkedProcess) -> None:
        self.process = process

    async def line(self, seconds: float = 60) -> str:
        async with asyncio.timeout(seconds):
            line = (await self.process.stdout.readline()).decode()
        assert line, "it ended"
        return line


class Trainer(Spoken):
    """Forks one trainer after another; see `tests.support.collective_trainer`."""

    epoch = 0
    address = ""
    pid = 0

    async def event(self, seconds: float = 60) -> dict[str, Any]:
        while True:
            with contextlib.suppress(json.JSONDecodeError):
                return json.loads(await self.line(seconds))

    async def begin(self, do: str, models: list[Path], versions: list[int], **fields: Any) -> None:
        """Start a trainer with a newer epoch than all previous ones."""
        self.epoch += 1
        command = {"do": do, "models": [str(path) for path in models], "versions": versions}
        self.process.write(
            json.dumps({**command, "address": self.address, "epoch": self.epoch, **fields})
        )

    async def end(self, seconds: float = 60) -> list[dict[str, Any]]:
        """The trainer's events until it ends."""
        events: list[dict[str, Any]] = []
        while "exit" not in (event := await self.event(seconds)):
            if "pid" in event:
                self.pid = event["pid"]
            else:
                events.append(event)
        return [*events, event]


@dataclass
class Stand:
    """A server and trainers, each in a separate process."""

    server: Spoken
    trainer: Trainer
    wire: Any
    models: list[Path]
    turns: list[Turn]
    """The turn that each model samples after a dense upload."""

    async def generate(self, max_tokens: int = 60, name: str | None = None) -> Turn:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        return await collect(
            self.wire.Generate(
                GenerateRequest(
                    trajectory_id=name or f"t{next(COUNTER)}",
                    tokens=sequence(PROMPT),
                    sampling_params=params,
                )
            )
        )

    async def serves(self, model: int, version: int) -> None:
        """Check that a turn is bitwise what this model samples, under this version."""
        turn = await self.generate()
        assert turn.tokens == self.turns[model].tokens
        assert turn.logprobs == self.turns[model].logprobs
        assert set(turn.versions) == {version}

    async def active(self) -> int:
        info = await self.wire.GetServerInfo(GetServerInfoRequest())
        return int(info.active_weight_version)


def serve(model: str) -> None:
    """`penstock serve`, in a process of its own."""
    from penstock.server.__main__ import main

    with forking():
        main(
            [
                *("--model", model, "--dtype", "float32", "--max-model-len", "512"),
                *(*SMALL_CACHE, "--listen", "127.0.0.1:0"),
                *("--set", f"weights.collective_seconds={DEADLINE_SECONDS}"),
            ]
        )


async def start_server(model: Path) -> tuple[Spoken, str]:
    server = Spoken(await ForkedProcess.start(functools.partial(serve, str(model))))
    while " on 127.0.0.1:" not in (line := await server.line(200)):
        pass
    return server, f"127.0.0.1:{line.rpartition(':')[2].split()[0]}"


async def start_trainer() -> Trainer:
    return Trainer(await ForkedProcess.start(trainer_main))


def trainer_main() -> None:
    from tests.support.collective_trainer import main

    main()


def dense(path: Path, version: int) -> list[Any]:
    """The requests of a full inline upload without the tied head."""
    state = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
    data = b""
    specs: list[Any] = []
    for name, tensor in state.items():
        if name == "lm_head.weight":
            continue
        values = tensor.contiguous().numpy().tobytes()
        spec = TensorSpec(name=name, shape=tuple(tensor.shape), dtype="float32")
        spec.offset_bytes, spec.length_bytes = len(data), len(values)
        spec.xxh3 = xxhash.xxh3_64_intdigest(values)
        specs.append(spec)
        data += values
    head = WeightHeader(
        weight_version=version,
        tensors=specs,
        inline=InlineSource(length_bytes=len(data)),
        activation=weights_pb2.ACTIVATION_IMMEDIATE,
    )
    return messages(head, data, 1 << 20)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stand(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Stand]:
    folder = tmp_path_factory.mktemp("models")
    models = [make_tiny_model(folder / str(seed), tied=True, seed=seed) for seed in range(2)]
    trainer = await start_trainer()
    server: Spoken | None = None
    try:
        server, address = await start_server(models[0])
        trainer.address = address
        assert (await trainer.event(200)) == {"event": "ready"}
        async with grpc.aio.insecure_channel(address, options=client_options()) as channel:
            stand = Stand(server, trainer, Wire(channel), models, [])
            for version, model in ((1, 1), (2, 0)):
                async for _ in stand.wire.UpdateWeights(iter(dense(models[model], version))):
                    pass
                stand.turns.insert(0, await stand.generate())
            yield stand
    finally:
        for process in (trainer, server):
            if process is not None:
                await process.process.close()


async def test_a_version_by_gloo_is_the_dense_upload_bit_for_bit_and_again(stand: Stand) -> None:
    assert stand.turns[0].tokens != stand.turns[1].tokens
    models = [stand.models[place] for place in (1, 0, 1)]
    running = asyncio.ensure_future(stand.generate(400))
    await stand.trainer.begin("send", models, [3, 4, 5])
    events = await stand.trainer.end()
    assert [event.get("active") for event in events] == [3, 4, 5, None], events
    await stand.serves(1, 5)
    turn = await running
    assert len(turn.tokens) == 400
    assert turn.versions == sorted(turn.versions)
    assert set(turn.versions) <= {2, 3, 4, 5}


@pytest.mark.parametrize("policy", ["RECOMPUTE", "DRAIN", "ABORT"])
async def test_turns_in_flight_follow_the_policy(stand: Stand, policy: str) -> None:
    version = await stand.active() + 1
    await stand.trainer.begin("send", [stand.models[1]], [version], policy=policy, waits=True)
    # On a busy machine the turn would be over before the trainer is ready to send.
    while (await stand.trainer.event()).get("event") != "prepared":
        pass
    running = asyncio.ensure_future(stand.generate(400, policy))
    await begun(stand.wire, policy)
    stand.trainer.process.write("")
    events = await stand.trainer.end()
    assert events[0].get("active") == version, events
    versions = set((await running).versions)
    assert version - 1 in versions
    assert (version in versions) == (policy == "RECOMPUTE")
    await stand.serves(1, version)


@pytest.mark.parametrize(
    ("broken", "reason"), [("nan", "NOT_FINITE"), ("checksum", "CHECKSUM_MISMATCH")]
)
async def test_what_arrives_broken_is_refused_by_name(
    stand: Stand, broken: str, reason: str
) -> None:
    version = await stand.active()
    await stand.trainer.begin("send broken", [stand.models[0]], [version + 1], broken=broken)
    failed = (await stand.trainer.end())[0]
    assert failed["failed"] == reason
    assert ".weight" in failed["why"]
    await stand.serves(1, version)


@pytest.mark.parametrize("where", ["between rounds", "in a broadcast", "alive but silent"])
async def test_a_trainer_that_dies_half_way_changes_nothing(stand: Stand, where: str) -> None:
    version = await stand.active()
    await stand.trainer.begin("die", [stand.models[0]], [version + 1], where=where)
    running = asyncio.ensure_future(stand.generate())
    while "event" not in (event := await stand.trainer.event()):
        stand.trainer.pid = event["pid"]
    began = time.monotonic()
    # The engine stands still and continues when the round is over.
    late = asyncio.ensure_future(stand.generate(name=where))
    await begun(stand.wire, where)
    if where == "alive but silent":
        os.kill(stand.trainer.pid, signal.SIGCONT)
        stopped = time.monotonic() - began
    turn = await running
    await late
    await stand.serves(1, version)
    # The deadline, the time to notice, and a turn.
    assert time.monotonic() - began < DEADLINE_SECONDS + 20
    assert turn.tokens == stand.turns[1].tokens
    assert set(turn.versions) == {version}
    if where == "alive but silent":
        failed = (await stand.trainer.end())[0]
        # A trainer stopped for longer than the ping timeout has lost the
        # connection, and the error with it.
        lost = stopped > KEEPALIVE_TIMEOUT_MS / 1000 and "ping timeout" in failed["why"]
        assert failed["failed"] == "SOURCE_UNAVAILABLE" or lost, (stopped, failed)
    else:
        assert (await stand.trainer.end())[-1] == {"exit": -signal.SIGKILL}


async def test_a_new_trainer_joins_and_succeeds(stand: Stand) -> None:
    # The server holds another model than the one that the new trainer sends.
    version = await stand.active() + 1
    await stand.trainer.begin("send", [stand.models[1]], [version])
    assert (await stand.trainer.end())[0].get("active") == version
    versions = [version + 1, version + 2]
    await stand.trainer.begin("transport", [stand.models[0]], versions)
    events = await stand.trainer.end()
    assert [event.get("active") for event in events] == [*versions, None], events
    # The checksums show that the second version equals the first.
    assert events[0]["changed"] > 0 == events[1]["changed"]
    await stand.serves(0, version + 2)


async def test_a_trainer_that_nobody_joins_hears_why(stand: Stand) -> None:
    await stand.trainer.begin("send", [stand.models[0]], [1])
    assert (await stand.trainer.end())[0]["failed"] == "WEIGHT_VERSION_STALE"
    stand.trainer.epoch -= 2
    await stand.trainer.begin("send", [stand.models[0]], [99])
    began = time.monotonic()
    events = await stand.trainer.end()
    assert events[0]["failed"] == "STALE_EPOCH", events
    assert time.monotonic() - began < 20
    stand.trainer.epoch += 2


async def test_an_engine_that_does_not_come_back_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from penstock.server.engine.protocol import EngineLost
    from penstock.server.vllm import collective as vllm_collective

    monkeypatch.setattr(vllm_collective, "GRACE_SECONDS", 0.05)
    dead: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    class Hanging:
        """An AsyncLLM whose workers hang in a collective."""

        async def update_weights(self, request: Any) -> None:
            await asyncio.Event().wait()

        init_weight_transfer_engine = update_weights

        async def finish_weight_update(self, weight_version: str) -> None:
            await self.update_weights(weight_version)

        async def collective_rpc(self, method: str) -> list[Any]:
            await self.update_weights(method)
            return []

    async def ask(answer: Any) -> Any:
        asked = asyncio.ensure_future(answer)
        await asyncio.wait({asked, dead}, return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        raise EngineLost(dead.result())

    def give_up(reason: str) -> None:
        if not dead.done():
            dead.set_result(reason)

    owner: Any = None
    llm: Any = Hanging()
    engine = vllm_collective.VllmCollective(owner, llm)
    monkeypatch.setattr(engine, "_ask", ask)
    monkeypatch.setattr(engine, "_give_up", give_up)
    for work in (
        engine.join_collective("nccl", {}, 0.05),
        engine.receive_collective({}, 0.05),
        engine.finish_collective(1, 0.05),
        engine.abandon_collective(0.05),
    ):
        with pytest.raises(EngineLost, match=r"did not come back from a collective within 0.05 s"):
            async with asyncio.timeout(20):
                await work


async def test_a_server_that_is_killed_half_way_is_noticed(stand: Stand) -> None:
    await stand.trainer.begin("lose the server", [stand.models[0]], [99])
    while "event" not in await stand.trainer.event():
        pass
    stand.server.process.kill()
    await stand.server.process.wait()
    killed = time.time()
    stand.trainer.process.write("go on")
    events = await stand.trainer.end()
    assert events[0]["at"] - killed < 6.0 + 20.0
    assert events[1]["failed"] in ("GroupBroken", "UNAVAILABLE"), events
