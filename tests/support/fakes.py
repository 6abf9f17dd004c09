"""Fakes for the heavy seams: an engine whose every token can be recomputed, and a byte tokenizer.

`FakeEngine` samples a pure function of (prefix, weight version). A test that knows the context and
the versions can recompute every token and log-probability. It therefore detects a wrong version, a
lost token or a duplicated one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray
from safetensors.numpy import load_file

from penstock.common.failpoints import hit
from penstock.server.engine.protocol import (
    Adapter,
    AdapterLimits,
    Delta,
    EngineDescription,
    EngineLoadFailed,
    EngineLost,
    EngineRequest,
    EngineStats,
    Finish,
    StagedWeights,
    TensorMeta,
)
from penstock.server.text.messages import Message, Tool
from penstock.server.text.renderer import Written
from penstock.server.text.streaming import TurnStream
from tests.support.fake_collective import FakeCollective

VOCAB_SIZE = 300
EOS = 256
END_OF_TURN = EOS
START_OF_TURN = 257
MAX_CONTEXT = 512
TENSORS = {
    "model.embed_tokens.weight": TensorMeta((VOCAB_SIZE, 4)),
    "model.layers.0.mlp.weight": TensorMeta((8, 4)),
    "lm_head.weight": TensorMeta((VOCAB_SIZE, 4), optional=True),
}


def sampled(prefix: bytes, version: int) -> tuple[int, float]:
    """The token that follows a prefix (int32 bytes) under a version, and its log-probability."""
    digest = xxhash.xxh3_64_intdigest(prefix, seed=version)
    # One token in 64 ends the turn; the others are lower-case letters.
    token = EOS if digest % 64 == 0 else 97 + (digest >> 8) % 26
    return token, -float((digest >> 16) % 1000) / 1000.0


def expected_tokens(
    context: Sequence[int], versions: Sequence[int]
) -> tuple[list[int], list[float]]:
    """Tokens and log-probabilities that follow `context` if `versions[i]` samples token i."""
    prefix = np.asarray(context, np.int32).tobytes()
    tokens: list[int] = []
    logprobs: list[float] = []
    for version in versions:
        token, logprob = sampled(prefix, version)
        tokens.append(token)
        logprobs.append(logprob)
        prefix += np.int32(token).tobytes()
    return tokens, logprobs


def expected_scores(token_ids: Sequence[int], version: int) -> NDArray[np.float32]:
    """Log-probabilities under a version of each token except the first, shape [n - 1]."""
    tokens = np.asarray(token_ids, np.int32)
    scores: list[float] = []
    for count in range(1, len(tokens)):
        prefix, token = tokens[:count].tobytes(), int(tokens[count])
        chosen, logprob = sampled(prefix, version)
        if token != chosen:
            digest = xxhash.xxh3_64_intdigest(tokens[: count + 1].tobytes(), seed=version)
            logprob = -1.0 - (digest % 1000) / 1000.0
        scores.append(logprob)
    return np.asarray(scores, np.float32)


@dataclass(eq=False)
class _Running:
    request: EngineRequest
    prefix: bytes
    deltas: asyncio.Queue[Delta] = field(default_factory=lambda: asyncio.Queue[Delta]())
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    count: int = 0
    finish: Finish | None = None


class FakeEngine(FakeCollective):
    """A `LocalEngine`.

    A step takes `step_seconds`, plus `turn_seconds` for each request that samples in it. Each
    scheduled request gets one token per step.
    """

    def __init__(
        self,
        step_seconds: float = 0.0,
        max_context: int = MAX_CONTEXT,
        checkpoint: Path | None = None,
        adapters: AdapterLimits | None = None,
        *,
        tensors: Mapping[str, TensorMeta] = TENSORS,
        vocab_size: int = VOCAB_SIZE,
        keeps_history: bool = True,
    ) -> None:
        """`keeps_history`: whether tests can read the past loads and requests."""
        super().__init__()
        self.step_seconds = step_seconds
        self.turn_seconds = 0.0
        self.choose: Callable[[bytes, int], tuple[int, float]] = sampled
        """Samples the token after a prefix under a version; returns it with its log-probability."""
        self._keeps_history = keeps_history
        self.version = 0
        self.loaded: list[StagedWeights] = []
        self.payloads: list[bytes] = []
        """The bytes of each load, copied from its file at the time."""
        self.fail_loads = 0
        """The number of following loads that fail half-way."""
        self.fail_preparations = 0
        self.prepared: list[int] = []
        """Versions prepared before their load."""
        self.corrupt_next_load = False
        """The next load reports success, but the engine keeps computing with the previous weights,
        like a layer that holds its own copy."""
        self.score_gate = asyncio.Event()
        """Scores wait for this event."""
        self.score_gate.set()
        self.scores = 0
        self.caches_dropped = 0
        self.salts: list[tuple[str, str, int]] = []
        """Tuples of (request id, cache salt, version active when the engine took the request)."""
        self.max_running = 0
        self.adapters: dict[int, dict[str, NDArray[np.float32]]] = {}
        """The loaded adapters, with the tensors read from the folder of each."""
        self.adapter_folders: dict[int, Path] = {}
        self.adapters_added: list[int] = []
        self.adapters_removed: list[int] = []
        self.fail_adapters = 0
        """The number of following adapters that the engine refuses."""
        self.pauses = 0
        self.freeze_at: int | None = None
        """While set, requests with this many tokens get no more."""
        self._description = EngineDescription(
            "fake", vocab_size, max_context, (EOS,), "float32", tensors, checkpoint, adapters
        )
        self._computes: int | None = 0
        """The version that the engine really computes with; None for a mixture."""
        self._running: dict[str, _Running] = {}
        self._paused = False
        self._wake = asyncio.Event()
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._stepping = asyncio.Lock()
        self._loop_task = asyncio.create_task(self._loop())

    @property
    def description(self) -> EngineDescription:
        return self._description

    async def generate(self, request: EngineRequest) -> AsyncGenerator[Delta]:
        if self._lost.done():
            raise EngineLost(self._lost.result())
        assert request.request_id not in self._running, "request ids must be unique"
        assert request.sampling.max_tokens >= 1
        assert request.adapter_version is None or request.adapter_version in self.adapters
        running = _Running(request, request.token_ids.tobytes())
        self._running[request.request_id] = running
        if self._keeps_history:
            self.salts.append((request.request_id, request.cache_salt, self.version))
        self.max_running = max(self.max_running, len(self._running))
        self._wake.set()
        return self._deltas(running)

    async def _deltas(self, running: _Running) -> AsyncGenerator[Delta]:
        try:
            while True:
                getting = asyncio.ensure_future(running.deltas.get())
                await asyncio.wait([getting, self._lost], return_when=asyncio.FIRST_COMPLETED)
                if not getting.done():
                    getting.cancel()
                    raise EngineLost(self._lost.result())
                delta = getting.result()
                yield delta
                if delta.finish is not None:
                    return
        finally:
            self._running.pop(running.request.request_id, None)

    async def _loop(self) -> None:
        while True:
            while self._paused or not self._running:
                self._wake.clear()
                await self._wake.wait()
            async with self._stepping:
                scheduled = self._scheduled()
                for running in scheduled:
                    self._sample(running)
            await asyncio.sleep(self.step_seconds + self.turn_seconds * len(scheduled))

    def _scheduled(self) -> list[_Running]:
        """Schedule as vLLM does: a step runs at most `max_adapters`
        adapters, and other requests wait."""
        chosen: list[_Running] = []
        adapters: set[int] = set()
        limits = self._description.adapters
        for running in self._running.values():
            adapter = running.request.adapter_version
            if running.finish is not None or running.count == self.freeze_at:
                continue
            if adapter is not None and adapter not in adapters:
                if limits is None or len(adapters) == limits.max_adapters:
                    continue
                adapters.add(adapter)
            chosen.append(running)
        return chosen

    def _sample(self, running: _Running) -> None:
        adapter = running.request.adapter_version
        assert adapter is None or adapter in self.adapters, "sampled by an adapter that was removed"
        version = self._computes if adapter is None else adapter
        assert version is not None, "sampled with a mixture of weights"
        token, logprob = self.choose(running.prefix, version)
        sampling = running.request.sampling
        running.prefix += np.int32(token).tobytes()
        running.tokens.append(token)
        running.logprobs.append(logprob)
        running.count += 1
        if (
            (token == EOS and not sampling.ignore_eos)
            or token in sampling.stop_token_ids
            or any(stop in self._written(running) for stop in sampling.stop)
        ):
            running.finish = Finish.STOP
        elif running.count >= sampling.max_tokens:
            running.finish = Finish.LENGTH
        first = running.count == 1
        if running.finish or first or len(running.tokens) >= running.request.stream_interval:
            self._hand_over(running)

    def _written(self, running: _Running) -> str:
        tokens = np.frombuffer(running.prefix, np.int32)[-running.count :]
        return decode_bytes(int(token) for token in tokens)

    def _hand_over(self, running: _Running) -> None:
        running.deltas.put_nowait(
            Delta(
                np.asarray(running.tokens, np.int32),
                np.asarray(running.logprobs, np.float32),
                self.version
                if running.request.adapter_version is None
                else running.request.adapter_version,
                running.finish,
                len(running.request.token_ids) // 2,
            )
        )
        running.tokens, running.logprobs = [], []

    async def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            running = self._running.get(request_id)
            if running is not None and running.finish is None:
                running.finish = Finish.ABORTED
                self._hand_over(running)

    async def pause(self, *, drop_cache: bool) -> None:
        self._paused = True
        self.pauses += 1
        self.caches_dropped += drop_cache
        async with self._stepping:
            # Tokens sampled before the boundary carry the previous version.
            for running in self._running.values():
                if running.tokens and running.finish is None:
                    self._hand_over(running)

    async def prepare(self, weights: StagedWeights) -> None:
        hit("engine.prepare")
        await asyncio.sleep(0)
        if self.fail_preparations:
            self.fail_preparations -= 1
            raise EngineLoadFailed("told not to make it ready")
        data = weights.path.read_bytes()
        assert all(t.offset_bytes + t.length_bytes <= len(data) for t in weights.tensors)
        if self._keeps_history:
            self.prepared.append(weights.weight_version)

    async def load(self, weights: StagedWeights) -> None:
        assert self._paused, "load only while paused"
        hit("engine.load")
        await asyncio.sleep(0)
        if self.fail_loads:
            self.fail_loads -= 1
            self._computes = None
            raise EngineLoadFailed("told to fail")
        data = weights.path.read_bytes()
        assert all(t.offset_bytes + t.length_bytes <= len(data) for t in weights.tensors)
        if self._keeps_history:
            self.loaded.append(weights)
            self.payloads.append(data)
        if self.corrupt_next_load:
            self.corrupt_next_load = False
        else:
            self._computes = weights.weight_version
        self.version = weights.weight_version

    async def add_adapter(self, adapter: Adapter) -> None:
        limits = self._description.adapters
        assert limits is not None
        assert len(self.adapters) <= limits.max_adapters, "it would lose one that it has"
        assert adapter.weight_version not in self.adapters
        await asyncio.sleep(0)
        if self.fail_adapters:
            self.fail_adapters -= 1
            raise EngineLoadFailed("told not to take it")
        config = json.loads((adapter.folder / "adapter_config.json").read_text())
        tensors = load_file(adapter.folder / "adapter_model.safetensors")
        assert config["peft_type"] == "LORA"
        assert all(config["r"] in tensor.shape for tensor in tensors.values())
        self.adapters[adapter.weight_version] = tensors
        self.adapter_folders[adapter.weight_version] = adapter.folder
        self.adapters_added.append(adapter.weight_version)

    async def remove_adapter(self, weight_version: int) -> None:
        assert self.adapter_folders[weight_version].exists(), "the folder has to stay until now"
        left = [
            r
            for r in self._running.values()
            if r.finish is None and r.request.adapter_version == weight_version
        ]
        assert not left, "it still samples"
        await asyncio.sleep(0)
        del self.adapters[weight_version]
        self.adapters_removed.append(weight_version)

    async def score(
        self, token_ids: NDArray[np.int32], adapter_version: int | None = None
    ) -> NDArray[np.float32]:
        assert not self._paused, "score only while it runs"
        await asyncio.wait(
            [asyncio.ensure_future(self.score_gate.wait()), self._lost],
            return_when=asyncio.FIRST_COMPLETED,
        )
        if self._lost.done():
            raise EngineLost(self._lost.result())
        self.scores += 1
        version = self._computes if adapter_version is None else adapter_version
        assert version is not None, "scored with a mixture of weights"
        assert adapter_version is None or self._has_slot_for(adapter_version), (
            "it would wait for ever"
        )
        return expected_scores([int(token) for token in token_ids], version)

    def _has_slot_for(self, adapter: int) -> bool:
        limits = self._description.adapters
        sampling = {
            running.request.adapter_version
            for running in self._running.values()
            if running.finish is None
        }
        return limits is not None and len(sampling - {None, adapter}) < limits.max_adapters

    async def resume(self) -> None:
        assert self._computes is not None, "resumed with a mixture of weights"
        self._paused = False
        self._wake.set()

    def stats(self) -> EngineStats:
        return EngineStats(len(self._running), 0, 0.0)

    def die(self, reason: str = "told to die") -> None:
        """Fail the way the server sees an engine process killed with SIGKILL."""
        self._lost.set_result(reason)

    async def lost(self) -> str:
        return await asyncio.shield(self._lost)

    async def close(self) -> None:
        self._loop_task.cancel()
        await asyncio.gather(self._loop_task, return_exceptions=True)


def decode_bytes(token_ids: Iterable[int]) -> str:
    return bytes(token for token in token_ids if token < 256).decode(errors="replace")


class ByteRenderer:
    """A byte tokenizer with a chat template of two control tokens."""

    def encode_text(self, text: str, *, first: bool) -> NDArray[np.int32]:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> NDArray[np.int32]:
        tokens: list[int] = []
        for message in messages:
            tokens += [START_OF_TURN, *message.role.encode(), 10, *message.content.encode()]
            tokens.append(END_OF_TURN)
        return np.asarray([*tokens, START_OF_TURN, *b"assistant", 10], np.int32)

    def render_next(self, messages: Sequence[Message], last_token: int | None) -> NDArray[np.int32]:
        rendered = self.render(messages, ())
        if last_token == END_OF_TURN:
            return rendered
        return np.concatenate([np.asarray([END_OF_TURN], np.int32), rendered])

    def read_message(
        self,
        token_ids: Sequence[int],
        prompt_token_ids: Sequence[int],
        tools: Sequence[Tool],
        name: str,
    ) -> Written:
        return Written(Message("assistant", self.decode(token_ids)))

    def open_stream(self, prompt_token_ids: Sequence[int], tools: Sequence[Tool]) -> TurnStream:
        return TurnStream(self.decode)

    def decode(self, token_ids: Iterable[int]) -> str:
        return decode_bytes(int(token) for token in token_ids)
