"""The engine's process never outlives the server's, however the server ends."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.collector import Collector
from tests.support.engines import SMALL_CACHE, ForkedProcess
from tests.support.harness import until
from tests.support.processes import engines_of
from tests.support.tiny_model import make_tiny_model

pytest.importorskip("vllm")

OPTIONS = ("--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "32")
OPTIONS += SMALL_CACHE

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
    print("service", os.environ.get("OTEL_SERVICE_NAME"), flush=True)
    print("ready", flush=True)
    await engine.lost()

if __name__ == "__main__":
    asyncio.run(main())
"""


@contextlib.asynccontextmanager
async def server_process(
    folder: Path, model: Path, collector: str
) -> AsyncGenerator[asyncio.subprocess.Process]:
    script = folder / "serve.py"
    script.write_text(SERVER)
    environment = os.environ | {
        # Nothing listens there; the process's own provider receives the spans.
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9",
        # vLLM's own process exports to this.
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": collector,
        "OTEL_BSP_SCHEDULE_DELAY": "100",
    }
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


async def kill_and_check(process: Any) -> None:
    """Kill the server with SIGKILL and check that none of its child processes survives."""
    family = psutil.Process(process.pid).children(recursive=True)
    assert family
    os.kill(process.pid, signal.SIGKILL)
    await process.wait()
    _, alive = await asyncio.to_thread(psutil.wait_procs, family, timeout=10)
    assert alive == []


async def test_a_killed_server_takes_its_engine_along_and_vllm_joins_the_trace(tmp_path: Path):
    model = make_tiny_model(tmp_path / "model", tied=True)
    collector = Collector()
    collecting, port = await collector.serve()
    async with server_process(tmp_path, model, f"http://127.0.0.1:{port}") as process:
        assert process.stdout and process.stderr
        lines = [(await process.stdout.readline()).decode().split() for _ in range(3)]
        # The name of vLLM's own process is not left in the server's environment, nor in that of
        # what the server starts later.
        trace_id = "0af7651916cd43dd8448eb211c80319c"
        assert lines == [["llm_request", trace_id], ["service", "None"], ["ready"]]
        assert engines_of(process.pid)
        await until(lambda: bool(collector.spans))
        assert {service for service, _ in collector.spans} == {"penstock-engine"}
        await kill_and_check(process)
        # Python's resource tracker reports that it cleans up after the killed process.
        noise = (await process.stderr.read()).decode().splitlines()
        assert [line for line in noise if "resource_tracker" not in line] == []
    await collecting.stop(None)


def serve(model: str) -> None:
    """Start an engine, whose process is spawned."""
    from penstock.server.vllm.engine import VllmEngine
    from penstock.server.vllm.options import engine_arguments

    asyncio.run(VllmEngine.start(engine_arguments(["--model", model, *OPTIONS])))


async def test_a_server_killed_while_it_starts_takes_its_engine_along(tmp_path: Path):
    model = make_tiny_model(tmp_path / "model", tied=True)
    process = await ForkedProcess.start(functools.partial(serve, str(model)))
    try:
        await until(lambda: bool(spawned(process.pid)))
        await kill_and_check(process)
    finally:
        await process.close()


def spawned(pid: int) -> list[psutil.Process]:
    """The processes that this one has spawned, from the first moment of each."""
    found: list[psutil.Process] = []
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [child] if any("spawn_main" in part for part in child.cmdline()) else []
    return found
