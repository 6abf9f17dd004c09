"""How long a full weight update pauses generation, and whether it is exact.

    python -m benchmarks.weights.update [--model DIR] [--updates 20] [--turns 16] [--in-flight keep]

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
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from benchmarks.weights.models import load_model, moved, tensors_of
from benchmarks.weights.server import PROMPT, Exchange, Turn, serve
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer, PreTrainedModel

from penstock.demo.model import prepare_model
from penstock.trainer.core.aio import ComputeThread
from penstock.trainer.weights.copy import WeightCopy
from penstock.trainer.weights.publisher import Publisher
from penstock.trainer.weights.sender import Sender
from penstock.v1 import weights_pb2


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
