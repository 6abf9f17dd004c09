"""What a step leaves behind: a line of JSON, scalars, and spans that tie traces together."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from rich.console import Console

from penstock.trainer.metrics import MetricsWriter, StepRecord, figures_of, keep_until
from penstock.wire import telemetry

REQUIRED = {
    "step", "weight_version", "reward_mean", "reward_std", "lag_mean", "lag_max",
    "tokens_masked", "tokens", "seconds", "seconds_wait", "seconds_train", "seconds_upload",
    "seconds_switch", "idle_ratio", "pause_seconds", "upload_bytes", "logprob_diff_mean",
    "logprob_diff_max", "groups", "groups_without_gradient", "failures", "time",
    "time_gather_start", "time_gather_end", "time_train_start", "time_train_end",
    "time_upload_start", "time_upload_end",
}  # fmt: skip


class Scalars:
    def __init__(self) -> None:
        self.written: dict[tuple[str, int], float] = {}

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.written[tag, global_step] = scalar_value

    def flush(self) -> None: ...
    def close(self) -> None: ...


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    return exporter


def write(folder: Path, *records: StepRecord, terminal: bool = False) -> tuple[str, Scalars]:
    out, scalars = io.StringIO(), Scalars()
    console = Console(file=out, force_terminal=terminal, width=200)
    writer = MetricsWriter(folder, scalars, console, steps=9)
    for record in records:
        writer.write(record, writer.begin_step(record.step))
    writer.close()
    return out.getvalue(), scalars


def test_a_record_is_a_line_of_json_and_scalars(tmp_path: Path) -> None:
    record = StepRecord(3, reward_mean=0.25, tokens_masked=7, traceparents=["x"])
    text, scalars = write(tmp_path, record)
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    fields: dict[str, Any] = json.loads(line)
    assert set(fields) >= REQUIRED
    assert (fields["step"], fields["reward_mean"], fields["tokens_masked"]) == (3, 0.25, 7)
    assert scalars.written["train/reward_mean", 3] == 0.25
    assert "step 3/9  reward 0.250" in text and text.count("\n") == 1


def test_a_terminal_gets_a_table(tmp_path: Path) -> None:
    text, _ = write(tmp_path, StepRecord(1, reward_mean=0.125), StepRecord(2), terminal=True)
    assert "step 2 of 9" in text and "0.125" in text and "reward" in text


def test_a_resumed_run_continues_its_file(tmp_path: Path) -> None:
    write(tmp_path, StepRecord(1), StepRecord(2), StepRecord(3))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')
    keep_until(tmp_path, 2)
    write(tmp_path, StepRecord(3, reward_mean=1.0))
    lines = [json.loads(x) for x in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[-1]["reward_mean"] == 1.0
    keep_until(tmp_path, 0)
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    keep_until(tmp_path / "nowhere", 0)


def test_a_trajectorys_trace_reaches_the_step_that_trained_it(
    tmp_path: Path, spans: InMemorySpanExporter
) -> None:
    agent = trace.get_tracer("agent").start_span("agent.call")
    traceparent = telemetry.traceparent(trace.set_span_in_context(agent))
    record = StepRecord(
        5,
        weight_version=6,
        time_train_start=100.0,
        time_train_end=101.5,
        traceparents=[traceparent, "", "nonsense"],
    )
    write(tmp_path, record)
    step, train = (
        next(s for s in spans.get_finished_spans() if s.name == name)
        for name in ("penstock.step", "penstock.train")
    )
    assert len(spans.get_finished_spans()) == 2
    caller = agent.get_span_context()
    assert train.context.trace_id == caller.trace_id
    assert train.parent is not None and train.parent.span_id == caller.span_id
    assert train.links[0].context.span_id == step.context.span_id
    assert [link.context.span_id for link in step.links] == [caller.span_id]
    assert (train.start_time, train.end_time) == (100_000_000_000, 101_500_000_000)
    assert step.attributes is not None and step.attributes["penstock.weight_version"] == 6


def test_the_record_of_a_killed_trainer_is_written_once(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step"')
    left = figures_of(StepRecord(3, weight_version=4, reward_mean=0.5, groups_dropped={"flat": 2}))
    for _ in range(2):
        written = keep_until(tmp_path, 3)
        writer = MetricsWriter(tmp_path, Scalars(), Console(file=io.StringIO()), steps=9)
        # As it comes back from a checkpoint.
        writer.restore(json.loads(json.dumps(left)), written_step=written)
        writer.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[2] == left
