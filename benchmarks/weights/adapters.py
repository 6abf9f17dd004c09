"""How long turns in flight wait for tokens during a switch, to an adapter and to a full version.

    python -m benchmarks.weights.adapters [--model DIR] [--rounds 6] [--turns 16] [--in-flight keep]

Runs two real `penstock serve` processes, one that takes adapters and one that does not. For each, the
trainer's publisher uploads through shared memory. In each round both servers switch once, with turns in
flight whose tokens are streamed one by one.

A switch to an adapter pauses nothing. But the engine loads the adapter between two steps, so the next step
waits for that. The cost of a switch is the longest wait of any turn for its next token. It is measured from
the order to switch until the first tokens after the version is active. The ordinary wait of the same turns
before the switch is shown next to it. It differs between the two servers, because vLLM on the CPU samples
more slowly with adapters.

Rounds are interleaved and figures are medians over rounds. The last line is one JSON object, in seconds:
{"adapter_longest_wait": .., "adapter_ordinary_wait": .., "full_longest_wait": .., "full_ordinary_wait": ..,
"adapter_bytes": .., "full_bytes": ..}
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch
from benchmarks.weights.models import load_model, moved, tensors_of
from benchmarks.weights.server import DTYPE, PROMPT, Exchange, Switch, serve, watched
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from penstock.demo.model import prepare_model
from penstock.demo.settings import LORA_ALPHA, LORA_RANK
from penstock.trainer.config.trainer import LoraConfig
from penstock.trainer.core.aio import ComputeThread
from penstock.trainer.policy.adapter import Adapter
from penstock.trainer.weights.copy import WeightCopy, Weights
from penstock.trainer.weights.publisher import Publisher
from penstock.trainer.weights.sender import Sender
from penstock.trainer.weights.transports import SharedMemory
from penstock.v1 import weights_pb2

ADAPTER, FULL = "adapter", "full"
LABELS = {ADAPTER: f"an adapter of rank {LORA_RANK}", FULL: "a full version"}
MAX_ADAPTERS = 3
"""Adapters that sample at the same time: the new one, and earlier ones that turns may still need."""
TURN_TOKENS = 96
AFTER_SECONDS = 2.0
"""From the start of the turns to the switch. Their first steps are slow, because they compute prompts."""


@dataclass
class Site:
    """A server, the weights its trainer switches between, and the measured switches."""

    stack: contextlib.AsyncExitStack
    weights: Sequence[Weights]
    prompt: list[int]
    in_flight: weights_pb2.InFlightPolicy.ValueType
    adapter: weights_pb2.LoraAdapter | None = None
    version: int = 0
    bytes_sent: int = 0
    switches: list[Switch] = field(default_factory=list[Switch])

    async def start(self, model: Path) -> None:
        """Starts the server and opens a trainer session with it."""
        lora = ("--enable-lora", "--max-lora-rank", str(LORA_RANK))
        lora += ("--max-loras", str(MAX_ADAPTERS))
        options = lora if self.adapter is not None else ()
        self._server = await self.stack.enter_async_context(serve(model, *options))
        self._exchange = Exchange(self._server, self.in_flight)
        self.stack.callback(self._exchange.close)
        await self._exchange.hello()
        compute = ComputeThread()
        self.stack.callback(compute.close)
        copy, channel = WeightCopy(compute), self._server.weights
        copy.dtype = DTYPE
        transports = [SharedMemory(channel)]
        self._sender = Sender(
            channel, copy, self._exchange, transports=transports, adapter=self.adapter
        )
        self._publisher = Publisher(copy, [self._sender])
        self.stack.callback(self._publisher.close)

    async def switch(self, turns: int) -> None:
        """Publishes the next version and switches to it with turns in flight."""
        self.version += 1
        weights = self.weights[self.version % len(self.weights)]
        await self._publisher.fill(weights, self.version)
        sent = await self._sender.upload(self.version)
        assert sent is not None
        self.bytes_sent = sent.bytes_sent
        self.switches.append(
            await watched(
                self._server,
                self.prompt,
                turns,
                lambda: self._exchange.switch(self.version),
                TURN_TOKENS,
                AFTER_SECONDS,
            )
        )
        self._sender.switched(self.version)


def adapters_of(model: Path) -> tuple[weights_pb2.LoraAdapter, list[Weights]]:
    """Returns the upload's adapter description, and the weights of two adapters that change sampling."""
    adapter = Adapter(load_model(model), LoraConfig(rank=LORA_RANK, alpha=LORA_ALPHA))
    found: list[Weights] = []
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        # PEFT initializes the second matrix to zero, so a fresh adapter would change nothing.
        tensors = [
            (name, 0.02 * torch.randn(tensor.shape, generator=generator))
            for name, tensor in adapter.weights()
        ]
        found.append(lambda tensors=tensors: iter(tensors))
    return adapter.message(), found


@contextlib.asynccontextmanager
async def sites(arguments: argparse.Namespace, console: Console) -> AsyncIterator[dict[str, Site]]:
    base = prepare_model(arguments.model, console.print)
    prompt = AutoTokenizer.from_pretrained(base).encode(PROMPT)
    policy = weights_pb2.InFlightPolicy.Value(f"IN_FLIGHT_POLICY_{arguments.in_flight.upper()}")
    async with contextlib.AsyncExitStack() as stack:
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        other = await asyncio.to_thread(moved, base, temporary / "moved", 1)
        full = [tensors_of(load_model(folder)) for folder in (base, other)]
        message, adapters = await asyncio.to_thread(adapters_of, base)
        found = {
            ADAPTER: Site(stack, adapters, prompt, policy, message),
            FULL: Site(stack, full, prompt, policy),
        }
        for name, site in found.items():
            console.print(f"starting penstock serve on {base} for {LABELS[name]}")
            await site.start(base)
        yield found


async def measure(arguments: argparse.Namespace, console: Console) -> dict[str, float]:
    async with sites(arguments, console) as found:
        for number in range(arguments.rounds + 1):
            for site in found.values():
                await site.switch(arguments.turns)
                if not number:
                    # The first switch also sets up mappings and the adapter's kernels: not counted.
                    site.switches.clear()
            if number:
                console.print(f"round {number} of {arguments.rounds}")
    show(console, found, arguments)
    figures: dict[str, float] = {}
    for name, site in found.items():
        longest, ordinary = waits(site)
        figures[f"{name}_longest_wait"] = round(median(longest), 4)
        figures[f"{name}_ordinary_wait"] = round(median(ordinary), 4)
    return figures | {f"{name}_bytes": site.bytes_sent for name, site in found.items()}


def waits(site: Site) -> tuple[list[float], list[float]]:
    """Returns the longest wait for a token at each switch and the ordinary wait before, in seconds."""
    found = [switched.waits for switched in site.switches if switched.waits is not None]
    return [longest for longest, _ in found], [ordinary for _, ordinary in found]


def show(console: Console, found: dict[str, Site], arguments: argparse.Namespace) -> None:
    table = Table(
        title=f"a switch with {arguments.turns} turns in flight, {arguments.in_flight}; "
        f"{arguments.rounds} rounds"
    )
    for name in ("", "median, ms", "smallest", "largest"):
        table.add_column(name, justify="right" if name else "left")

    def line(label: str, values: Sequence[float]) -> None:
        three = (median(values), min(values), max(values))
        table.add_row(label, *(f"{1e3 * value:.1f}" for value in three))

    for name, site in found.items():
        longest, ordinary = waits(site)
        table.add_section()
        table.add_row(f"[bold]{LABELS[name]}[/], {site.bytes_sent / 1e6:.1f} MB")
        line("pause, as reported by the server", [switched.pause for switched in site.switches])
        line("from the order until it is active", [switched.active for switched in site.switches])
        line("longest wait for a token during the switch", longest)
        line("ordinary wait for a token before", ordinary)
        more = [long - usual for long, usual in zip(longest, ordinary, strict=True)]
        line("difference", more)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", help="model directory or hub name; default: the demo's")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--turns", type=int, default=16, help="turns in flight at a switch")
    parser.add_argument("--in-flight", default="keep", choices=("keep", "recompute"))
    arguments = parser.parse_args()
    if arguments.turns < 1:
        parser.error("--turns must be at least 1: without turns, no wait can be measured")
    print(json.dumps(asyncio.run(measure(arguments, Console(width=110)))))


if __name__ == "__main__":
    main()
