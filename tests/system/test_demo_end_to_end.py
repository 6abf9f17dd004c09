"""`penstock demo --tiny` as a user runs it, and that nothing remains when it is interrupted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.collector import Collector

pytest.importorskip("vllm")

MARK = "PENSTOCK_TEST_MARK"
STEPS = 8


@dataclass
class Demo:
    """A running demo. Its processes inherit an environment variable that tells them from all others."""

    process: subprocess.Popen[str]
    mark: str
    out: Path

    def printed_until(self, text: str) -> str:
        """What was printed up to the first line that contains `text`."""
        assert self.process.stdout is not None
        printed: list[str] = []
        for line in self.process.stdout:
            printed.append(line)
            if text in line:
                return "".join(printed)
        raise AssertionError(f"{text!r} was not printed; this was:\n{''.join(printed)}")

    def pids(self) -> dict[int, str]:
        """The demo's running processes, with their command lines."""
        wanted = f"{MARK}={self.mark}".encode()
        found: dict[int, str] = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    arguments = (folder / "cmdline").read_bytes().split(b"\0")
                    found[int(folder.name)] = b" ".join(arguments).decode(errors="replace")
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
        return found

    def pid_of(self, command: str) -> int:
        """The one process of a penstock command."""
        pattern = re.compile(rf"-m penstock\.cli {command}\b")
        (pid,) = [pid for pid, line in self.pids().items() if pattern.search(line)]
        return pid

    def assert_nothing_is_left(self) -> None:
        deadline = time.monotonic() + 10
        while self.pids():
            assert time.monotonic() < deadline, self.pids()
            time.sleep(0.05)


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """An OTLP endpoint. Processes started from now on export to it."""
    collector = Collector()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server, port = asyncio.run_coroutine_threadsafe(collector.serve(), loop).result()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_INSECURE", "true")
    yield collector
    asyncio.run_coroutine_threadsafe(server.stop(1), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture
def demo(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Demo]:
    """A just started `penstock demo --tiny` with four steps, and the options of an indirect parameter."""
    mark = uuid.uuid4().hex
    out = tmp_path / "out"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "penstock.cli", "demo", "--tiny"),
            *("--steps", "4", "--out", str(out)),
            *getattr(request, "param", ()),
        ],
        env={**os.environ, MARK: mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    running = Demo(process, mark, out)
    yield running
    process.kill()
    process.communicate()
    for pid in running.pids():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.timeout(600)
# The target looks at the attempts of four steps, and any reward reaches this one. The last steps are of
# attempts that the restarted server sampled: the spans of the killed one may be lost.
@pytest.mark.parametrize(
    "demo", [("--steps", "12", "--target", "0", "--patience", "5")], indirect=True
)
def test_a_tiny_model_goes_once_round_though_its_server_is_killed_and_traces_reach_the_step(
    collector: Collector, demo: Demo
) -> None:
    printed = demo.printed_until("step 1/12")
    os.kill(demo.pid_of("serve"), signal.SIGKILL)
    printed += demo.process.communicate(timeout=500)[0]
    assert demo.process.returncode == 0, printed
    demo.assert_nothing_is_left()
    events = (demo.out / "events.log").read_text()
    assert "server: was ended by SIGKILL; starting again in 0.5 s (1 of 5 restarts)" in events
    summary = json.loads((demo.out / "summary.json").read_text())
    for name in ("reward_by_step", "lag_by_step", "pause_seconds_by_step"):
        assert len(summary[name]) == STEPS
    assert summary["seconds"] > 0
    assert summary["tokens_per_second"] > 0
    # The restarted server held the first weights, but no sample came from them mid-run.
    assert summary["lag_max"] <= 4
    metrics = [json.loads(line) for line in (demo.out / "metrics.jsonl").read_text().splitlines()]
    assert [record["weight_version"] for record in metrics] == list(range(1, STEPS + 1))
    # An attempt whose lease ran out meanwhile was retried.
    assert all(record["failures"] == 0 for record in metrics)
    # The engine computes with the weights that the trainer trained.
    assert max(record["probe_difference"] for record in metrics) < 1e-4
    assert any(record["applied"] for record in metrics)
    assert (demo.out / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert "reward, last" in printed
    check_words(demo, printed, summary)
    check_traces(collector)


def check_words(demo: Demo, printed: str, summary: dict[str, Any]) -> None:
    """The demo says what it does, shows what was learned, and ends with its figures and what to try."""
    for words in (
        "computes in float32",
        "ends when the mean reward is 0,",
        "vLLM takes 20 to 60 s",
    ):
        assert words in printed
    assert re.search(r"server +serves at \S+ after \d+ s", printed)
    assert f"reached in {STEPS} steps" in printed
    assert "at most" in printed
    assert f"step {STEPS}/{STEPS}" in printed
    assert summary["target_reached"]
    answers = summary["answers"]
    assert [one["prompt"] for one in answers] == ["one", "two", "three"]
    assert any(one["before"] != one["after"] for one in answers)
    order = ("Three prompts that were not trained", "demo.png", "Next:", "penstock train --model")
    places = [printed.index(words) for words in order]
    assert places == sorted(places)
    line = json.loads(printed.splitlines()[-1])
    assert line["steps"] == STEPS
    assert line["dtype"] == "float32"
    assert 0 <= line["start_seconds"] <= line["target_seconds"] <= line["end_seconds"]
    assert line["setup_seconds"] is None
    # Attempts that are given back at the end are not failures.
    assert "WORKER_STOPPED" not in (demo.out / "worker.log").read_text()


def check_traces(collector: Collector) -> None:
    """One trace leads from the agent's call through server and engine to the step that trained it."""
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
    # The training span in the agent's trace and the step's own span link to each other.
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


@pytest.mark.timeout(60)
def test_ctrl_c_leaves_nothing_running(demo: Demo) -> None:
    demo.printed_until("server   starting")
    demo.process.send_signal(signal.SIGINT)
    printed, _ = demo.process.communicate(timeout=40)
    assert demo.process.returncode == 130, printed
    assert "interrupted" in printed
    demo.assert_nothing_is_left()
