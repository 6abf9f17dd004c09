"""Writes the record of each step: to the terminal, `metrics.jsonl`, TensorBoard, trackers and traces."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass
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
from penstock.trainer.metrics.reporting import Trackers
from penstock.trainer.metrics.step_record import FIGURES, StepRecord
from penstock.trainer.metrics.tracker import Scalars

FILE = "metrics.jsonl"
PREFIX = "train/"


@dataclass(eq=False, repr=False)
class MetricsWriter:
    """Writes each record to all destinations.

    `metrics.jsonl` and the traces get every step. The other destinations get points: the aggregate of
    `every_steps` steps, due at each multiple of that number. At the end of the run, one more point has the
    remaining steps. A run that resumes between two points reads the steps since the last one from
    `metrics.jsonl`, including those that the previous run sent in its final point.

    Methods that write raise StorageFailed if the disk refuses `metrics.jsonl` or TensorBoard's files.
    TensorBoard writes in a separate thread, so its failure is raised at the next point.
    """

    folder: Path
    """Holds `metrics.jsonl`, to which records are appended."""
    scalars: Scalars
    console: Console
    steps: int
    """Number of the run's last step."""
    step: int = 0
    """The last step already done."""
    every_steps: int = 1
    trackers: Trackers | None = None
    """Only asked for the points they lost; points reach them through `scalars`."""
    load: LoadMeter | None = None

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._path = self.folder / FILE
        since = self.step - self.step % self.every_steps
        self._lines: list[Line] = _lines_between(self._path, since, self.step)
        self._unsent = False
        self._file: TextIO = self._path.open("a", encoding="utf-8")
        self._pace = Pace(self.steps)
        self.display = Display(self.console, self.steps, self._pace, step=self.step)
        self._tracer = trace.get_tracer("penstock.trainer")
        self._instruments = _Instruments()
        self.stalled = self._instruments.stalled
        """Called with the seconds for which the event loop stood still."""

    def measuring(self) -> AbstractAsyncContextManager[None]:
        """Return a context in which the server's load is sampled."""
        return nullcontext() if self.load is None else self.load.running()

    def begin_step(
        self, step: int, afterwards: float | None = 0.0, *, may_end_early: bool = False
    ) -> Span:
        """Start the step's span, in a separate trace. `write` ends it.

        `afterwards` is how many seconds the run takes after its last step; None if that is unknown.
        `may_end_early` is whether it ends before its last step if it reaches its target.
        """
        self._pace.begin(step)
        self._pace.afterwards, self._pace.may_end_early = afterwards, may_end_early
        return self._tracer.start_span("penstock.step", attributes={"penstock.step": step})

    def write(self, record: StepRecord, span: Span) -> None:
        """Write a step's record once its switch has been answered."""
        if self.load is not None:
            begun = record.time_gather_start
            record.load = self.load.take(begun, begun + record.seconds)
        if self.trackers is not None:
            record.tracker_points_lost = self.trackers.take_lost()
        line = record.line()
        self._append(record.step, as_json(line))
        self._trace(record, span)
        self._instruments.record(record)
        self._add(record.step, line)
        if record.sample:
            self.display.print(record.sample)

    def restore(self, step: int, line: Mapping[str, object]) -> None:
        """Write the figures of the last finished step, which the checkpoint holds.

        The previous trainer died before it wrote them. The step's traces are lost, and so are the
        times of events that were still to come when the checkpoint was written.
        """
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
        """Remove the evaluations of `step` and later steps from `metrics.jsonl`.

        The step is not written yet, and the evaluated weights no longer belong to the run.
        TensorBoard and the trackers still show them.
        """
        self._file.close()
        keep_until(self.folder, step - 1, step - 1)
        self._file = self._path.open("a", encoding="utf-8")

    def _add(self, step: int, line: Line) -> None:
        self._lines.append(line)
        self._unsent, self.step = True, step
        if step % self.every_steps == 0:
            self._send()
        self.display.step(step)

    def end_with(self, step: int) -> None:
        """Take this step for the last one. Its record may still follow."""
        self.display.end_with(step)
        if self.trackers is not None:
            self.trackers.steps = step

    def close(self) -> None:
        """Send the remaining steps, flush, and end the display whatever else fails."""
        with closing(self.display), storing(self.folder), ExitStack() as stack:
            stack.callback(self.scalars.close)
            stack.callback(self._file.close)
            if self._unsent:
                self._send()

    def _send(self) -> None:
        """Send one point with the lines since the last one."""
        point = aggregate(FIGURES, self._lines)
        self._lines, self._unsent = [], False
        with storing(self.folder):
            for name, value in scalars(FIGURES, point).items():
                self.scalars.add_scalar(f"{PREFIX}{name}", value, self.step)
            self.scalars.flush()
        self.display.show(self.step, point)

    def _trace(self, record: StepRecord, span: Span) -> None:
        """Link the step's span and the trajectories' spans in both directions.

        The step's span links to each trajectory's span. Each trajectory's trace gets a child span
        that covers the computation and links to the step's span.
        """
        start, end = int(record.time_train_start * 1e9), int(record.time_train_end * 1e9)
        attributes = {
            "penstock.step": record.step,
            "penstock.weight_version": record.weight_version,
        }
        for traceparent in record.traceparents:
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
    """OpenTelemetry instruments; no-ops without an SDK."""

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
        self._stalls = meter.create_histogram("penstock.trainer.stall", unit="s")

    def stalled(self, seconds: float) -> None:
        self._stalls.record(seconds)

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
    """Remove from `metrics.jsonl` what a resumed run will do again: everything if `step` is zero.

    Evaluations stay up to the step `measured`, if given. They are not repeated for steps that the ledger
    contains, unless a step has a different result. Returns the last step in the file; zero if none.
    """
    path, kept, last = folder / FILE, list[str](), 0
    with storing(path):
        if not path.exists():
            return 0
        for text in path.read_text(encoding="utf-8").splitlines(keepends=True):
            try:
                line = json.loads(text)
                of = int(line["step"])
            except ValueError:
                break  # The killed trainer left half a line.
            # A line with a kind, such as an evaluation, is not a step's record.
            if "kind" in line and measured is not None and of <= measured:
                kept.append(text)
            elif step and of <= step:
                kept.append(text)
                last = max(last, of if "kind" not in line else 0)
        # Replaced atomically: if the process is killed meanwhile, the old file stays.
        shorter = path.with_name(f".{FILE}")
        shorter.write_text("".join(kept), encoding="utf-8")
        shorter.replace(path)
    return last


def _lines_between(path: Path, after: int, until: int) -> list[Line]:
    """Read the figures of the steps after `after`, up to and including `until`.

    The file has no incomplete line. Lines with a kind are not step records and are skipped.
    """
    if after == until or not path.exists():
        return []
    with path.open(encoding="utf-8") as file:
        lines = [cast("Line", json.loads(line)) for line in file]
    return [
        line for line in lines if after < cast("int", line["step"]) <= until and "kind" not in line
    ]
