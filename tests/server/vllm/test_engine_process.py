"""The engine's process never outlives the server's, however the server ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from tests.support.processes import engines_of
from tests.support.tiny_model import make_tiny_model

pytest.importorskip("vllm")

OPTIONS = ("--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "32")
OPTIONS += ("--kv-cache-memory-bytes", str(64 << 20))

SERVER = """
import asyncio, os, sys
from penstock.server.engine.protocol import EngineRequest, Sampling
from penstock.server.vllm.engine import VllmEngine
from penstock.server.vllm.options import engine_arguments

async def main():
    import numpy as np
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    trace.set_tracer_provider(provider)
    engine = await VllmEngine.start(engine_arguments(sys.argv[1:]))
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    request = EngineRequest("traced", np.arange(9, dtype=np.int32), Sampling(max_tokens=3), "s",
                            trace_headers={"traceparent": parent})
    async for delta in await engine.generate(request):
        pass
    for span in spans.get_finished_spans():
        if span.name == "llm_request" and span.parent:
            print(span.name, f"{span.context.trace_id:032x}", flush=True)
    print("ready", flush=True)
    await engine.lost()

if __name__ == "__main__":
    asyncio.run(main())
"""


@contextlib.asynccontextmanager
async def server_process(folder: Path, model: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    script = folder / "serve.py"
    script.write_text(SERVER)
    # Nothing listens there; the process's own provider receives the spans.
    environment = os.environ | {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
    command = [sys.executable, str(script), "--model", str(model), *OPTIONS]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=environment
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def kill_and_check(process: asyncio.subprocess.Process) -> None:
    """Kill the server with SIGKILL and check that none of its child processes survives."""
    family = psutil.Process(process.pid).children(recursive=True)
    assert family
    # vLLM may export spans from it; without a name they are those of "unknown_service".
    services = {child.environ().get("OTEL_SERVICE_NAME") for child in family}
    assert "penstock-engine" in services
    os.kill(process.pid, signal.SIGKILL)
    await process.wait()
    _, alive = await asyncio.to_thread(psutil.wait_procs, family, timeout=10)
    assert alive == []


async def test_a_killed_server_takes_its_engine_along_and_vllm_joins_the_trace(tmp_path: Path):
    async with server_process(tmp_path, make_tiny_model(tmp_path / "model", tied=True)) as process:
        assert process.stdout and process.stderr
        lines = [(await process.stdout.readline()).decode().split() for _ in range(2)]
        assert lines == [["llm_request", "0af7651916cd43dd8448eb211c80319c"], ["ready"]]
        assert engines_of(process.pid)
        await kill_and_check(process)
        # Python's resource tracker reports that it cleans up after the killed process.
        noise = (await process.stderr.read()).decode().splitlines()
        assert [line for line in noise if "resource_tracker" not in line] == []


async def test_a_server_killed_while_it_starts_takes_its_engine_along(tmp_path: Path):
    async with server_process(tmp_path, make_tiny_model(tmp_path / "model", tied=True)) as process:
        while not engines_of(process.pid):
            await asyncio.sleep(0.02)
        await kill_and_check(process)
