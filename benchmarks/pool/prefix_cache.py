"""The share of a turn's context that comes from the prefix cache, by routing policy.

    python -m benchmarks.pool.prefix_cache [--model DIR] [--engines 2] [--groups 4]
        [--siblings 4] [--turns 5]

Runs several `penstock serve` with real vLLM, and one hub for each policy (`pool.routing`) in front of the
same engine servers. One hub at a time is used, in interleaved rounds. The siblings of a group start with
the same prompt at the same time. Each turn appends a tool's answer, which takes a moment. Every round has
prompts that no cache has seen.

Without --model, the benchmark creates a small model with one token per byte. That is enough, because the
hit rate depends only on the tokens.

The hit rate is the number of tokens that the engine took from its cache
(`TurnFinished.cached_token_count`) divided by the context of all turns. The last line is one JSON object:
{"hit_rate": {policy: ..}, "first_token_seconds": {policy: ..}, "seconds": {policy: ..}}. The latter two
are medians over turns and over rounds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import click
import grpc
import numpy as np
from benchmarks.pool.processes import Hub, hub
from benchmarks.support.processes import Process, serving_address, started
from rich.console import Console
from rich.table import Table

from penstock.v1 import rollout_service_pb2, trajectory_pb2
from penstock.wire import codec, messages, methods

POLICIES = ("sticky", "least_loaded", "round_robin")
PROMPT_TOKENS = 512
TURN_TOKENS = 32
OBSERVATION_TOKENS = 64
LONGEST_TOOL_SECONDS = 0.5
ENGINE = ("--max-model-len", "2048", "--max-num-seqs", "32", "--kv-cache-memory-bytes", "268435456")


@dataclass(frozen=True)
class Shape:
    """Number and size of the conversations in a round."""

    groups: int
    siblings: int
    turns: int


@dataclass
class Seen:
    """Measurements of one policy."""

    context: list[int] = field(default_factory=list[int])
    cached: list[int] = field(default_factory=list[int])
    """Cached context tokens of each turn."""
    opens: list[bool] = field(default_factory=list[bool])
    """Whether each turn was the first of its conversation."""
    first_token_seconds: list[float] = field(default_factory=list[float])
    round_seconds: list[float] = field(default_factory=list[float])

    def hit_rate(self, *, opens: bool | None = None) -> float:
        """Hit rate of all turns, or only of first turns (`opens`), or only of later ones."""
        chosen = [i for i, first in enumerate(self.opens) if opens is None or first == opens]
        return sum(self.cached[i] for i in chosen) / sum(self.context[i] for i in chosen)


class Agents:
    """The conversations through one hub."""

    def __init__(self, own: Hub, seen: Seen, rng: random.Random) -> None:
        channel = own.channel
        self._generate = methods.streaming(channel, rollout_service_pb2.GenerateResponse)
        self._continue = methods.streaming(channel, rollout_service_pb2.ContinueResponse)
        self._complete = channel.unary_unary(
            "/penstock.v1.TaskService/CompleteTrajectory", codec.encode
        )
        self._seen = seen
        self._rng = rng

    async def round(self, name: str, shape: Shape) -> None:
        """Runs every conversation once."""
        began = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for group in range(shape.groups):
                prompt = self._tokens(PROMPT_TOKENS)
                for index in range(shape.siblings):
                    tasks.create_task(self._converse(f"{name}-{group}", index, shape, prompt))
        self._seen.round_seconds.append(time.perf_counter() - began)

    def _tokens(self, count: int) -> trajectory_pb2.TokenSequence:
        ids = np.asarray([self._rng.randrange(32, 127) for _ in range(count)], np.int32)
        return messages.TokenSequence(token_ids=codec.array_bytes(ids))

    async def _converse(
        self, group: str, index: int, shape: Shape, prompt: trajectory_pb2.TokenSequence
    ) -> None:
        name = f"{group}-{index}"
        opening = messages.GenerateRequest(
            trajectory_id=name,
            group_id=group,
            group_size=shape.siblings,
            sample_index=index,
            tokens=prompt,
            sampling_params=messages.SamplingParams(max_tokens=TURN_TOKENS, ignore_eos=True),
            stream_options=prompt_stream(),
        )
        await self._turn(self._generate(opening), opens=True)
        for _ in range(shape.turns - 1):
            await asyncio.sleep(self._rng.uniform(0.0, LONGEST_TOOL_SECONDS))
            said = self._tokens(OBSERVATION_TOKENS)
            following = messages.ContinueRequest(
                trajectory_id=name, tokens=said, stream_options=prompt_stream()
            )
            await self._turn(self._continue(following), opens=False)
        await self._complete(
            messages.CompleteTrajectoryRequest(
                trajectory_id=name, outcome=messages.Outcome(reward=1.0)
            )
        )

    async def _turn(
        self,
        call: grpc.aio.UnaryStreamCall[
            object, rollout_service_pb2.GenerateResponse | rollout_service_pb2.ContinueResponse
        ],
        *,
        opens: bool,
    ) -> None:
        began, first = time.perf_counter(), 0.0
        async for event in call:
            kind = event.WhichOneof("event")
            if kind == "started":
                self._seen.context.append(event.started.context_token_count)
                self._seen.opens.append(opens)
                place = len(self._seen.cached)
                self._seen.cached.append(0)
            elif kind == "segment":
                first = first or time.perf_counter() - began
            else:
                self._seen.cached[place] = event.finished.cached_token_count
        self._seen.first_token_seconds.append(first)


def prompt_stream() -> rollout_service_pb2.StreamOptions:
    """Stream options that send each token as soon as it is sampled."""
    options = messages.StreamOptions()
    options.flush_interval.FromNanoseconds(0)
    return options


async def measure(model: Path, count: int, shape: Shape, rounds: int) -> dict[str, Seen]:
    """Measures every routing policy in interleaved rounds."""
    seen = {policy: Seen() for policy in POLICIES}
    rng = random.Random(0)
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        processes: list[Process] = []
        for number in range(count):
            command = ("-m", "penstock.cli", "serve", "--model", str(model), *ENGINE)
            command += ("--listen", "127.0.0.1:0", "--http-listen", "")
            log = folder / f"engine-{number}.log"
            process = await stack.enter_async_context(started(*command, log=log))
            stack.callback(process.terminate)
            processes.append(process)
        serving = [await serving_address(process) for process in processes]
        hubs: dict[str, Agents] = {}
        for policy in POLICIES:
            own = folder / policy
            own.mkdir()
            setting = f"pool.routing={policy}"
            made = await stack.enter_async_context(hub(own, model, serving, setting))
            hubs[policy] = Agents(made, seen[policy], rng)
        for number in range(rounds + 1):
            for policy in random.sample(POLICIES, len(POLICIES)):
                await hubs[policy].round(f"{policy}-{number}", shape)
                if number == 0:
                    # The first round includes vLLM's warm-up.
                    seen[policy].__init__()
    return seen


def show(seen: dict[str, Seen]) -> None:
    """Prints the table and the last line."""
    table = Table(title="context tokens from the prefix cache")
    for name in ("routing", "all turns", "first turns", "later turns", "first token", "a round"):
        table.add_column(name)
    for policy, found in seen.items():
        table.add_row(
            policy,
            f"{found.hit_rate():.1%}",
            f"{found.hit_rate(opens=True):.1%}",
            f"{found.hit_rate(opens=False):.1%}",
            f"{statistics.median(found.first_token_seconds) * 1e3:.0f} ms",
            f"{statistics.median(found.round_seconds):.2f} s",
        )
    Console(width=120).print(table)
    medians = {"first_token_seconds": "first_token_seconds", "seconds": "round_seconds"}
    result = {"hit_rate": {policy: round(found.hit_rate(), 4) for policy, found in seen.items()}}
    for name, of in medians.items():
        result[name] = {
            policy: round(float(statistics.median(getattr(found, of))), 4)
            for policy, found in seen.items()
        }
    print(json.dumps(result))


@click.command()
@click.option("--model", type=click.Path(path_type=Path, exists=True), help="Model folder.")
@click.option("--engines", "count", default=2, show_default=True)
@click.option("--groups", default=4, show_default=True)
@click.option("--siblings", default=4, show_default=True)
@click.option("--turns", default=5, show_default=True)
@click.option("--rounds", default=2, show_default=True)
def main(
    model: Path | None, count: int, groups: int, siblings: int, turns: int, rounds: int
) -> None:
    """Measure prefix-cache hit rates by routing policy."""
    with tempfile.TemporaryDirectory() as name:
        if model is None:
            from tests.support.tiny_model import make_tiny_model

            model = make_tiny_model(Path(name) / "tiny", layers=8, hidden=256)
        show(asyncio.run(measure(model, count, Shape(groups, siblings, turns), rounds)))


if __name__ == "__main__":
    main()
