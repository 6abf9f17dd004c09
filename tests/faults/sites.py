"""The servers that faults are applied to: one around the fake engine, one around real vLLM in fp32."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from penstock.server.assembly import Serving
from penstock.server.config import settings as config
from penstock.server.engine.protocol import EngineLoadFailed, StagedWeights
from penstock.server.lifecycle import Lifecycle, bind
from penstock.wire.channel import client_options
from tests.faults.scoring import Scorer, runs
from tests.faults.trajectories import Seen, Trajectories
from tests.support import harness
from tests.support.fakes import FakeEngine, expected_tokens
from tests.support.harness import Exchange, GetServerInfoRequest, Wire, hello
from tests.support.processes import engines_of
from tests.support.tiny_model import make_tiny_model

EPOCH = 1_000_000
Tensors = dict[str, "np.ndarray[Any, np.dtype[np.float32]]"]


class Loads:
    """Wraps an engine's `load` and `prepare`, to delay a load or make one fail half-way."""

    def __init__(self, engine: Any, spoil: Callable[[StagedWeights], StagedWeights]) -> None:
        self._load = engine.load
        self._spoil = spoil
        self._prepare = engine.prepare
        self._breaking = 0
        self._breaking_ahead = False
        self._gate = asyncio.Event()
        self._gate.set()
        self.begun = asyncio.Event()
        engine.load = self._pass
        engine.prepare = self._pass_ahead

    def break_next(self, count: int = 1) -> None:
        """Make the next `count` loads fail. The second is the reload of the previous version."""
        self._breaking = count

    def break_next_ahead(self) -> None:
        """Make the next version fail in `prepare`."""
        self._breaking_ahead = True

    def hold(self) -> None:
        """Make loads wait from now on."""
        self.begun.clear()
        self._gate.clear()

    def go_on(self) -> None:
        self._gate.set()

    async def _pass(self, weights: StagedWeights) -> None:
        self.begun.set()
        await self._gate.wait()
        if not self._breaking:
            await self._load(weights)
            return
        self._breaking -= 1
        with pytest.raises(EngineLoadFailed) as caught:
            await self._load(self._spoil(weights))
        raise caught.value

    async def _pass_ahead(self, weights: StagedWeights) -> None:
        if not self._breaking_ahead:
            await self._prepare(weights)
            return
        self._breaking_ahead = False
        with pytest.raises(EngineLoadFailed) as caught:
            await self._prepare(self._spoil(weights))
        raise caught.value


@dataclass(frozen=True)
class State:
    """The state that a refused upload must leave unchanged."""

    active: int
    staged: tuple[int, ...]
    base: int
    held_bytes: int
    outputs: tuple[tuple[tuple[int, ...], tuple[float, ...]], ...]


class Site:
    """A running server, and ways to inspect it."""

    def __init__(
        self,
        name: str,
        serving: Serving,
        engine: Any,
        address: str,
        wire: Any,
        exchange: Exchange,
        loads: Loads,
        tensors: Callable[[int], Tensors],
        explain: Callable[[Seen], None],
        engine_pid: int | None,
        dropped_cache: set[int],
    ) -> None:
        self.name = name
        self.serving = serving
        self.engine = engine
        self.address = address
        self.wire = wire
        self.exchange = exchange
        self.loads = loads
        self.tensors = tensors
        self.explain = explain
        self.engine_pid = engine_pid
        self.dropped_cache = dropped_cache
        """Versions whose switch dropped the cache of every turn."""
        self.trajectories = Trajectories(wire)
        self.uploaded = 0
        """The newest version of any upload."""

    @property
    def active(self) -> int:
        return self.serving.switch.active_version

    @property
    def held_bytes(self) -> int:
        return self.serving.weights.stage.held_bytes

    def next_version(self) -> int:
        self.uploaded = max(self.uploaded, self.active) + 1
        return self.uploaded

    async def idle(self) -> None:
        """Wait until no upload and no switch is in progress."""
        async with asyncio.timeout(20):
            await self.serving.uploads._slot.wait_free()
            await self.serving.weights._switches.wait()

    async def state(self) -> State:
        """The current state. Nothing else may be in flight."""
        info = await self.wire.GetServerInfo(GetServerInfoRequest())
        return State(
            info.active_weight_version,
            tuple(info.staged_weight_versions),
            info.delta_base_weight_version,
            self.held_bytes,
            await self.outputs(info.active_weight_version),
        )

    async def outputs(self, version: int) -> tuple[tuple[tuple[int, ...], tuple[float, ...]], ...]:
        """Tokens and log-probabilities of some prompts, greedy and from a seed, one after another."""
        found: list[tuple[tuple[int, ...], tuple[float, ...]]] = []
        # Too short for vLLM's prefix cache, so that each is computed from scratch.
        for prompt, fields in (
            ([1, 2, 3], {"temperature": 0.0}),
            (list(b"a fixed seed"), {"temperature": 1.0, "seed": 7}),
        ):
            turn = await self.trajectories.turn(prompt, 10, **fields)
            assert set(turn.versions) == {version}
            seen = Seen()
            seen.give(prompt)
            seen.take(turn)
            self.explain(seen)
            found.append((tuple(turn.tokens), tuple(turn.logprobs)))
        return tuple(found)

    def check_held(self, version: int) -> None:
        """Check that the server holds this version, bit for bit, and no more memory than that."""
        held = self.serving.weights.held.get(version)
        assert held is not None
        wanted = self.tensors(version)
        assert {tensor.name for tensor in held.weights.tensors} == set(wanted)
        for tensor in held.weights.tensors:
            data = os.pread(held.buffer.descriptor, tensor.length_bytes, tensor.offset_bytes)
            assert data == wanted[tensor.name].tobytes(), tensor.name
        assert self.held_bytes <= held.buffer.length_bytes

    def forget(self) -> None:
        """Clear the fake engine's notes, which no test reads afterwards."""
        if isinstance(self.engine, FakeEngine):
            for notes in (self.engine.loaded, self.engine.payloads, self.engine.salts):
                notes.clear()


@contextlib.asynccontextmanager
async def fake_site(folder: Path, step_seconds: float = 0.001) -> AsyncGenerator[Site]:
    """A server around the fake engine, which computes with the version it was given."""

    def explain(seen: Seen) -> None:
        for begin, end, version in runs(seen):
            tokens, logprobs = expected_tokens(seen.tokens[:begin], [version] * (end - begin))
            assert seen.tokens[begin:end] == tokens
            assert seen.logprobs[begin:end] == pytest.approx(logprobs)

    def spoil(weights: StagedWeights) -> StagedWeights:
        if running.engine._paused:
            running.engine.fail_loads = 1
        else:
            running.engine.fail_preparations = 1
        return weights

    async with harness.serve(folder, step_seconds=step_seconds) as running:
        exchange = await hello(running.wire, EPOCH)
        yield Site(
            "fake",
            running.serving,
            running.engine,
            running.address,
            running.wire,
            exchange,
            Loads(running.engine, spoil),
            harness.weights_of,
            explain,
            None,
            set(),
        )


OPTIONS = ("--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "64")
# A cache so small that it is full after a few hundred turns, and grows no more.
OPTIONS += ("--max-num-batched-tokens", "16384", "--kv-cache-memory-bytes", str(20 << 20))


@contextlib.asynccontextmanager
async def vllm_site(folder: Path) -> AsyncGenerator[Site]:
    """A server around real vLLM, with a tied model. Every version has different weights."""
    pytest.importorskip("vllm")
    from penstock.server.text.renderer import Renderer, load_tokenizer
    from penstock.server.vllm.options import engine_arguments
    from tests.support.engines import start_engine

    path = make_tiny_model(folder / "model", tied=True)
    tensors = versions_of(path)
    loaded = config.load(None, ["listen=127.0.0.1:0"])
    server, port = bind(loaded.listen, loaded.limits.concurrent_calls)
    before = engines_of(os.getpid())
    engine = await start_engine(engine_arguments(["--model", str(path), *OPTIONS]))
    (process,) = [p for p in engines_of(os.getpid()) if p not in before]
    renderer = Renderer(load_tokenizer(str(path)), engine.description.eos_token_ids)
    serving = Serving(engine, renderer, loaded)
    life = Lifecycle(serving, server)
    await life.start()
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=client_options())
    wire = Wire(channel)
    exchange = await hello(wire, EPOCH)
    scorer = Scorer(path, tensors)
    rng = random.Random(0)

    def spoil(weights: StagedWeights) -> StagedWeights:
        # vLLM reads the tensors before this one, then refuses.
        broken = rng.randrange(1, len(weights.tensors))
        changed = list(weights.tensors)
        changed[broken] = replace(changed[broken], shape=(*changed[broken].shape, 1, 1))
        return replace(weights, tensors=tuple(changed))

    try:
        yield Site(
            "vllm",
            serving,
            engine,
            f"127.0.0.1:{port}",
            wire,
            exchange,
            Loads(engine, spoil),
            tensors,
            scorer.check,
            process.pid,
            scorer.dropped_cache,
        )
    finally:
        await channel.close()
        await life.stop(0.0)


def versions_of(path: Path) -> Callable[[int], Tensors]:
    """The model's weights, with about one element in a hundred specific to each version."""
    from safetensors.numpy import load_file

    base = {
        name: tensor
        for name, tensor in load_file(path / "model.safetensors").items()
        if name != "lm_head.weight"
    }

    @lru_cache(16)
    def tensors(version: int) -> Tensors:
        rng = np.random.default_rng(version)
        found = {name: tensor.copy() for name, tensor in base.items()}
        for tensor in found.values():
            if version:
                places = rng.integers(0, tensor.size, max(1, tensor.size // 100))
                tensor.flat[places] *= rng.choice(np.float32([-2.0, 1.5, 3.0]), len(places))
        return found

    return tensors
