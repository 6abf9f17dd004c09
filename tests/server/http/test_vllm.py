"""The official SDKs on real vLLM: a conversation with a tool, during weight switches."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio
import torch
import xxhash
from transformers import AutoModelForCausalLM

from penstock.server.text.messages import Message, Tool
from penstock.server.text.renderer import Renderer, load_tokenizer
from penstock.v1 import weights_pb2
from penstock.wire.channel import client_options
from tests.support.harness import InlineSource, TensorSpec, WeightHeader, Wire, messages
from tests.support.languages import clients
from tests.support.sdk_agents import (
    ANSWER,
    SCHEMA,
    USER,
    chat_agent,
    messages_agent,
    responses_agent,
)
from tests.support.tiny_model import EOS_ID, make_tiny_model

pytest.importorskip("vllm")
pytestmark = pytest.mark.asyncio(loop_scope="module")

CALL = json.dumps({"name": "weather", "arguments": {"q": "Paris"}})
CALLED = f"<tool_call>\n{CALL}\n</tool_call><|im_end|>"
SAID = "It has 21 degrees in Paris."
POLICIES = ("KEEP", "RECOMPUTE", "ABORT")
NPM_SECONDS = 45
OPENAI = "openai@6"
NODE = Path(__file__).parents[3] / ".venv" / "share" / "node"


def taught(folder: Path) -> Path:
    """A model trained to repeat one conversation: it calls the tool,
    then states the tool's answer."""
    make_tiny_model(folder, tied=True, hidden=128)
    tokenizer: Any = load_tokenizer(str(folder))
    renderer = Renderer(tokenizer, [EOS_ID])
    tool = Tool("weather", "", SCHEMA)
    asked = renderer.render([Message("user", USER["content"])], [tool])
    called = np.asarray(tokenizer.encode(CALLED, add_special_tokens=False))
    answered = renderer.render_next([Message("tool", ANSWER, tool_call_id="x")], EOS_ID)
    said = np.asarray(tokenizer.encode(f"{SAID}<|im_end|>", add_special_tokens=False))
    tokens = torch.tensor(np.concatenate([asked, called, answered, said]), dtype=torch.long)[None]
    labels = torch.full_like(tokens, -100)
    begin, end = len(asked), len(asked) + len(called)
    labels[:, begin:end] = tokens[:, begin:end]
    labels[:, -len(said) :] = tokens[:, -len(said) :]
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(300):
        loss = model(tokens, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if loss.item() < 0.005:
            break
    assert loss.item() < 0.05, loss.item()
    model.save_pretrained(folder)
    return folder


@dataclass
class Running:
    """A server on real vLLM whose weights tests can switch."""

    serving: Any
    wire: Any
    state: dict[str, torch.Tensor]
    version: int = 0

    async def switch(self) -> None:
        """Switch to the next version: the same weights with noise too
        small to change a greedy turn."""
        self.version += 1
        data, specs = b"", []
        for name, tensor in self.state.items():
            values = (tensor + 1e-5 * torch.randn_like(tensor)).numpy().tobytes()
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
            weight_version=self.version,
            tensors=specs,
            inline=InlineSource(length_bytes=len(data)),
            activation=weights_pb2.ACTIVATION_IMMEDIATE,
            in_flight=f"IN_FLIGHT_POLICY_{POLICIES[self.version % len(POLICIES)]}",
        )
        async for _ in self.wire.UpdateWeights(iter(messages(head, data, 1 << 20))):
            pass

    @contextlib.asynccontextmanager
    async def switching(self) -> AsyncGenerator[None]:
        """Switch versions back to back, as fast as they load, until the end of the block."""

        async def switch_on() -> None:
            while True:
                await self.switch()

        task = asyncio.create_task(switch_on())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Running]:
    from penstock.server.assembly import Serving
    from penstock.server.config import settings as config
    from penstock.server.http.server import open_http
    from penstock.server.lifecycle import Lifecycle, bind
    from penstock.server.security.gate import open_gate
    from penstock.server.vllm.options import engine_arguments
    from penstock.server.vllm.parsers import VllmParsers
    from tests.support.engines import SMALL_CACHE, start_engine

    model = taught(tmp_path_factory.mktemp("model"))
    loaded = config.load(None, ["listen=127.0.0.1:0"])
    gate = open_gate(loaded)
    server, port = bind(loaded.listen, loaded.limits.concurrent_calls, gate)
    http = open_http(loaded, port, gate.credentials)
    options = ["--model", str(model), "--dtype", "float32", "--max-model-len", "1024"]
    engine = await start_engine(engine_arguments([*options, *SMALL_CACHE]))
    tokenizer = load_tokenizer(str(model))
    parser = VllmParsers(tokenizer, "hermes", "")
    renderer = Renderer(tokenizer, engine.description.eos_token_ids, parser)
    serving = Serving(engine, renderer, loaded, gate=gate, http=http)
    life = Lifecycle(serving, server)
    await life.start()
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=client_options())
    loaded_model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    state = loaded_model.state_dict()
    state.pop("lm_head.weight", None)
    yield Running(serving, Wire(channel), state)
    await channel.close()
    await life.stop(0.0)


async def node_agent(base: str, stream: bool, **_: Any) -> str:
    """The same agent with the `openai` package on Node."""
    environment = clients.node_environment()
    # Look up node on that environment's PATH, not on this process's own.
    program = shutil.which("node", path=environment["PATH"]) or "node"
    process = await asyncio.create_subprocess_exec(
        *(program, str(Path(__file__).parents[2] / "support" / "openai_agent.cjs")),
        *(base, "streamed" if stream else "whole"),
        env={**environment, "NODE_PATH": str(NODE / "node_modules")},
        stdout=asyncio.subprocess.PIPE,
    )
    said, _nothing = await process.communicate()
    assert process.returncode == 0
    return said.decode().rstrip("\n")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def node() -> None:
    """Install the `openai` package; skip the test if Node or the registry is not available."""
    try:
        environment = clients.node_environment()
    except clients.NotHere as error:
        pytest.skip(str(error))
    if (NODE / "node_modules" / "openai").exists():
        return
    NODE.mkdir(parents=True, exist_ok=True)
    # Stops npm from searching the parent folders. With --prefix instead, npm may hang forever.
    (NODE / "package.json").write_text('{"private": true}\n')
    install = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", OPENAI]
    try:
        # Without a registry npm retries for minutes.
        await asyncio.to_thread(
            clients.download, install, environment, NODE, f"npm install {OPENAI}", NPM_SECONDS
        )
    except clients.NotHere as error:
        shutil.rmtree(NODE, ignore_errors=True)
        pytest.skip(str(error))


async def converse(running: Running, agent: Any, stream: bool) -> None:
    http = f"http://127.0.0.1:{running.serving.info.http_port}/v1"
    versions: set[int] = set()
    # Repeat until a switch happens within a turn. On a fast machine not every conversation has one.
    for _ in range(20):
        attempt = uuid.uuid4().hex
        async with running.switching():
            said = await agent(f"{http}/attempts/{attempt}", stream, extra_body={"temperature": 0})
        record = running.serving.store.find(attempt)
        assert said == SAID
        assert (record.turn_count, record.children) == (2, [])
        turns = {
            (segment.turn_index, segment.weight_version)
            for segment in record.segments
            if segment.logprobs
        }
        versions |= {version for _, version in turns}
        if len(turns) > 2:
            break
    assert len(turns) > 2, versions


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("agent", [chat_agent, responses_agent, messages_agent])
async def test_an_sdk_uses_a_tool_while_weights_switch(running: Running, agent: Any, stream: bool):
    await converse(running, agent, stream)


@pytest.mark.usefixtures("node")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_the_sdk_on_node_uses_a_tool_while_weights_switch(running: Running, stream: bool):
    await converse(running, node_agent, stream)
