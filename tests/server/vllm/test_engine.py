"""The vLLM engine on small fp32 models, compared with Hugging Face's own forward pass."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from penstock.server.core.errors import DomainError
from penstock.server.engine.protocol import (
    Delta,
    EngineLoadFailed,
    EngineLost,
    EngineRequest,
    Finish,
    Sampling,
    StagedTensor,
    StagedWeights,
)
from penstock.server.journal.memory import MemoryJournal
from penstock.server.turns.records import TurnRecorder
from penstock.server.turns.runner import TurnRunner
from penstock.server.turns.store import TrajectoryStore
from penstock.server.vllm.engine import VllmEngine
from penstock.server.vllm.options import describe_options, engine_arguments
from penstock.server.vllm.translation import version_pieces
from penstock.server.weights.engine_switch import EngineSwitch
from penstock.server.weights.probe import Probe
from penstock.server.weights.staging.incoming import Staged
from penstock.server.weights.staging.manifest import Encoding, ManifestTensor
from penstock.server.weights.staging.stage import WeightStage
from penstock.server.weights.switch import InFlight, ProbeMismatch, Update, WeightSwitch
from penstock.wire import sparse
from penstock.wire.reasons import Reason
from tests.support.engines import SMALL_CACHE, start_engine
from tests.support.processes import engines_of
from tests.support.tiny_model import EOS_ID, VOCAB_SIZE, make_tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

OPTIONS = ("--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "32")
OPTIONS += SMALL_CACHE
PROMPT = tuple(b"Once upon a time there was a pump, ")
GREEDY = Sampling(max_tokens=24, temperature=0.0, ignore_eos=True)
Tensors = dict[str, np.ndarray]
COUNTER = iter(range(1_000_000))


@dataclass(frozen=True)
class Turn:
    """The merged output of one request."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish: Finish | None
    cached: int


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[bool, int], Path]:
    """(tied, seed) to model folder."""
    root = tmp_path_factory.mktemp("models")
    made: dict[tuple[bool, int], Path] = {}
    for tied in (False, True):
        for seed in range(3):
            path = root / f"{'tied' if tied else 'untied'}-{seed}"
            architecture = "llama" if tied else "qwen3"
            made[tied, seed] = make_tiny_model(
                path, tied=tied, seed=seed, architecture=architecture
            )
    return made


async def start(path: Path) -> VllmEngine:
    arguments = engine_arguments(["--model", str(path), *OPTIONS])
    # Replaces Penstock's own extension, which is the default.
    arguments.worker_extension_cls = "tests.support.stale_head.WorkerExtension"
    return await start_engine(arguments)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(models: dict[tuple[bool, int], Path]) -> AsyncIterator[VllmEngine]:
    engine = await start(models[False, 0])
    yield engine
    await engine.close()


def request(
    prompt: tuple[int, ...] = PROMPT, sampling: Sampling = GREEDY, **fields
) -> EngineRequest:
    fields = {"request_id": f"r{next(COUNTER)}", "cache_salt": f"s{next(COUNTER)}", **fields}
    return EngineRequest(token_ids=np.array(prompt, np.int32), sampling=sampling, **fields)


async def run(engine: VllmEngine, asked: EngineRequest) -> Turn:
    return merge([delta async for delta in await engine.generate(asked)])


def merge(deltas: list[Delta]) -> Turn:
    assert [delta.finish is None for delta in deltas] == [True] * (len(deltas) - 1) + [False]
    return Turn(
        [int(token) for delta in deltas for token in delta.token_ids],
        [float(value) for delta in deltas for value in delta.logprobs],
        [delta.weight_version for delta in deltas for _ in delta.token_ids],
        deltas[-1].finish,
        deltas[-1].cached_token_count,
    )


class Reference:
    """A model as computed by Hugging Face."""

    def __init__(self, path: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    @torch.no_grad()
    def logits(self, token_ids: list[int]) -> torch.Tensor:
        return self.model(torch.tensor([token_ids])).logits[0]

    def greedy(self, prompt: tuple[int, ...], count: int) -> list[int]:
        token_ids = list(prompt)
        for _ in range(count):
            token_ids.append(int(self.logits(token_ids)[-1].argmax()))
        return token_ids[len(prompt) :]

    def score(self, prompt: tuple[int, ...], output: list[int], temperature: float = 1.0):
        logits = self.logits([*prompt, *output])[len(prompt) - 1 : -1]
        logprobs = torch.log_softmax(logits / temperature, -1)
        return logprobs.gather(1, torch.tensor(output)[:, None])[:, 0].numpy()


def stage(path: Path, folder: Path, version: int, leave_out: tuple[str, ...] = ()) -> StagedWeights:
    """A version as `WeightStage` would hand it over."""
    staged: list[StagedTensor] = []
    target = folder / f"version-{version}"
    with target.open("wb") as file:
        for name, tensor in load_file(path / "model.safetensors").items():
            if name in leave_out:
                continue
            data = tensor.numpy().tobytes()
            shape = tuple(tensor.shape)
            staged.append(StagedTensor(name, shape, "float32", file.tell(), len(data)))
            file.write(data)
    return StagedWeights(version, target, tuple(staged))


async def switch(
    engine: VllmEngine, weights: StagedWeights, *, drop_cache: bool = True, ahead: bool = False
) -> None:
    if ahead:
        await engine.prepare(weights)
        assert await is_ready(engine)
    await engine.pause(drop_cache=drop_cache)
    try:
        await engine.load(weights)
    finally:
        await engine.resume()
    assert not await is_ready(engine)


async def is_ready(engine: VllmEngine) -> bool:
    """Whether a prepared version waits for its load in the engine process."""
    (ready,) = await engine._llm.collective_rpc("is_ready")
    return ready


async def test_the_description_names_every_tensor_of_an_upload(
    engine: VllmEngine, models: dict[tuple[bool, int], Path]
):
    stored = load_file(models[False, 0] / "model.safetensors")
    described = engine.description
    assert {n: meta.shape for n, meta in described.tensors.items()} == {
        name: tuple(tensor.shape) for name, tensor in stored.items()
    }
    assert described.vocab_size == VOCAB_SIZE
    assert described.eos_token_ids == (EOS_ID,)
    assert described.weight_dtype == "float32"
    assert described.max_context_length == 1024


async def test_greedy_tokens_and_logprobs_are_those_of_hugging_face(
    engine: VllmEngine, models: dict[tuple[bool, int], Path]
):
    reference = Reference(models[False, 0])
    turn = await run(engine, request())
    assert turn.token_ids == reference.greedy(PROMPT, GREEDY.max_tokens)
    np.testing.assert_allclose(turn.logprobs, reference.score(PROMPT, turn.token_ids), atol=1e-4)
    assert turn.versions == [0] * GREEDY.max_tokens
    assert turn.finish is Finish.LENGTH


@pytest.mark.parametrize("temperature", [0.01, 0.7, 1.0, 1.5])
async def test_logprobs_are_of_the_distribution_sampled_from(
    engine: VllmEngine, models: dict[tuple[bool, int], Path], temperature: float
):
    reference = Reference(models[False, 0])
    turn = await run(engine, request(sampling=replace(GREEDY, temperature=temperature)))
    scored = reference.score(PROMPT, turn.token_ids, temperature)
    np.testing.assert_allclose(turn.logprobs, scored, atol=1e-4 / min(temperature, 1.0))


@pytest.mark.parametrize("temperature", [0.0099, 2.1])
async def test_a_temperature_that_vllm_would_change_is_refused(
    engine: VllmEngine, temperature: float
):
    with pytest.raises(ValueError, match=str(temperature)):
        await run(engine, request(sampling=replace(GREEDY, temperature=temperature)))


async def test_truncation_is_part_of_the_distribution(engine: VllmEngine):
    turn = await run(engine, request(sampling=replace(GREEDY, temperature=1.0, top_k=1)))
    assert turn.token_ids == (await run(engine, request())).token_ids
    np.testing.assert_allclose(turn.logprobs, 0.0, atol=1e-6)
    narrow = await run(engine, request(sampling=replace(GREEDY, temperature=1.0, top_k=3)))
    assert np.mean(narrow.logprobs) > -np.log(3) - 0.5


async def test_a_seed_makes_a_turn_repeatable(engine: VllmEngine):
    sampling = replace(GREEDY, temperature=1.0, seed=7)
    first, second = [await run(engine, request(sampling=sampling)) for _ in range(2)]
    assert first == second
    other = await run(engine, request(sampling=replace(sampling, seed=8)))
    assert other.token_ids != first.token_ids


@pytest.mark.parametrize("interval", [1, 5, 1000])
async def test_deltas_are_gathered_but_the_first_and_the_last_never_wait(
    engine: VllmEngine, interval: int
):
    # Long, because a reader on a busy machine finds a short turn at its end.
    long = replace(GREEDY, max_tokens=400)
    streamed = await engine.generate(request(sampling=long, stream_interval=interval))
    deltas = [d async for d in streamed]
    # The first token never waits for more, but a slow reader may find several. Had it waited for a
    # full interval, all tokens would come at once with the longest.
    assert len(deltas) > 1
    assert all(len(d.token_ids) >= interval for d in deltas[1:-1])
    assert merge(deltas).token_ids == (await run(engine, request(sampling=long))).token_ids


@pytest.mark.parametrize("interval", [1, 7])
async def test_aborted_and_continued_greedy_text_is_that_of_one_turn(
    engine: VllmEngine, interval: int
):
    whole = await run(engine, request(sampling=replace(GREEDY, max_tokens=120)))
    token_ids: list[int] = []
    logprobs: list[float] = []
    aborts = 0
    while len(token_ids) < 120:
        sampling = replace(GREEDY, max_tokens=120 - len(token_ids))
        asked = request((*PROMPT, *token_ids), sampling, stream_interval=interval, cache_salt="c")
        deltas: list[Delta] = []
        async for delta in await engine.generate(asked):
            deltas.append(delta)
            if len(deltas) == 3 and delta.finish is None:
                await engine.abort([asked.request_id, "nobody"])
        part = merge(deltas)
        aborts += part.finish is Finish.ABORTED
        token_ids += part.token_ids
        logprobs += part.logprobs
    assert aborts > 2
    assert token_ids == whole.token_ids
    np.testing.assert_allclose(logprobs, whole.logprobs, atol=1e-4)


async def begins(engine: VllmEngine) -> None:
    """Wait until the engine runs a request. vLLM reports its load with a step, which may
    take a while on a busy machine."""
    async with asyncio.timeout(20):
        while not engine.stats().running:
            await asyncio.sleep(0.01)


async def test_an_abort_leaves_the_engine_idle(engine: VllmEngine):
    asked = [request(sampling=replace(GREEDY, max_tokens=900)) for _ in range(4)]
    turns = [asyncio.create_task(run(engine, each)) for each in asked]
    await first_token(engine)
    await begins(engine)
    await engine.abort([each.request_id for each in asked])
    assert {turn.finish for turn in await asyncio.gather(*turns)} == {Finish.ABORTED}
    assert engine.stats().running == 0


async def test_closing_the_iterator_stops_the_request(engine: VllmEngine):
    deltas = await engine.generate(request(sampling=replace(GREEDY, max_tokens=900)))
    await anext(deltas)
    await deltas.aclose()
    assert engine.stats().running == 0
    await first_token(engine)


async def first_token(engine: VllmEngine) -> None:
    """Run a separate request to its end, so that earlier requests are running."""
    await run(engine, request(sampling=replace(GREEDY, max_tokens=2)))


async def test_nothing_is_sampled_while_paused(engine: VllmEngine):
    asked = request(sampling=replace(GREEDY, max_tokens=60))
    deltas = await engine.generate(asked)
    got = [await anext(deltas)]
    await engine.pause(drop_cache=False)
    other = asyncio.create_task(run(engine, request()))
    # Deltas in flight arrive. After that a paused engine answers commands but samples nothing.
    for _ in range(5):
        await engine.abort(["nobody"])
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.2):
            got.append(await anext(deltas))
            got.append(await anext(deltas))
            pytest.fail("two more deltas while paused")
    assert not other.done()
    await engine.resume()
    assert (await other).finish is Finish.LENGTH


async def test_an_abort_while_paused_keeps_what_was_sampled(engine: VllmEngine):
    asked = request(sampling=replace(GREEDY, max_tokens=900), stream_interval=50)
    deltas = await engine.generate(asked)
    got = [await anext(deltas)]
    await engine.pause(drop_cache=False)
    await engine.abort([asked.request_id])
    got += [delta async for delta in deltas]
    await engine.resume()
    turn = merge(got)
    assert turn.finish is Finish.ABORTED
    assert len(turn.token_ids) == len(turn.logprobs) >= 1


async def test_the_cache_is_shared_within_a_salt_only(engine: VllmEngine):
    prompt = tuple(range(100))
    assert (await run(engine, request(prompt, cache_salt="a"))).cached == 0
    assert (await run(engine, request(prompt, cache_salt="a"))).cached == 96
    assert (await run(engine, request(prompt, cache_salt="b"))).cached == 0


async def test_an_end_of_sequence_token_ends_the_turn(engine: VllmEngine):
    sampling = Sampling(max_tokens=200, temperature=1.5)
    turns = await asyncio.gather(
        *[run(engine, request(sampling=replace(sampling, seed=s))) for s in range(24)]
    )
    stopped = [turn for turn in turns if turn.finish is Finish.STOP]
    assert stopped
    assert all(turn.token_ids.index(EOS_ID) == len(turn.token_ids) - 1 for turn in stopped)
    assert all(
        EOS_ID not in turn.token_ids and len(turn.token_ids) == 200
        for turn in turns
        if turn not in stopped
    )
    seed = turns.index(stopped[0])
    ignoring = replace(sampling, seed=seed, ignore_eos=True)
    turn = await run(engine, request(sampling=ignoring))
    assert turn.finish is Finish.LENGTH
    assert turn.token_ids[: len(stopped[0].token_ids)] == stopped[0].token_ids


async def test_a_stop_token_ends_the_turn(engine: VllmEngine):
    whole = await run(engine, request())
    stop = whole.token_ids[5]
    turn = await run(engine, request(sampling=replace(GREEDY, stop_token_ids=(stop,))))
    assert turn.finish is Finish.STOP
    assert turn.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]


async def test_a_stop_string_ends_the_turn_and_leaves_no_work_behind(engine: VllmEngine):
    long = replace(GREEDY, max_tokens=200)
    whole = await run(engine, request(sampling=long))
    at = next(i for i, t in enumerate(whole.token_ids) if i > 3 and chr(t).isalnum() and t < 128)
    text = chr(whole.token_ids[at])
    turn = await run(engine, request(sampling=replace(long, stop=(text,)), stream_interval=16))
    assert turn.finish is Finish.STOP
    assert turn.token_ids == whole.token_ids[: whole.token_ids.index(ord(text)) + 1]
    await first_token(engine)
    assert engine.stats().running == 0


async def test_what_the_tokenizer_has_no_text_for_ends_with_the_context(engine: VllmEngine):
    prompt = tuple(np.arange(1020) % 256)
    turn = await run(engine, request(prompt, replace(GREEDY, max_tokens=100)))
    assert turn.finish is Finish.LENGTH
    assert len(turn.token_ids) == 4


UPDATES = 20
UNDER_LOAD = 900


@pytest.mark.parametrize("interval", [1, 16])
async def test_every_token_carries_the_version_whose_weights_sampled_it(
    engine: VllmEngine, models: dict[tuple[bool, int], Path], tmp_path: Path, interval: int
):
    base = engine_version(await run(engine, request()))
    loaded = [Reference(models[False, seed]) for seed in range(3)]
    sampling = Sampling(max_tokens=UNDER_LOAD, temperature=1.0, ignore_eos=True)
    prompts = [(*PROMPT, index) for index in range(4)]
    streams = [
        await engine.generate(request(prompt, sampling, stream_interval=interval))
        for prompt in prompts
    ]
    turns = [asyncio.create_task(gather(stream)) for stream in streams]
    for step in range(1, UPDATES + 1):
        await first_token(engine)
        version = base + step
        weights = stage(models[False, step % 3], tmp_path, version)
        await switch(engine, weights, ahead=step % 2 == 0)
    seen: set[int] = set()
    for prompt, turn in zip(prompts, turns, strict=True):
        deltas = await turn
        result = merge(deltas)
        assert result.versions == sorted(result.versions)
        assert len(result.token_ids) == UNDER_LOAD
        seen |= set(result.versions)
        scores = [reference.score(prompt, result.token_ids) for reference in loaded]
        for step in range(1, UPDATES + 1):
            mine = np.array(result.versions) == base + step
            wanted = scores[step % 3][mine]
            np.testing.assert_allclose(np.array(result.logprobs)[mine], wanted, atol=1e-3)
    assert base + UPDATES in seen
    assert len(seen) >= UPDATES // 2


def engine_version(turn: Turn) -> int:
    return turn.versions[-1]


async def gather(deltas: AsyncIterator[Delta]) -> list[Delta]:
    return [delta async for delta in deltas]


async def test_a_failed_load_is_told_and_a_complete_one_heals_it(
    engine: VllmEngine, models: dict[tuple[bool, int], Path], tmp_path: Path
):
    version = engine_version(await run(engine, request())) + 1
    good = stage(models[False, 2], tmp_path, version)
    await engine.pause(drop_cache=True)
    for broken in range(3, len(good.tensors), 5):
        tensors = list(good.tensors)
        tensors[broken] = replace(tensors[broken], shape=(*tensors[broken].shape, 1, 1))
        with pytest.raises(EngineLoadFailed, match=f"weight version {version}"):
            await engine.load(replace(good, tensors=tuple(tensors)))
    with pytest.raises(EngineLoadFailed):
        await engine.load(replace(good, path=tmp_path / "absent"))
    await engine.load(good)
    await engine.resume()
    reference = Reference(models[False, 2])
    turn = await run(engine, request())
    assert turn.versions == [version] * len(turn.token_ids)
    assert turn.token_ids == reference.greedy(PROMPT, GREEDY.max_tokens)
    np.testing.assert_allclose(turn.logprobs, reference.score(PROMPT, turn.token_ids), atol=1e-4)


async def test_what_is_made_ready_changes_nothing_before_its_load(
    engine: VllmEngine, models: dict[tuple[bool, int], Path], tmp_path: Path
):
    version = engine_version(await run(engine, request())) + 1
    folders = [tmp_path / str(seed) for seed in range(3)]
    for folder in folders:
        folder.mkdir()
    one, two = (stage(models[False, seed], folders[seed], version + seed) for seed in (1, 2))
    await switch(engine, one)
    of_one = await run(engine, request())
    stream = await engine.generate(request(sampling=replace(GREEDY, max_tokens=400)))
    long = asyncio.create_task(gather(stream))
    await first_token(engine)
    await engine.prepare(two)
    assert await is_ready(engine)
    again = await run(engine, request())
    assert (again.token_ids, again.logprobs) == (of_one.token_ids, of_one.logprobs)
    turn = merge(await long)
    assert set(turn.versions) == {version + 1}
    reference = Reference(models[False, 1])
    np.testing.assert_allclose(turn.logprobs, reference.score(PROMPT, turn.token_ids), atol=1e-4)

    # Load a version other than the prepared one: one with another number, one with other bytes.
    await engine.pause(drop_cache=True)
    await engine.load(replace(one, weight_version=two.weight_version))
    await engine.resume()
    assert not await is_ready(engine)
    turn = await run(engine, request())
    assert (turn.token_ids, turn.logprobs) == (of_one.token_ids, of_one.logprobs)
    assert set(turn.versions) == {version + 2}

    # A version that cannot be loaded is refused, and the previously prepared one is dropped.
    await engine.prepare(two)
    tensors = list(two.tensors)
    tensors[5] = replace(tensors[5], shape=(*tensors[5].shape, 1, 1))
    for bad in (replace(two, tensors=tuple(tensors)), replace(two, path=tmp_path / "absent")):
        with pytest.raises(EngineLoadFailed, match=f"version {two.weight_version} ready"):
            await engine.prepare(bad)
        assert not await is_ready(engine)
    turn = await run(engine, request())
    assert (turn.token_ids, turn.logprobs) == (of_one.token_ids, of_one.logprobs)
    # An upload without one of its layers is not prepared, and its load works as if unprepared.
    await engine.prepare(replace(two, tensors=two.tensors[:-1]))
    assert not await is_ready(engine)
    third = replace(two, weight_version=version + 3)
    await switch(engine, third, ahead=True)
    turn = await run(engine, request())
    assert turn.token_ids == Reference(models[False, 2]).greedy(PROMPT, GREEDY.max_tokens)
    assert set(turn.versions) == {version + 3}


async def test_scores_are_those_of_hugging_face(
    engine: VllmEngine, models: dict[tuple[bool, int], Path], tmp_path: Path
):
    version = engine_version(await run(engine, request())) + 1
    await switch(engine, stage(models[False, 1], tmp_path, version))
    reference = Reference(models[False, 1])
    busy = [
        asyncio.create_task(run(engine, request(sampling=replace(GREEDY, max_tokens=300))))
        for _ in range(4)
    ]
    text = tuple(np.random.default_rng(0).integers(0, VOCAB_SIZE, 400).tolist())
    for length in (2, 33, 400):
        scored = await engine.score(np.array(text[:length], np.int32))
        assert scored.shape == (length - 1,)
        wanted = reference.score(text[:1], list(text[1:length]))
        np.testing.assert_allclose(scored, wanted, atol=1e-4)
    assert not any(turn.done() for turn in busy)
    assert len({tuple((await turn).token_ids) for turn in busy}) == 1


async def upload(
    stage: WeightStage, version: int, tensors: Tensors, base: Staged | None = None
) -> Staged:
    """A version as it arrives over the stream; with a base, as a delta from it."""
    manifest: list[ManifestTensor] = []
    payload = b""
    held = base.weights.path.read_bytes() if base else b""
    places = {tensor.name: tensor for tensor in base.weights.tensors} if base else {}
    for name, tensor in tensors.items():
        bits = tensor.ravel().view(np.uint32)
        encoding, coding, data = Encoding.RAW, None, tensor.tobytes()
        if place := places.get(name):
            before = np.frombuffer(held, np.uint32, bits.size, place.offset_bytes)
            encoded = sparse.encode(before, bits)
            coding, data = encoded.coding, b"".join(encoded.parts)
            encoding = Encoding.SPARSE if coding else Encoding.SAME
        digest = xxhash.xxh3_64_intdigest(tensor.tobytes())
        at = (len(payload), len(data))
        manifest.append(
            ManifestTensor(name, tensor.shape, "float32", *at, digest, encoding, coding)
        )
        payload += data
    arriving = await stage.begin_inline(version, manifest, len(payload), base)
    if payload:
        arriving.write_chunk(0, payload, xxhash.xxh3_64_intdigest(payload))
    return await arriving.verify()


def tensors_of(path: Path) -> Tensors:
    return {name: t.numpy() for name, t in load_file(path / "model.safetensors").items()}


async def test_a_delta_samples_as_the_dense_upload(
    engine: VllmEngine, models: dict[tuple[bool, int], Path]
):
    described = engine.description
    staging = WeightStage(None, described.tensors, described.weight_dtype)
    version = engine_version(await run(engine, request())) + 1
    first = tensors_of(models[False, 2])
    second = {name: tensor.copy() for name, tensor in first.items()}
    for index, tensor in enumerate(second.values()):
        # One element in a hundred changes, by a small or a large step; some tensors stay unchanged.
        if index % 5:
            tensor.ravel()[index::100] *= np.float32(1.0001 if index % 2 else -3.0)
    dense = await upload(staging, version, first)
    await switch(engine, dense.weights)
    before = await run(engine, request())
    delta = await upload(staging, version + 1, second, dense)
    await switch(engine, delta.weights)
    by_delta = await run(engine, request())
    assert by_delta.token_ids != before.token_ids
    again = await upload(staging, version + 2, second)
    assert again.weights.path.read_bytes() == delta.weights.path.read_bytes()
    await switch(engine, dense.weights)
    assert (await run(engine, request())).logprobs == before.logprobs
    await switch(engine, again.weights)
    whole = await run(engine, request())
    assert (whole.token_ids, whole.logprobs) == (by_delta.token_ids, by_delta.logprobs)
    staging.close()


def unrecorded() -> TurnRecorder:
    return TurnRecorder(MemoryJournal(), TrajectoryStore(1))


def engine_switch(
    engine: VllmEngine, active: int, *, ahead: bool = True
) -> tuple[WeightSwitch, EngineSwitch]:
    """A switch of full weights only, and its state."""
    state = WeightSwitch(active)
    turns = TurnRunner(engine, state, lambda ids: "", unrecorded())
    return state, EngineSwitch(engine, state, turns, cast("Any", None), prepare_ahead=ahead)


def update(weights: StagedWeights, probe: Probe | None) -> Update:
    return Update(Staged(weights, {}, cast("Any", None)), probe)


async def refused_switch(
    engine: VllmEngine,
    active: int,
    weights: StagedWeights,
    before: StagedWeights,
    probe: Probe | None = None,
    *,
    ahead: bool = True,
) -> DomainError:
    """Run a switch that fails and rolls back; return its error."""

    @contextlib.asynccontextmanager
    async def way_back() -> AsyncIterator[StagedWeights]:
        yield before

    state, switching = engine_switch(engine, active, ahead=ahead)
    with pytest.raises(DomainError) as caught:
        await switching.switch(update(weights, probe), InFlight.RECOMPUTE, way_back)
    assert state.trusted
    assert state.active_version == active
    return caught.value


async def test_a_load_that_fails_half_way_is_undone(
    engine: VllmEngine, models: dict[tuple[bool, int], Path], tmp_path: Path
):
    described = engine.description
    staging = WeightStage(None, described.tensors, described.weight_dtype)
    version = engine_version(await run(engine, request())) + 1
    base = await staging.read_base_model(version, described.checkpoint or tmp_path)
    await switch(engine, base.weights)
    fresh = Reference(models[False, 0])
    wanted = await run(engine, request())
    assert wanted.token_ids == fresh.greedy(PROMPT, GREEDY.max_tokens)
    lying = stage(models[False, 1], tmp_path, version + 1)
    for broken in (4, len(lying.tensors) - 1):
        tensors = list(lying.tensors)
        tensors[broken] = replace(tensors[broken], shape=(*tensors[broken].shape, 1, 1))
        bad = replace(lying, tensors=tuple(tensors))
        for ahead in (False, True):
            error = await refused_switch(engine, version, bad, base.weights, ahead=ahead)
            assert error.reason is Reason.WEIGHT_LOAD_FAILED
            assert await run(engine, request()) == wanted
    staging.close()


async def check_probe(
    engine: VllmEngine, models: dict[tuple[bool, int], Path], tmp_path: Path, version: int
) -> None:
    """Correct weights pass the probe. A head that keeps its old weights
    is detected and rolled back."""
    text = np.random.default_rng(1).integers(0, VOCAB_SIZE, 64).astype(np.int32)
    before = stage(models[True, 1], tmp_path, version)
    new = stage(models[True, 2], tmp_path, version + 1)
    wanted = Reference(models[True, 2]).score(tuple(text[:1].tolist()), text[1:].tolist())
    probe = Probe(text, wanted.astype(np.float32), 1e-3)
    _, switching = engine_switch(engine, version - 1)
    for weights, checked in ((new, probe), (before, None)):
        switched = await switching.switch(
            update(replace(weights, weight_version=version), checked),
            InFlight.KEEP,
            lambda: contextlib.nullcontext(),
        )
        if switched.probe:
            assert switched.probe.mean_difference < 1e-4
    good = await run(engine, request())
    await engine._llm.collective_rpc("keep_stale_head")
    error = await refused_switch(engine, version, new, before, probe)
    assert isinstance(error, ProbeMismatch)
    assert error.result.mean_difference > 0.05
    again = await run(engine, request())
    assert (again.token_ids, again.logprobs) == (good.token_ids, good.logprobs)
    assert set(again.versions) == {version}


@pytest.mark.parametrize("tied", [False, True])
async def test_after_a_load_it_samples_as_a_fresh_engine(
    engine: VllmEngine, models: dict[tuple[bool, int], Path], tmp_path: Path, tied: bool
):
    sampled = replace(GREEDY, temperature=1.0, seed=3, max_tokens=60)
    async with running(models[tied, 1]) as (fresh, process):
        expected = [await run(fresh, request(sampling=s)) for s in (GREEDY, sampled)]
        await check_death_is_noticed(fresh, process)
    if not tied:
        await check_loads(engine, models, tmp_path, sampled, expected, tied=False)
        return
    async with running(models[tied, 0]) as (other, process):
        await check_loads(other, models, tmp_path, sampled, expected, tied=True)
        await check_probe(other, models, tmp_path, 30)
    assert not process.is_running()


async def check_loads(
    engine: VllmEngine,
    models: dict[tuple[bool, int], Path],
    tmp_path: Path,
    sampled: Sampling,
    expected: list[Turn],
    *,
    tied: bool,
) -> None:
    """Check that model 1's weights always sample the expected turns, whatever was loaded before."""
    first = engine_version(await run(engine, request())) + 1
    head = ("lm_head.weight",) if tied else ()
    cases = [((), False), (head, False), ((), True), (head, True), (head, False)]
    for index, (leave_out, ahead) in enumerate(cases):
        version = first + 2 * index
        await switch(engine, stage(models[tied, 2], tmp_path, version), ahead=ahead)
        await switch(engine, stage(models[tied, 1], tmp_path, version + 1, leave_out), ahead=ahead)
        turns = [await run(engine, request(sampling=s)) for s in (GREEDY, sampled)]
        for turn, wanted in zip(turns, expected, strict=True):
            assert turn.token_ids == wanted.token_ids
            assert turn.logprobs == wanted.logprobs
            assert set(turn.versions) == {version + 1}


@contextlib.asynccontextmanager
async def running(path: Path) -> AsyncIterator[tuple[VllmEngine, psutil.Process]]:
    """A second engine and its process."""
    before = engines_of(os.getpid())
    engine = await start(path)
    (process,) = [p for p in engines_of(os.getpid()) if p not in before]
    try:
        yield engine, process
    finally:
        await engine.close()


async def check_death_is_noticed(engine: VllmEngine, process: psutil.Process) -> None:
    """Check that every waiting call learns that the engine was killed."""
    waiting = asyncio.create_task(engine.lost())
    asked = request(sampling=replace(GREEDY, max_tokens=900))
    turn = asyncio.create_task(run(engine, asked))
    await first_token(engine)
    process.kill()
    async with asyncio.timeout(20):
        assert "was ended by SIGKILL" in await waiting
        with pytest.raises(EngineLost):
            await turn
        for act in (engine.resume, lambda: engine.abort(["x"]), lambda: run(engine, request())):
            with pytest.raises(EngineLost):
                await act()


async def test_the_parser_is_vllms_and_a_later_option_wins(models: dict[tuple[bool, int], Path]):
    model = str(models[False, 0])
    arguments = engine_arguments(["--model", model, "--block-size", "16", "--max-num-seqs=7"])
    described = describe_options(arguments)
    assert described["block_size"] == 16
    assert described["max_num_seqs"] == 7
    assert described["logprobs_mode"] == "processed_logprobs"
    assert json.loads(json.dumps(described)) == described


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--no-such-option", "1"], "--no-such-option"),
        (["--max-model-len", "many"], "--max-model-len"),
        (["--dtype", "int3"], "--dtype"),
        (["--worker-extension-cls", "mine.Own"], "mine.Own"),
    ],
)
async def test_a_wrong_option_is_a_value_error_that_names_it(options: list[str], message: str):
    with pytest.raises(ValueError, match=message):
        engine_arguments(options)


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=40),
    st.lists(st.integers(1, 9), max_size=40),
)
async def test_version_pieces_cover_each_token_once_with_its_version(
    versions: list[int], sizes: list[int]
):
    versions = sorted(versions)
    starts = [
        (str(version), index)
        for index, version in enumerate(versions)
        if not index or versions[index - 1] != version
    ]
    labelled: list[int] = []
    position = 0
    for size in [*sizes, len(versions)]:
        end = min(position + size, len(versions))
        for begin, stop, version in version_pieces(starts, position, end):
            assert begin == len(labelled)
            labelled += [version] * (stop - begin)
        position = end
    assert labelled == versions
