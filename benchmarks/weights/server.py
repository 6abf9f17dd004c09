"""The server whose weights are updated, the trainer's stream to it, and the turns that run meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from benchmarks.support.processes import serving_address, started

from penstock.v1 import rollout_service_pb2, trainer_service_pb2, weights_pb2
from penstock.wire import codec, methods
from penstock.wire.channel import client_options
from penstock.wire.messages import ExchangeRequest, GenerateRequest, SamplingParams, TokenSequence

EPOCH = 1
PROMPT = "Once upon a time there was a"


@dataclass
class Turn:
    """The tokens of one turn of the load."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    arrived: list[float] = field(default_factory=list[float])
    """When each token arrived, by `time.perf_counter`."""


class Server:
    """A `penstock serve` process and calls to it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.channel = grpc.aio.insecure_channel(address, options=client_options())
        self.weights = grpc.aio.insecure_channel(
            address, options=client_options(own_connection=True)
        )
        self._generate = methods.streaming(self.channel, rollout_service_pb2.GenerateResponse)
        self._count = 0

    async def turn(
        self, prompt: list[int], max_tokens: int, temperature: float, *, gathered: bool = True
    ) -> Turn:
        """Takes one turn with a token prompt; without `gathered`, each token is sent separately."""
        self._count += 1
        turn = Turn(prompt)
        request = GenerateRequest(
            trajectory_id=f"update-{self._count}",
            tokens=TokenSequence(token_ids=codec.array_bytes(np.asarray(prompt, np.int32))),
            sampling_params=SamplingParams(
                max_tokens=max_tokens, temperature=temperature, ignore_eos=True
            ),
            stream_options={} if gathered else {"flush_interval": {"nanos": 1_000_000}},
        )
        async for event in self._generate(request):
            if event.WhichOneof("event") == "segment":
                ids = codec.token_ids(event.segment).tolist()
                turn.tokens += ids
                turn.logprobs += codec.logprobs(event.segment).tolist()
                turn.versions += [event.segment.weight_version] * len(ids)
                turn.arrived += [time.perf_counter()] * len(ids)
        return turn


@contextlib.asynccontextmanager
async def serve(model: Path, *options: str) -> AsyncIterator[Server]:
    command = ("-m", "penstock.cli", "serve", "--model", str(model), "--listen", "127.0.0.1:0")
    command += ("--dtype", DTYPE, "--max-model-len", "1024", *options)
    async with started(*command, end_seconds=None) as process:
        server = Server(await serving_address(process))
        try:
            yield server
        finally:
            await server.channel.close()
            await server.weights.close()
            process.terminate()


class Exchange:
    """The part of the trainer's `Exchange` stream that uploads and switches need."""

    trainer_epoch = EPOCH

    def __init__(
        self,
        server: Server,
        in_flight: weights_pb2.InFlightPolicy.ValueType = weights_pb2.IN_FLIGHT_POLICY_KEEP,
    ) -> None:
        self.in_flight = in_flight
        self.restored = asyncio.Event()
        self.restored.set()
        self._outgoing: asyncio.Queue[object] = asyncio.Queue()
        call = server.channel.stream_stream(
            "/penstock.v1.TrainerService/Exchange",
            request_serializer=codec.encode,
            response_deserializer=codec.decoder(trainer_service_pb2.ExchangeResponse),
        )
        self._call = call(self._requests())

    async def _requests(self) -> AsyncIterator[object]:
        while True:
            yield await self._outgoing.get()

    async def hello(self) -> None:
        staleness = {"max_lag": 1, "groups_per_step": 1}
        hello = {"run_id": "bench", "trainer_epoch": EPOCH, "staleness": staleness}
        self._outgoing.put_nowait(ExchangeRequest(hello=hello))
        await self._call.read()

    async def answer(self, wait: Awaitable[Any]) -> Any:
        return await wait

    async def switch(self, version: int) -> float:
        """Switches to a version; returns the pause of generation in seconds."""
        message = {"weight_version": version, "in_flight": self.in_flight}
        self._outgoing.put_nowait(ExchangeRequest(switch_weights=message))
        response = await self._call.read()
        receipt = response.weight_receipt
        assert receipt.active_weight_version == version, receipt
        return receipt.pause.ToNanoseconds() / 1e9

    def close(self) -> None:
        self._call.cancel()


DTYPE = "bfloat16"
TURN_TOKENS = 64


@dataclass(frozen=True)
class Switch:
    """The effect of a switch on turns in flight."""

    pause: float
    """Seconds that generation was paused."""
    active: float
    """Seconds from the order until the version was active."""
    waits: tuple[float, float] | None
    """Seconds between two tokens of a turn: the maximum in that time, and the median before it.

    None without turns in flight.
    """


async def watched(
    server: Server,
    prompt: list[int],
    turns: int,
    switch: Callable[[], Awaitable[float]],
    tokens: int = TURN_TOKENS,
    after_seconds: float = 0.6,
) -> Switch:
    """Measures the effect of `switch` on turns in flight; `switch` returns its pause in seconds.

    It is called after the turns have been sampled for a while, which gives their ordinary wait for a token.
    """
    running = [
        asyncio.ensure_future(server.turn([*prompt, 100 + index], tokens, 1.0, gathered=False))
        for index in range(turns)
    ]
    if running:
        await asyncio.sleep(after_seconds)
    began = time.perf_counter()
    pause = await switch()
    ended = time.perf_counter()
    arrivals = [np.array(turn.arrived) for turn in await asyncio.gather(*running)]
    if not arrivals:
        return Switch(pause, ended - began, None)
    meanwhile = [np.diff(times)[(times[1:] > began) & (times[:-1] < ended)] for times in arrivals]
    ordinary = [np.diff(times[times < began]) for times in arrivals]
    longest = float(np.concatenate(meanwhile).max())
    return Switch(pause, ended - began, (longest, float(np.median(np.concatenate(ordinary)))))
