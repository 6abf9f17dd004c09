"""LoRA on real vLLM in fp32: each version samples like PEFT's own forward
pass, and is freed afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio
import torch
import xxhash
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import AutoModelForCausalLM

from penstock.server.engine.protocol import Adapter, EngineLoadFailed
from penstock.v1 import trajectory_pb2, weights_pb2
from penstock.wire import codec
from penstock.wire.channel import client_options
from penstock.wire.failure import read_failure
from tests.server.vllm.test_wire_vllm import upload_of
from tests.support.harness import (
    GenerateRequest,
    GetServerInfoRequest,
    InlineSource,
    SamplingParams,
    TensorSpec,
    Turn,
    WeightHeader,
    WeightProbe,
    Wire,
    collect,
    messages,
    sequence,
)
from tests.support.tiny_model import make_tiny_model

pytest.importorskip("vllm")
pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = list(b"adapters in flight")
RANK = 4
LONG = 900
"""Long enough that a turn is still running when an adapter arrives, even on a busy machine."""


def greedy(count: int, **fields: Any) -> Any:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": count, "ignore_eos": True, **fields})


class Peft:
    """The model with an adapter, as computed by PEFT."""

    def __init__(self, path: Path, *, seed: int, zero: bool = False, stabilized: bool = False):
        base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.config = LoraConfig(
            r=RANK,
            lora_alpha=2 * RANK,
            target_modules="all-linear",
            init_lora_weights=zero,
            use_rslora=stabilized,
            task_type="CAUSAL_LM",
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = get_peft_model(base, self.config).eval()

    def state(self) -> dict[str, torch.Tensor]:
        return get_peft_model_state_dict(self.model)

    @torch.no_grad()
    def score(self, tokens: list[int]) -> np.ndarray:
        logits = self.model(torch.tensor([tokens])).logits[0]
        logprobs = torch.log_softmax(logits, -1)[:-1]
        return logprobs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].numpy()

    def check(self, turn: Turn, before: list[int], tokens: list[int], begin: int = 0) -> None:
        """Check that each token is the most likely one after its
        prefix, with this log-probability."""
        with torch.no_grad():
            logits = self.model(torch.tensor([[*before, *tokens]])).logits[0][len(before) - 1 : -1]
        assert logits.argmax(-1).tolist() == tokens
        wanted = torch.log_softmax(logits, -1).max(-1).values.numpy()
        np.testing.assert_allclose(turn.logprobs[begin : begin + len(tokens)], wanted, atol=1e-4)


def requests_of(peft: Peft, version: int, **fields: Any) -> list[Any]:
    data = b""
    specs: list[Any] = []
    for name, tensor in peft.state().items():
        values = tensor.contiguous().numpy().tobytes()
        specs.append(
            TensorSpec(
                name=name,
                shape=tuple(tensor.shape),
                dtype="float32",
                offset_bytes=len(data),
                length_bytes=len(values),
                xxh3=xxhash.xxh3_64_intdigest(values),
            )
        )
        data += values
    targets = sorted({name.split(".")[-3] for name in peft.state()})
    head = WeightHeader(
        weight_version=version,
        tensors=specs,
        inline=InlineSource(length_bytes=len(data)),
        activation=weights_pb2.ACTIVATION_IMMEDIATE,
        adapter={
            "rank": RANK,
            "alpha": 2.0 * RANK,
            "target_modules": targets,
            "rank_stabilized": peft.config.use_rslora,
        },
        **fields,
    )
    return messages(head, data, 1 << 20)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [make_tiny_model(folder / str(seed), tied=True, seed=seed) for seed in range(2)]


class Server:
    """A real server on real vLLM with room for two adapters, and raw calls to it."""

    def __init__(self, wire: Any, serving: Any, engine: Any, stage: Path) -> None:
        self.wire, self.serving, self.engine, self.stage = wire, serving, engine, stage
        self.version = 0
        self.names = iter(range(1_000_000))

    async def push(self, peft: Peft, **fields: Any) -> Any:
        self.version += 1
        requests = requests_of(peft, self.version, **fields)
        return [response async for response in self.wire.UpdateWeights(iter(requests))][-1]

    async def begun(self, names: int) -> None:
        """Wait until this many turns are in flight and each has a token."""
        async with asyncio.timeout(20):
            while len(self.serving.turns.sampling) < names or not all(
                turn.policy_token_count for turn in self.serving.turns.sampling
            ):
                await asyncio.sleep(0.005)

    async def generate(self, count: int = 24, **fields: Any) -> Turn:
        fields.setdefault("sampling_params", greedy(count))
        request = GenerateRequest(
            trajectory_id=f"t{next(self.names)}", tokens=sequence(PROMPT), **fields
        )
        return await collect(self.wire.Generate(request))

    async def only(self, *versions: int) -> None:
        """Wait until the engine and the stage folder have exactly these adapters."""
        async with asyncio.timeout(20):
            while set(await self.engine._llm.list_loras()) != set(versions):
                await asyncio.sleep(0.01)
            wanted = {f"v{version}" for version in versions}
            while {path.name for path in self.stage.glob("penstock-adapters-*/*")} != wanted:
                await asyncio.sleep(0.01)
        info = await self.wire.GetServerInfo(GetServerInfoRequest())
        assert list(info.adapter_weight_versions) == sorted(versions)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def server(
    models: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Server]:
    from penstock.server.assembly import Serving
    from penstock.server.config import settings as config
    from penstock.server.lifecycle import Lifecycle, bind
    from penstock.server.text.renderer import Renderer, load_tokenizer
    from penstock.server.vllm.options import engine_arguments
    from tests.support.engines import SMALL_CACHE, start_engine

    stage = tmp_path_factory.mktemp("stage")
    loaded = config.load(None, ["listen=127.0.0.1:0", f"weights.stage_folder={stage}"])
    listening, port = bind(loaded.listen, loaded.limits.concurrent_calls)
    options = ["--model", str(models[0]), "--dtype", "float32", "--max-model-len", "1024"]
    options += ["--enable-lora", "--max-loras", "2", "--max-lora-rank", "8"]
    engine = await start_engine(engine_arguments([*options, *SMALL_CACHE]))
    renderer = Renderer(load_tokenizer(str(models[0])), engine.description.eos_token_ids)
    serving = Serving(engine, renderer, loaded)
    life = Lifecycle(serving, listening)
    await life.start()
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=client_options())
    yield Server(Wire(channel), serving, engine, stage)
    await channel.close()
    await life.stop(0.0)


async def test_full_weights_can_be_uploaded_until_there_is_an_adapter(
    server: Server, models: list[Path]
) -> None:
    """First in this file, because later tests leave an adapter."""
    before = await server.generate()
    for path in (models[1], models[0]):
        server.version += 1
        keep = weights_pb2.IN_FLIGHT_POLICY_KEEP
        requests = upload_of(path, server.version, keep)
        states = [response.state async for response in server.wire.UpdateWeights(iter(requests))]
        assert states[-1] == weights_pb2.WEIGHT_STATE_ACTIVE
        turn = await server.generate()
        assert (turn.tokens == before.tokens) == (path == models[0])
    np.testing.assert_allclose(turn.logprobs, before.logprobs, atol=1e-5)


def probe_of(score: np.ndarray) -> Any:
    return WeightProbe(
        token_ids=codec.array_bytes(np.asarray(PROMPT, np.int32)),
        logprobs=codec.array_bytes(score.astype(np.float32), codec.LOGPROB),
        tolerance=1e-4,
    )


async def test_an_adapter_samples_as_peft_computes_it(server: Server, models: list[Path]) -> None:
    base = await server.generate()
    fresh = Peft(models[0], seed=0, zero=True)
    assert (await server.push(fresh)).state == weights_pb2.WEIGHT_STATE_ACTIVE
    # B is zero, so the new version samples the same tokens.
    same = await server.generate()
    assert same.tokens == base.tokens
    assert set(same.versions) == {server.version}
    for seed, stabilized in ((1, False), (2, True)):
        peft = Peft(models[0], seed=seed, stabilized=stabilized)
        response = await server.push(peft, probe=probe_of(peft.score(PROMPT)))
        assert response.probe.max_difference < 1e-4
        turn = await server.generate()
        assert turn.tokens != base.tokens
        assert set(turn.versions) == {server.version}
        peft.check(turn, PROMPT, turn.tokens)
        await server.only(server.version)


async def test_a_probe_is_scored_among_turns_in_flight(server: Server, models: list[Path]) -> None:
    """vLLM's own preparation of the output layer for adapters cannot do this."""
    running = [asyncio.ensure_future(server.generate(300)) for _ in range(5)]
    await server.begun(5)
    for seed in (50, 51):
        peft = Peft(models[0], seed=seed)
        response = await server.push(peft, probe=probe_of(peft.score(PROMPT)))
        assert response.probe.max_difference < 1e-4
        running += [asyncio.ensure_future(server.generate(200)) for _ in range(3)]
        await asyncio.sleep(0.05)
    wrong = Peft(models[0], seed=52)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await server.push(wrong, probe=probe_of(Peft(models[0], seed=53).score(PROMPT)))
    assert read_failure(caught.value).reason == "PROBE_MISMATCH"
    for call in running:
        assert len((await call).tokens) in (200, 300)


async def test_old_turns_finish_under_the_old_adapter_and_it_is_freed(
    server: Server, models: list[Path]
) -> None:
    old, new = Peft(models[0], seed=3), Peft(models[0], seed=4)
    await server.push(old)
    before = server.version
    running = [asyncio.ensure_future(server.generate(LONG)) for _ in range(3)]
    await server.begun(3)
    await server.push(new)
    after = await server.generate()
    assert not running[0].done()
    assert set(await server.engine._llm.list_loras()) == {before, server.version}
    new.check(after, PROMPT, after.tokens)
    for call in running:
        turn = await call
        assert turn.versions == [before] * LONG
        old.check(turn, PROMPT, turn.tokens)
    await server.only(server.version)


async def test_recompute_goes_on_under_the_new_adapter_at_the_exact_token(
    server: Server, models: list[Path]
) -> None:
    old, new = Peft(models[0], seed=5), Peft(models[0], seed=6)
    await server.push(old)
    before = server.version
    running = [asyncio.ensure_future(server.generate(LONG)) for _ in range(3)]
    await server.begun(3)
    await server.push(new, in_flight=weights_pb2.IN_FLIGHT_POLICY_RECOMPUTE)
    for call in running:
        turn = await call
        assert set(turn.versions) == {before, server.version}
        cut = turn.versions.index(server.version)
        assert turn.versions == [before] * cut + [server.version] * (LONG - cut)
        old.check(turn, PROMPT, turn.tokens[:cut])
        new.check(turn, [*PROMPT, *turn.tokens[:cut]], turn.tokens[cut:], cut)
    await server.only(server.version)


async def test_turns_that_end_at_a_stop_string_leave_their_adapter_at_once(
    server: Server, models: list[Path]
) -> None:
    """vLLM's front end ends these turns before the engine process knows."""
    for seed in range(7, 13):
        peft = Peft(models[0], seed=seed)
        await server.push(peft)
        plain = await server.generate(40)
        text = bytes(token for token in plain.tokens if token < 128).decode()
        if not text:
            continue
        turns = [
            asyncio.ensure_future(
                server.generate(sampling_params=greedy(40, stop=[text[len(text) // 2]]))
            )
            for _ in range(4)
        ]
        await asyncio.sleep(0.01 * (seed % 3))
        await server.push(Peft(models[0], seed=seed + 20))
        for call in turns:
            reason = (await call).finished.finish_reason
            assert reason == trajectory_pb2.FINISH_REASON_STOP
        await server.only(server.version)


async def test_full_weights_are_refused_once_there_is_an_adapter(
    server: Server, models: list[Path]
) -> None:
    await server.push(Peft(models[0], seed=40))
    requests = upload_of(models[1], server.version + 1, weights_pb2.IN_FLIGHT_POLICY_KEEP)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        _ = [response async for response in server.wire.UpdateWeights(iter(requests))]
    assert read_failure(caught.value).reason == "ADAPTER_ACTIVE"


async def test_what_vllm_cannot_load_changes_nothing(
    server: Server, models: list[Path], tmp_path: Path
) -> None:
    peft = Peft(models[0], seed=41)
    await server.push(peft)
    running = asyncio.ensure_future(server.generate(200))
    with pytest.raises(EngineLoadFailed):
        await server.engine.add_adapter(Adapter(999, tmp_path))
    turn = await running
    peft.check(turn, PROMPT, turn.tokens)
    await server.only(server.version)
