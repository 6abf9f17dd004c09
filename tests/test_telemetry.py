"""One trace from the agent's call through the server and the engine to the optimizer step."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.collector import Collector

pytest.importorskip("vllm")


@pytest.mark.timeout(180)
async def test_one_trace_reaches_from_the_agent_to_the_step_that_used_it(tmp_path: Path) -> None:
    collector = Collector()
    server, port = await collector.serve()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "penstock.client", "demo", "--tiny", "--steps", "2"),
        *("--out", str(tmp_path / "out")),
        env={
            **os.environ,
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
            "OTEL_EXPORTER_OTLP_INSECURE": "true",
        },
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    printed, _ = await process.communicate()
    await server.stop(1)
    assert process.returncode == 0, printed.decode()

    traces: dict[bytes, dict[str, tuple[str, Any]]] = defaultdict(dict)
    for service, span in collector.spans:
        traces[span.trace_id][f"{service}:{span.name}"] = (service, span)
    trained = [spans for spans in traces.values() if "penstock-trainer:penstock.train" in spans]
    assert trained, sorted({f"{s}:{span.name}" for s, span in collector.spans})
    whole = [
        spans
        for spans in trained
        if {
            "penstock-rollout:penstock.attempt",
            "penstock-rollout:penstock.turn",
            "penstock-server:penstock.turn",
            "penstock-server:llm_request",
        }
        <= set(spans)
    ]
    assert whole, [sorted(spans) for spans in trained][:3]
    spans = whole[0]
    turn = spans["penstock-server:penstock.turn"][1]
    assert turn.parent_span_id == spans["penstock-rollout:penstock.turn"][1].span_id
    assert spans["penstock-server:llm_request"][1].parent_span_id == turn.span_id
    # The span of the training in the agent's trace and the step's own span link to one another.
    step = spans["penstock-trainer:penstock.train"][1].links[0]
    steps = {s.span_id: s for _, s in collector.spans if s.name == "penstock.step"}
    assert step.span_id in steps
    assert turn.trace_id in {link.trace_id for link in steps[step.span_id].links}
    switches = [s for _, s in collector.spans if s.name == "penstock.switch_weights"]
    assert {a.key for a in switches[0].attributes} >= {
        "penstock.weight_version",
        "penstock.pause_seconds",
    }
    for metric in (
        "penstock.tokens",
        "penstock.group.lag",
        "penstock.weights.pause",
        "penstock.weights.changed_tensors",
        "penstock.groups.buffered",
        "penstock.groups.outstanding",
        "penstock.groups.redelivered",
    ):
        assert ("penstock-server", metric) in collector.metrics
