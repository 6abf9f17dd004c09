"""How fast weights travel by each transport, and how long the switch pauses generation.

    python -m benchmarks.weights.transports [--model DIR] [--rounds 4] [--turns 16] [--only TRANSPORT,...]

Runs a real `penstock serve` and the trainer's publisher, on the demo's model with an untied output head.

**Travel.** A version travels from the moment the trainer has its tensors until the server has it complete
and verified (STAGED). That includes packing, checksums and the server's verification, which overlap with
shared memory.

**Switch.** Then the server switches with turns in flight. Generation is paused from the end of a step until
it resumes. With a collective, the version travels straight into the engine and is active once it has
arrived. Its figures include that time, which is nearly all pause. The last line has none of them.

**Baselines**, in the same round:

- one copy of the bytes into shared memory;
- the packed bytes through TCP on loopback, compared only with the time after packing;
- one unary call for each tensor, which the contract does not offer, to a server that only receives them;
- vLLM alone in a separate process: pause, reload from disk and resume; the load of a staged version with
  nothing else to do; and a restart, from the order to stop to the first token.

Rounds are interleaved, and each figure is a median over rounds. Each ratio is taken within a round, to the
measurements right before and after. The last line is one JSON object: {"shared_memory_of_memcpy": ratio of
speeds, "stream_of_tcp": likewise, "pause_over_load_seconds": time of a pause beyond the engine's own load,
"disk_reload_over_pause": ratio, "restart_over_pause": ratio}
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import grpc
import numpy as np
import torch
from benchmarks.weights.baselines import Calls, Engine, Memcpy, Tcp, engine
from benchmarks.weights.figures import (
    CHECKPOINT,
    COLLECTIVE,
    DELTA,
    SHARED,
    STAGING,
    STREAM,
    TRANSPORTS,
    Figures,
    headline,
    show,
)
from benchmarks.weights.models import load_model, moved, tensors_of, untied
from benchmarks.weights.server import (
    DTYPE,
    PROMPT,
    TURN_TOKENS,
    Exchange,
    Server,
    Switch,
    serve,
    watched,
)
from rich.console import Console
from transformers import AutoTokenizer

from penstock.demo.model import prepare_model
from penstock.server.vllm import environment as vllm_environment
from penstock.trainer.config.weights import CollectiveConfig
from penstock.trainer.core.aio import ComputeThread
from penstock.trainer.weights.collective.transport import CollectiveTransport
from penstock.trainer.weights.copy import WeightCopy, Weights
from penstock.trainer.weights.payload import Payload
from penstock.trainer.weights.publisher import Publisher
from penstock.trainer.weights.sender import Delta, Sender
from penstock.trainer.weights.transports import (
    CheckpointFolder,
    SharedMemory,
    Stream,
    Transport,
    VersionFolders,
)

ENGINE = ["--dtype", DTYPE, "--max-model-len", "1024"]
CHANGED_RATIO = 0.01


@dataclass(frozen=True)
class Travel:
    """The upload of one version."""

    seconds: float
    packing_seconds: float
    bytes_sent: int


class Trainer:
    """Publishes versions by every transport, with one publisher each, and switches to them."""

    def __init__(self, server: Server, exchange: Exchange, folder: Path, prompt: list[int]) -> None:
        self._compute = ComputeThread()
        self._server = server
        self._exchange = exchange
        self._prompt = prompt
        channel = server.weights
        folders = VersionFolders(self._compute, folder, keep=2)
        stream = self._publisher(channel, Stream(channel), "on")
        self._publishers = {
            SHARED: self._publisher(channel, SharedMemory(channel)),
            STREAM: stream,
            # Its base is the version that the stream uploaded before.
            DELTA: stream,
            CHECKPOINT: self._publisher(channel, CheckpointFolder(channel, folders)),
            COLLECTIVE: self._publisher(
                channel, CollectiveTransport(server.address, CollectiveConfig(backend="gloo"))
            ),
        }
        self.version = 0

    def _publisher(
        self, channel: grpc.aio.Channel, transport: Transport, delta: Delta = "auto"
    ) -> Publisher:
        copy = WeightCopy(self._compute)
        copy.dtype = DTYPE
        sender = Sender(channel, copy, self._exchange, transports=[transport], delta=delta)
        return Publisher(copy, [sender])

    async def publish(self, transport: str, weights: Weights) -> Travel:
        """Uploads the next version until it is staged."""
        self.version += 1
        publisher = self._publishers[transport]
        if transport != DELTA:
            publisher.senders[0].forget_base()
        began = time.perf_counter()
        await publisher.fill(weights, self.version, uploads=True)
        packed = time.perf_counter()
        sent = await publisher.senders[0].upload(self.version)
        staged = time.perf_counter()
        assert sent is not None and sent.delta == (transport == DELTA), sent
        return Travel(staged - began, packed - began, sent.bytes_sent)

    async def switch(self, transport: str, turns: int) -> Switch:
        """Switches to the version published last."""
        switched = await watched(
            self._server,
            self._prompt,
            turns,
            lambda: self._exchange.switch(self.version),
        )
        self._publishers[transport].senders[0].switched(self.version)
        return switched

    async def broadcast(self, weights: Weights, turns: int) -> tuple[Travel, Switch]:
        """Sends the next version by the collective, after which it is active."""
        self.version += 1
        publisher = self._publishers[COLLECTIVE]
        sender, bytes_sent = publisher.senders[0], 0
        began = time.perf_counter()
        await publisher.fill(weights, self.version)
        packing = time.perf_counter() - began

        async def send() -> float:
            nonlocal bytes_sent
            sent = await sender.upload(self.version)
            assert sent is not None
            bytes_sent = sent.bytes_sent
            return sent.pause_seconds

        switched = await watched(self._server, self._prompt, turns, send)
        sender.switched(self.version)
        return Travel(packing + switched.active, packing, bytes_sent), switched

    def close(self) -> None:
        for publisher in set(self._publishers.values()):
            publisher.close()
        self._compute.close()


@contextlib.asynccontextmanager
async def trainer(model: Path) -> AsyncIterator[Trainer]:
    prompt = AutoTokenizer.from_pretrained(model).encode(PROMPT)
    with tempfile.TemporaryDirectory() as folder:
        async with serve(model) as server:
            exchange = Exchange(server)
            await exchange.hello()
            publishing = Trainer(server, exchange, Path(folder), prompt)
            try:
                yield publishing
            finally:
                exchange.close()
                publishing.close()


def nudged(weights: Weights) -> Weights:
    """Returns the weights with one element in a hundred changed to some nearby value."""
    generator = torch.Generator().manual_seed(2)
    changed: list[tuple[str, torch.Tensor]] = []
    for name, tensor in weights():
        bits = tensor.detach().clone().view(torch.int16).flatten()
        count = max(1, int(bits.numel() * CHANGED_RATIO))
        places = torch.randint(bits.numel(), (count,), generator=generator)
        bits[places] ^= torch.randint(1, 16, (count,), generator=generator).to(torch.int16)
        changed.append((name, bits.view(torch.bfloat16).view(tensor.shape)))
    return lambda: iter(changed)


def packed(weights: Weights) -> tuple[Payload, dict[str, object]]:
    """Packs a version into memory; also returns the description that the engine's loader needs."""
    payload = Payload(weights(), DTYPE)
    payload.fill(weights())
    specs = payload.specs
    return payload, {
        "path": str(payload.file.path),
        "names": [spec.name for spec in specs],
        "dtypes": [spec.dtype for spec in specs],
        "shapes": [list(spec.shape) for spec in specs],
        "offsets_bytes": [spec.offset_bytes for spec in specs],
    }


@dataclass
class Round:
    """The measurements of one round, and the figures they are added to."""

    figures: Figures
    trainer: Trainer
    bare: Engine | None
    memcpy: Memcpy
    tcp: Tcp
    calls: Calls
    tensors: Sequence[memoryview]
    update: dict[str, object]
    folders: Sequence[Path]
    turns: int
    repeats: int

    async def travel(self, transport: str, weights: Sequence[Weights]) -> None:
        """Uploads several versions by one transport, each between two measurements of its baseline.

        Each version is switched to, the last one with turns in flight. The first is not measured,
        because it cannot reuse the memory that another transport left.
        """
        baseline = self.memcpy if transport in (SHARED, CHECKPOINT) else self.tcp
        name = "memcpy" if transport in (SHARED, CHECKPOINT) else "TCP"
        seconds: list[float] = []
        packing: list[float] = []
        ratios: list[float] = []
        baselines: list[float] = []
        if transport == DELTA:
            await self.trainer.publish(STREAM, weights[-1])
            await self.trainer.switch(STREAM, 0)
        for number in range(self.repeats + 1):
            before = baseline()
            travel = await self.trainer.publish(transport, weights[number % len(weights)])
            after = baseline()
            if number == self.repeats:
                await self.switch(transport)
            else:
                await self.trainer.switch(transport, 0)
            if not number:
                continue
            seconds.append(travel.seconds)
            packing.append(travel.packing_seconds)
            baselines += before, after
            # The TCP baseline sends packed bytes; with shared memory, the copy itself is the packing.
            comparable = travel.seconds - (travel.packing_seconds if name == "TCP" else 0.0)
            ratios.append((before + after) / 2 / comparable)
            self.figures.bytes_sent[transport] = travel.bytes_sent
        self.figures.add("travel", transport, median(seconds))
        self.figures.add("packing", transport, median(packing))
        self.figures.add("travel", name, median(baselines))
        self.figures.add("ratios", transport, median(ratios))

    async def broadcast(self, weights: Sequence[Weights]) -> None:
        """Sends several versions by the collective, each between two measurements of TCP.

        One more has turns in flight, to measure their waits. The first is not measured, because it also
        joins the collective.
        """
        seconds: list[float] = []
        packing: list[float] = []
        ratios: list[float] = []
        baselines: list[float] = []
        for number in range(self.repeats + 1):
            before = self.tcp()
            travel, _ = await self.trainer.broadcast(weights[number % len(weights)], 0)
            after = self.tcp()
            if not number:
                continue
            seconds.append(travel.seconds)
            packing.append(travel.packing_seconds)
            baselines += before, after
            ratios.append((before + after) / 2 / (travel.seconds - travel.packing_seconds))
            self.figures.bytes_sent[COLLECTIVE] = travel.bytes_sent
        last = weights[(self.repeats + 1) % len(weights)]
        _, switched = await self.trainer.broadcast(last, self.turns)
        self.figures.add("travel", COLLECTIVE, median(seconds))
        self.figures.add("packing", COLLECTIVE, median(packing))
        self.figures.add("travel", "TCP", median(baselines))
        self.figures.add("ratios", COLLECTIVE, median(ratios))
        self.note(COLLECTIVE, switched)

    async def switch(self, transport: str) -> None:
        """Switches with turns in flight, between two loads by an otherwise idle engine."""
        loads = [await self.load()]
        switched = await self.trainer.switch(transport, self.turns)
        loads.append(await self.load())
        self.note(transport, switched)
        self.figures.add("over_load", transport, switched.pause - fmean(loads))

    def note(self, transport: str, switched: Switch) -> None:
        """Adds the measurements of a switch."""
        self.figures.add("pause", transport, switched.pause)
        self.figures.add("active", transport, switched.active)
        if switched.waits is not None:
            for name, seconds in zip((transport, "ordinary"), switched.waits, strict=True):
                self.figures.add("wait", name, seconds)

    async def load(self) -> float:
        """Returns the seconds of the engine's own load."""
        if self.bare is None:
            return 0.0
        seconds = await self.bare(do="load", update=self.update)
        self.figures.add("pause", "load", seconds)
        return seconds

    async def vllm(self, number: int) -> None:
        """Measures vLLM alone, and a call for each tensor."""
        self.figures.add("travel", "calls", await self.calls(self.tensors))
        if self.bare is None:
            return
        path = str(self.folders[number % 2])
        reload = await self.bare(do="reload", path=path, turns=self.turns, tokens=TURN_TOKENS)
        self.figures.add("pause", "reload", reload)
        self.figures.add("pause", "restart", await self.bare(do="restart"))
        # The first loads include the new engine's warm-up and are not measured.
        await self.bare(do="load", update=self.update)
        await self.bare(do="reload", path=path, turns=0, tokens=TURN_TOKENS)


async def measure(arguments: argparse.Namespace, console: Console) -> dict[str, float | None]:
    chosen = arguments.only.split(",")
    base = prepare_model(arguments.model, console.print)
    figures = Figures()
    async with contextlib.AsyncExitStack() as stack:
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if not arguments.model:
            base = await asyncio.to_thread(untied, base, temporary / "untied")
        folders = [base, await asyncio.to_thread(moved, base, temporary / "moved", 1)]
        weights = [tensors_of(load_model(folder)) for folder in folders]
        one_percent = nudged(weights[1])
        payload, update = packed(weights[0])
        stack.callback(payload.close)
        data = np.frombuffer(payload.file.view, np.uint8).copy()
        console.print(f"starting penstock serve on {base}")
        publishing = await stack.enter_async_context(trainer(base))
        bare = None
        if not arguments.no_vllm:
            console.print("starting vLLM alone")
            bare = await stack.enter_async_context(engine(str(base), ENGINE))
        tcp, calls = Tcp(data), Calls()
        stack.callback(tcp.close)
        stack.push_async_callback(calls.close)
        tensors = [
            payload.file.view[spec.offset_bytes : spec.offset_bytes + spec.length_bytes]
            for spec in payload.specs
        ]
        # The first round also sets up mappings and connections and is not measured.
        round_ = Round(
            Figures(),
            publishing,
            bare,
            Memcpy(data),
            tcp,
            calls,
            tensors,
            update,
            folders,
            arguments.turns,
            arguments.repeats,
        )
        for number in range(arguments.rounds + 1):
            for transport in STAGING:
                if transport in chosen:
                    versions = [one_percent, weights[1]] if transport == DELTA else weights
                    await round_.travel(transport, versions)
            if COLLECTIVE in chosen:
                await round_.broadcast(weights)
            await round_.vllm(number)
            if not number:
                round_.figures = figures
            else:
                console.print(f"round {number} of {arguments.rounds}")
        show(console, figures, data.nbytes, len(tensors), arguments)
    return headline(figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", help="model directory or hub name; default: the demo's, untied")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3, help="versions per transport and round")
    parser.add_argument("--turns", type=int, default=16, help="turns in flight at a switch")
    parser.add_argument("--only", default=",".join(TRANSPORTS), help="transports to measure")
    parser.add_argument("--no-vllm", action="store_true", help="do not measure vLLM alone")
    arguments = parser.parse_args()
    console = Console(width=110)
    # Both engines run with the settings that `penstock serve` uses.
    vllm_environment.set_cpu_defaults()
    print(json.dumps(asyncio.run(measure(arguments, console))))


if __name__ == "__main__":
    main()
