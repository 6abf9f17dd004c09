"""What each step was like: one record, shown to a person, kept as JSONL and for TensorBoard, and
traced."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, closing, nullcontext
from pathlib import Path
from typing import TextIO, cast

from opentelemetry import metrics, trace
from opentelemetry.trace import Link, Span
from rich.console import Console

from penstock.common import telemetry
from penstock.trainer.core.errors import storing
from penstock.trainer.core.figures import MOMENT, Line, aggregate, as_json, scalars
from penstock.trainer.exchange.server_load import LoadMeter
from penstock.trainer.metrics.display import Display
from penstock.trainer.metrics.pace import Pace
from penstock.trainer.metrics.step_record import FIGURES, StepRecord
from penstock.trainer.metrics.tracker import Scalars
from penstock.trainer.metrics.trackers import Trackers

FILE = "metrics.jsonl"
PREFIX = "train/"


class MetricsWriter:
    """Writes each record wherever records go: to `metrics.jsonl` and the traces step by step, to everybody
    else the point of `every_steps` of them.

    A point is due where the number of its step is a multiple of `every_steps`, and at the end, of the
    steps that came since. A run that resumes between two takes the steps since the last one from
    `metrics.jsonl`, so that its next point is of as many steps as any other, those of a point at the
    end of the run before included.

    Whatever writes raises StorageFailed where the disk does not take it, for `metrics.jsonl` and for
    TensorBoard, which writes in a thread of its own and says so at the next point.
    """

    def __init__(
        self,
        folder: Path,
        scalars: Scalars,
        console: Console,
        *,
        steps: int,
        step: int = 0,
        every_steps: int = 1,
        trackers: Trackers | None = None,
        load: LoadMeter | None = None,
    ) -> None:
        """`folder` gets `metrics.jsonl`, to whose end records are added. `steps` is the number of the run's
        last step, `step` the last that is done already. `trackers` are asked what they lost; points reach
        them by `scalars`."""
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / FILE
        self._lines: list[Line] = _lines_between(self._path, step - step % every_steps, step)
        self._unsent = False
        self._last_step = step
        self._every = every_steps
        self._file: TextIO = self._path.open("a", encoding="utf-8")
        self._scalars = scalars
        self._trackers = trackers
        self._load = load
        self._pace = Pace(steps)
        self._display = Display(console, steps, self._pace, step=step)
        self._tracer = trace.get_tracer("penstock.trainer")
        self._instruments = _Instruments()

    def measuring(self) -> AbstractAsyncContextManager[None]:
        """The server's load is sampled meanwhile."""
        return nullcontext() if self._load is None else self._load.running()

    def begin_step(self, step: int, afterwards: float | None = 0.0) -> Span:
        """The step's span, in a trace of its own; `write` ends it. `afterwards` is how many seconds the run
        takes after its last step, None where nobody knows."""
        self._pace.begin(step)
        self._pace.afterwards = afterwards
        return self._tracer.start_span("penstock.step", attributes={"penstock.step": step})

    def write(self, record: StepRecord, span: Span) -> None:
        """The step is over, its switch answered."""
        if self._load is not None:
            begun = record.time_gather_start
            record.load = self._load.take(begun, begun + record.seconds)
        if self._trackers is not None:
            record.tracker_points_lost = self._trackers.take_lost()
        line = record.line()
        self._append(record.step, as_json(line))
        self._trace(record, span, record.traceparents)
        self._instruments.record(record)
        self._add(record.step, line)

    def restore(self, step: int, line: Mapping[str, object]) -> None:
        """Writes the figures of the last step that is done, which the trainer that did it left in its
        checkpoint and did not live to write. Its traces are lost, and when that happened which was still to
        come then."""
        moments = [each.name for each in FIGURES if each.unit == MOMENT]
        ahead = {name: None for name in moments if not line.get(name)}
        line = {**line, **ahead, "time": time.time()}
        self._append(step, line)
        self._add(step, cast("Line", line))

    def _append(self, step: int, line: Mapping[str, object]) -> None:
        with storing(self._path):
            self._file.write(json.dumps({"step": step, **line}) + "\n")
            self._file.flush()

    def forget(self, step: int) -> None:
        """Removes the evaluations of this step, which is not written yet, and of later ones: they are of
        weights that the run has no more. What showed them goes on showing them."""
        self._file.close()
        keep_until(self._path.parent, step - 1, step - 1)
        self._file = self._path.open("a", encoding="utf-8")

    def _add(self, step: int, line: Line) -> None:
        self._lines.append(line)
        self._unsent, self._last_step = True, step
        if step % self._every == 0:
            self._send()
        self._display.step(step)

    def doing(self, what: str) -> None:
        """Every step is done, and this is not."""
        self._display.doing(what)

    def close(self) -> None:
        """Sends what is left, flushes, and ends the display, which it does whatever else fails."""
        with closing(self._display), storing(self._path.parent), ExitStack() as stack:
            stack.callback(self._scalars.close)
            stack.callback(self._file.close)
            if self._unsent:
                self._send()

    def _send(self) -> None:
        """The point of the lines that came since the last one."""
        point = aggregate(FIGURES, self._lines)
        self._lines, self._unsent = [], False
        with storing(self._path.parent):
            for name, value in scalars(FIGURES, point).items():
                self._scalars.add_scalar(f"{PREFIX}{name}", value, self._last_step)
            self._scalars.flush()
        self._display.show(self._last_step, point)

    def _trace(self, record: StepRecord, span: Span, traceparents: Sequence[str]) -> None:
        """Ties both ways: the step's span links to the trajectories' spans, and each of their
        traces gets a child that lies where the step computed and links to it."""
        start, end = int(record.time_train_start * 1e9), int(record.time_train_end * 1e9)
        attributes = {
            "penstock.step": record.step,
            "penstock.weight_version": record.weight_version,
        }
        for traceparent in traceparents:
            context = telemetry.from_traceparent(traceparent)
            caller = trace.get_current_span(context).get_span_context()
            if not caller.is_valid:
                continue
            span.add_link(caller)
            child = self._tracer.start_span(
                "penstock.train",
                context=context,
                links=[Link(span.get_span_context())],
                start_time=start,
                attributes=attributes,
            )
            child.end(end)
        span.set_attributes(
            {
                **attributes,
                "penstock.reward_mean": record.batch.reward_mean,
                "penstock.lag_mean": record.batch.lag_mean,
                "penstock.tokens": record.batch.tokens,
                "penstock.pause_seconds": record.pause_seconds,
            }
        )
        span.end()


class _Instruments:
    """OpenTelemetry's instruments; no-ops without an SDK."""

    def __init__(self) -> None:
        meter = metrics.get_meter("penstock.trainer")
        self._reward = meter.create_histogram("penstock.trainer.reward_mean")
        self._lag = meter.create_histogram("penstock.trainer.lag_mean", unit="{version}")
        self._idle = meter.create_histogram("penstock.trainer.idle_ratio", unit="1")
        self._seconds = meter.create_histogram("penstock.trainer.step.duration", unit="s")
        self._pause = meter.create_histogram("penstock.trainer.pause.duration", unit="s")
        self._tokens = meter.create_counter("penstock.trainer.tokens", unit="{token}")
        self._masked = meter.create_counter("penstock.trainer.tokens_masked", unit="{token}")
        self._bytes = meter.create_counter("penstock.trainer.upload", unit="By")
        self._probe = meter.create_histogram("penstock.trainer.probe_difference", unit="{nat}")
        self._unchanged = meter.create_counter(
            "penstock.trainer.weights.unchanged", unit="{version}"
        )
        self._failures = meter.create_counter("penstock.trainer.failures", unit="{trajectory}")
        self._dropped = meter.create_counter("penstock.trainer.groups_dropped", unit="{group}")

    def record(self, record: StepRecord) -> None:
        self._reward.record(record.batch.reward_mean)
        self._lag.record(record.batch.lag_mean)
        self._idle.record(record.idle_ratio)
        self._seconds.record(record.seconds)
        self._pause.record(record.pause_seconds)
        self._tokens.add(record.batch.tokens)
        self._masked.add(record.batch.tokens_masked)
        self._bytes.add(record.upload_bytes)
        self._failures.add(record.failures)
        self._unchanged.add(record.unchanged)
        for reason, count in record.groups_dropped.items():
            self._dropped.add(count, {"reason": reason})
        if record.probe_difference is not None:
            self._probe.record(record.probe_difference)


def keep_until(folder: Path, step: int, measured: int | None = None) -> int:
    """Removes from `metrics.jsonl` what a resumed run is about to do again; all of it at step
    zero. Returns the last step that it has, zero where it has none.

    Evaluations stay up to the step `measured`, where there is one: nobody makes them again of steps that
    the ledger has, unless one comes out otherwise."""
    path = folder / FILE
    with storing(path):
        return _keep_until(path, step, measured) if path.exists() else 0


def _keep_until(path: Path, step: int, measured: int | None) -> int:
    kept: list[str] = []
    last = 0
    for text in path.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            line = json.loads(text)
            of = int(line["step"])
        except ValueError:
            break  # The killed trainer wrote half a line.
        # What says of what kind it is is no step's.
        if "kind" in line and measured is not None and of <= measured:
            kept.append(text)
        elif step and of <= step:
            kept.append(text)
            last = max(last, of if "kind" not in line else 0)
    # As a whole: who is killed meanwhile keeps what there was.
    shorter = path.with_name(f".{FILE}")
    shorter.write_text("".join(kept), encoding="utf-8")
    shorter.replace(path)
    return last


def _lines_between(path: Path, after: int, until: int) -> list[Line]:
    """The figures of the steps after one and up to another, from a file without half a line; a line that
    says of what kind it is is no step's."""
    if after == until or not path.exists():
        return []
    with path.open(encoding="utf-8") as file:
        lines = [cast("Line", json.loads(line)) for line in file]
    return [
        line for line in lines if after < cast("int", line["step"]) <= until and "kind" not in line
    ]
