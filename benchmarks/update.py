"""How long a full weight update pauses generation, and whether it is exact.

    python benchmarks/update.py [--model DIR] [--updates 20] [--turns 16] [--in-flight keep]

A rollout server samples under load. The trainer's publisher packs the model's weights (bf16) into shared
memory and uploads them staged, while generation continues. Then it switches. Versions alternate between the
model's weights and weights moved by noise.

Afterwards every token of the load is scored in a plain forward pass, under the weights of the version it
carries. The tokens and log-probabilities of the updated server are compared with those of a fresh server
that was started with the same weights.

The last line is one JSON object: {"pause_seconds": median over the updates, ...}
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from penstock.demo.model import prepare_model
from penstock.trainer.core.compute import ComputeThread
from penstock.trainer.weights.copy import WeightCopy
from penstock.trainer.weights.publisher import Publisher
from penstock.trainer.weights.sender import Sender
from penstock.v1 import rollout_service_pb2, trainer_service_pb2, trajectory_pb2, weights_pb2
from penstock.wire import codec
from penstock.wire.channel import client_options

GenerateRequest = codec.twin(rollout_service_pb2.GenerateRequest)
SamplingParams = codec.twin(rollout_service_pb2.SamplingParams)
TokenSequence = codec.twin(trajectory_pb2.TokenSequence)
ExchangeRequest = codec.twin(trainer_service_pb2.ExchangeRequest)

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

    def __init__(self, process: asyncio.subprocess.Process, address: str) -> None:
        self.process = process
        self.address = address
        self.channel = grpc.aio.insecure_channel(address, options=client_options())
        self.weights = grpc.aio.insecure_channel(
            address, options=client_options(own_connection=True)
        )
        self._generate = self.channel.unary_stream(
            "/penstock.v1.RolloutService/Generate",
            request_serializer=codec.encode,
            response_deserializer=codec.decoder(rollout_service_pb2.GenerateResponse),
        )
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
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "penstock.cli", "serve", "--model", str(model)),
        *("--listen", "127.0.0.1:0", "--dtype", "bfloat16", "--max-model-len", "1024"),
        *options,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    line = (await process.stdout.readline()).decode()
    server = Server(process, line.split(" on ")[1].split()[0])
    try:
        yield server
    finally:
        await server.channel.close()
        await server.weights.close()
        with contextlib.suppress(ProcessLookupError):  # Already ended, which the caller reports.
            process.terminate()
        await process.wait()


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


def load_model(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()


def tensors_of(model: PreTrainedModel) -> Callable[[], Iterator[tuple[str, torch.Tensor]]]:
    tied = model.config.tie_word_embeddings

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in model.state_dict().items():
            if not (tied and name == "lm_head.weight"):
                yield name, tensor

    return tensors


def moved(model: Path, folder: Path, seed: int) -> Path:
    """Writes a copy of the model with noise added to every weight; returns its folder."""
    generator = torch.Generator().manual_seed(seed)
    other = load_model(model)
    with torch.no_grad():
        for parameter in other.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.02
            parameter.mul_(1 + noise.to(parameter.dtype))
    other.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


def score(model: PreTrainedModel, turn: Turn) -> np.ndarray:
    """Log-probability of each of a turn's tokens at temperature 1, float64, shape [n]."""
    ids = torch.tensor([turn.prompt + turn.tokens])
    with torch.no_grad():
        logits = model(ids).logits[0, len(turn.prompt) - 1 : -1].float()
    logprobs = torch.log_softmax(logits, -1)
    return logprobs[torch.arange(len(turn.tokens)), torch.tensor(turn.tokens)].double().numpy()


async def measure(arguments: argparse.Namespace, console: Console) -> dict[str, object]:
    base = prepare_model(arguments.model, console.print)
    in_flight = getattr(weights_pb2, f"IN_FLIGHT_POLICY_{arguments.in_flight.upper()}")
    with tempfile.TemporaryDirectory() as temporary:
        folders = [base, await asyncio.to_thread(moved, base, Path(temporary) / "moved", 1)]
        models = [load_model(folder) for folder in folders]
        prompt = AutoTokenizer.from_pretrained(base).encode(PROMPT)
        pauses: list[float] = []
        uploads: list[float] = []
        turns: list[Turn] = []
        compute = ComputeThread()
        async with serve(base) as server:
            exchange = Exchange(server, in_flight)
            copy = WeightCopy(compute)
            copy.dtype = "bfloat16"
            sender = Sender(server.weights, copy, exchange)
            publisher = Publisher(copy, [sender])
            await exchange.hello()
            stop = asyncio.Event()

            async def load(index: int) -> None:
                while not stop.is_set():
                    turns.append(await server.turn([*prompt, 100 + index], 160, 1.0))

            loads = [asyncio.ensure_future(load(i)) for i in range(arguments.turns)]
            await asyncio.sleep(2.0)
            for version in range(1, arguments.updates + 1):
                model = models[version % 2]
                await publisher.fill(tensors_of(model), version)
                began = time.perf_counter()
                await sender.upload(version)
                uploads.append(time.perf_counter() - began)
                pauses.append(await exchange.switch(version))
                await asyncio.sleep(0.5)
            stop.set()
            await asyncio.gather(*loads)
            updated = await server.turn(prompt, 64, 0.0)
            length = publisher.length_bytes
            exchange.close()
            publisher.close()
        compute.close()
        console.print(f"{arguments.updates} updates done; starting a fresh server to compare with")
        async with serve(folders[arguments.updates % 2]) as fresh_server:
            fresh = await fresh_server.turn(prompt, 64, 0.0)
        exact = fresh.tokens == updated.tokens and fresh.logprobs == updated.logprobs
        checked = await asyncio.to_thread(check_versions, models, turns)
    table = Table(title=f"{length / 1e6:.0f} MB through shared memory, {arguments.turns} turns")
    table.add_column("")
    table.add_column("median", justify="right")
    table.add_column("smallest", justify="right")
    table.add_column("largest", justify="right")
    for name, values in (("pause, s", pauses), ("upload and verification, s", uploads)):
        table.add_row(
            name, f"{statistics.median(values):.3f}", f"{min(values):.3f}", f"{max(values):.3f}"
        )
    console.print(table)
    console.print(f"tokens and log-probabilities equal a fresh server's: {exact}")
    console.print(
        f"{checked['tokens']} tokens scored under the version they carry: mean difference "
        f"{checked['difference']:.4f}; under the other weights {checked['difference_other']:.4f}; "
        f"turns that agree better with other versions than their own: {checked['mislabelled']}"
    )
    return {
        "pause_seconds": round(statistics.median(pauses), 4),
        "upload_seconds": round(statistics.median(uploads), 4),
        "bytes": length,
        "equals_fresh_server": exact,
        **checked,
    }


def check_versions(models: list[PreTrainedModel], turns: list[Turn]) -> dict[str, float]:
    """Scores turns under both weights. Tokens with a wrong version label agree better with the other one.

    Only the first segment of each turn is scored: the tokens sampled before any switch, from a cache of
    their version. A turn that continues over a switch keeps a cache computed under several versions
    (policy KEEP), which a plain forward pass cannot reproduce.
    """
    own: list[np.ndarray] = []
    other: list[np.ndarray] = []
    for turn in turns:
        first = turn.versions[0]
        count = next((i for i, v in enumerate(turn.versions) if v != first), len(turn.versions))
        if count < 8:
            continue
        piece = Turn(turn.prompt, turn.tokens[:count], turn.logprobs[:count])
        sampled = np.asarray(piece.logprobs)
        own.append(np.abs(score(models[first % 2], piece) - sampled))
        other.append(np.abs(score(models[1 - first % 2], piece) - sampled))
    pairs = list(zip(own, other, strict=True))
    mislabelled = sum(float(mine.mean()) >= float(others.mean()) for mine, others in pairs)
    return {
        "tokens": float(sum(len(mine) for mine in own)),
        "difference": round(float(np.concatenate(own).mean()), 4),
        "difference_other": round(float(np.concatenate(other).mean()), 4),
        "mislabelled": float(mislabelled),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", help="model directory or hub name; default: the demo's")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--turns", type=int, default=16, help="turns in flight at all times")
    parser.add_argument(
        "--in-flight", default="keep", choices=("keep", "recompute", "drain", "abort")
    )
    arguments = parser.parse_args()
    console = Console(width=110)
    print(json.dumps(asyncio.run(measure(arguments, console))))


if __name__ == "__main__":
    main()
