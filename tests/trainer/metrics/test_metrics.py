"""The output of a step: a line of JSON, scalars, and spans that link traces together."""

from __future__ import annotations

import errno
import io
import json
import os
import re
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from rich.console import Console

from penstock.common import telemetry
from penstock.trainer.core.errors import StorageFailed
from penstock.trainer.core.figures import as_json
from penstock.trainer.evaluation.record import make_record
from penstock.trainer.evaluation.writer import EvaluationWriter, last_steps
from penstock.trainer.metrics.batch_figures import BatchFigures
from penstock.trainer.metrics.metrics import MetricsWriter, keep_until
from penstock.trainer.metrics.step_record import StepRecord
from penstock.trainer.policy.protocol import StepResult

REQUIRED = {
    "step", "weight_version", "reward_mean", "reward_std", "lag_mean", "lag_max",
    "tokens_masked", "tokens", "seconds", "seconds_wait", "seconds_train", "seconds_upload",
    "seconds_switch", "idle_ratio", "pause_seconds", "upload_bytes", "logprob_diff_mean",
    "logprob_diff_max", "groups", "groups_without_gradient", "failures", "time",
    "time_gather_start", "time_gather_end", "time_train_start", "time_train_end",
    "time_upload_start", "time_upload_end",
}  # fmt: skip


@dataclass
class Scalars:
    written: dict[tuple[str, int], float] = field(default_factory=dict[tuple[str, int], float])

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
    record = StepRecord(
        3,
        batch=BatchFigures(trajectories=1, attempts=1, reward_mean=0.25, tokens_masked=7),
        traceparents=["x"],
    )
    text, scalars = write(tmp_path, record)
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    fields: dict[str, Any] = json.loads(line)
    assert set(fields) >= REQUIRED
    assert (fields["step"], fields["reward_mean"], fields["tokens_masked"]) == (3, 0.25, 7)
    assert scalars.written["train/reward_mean", 3] == 0.25
    assert "step 3/9  reward 0.250" in text and text.count("\n") == 1


def test_a_terminal_gets_a_table(tmp_path: Path) -> None:
    first = StepRecord(1, batch=BatchFigures(trajectories=1, attempts=1, reward_mean=0.125))
    text, _ = write(tmp_path, first, StepRecord(2), terminal=True)
    assert "step 2 of 9" in text and "0.125" in text and "reward" in text


def test_a_resumed_run_continues_its_file(tmp_path: Path) -> None:
    write(tmp_path, StepRecord(1), StepRecord(2), StepRecord(3))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')
    keep_until(tmp_path, 2)
    write(tmp_path, StepRecord(3, batch=BatchFigures(reward_mean=1.0)))
    lines = [json.loads(x) for x in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[-1]["reward_mean"] == 1.0
    keep_until(tmp_path, 0)
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    keep_until(tmp_path / "nowhere", 0)


def test_what_was_measured_goes_with_a_step_that_comes_out_otherwise(tmp_path: Path) -> None:
    console = Console(file=io.StringIO())
    # Both writers have the file open at the same time.
    evaluations = EvaluationWriter(tmp_path, Scalars(), console)

    def measure(step: int) -> None:
        record = make_record(
            [],
            name="n",
            step=step,
            weight_version=step,
            mode="pinned",
            samples_per_prompt=1,
            passes_from=1.0,
            prompts_asked=1,
        )
        evaluations.write(record)

    for step in (0, 2, 4):
        measure(step)
    with closing(MetricsWriter(tmp_path, Scalars(), console, steps=9)) as writer:
        (first, second) = steps(1, 2)
        writer.write(first, writer.begin_step(1))
        writer.forget(2)
        assert last_steps(tmp_path) == {"n": 0}
        measure(2)
        writer.write(second, writer.begin_step(2))
    lines = [json.loads(x) for x in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    found = [(line["step"], line.get("kind")) for line in lines]
    assert found == [(0, "evaluation"), (1, None), (2, "evaluation"), (2, None)]
    # An evaluation before the first step used the run's initial weights, so it stays.
    with closing(MetricsWriter(tmp_path, Scalars(), console, steps=9)) as writer:
        writer.forget(1)
    assert last_steps(tmp_path) == {"n": 0}


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


class FullDisk(Scalars):
    """A TensorBoard writer whose thread met a full disk, so that every later call fails."""

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    close = flush


def test_a_full_disk_ends_the_run_with_a_sentence_and_gives_the_terminal_back(
    tmp_path: Path,
) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=200)
    writer = MetricsWriter(tmp_path, FullDisk(), console, steps=9)
    (record,) = steps(1)
    with pytest.raises(StorageFailed, match="No space left on device"):
        writer.write(record, writer.begin_step(1))
    with pytest.raises(StorageFailed, match="No space left on device"):
        writer.close()
    hidden, shown = "\x1b[?25l", "\x1b[?25h"
    assert hidden in out.getvalue() and out.getvalue().rindex(shown) > out.getvalue().rindex(hidden)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has it")
def test_a_line_that_the_disk_does_not_take_ends_the_run(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, Scalars(), Console(file=io.StringIO()), steps=9)
    writer._file.close()
    writer._file = Path("/dev/full").open("w")  # noqa: SIM115 - it is the writer's to close.
    (record,) = steps(1)
    with pytest.raises(StorageFailed, match=r"metrics\.jsonl: No space left"):
        writer.write(record, writer.begin_step(1))
    with pytest.raises(StorageFailed, match="No space left"):
        writer.close()


def test_a_full_disk_as_lines_are_removed_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')

    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        with pytest.raises(StorageFailed, match=r"metrics\.jsonl: No space left"):
            keep_until(tmp_path, 1)
    assert keep_until(tmp_path, 1) == 1


@pytest.mark.parametrize("every_steps", [1, 3])
def test_the_record_of_a_killed_trainer_is_written_once(tmp_path: Path, every_steps: int) -> None:
    console = Console(file=io.StringIO())
    first = MetricsWriter(tmp_path, Scalars(), console, steps=9, every_steps=every_steps)
    for record in steps(1, 2):
        first.write(record, first.begin_step(record.step))
    # The trainer is killed: it sends nothing more.
    first._file.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "kind": "evaluation"}\n{"step"')
    (record,) = steps(3)
    ahead = {"time": None, "time_switch_end": None}
    for name in [name for name in record.line() if name.startswith("time") and name not in ahead]:
        setattr(record, name, 100.0)
    left = as_json(record.line())
    scalars = Scalars()
    for again in range(2):
        written = keep_until(tmp_path, 3)
        assert written == (3 if again else 2)
        writer = MetricsWriter(
            tmp_path, scalars, console, steps=9, step=written, every_steps=every_steps
        )
        if written < 3:
            # As restored from a checkpoint.
            writer.restore(3, json.loads(json.dumps(left)))
        writer.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 3]
    # The time of what the killed trainer did not finish is unknown.
    assert rows[3].pop("time") > 1e9
    assert {"time": None, **rows[3]} == {"step": 3, **left, **ahead}
    # The point at this step covers as many steps as any other.
    assert scalars.written["train/tokens", 3] == (6.0 if every_steps == 3 else 3.0)


def steps(*numbers: int) -> list[StepRecord]:
    """Records whose reward and token count equal the step number."""
    return [
        StepRecord(n, batch=BatchFigures(trajectories=1, attempts=1, reward_mean=n, tokens=n))
        for n in numbers
    ]


def write_windows(folder: Path, *records: StepRecord, step: int = 0) -> tuple[str, Scalars]:
    out, scalars = io.StringIO(), Scalars()
    writer = MetricsWriter(
        folder, scalars, Console(file=out, width=200), steps=9, step=step, every_steps=3
    )
    for record in records:
        writer.write(record, writer.begin_step(record.step))
    writer.close()
    return out.getvalue(), scalars


def test_steps_are_told_together_and_kept_apart(tmp_path: Path) -> None:
    text, scalars = write_windows(tmp_path, *steps(1, 2, 3, 4))
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4
    told = {
        (n, s): v for (n, s), v in scalars.written.items() if n.endswith(("reward_mean", "/tokens"))
    }
    assert told == {
        ("train/reward_mean", 3): 2.0,
        ("train/tokens", 3): 6.0,
        # The remaining step at the end.
        ("train/reward_mean", 4): 4.0,
        ("train/tokens", 4): 4.0,
    }
    first, last = text.splitlines()
    assert first.startswith("steps 1 to 3/9  reward 2.000") and "tokens 6 " in first
    assert last.startswith("step 4/9  reward 4.000")


def test_a_run_that_resumes_amid_some_steps_tells_them_all(tmp_path: Path) -> None:
    write_windows(tmp_path, *steps(1, 2, 3, 4, 5))
    keep_until(tmp_path, 4)
    text, scalars = write_windows(tmp_path, *steps(5, 6, 7), step=4)
    assert scalars.written["train/tokens", 6] == 15.0
    assert scalars.written["train/tokens", 7] == 7.0
    assert text.splitlines()[0].startswith("steps 4 to 6/9  reward 5.000")


def test_a_run_that_resumes_and_does_nothing_tells_nothing(tmp_path: Path) -> None:
    write_windows(tmp_path, *steps(1, 2))
    assert write_windows(tmp_path, step=2) == ("", Scalars())


def test_where_there_is_no_terminal_there_are_lines_alone(tmp_path: Path) -> None:
    text, _ = write(tmp_path, *steps(1, 2, 3))
    assert "\x1b" not in text and "\r" not in text
    lines = text.splitlines()
    assert [line.partition("  ")[0] for line in lines] == ["step 1/9", "step 2/9", "step 3/9"]
    assert "left" not in lines[0] and lines[2].endswith(" left")


def test_a_terminal_gets_a_bar_and_the_time_left(tmp_path: Path) -> None:
    text, _ = write(tmp_path, *steps(1, 2, 3), terminal=True)
    # The display uses the real clock, and the machine may be busy.
    assert "step 3 of 9" in text and re.search(r"roughly \d+ s left", text)
    text, _ = write(tmp_path / "done", *steps(9), terminal=True)
    assert "step 9 of 9" in text and "done, in " in text


@pytest.mark.parametrize(("width", "seen"), [(160, {"reward", "MB"}), (60, {"reward"})])
def test_a_narrow_terminal_gets_fewer_columns(tmp_path: Path, width: int, seen: set[str]) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=width)
    writer = MetricsWriter(tmp_path, Scalars(), console, steps=9)
    for record in steps(1, 2):
        writer.write(record, writer.begin_step(record.step))
    writer.close()
    assert {head for head in ("reward", "MB") if head in out.getvalue()} == seen
    assert "…" not in out.getvalue()


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    record = StepRecord(1, result=StepResult(updates=1, grad_norm=float("inf")))
    write(tmp_path, record)

    def refuse(name: str) -> None:
        raise AssertionError(name)

    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert line["grad_norm"] is None
