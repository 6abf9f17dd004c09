"""The wire on real vLLM in fp32: exact tokens across aborts, conversations and weight updates."""

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
from transformers import AutoModelForCausalLM

from penstock.v1 import conversation_pb2, trajectory_pb2, weights_pb2
from penstock.wire import codec
from penstock.wire.channel import client_options
from tests.support.harness import (
    AbortRequest,
    ChatMessage,
    ContinueRequest,
    Conversation,
    GenerateRequest,
    GetTrajectoryRequest,
    InlineSource,
    SamplingParams,
    TensorSpec,
    Turn,
    WeightHeader,
    Wire,
    begun,
    collect,
    messages,
    sequence,
)
from tests.support.tiny_model import make_tiny_model

pytest.importorskip("vllm")
pytestmark = pytest.mark.asyncio(loop_scope="module")

GREEDY = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two tied models of the same shape."""
    folder = tmp_path_factory.mktemp("models")
    return [make_tiny_model(folder / str(seed), tied=True, seed=seed) for seed in range(2)]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def wire(models: list[Path]) -> AsyncGenerator[Any]:
    """Raw calls to a real server on real vLLM."""
    from penstock.server.assembly import Serving
    from penstock.server.config import settings as config
    from penstock.server.lifecycle import Lifecycle, bind
    from penstock.server.text.renderer import Renderer, load_tokenizer
    from penstock.server.vllm.options import engine_arguments
    from tests.support.engines import SMALL_CACHE, start_engine

    loaded = config.load(None, ["listen=127.0.0.1:0"])
    server, port = bind(loaded.listen, loaded.limits.concurrent_calls)
    options = ["--model", str(models[0]), "--dtype", "float32", "--max-model-len", "512"]
    engine = await start_engine(engine_arguments([*options, *SMALL_CACHE]))
    renderer = Renderer(load_tokenizer(str(models[0])), engine.description.eos_token_ids)
    life = Lifecycle(Serving(engine, renderer, loaded), server)
    await life.start()
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=client_options())
    yield Wire(channel)
    await channel.close()
    await life.stop(0.0)


async def generate(wire: Any, trajectory_id: str, **fields: Any) -> Turn:
    fields.setdefault("sampling_params", GREEDY)
    return await collect(wire.Generate(GenerateRequest(trajectory_id=trajectory_id, **fields)))


async def test_greedy_text_survives_any_number_of_aborts(wire: Any) -> None:
    prompt = sequence(list(b"once upon a time"))
    whole = await generate(wire, "whole", tokens=prompt)
    assert len(whole.tokens) == 120
    call = asyncio.ensure_future(generate(wire, "cut", tokens=prompt))
    turns: list[Turn] = []
    while True:
        sampled = sum(len(turn.tokens) for turn in turns)
        await begun(wire, "cut", min(120, sampled + 15))
        await wire.Abort(AbortRequest(trajectories={"trajectory_ids": ["cut"]}))
        turns.append(await call)
        if turns[-1].finished.finish_reason != trajectory_pb2.FINISH_REASON_ABORTED:
            break
        call = asyncio.ensure_future(collect(wire.Continue(ContinueRequest(trajectory_id="cut"))))
    assert len(turns) >= 3
    assert [token for turn in turns for token in turn.tokens] == whole.tokens
    joined = [logprob for turn in turns for logprob in turn.logprobs]
    np.testing.assert_allclose(joined, whole.logprobs, atol=1e-4)


async def test_a_conversation_goes_on_after_the_policys_own_tokens(wire: Any) -> None:
    def say(text: str) -> Any:
        message = ChatMessage(role=conversation_pb2.ROLE_USER, content=text)
        return Conversation(messages=[message])

    few = SamplingParams(temperature=0.0, max_tokens=12)
    first = await generate(wire, "talk", conversation=say("hello"), sampling_params=few)
    assert first.finished.message.role == conversation_pb2.ROLE_ASSISTANT
    second = await collect(
        wire.Continue(ContinueRequest(trajectory_id="talk", conversation=say("again")))
    )
    answer = await wire.GetTrajectory(GetTrajectoryRequest(trajectory_id="talk"))
    stored = answer.trajectory
    context = [int(token) for segment in stored.segments[:-1] for token in codec.token_ids(segment)]
    # The same tokens in one prompt give the same turn.
    alone = await generate(wire, "alone", tokens=sequence(context), sampling_params=few)
    assert alone.tokens == second.tokens
    assert second.started.context_token_count == len(context)


def upload_of(path: Path, version: int, in_flight: Any) -> list[Any]:
    """The requests that upload a model inline, without its tied head."""
    state = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
    data = b""
    specs: list[Any] = []
    for name, tensor in state.items():
        if name == "lm_head.weight":
            continue
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
    head = WeightHeader(
        weight_version=version,
        tensors=specs,
        inline=InlineSource(length_bytes=len(data)),
        activation=weights_pb2.ACTIVATION_IMMEDIATE,
        in_flight=in_flight,
    )
    return messages(head, data, 1 << 20)


async def test_updates_change_what_is_sampled_and_back_again(wire: Any, models: list[Path]) -> None:
    prompt = sequence(list(b"weights in flight"))
    before = await generate(wire, "before", tokens=prompt)
    recompute = weights_pb2.IN_FLIGHT_POLICY_RECOMPUTE
    for version in (1, 2):
        path = models[version % 2]
        running = asyncio.ensure_future(
            generate(
                wire,
                f"running-{version}",
                tokens=prompt,
                sampling_params=SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True),
            )
        )
        await begun(wire, f"running-{version}")
        states = [
            response.state
            async for response in wire.UpdateWeights(iter(upload_of(path, version, recompute)))
        ]
        assert states[-1] == weights_pb2.WEIGHT_STATE_ACTIVE
        crossed = await running
        assert crossed.versions == sorted(crossed.versions)
        assert set(crossed.versions) == {version - 1, version}
        after = await generate(wire, f"after-{version}", tokens=prompt)
        assert set(after.versions) == {version}
        # The same weights under another version sample the same tokens; other weights do not.
        assert (after.tokens == before.tokens) == (version == 2)
        if version == 2:
            np.testing.assert_allclose(after.logprobs, before.logprobs, atol=1e-5)
