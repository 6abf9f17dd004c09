"""What each step was like: one record, shown to a person, kept as JSONL and for TensorBoard, and
traced."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol, TextIO, cast

from opentelemetry import metrics, trace
from opentelemetry.trace import Link, Span
from rich.console import Console
from rich.live import Live
from rich.table import Table

from penstock.wire import telemetry

ROWS_SHOWN = 16


@dataclass(slots=True)
class StepRecord:
    """One step; the field names are the keys of `metrics.jsonl`. Times are unix seconds."""

    step: int
    weight_version: int = 0
    """Version of the weights the step made."""
    reward_mean: float = 0.0
    reward_std: float = 0.0
    lag_mean: float = 0.0
    """Versions behind the trainer, over the tokens young enough to be trained."""
    lag_max: int = 0
    tokens: int = 0
    """Policy tokens in the batch."""
    tokens_trained: int = 0
    """Tokens in the loss: young enough, and of a group that some term of it moves."""
    tokens_masked: int = 0
    """Policy tokens left out for their age."""
    groups: int = 0
    groups_without_gradient: int = 0
    groups_failed: int = 0
    """Groups refused since the step before, because every trajectory had failed."""
    failures: int = 0
    """Failed trajectories, those of refused groups included."""
    groups_dropped: dict[str, int] = field(default_factory=dict[str, int])
    """Groups refused since the step before, because they were of no use, by reason."""
    groups_kept_in_need: int = 0
    """Groups in the batch that would have been dropped, had there not been too many of them."""
    overlong_penalty_mean: float = 0.0
    """What a trajectory in the batch lost for its length; `reward_mean` is without that."""
    tokens_truncated: int = 0
    """Tokens left out because the token budget ended their turn."""
    applied: bool = True
    """Whether the weights changed."""
    loss: float = 0.0
    grad_norm: float = 0.0
    learning_rate: float = 0.0
    clip_fraction: float = 0.0
    """Part of the tokens in the loss whose ratio was out of its bounds; here and below see
    `policy.StepResult`."""
    clip_fraction_low: float = 0.0
    clip_fraction_high: float = 0.0
    logprob_diff_mean: float = 0.0
    logprob_diff_max: float = 0.0
    entropy: float = 0.0
    kl_reference: float | None = None
    correction_weight_mean: float | None = None
    correction_weight_max: float | None = None
    correction_masked: float | None = None
    correction_clipped: float | None = None
    critic_loss: float | None = None
    critic_explained_variance: float | None = None
    seconds: float = 0.0
    """From the beginning of this step's gathering to that of the next one's."""
    seconds_wait: float = 0.0
    seconds_train: float = 0.0
    """Packing, forward and backward passes, optimizer."""
    seconds_upload: float = 0.0
    seconds_held: float = 0.0
    """How long the switch waited for pinned evaluations."""
    seconds_switch: float = 0.0
    """From the request to its receipt; the next step's gathering has begun meanwhile."""
    seconds_checkpoint: float = 0.0
    idle_ratio: float = 0.0
    """Part of the step in which the trainer waited for groups."""
    pause_seconds: float = 0.0
    """How long generation stood still for the switch."""
    probe_difference: float | None = None
    """Mean difference between the engine's score of the probe and the trainer's, in nats; None without
    one."""
    upload_bytes: int = 0
    """Bytes of weights that were sent; through the stream those of attempts that failed too."""
    upload_dense_bytes: int = 0
    """Size of the whole version."""
    delta: bool = False
    """Whether the version went as a difference."""
    changed_tensors: int | None = None
    """Tensors that differ from what the server sampled before, as it says; None where it did not say."""
    changed_elements_ratio: float | None = None
    """Elements that differ from the version before, of all; None where no difference was made."""
    unchanged: bool = False
    """Whether no tensor changed: an alarm."""
    time: float = 0.0
    """When the record was made."""
    time_gather_start: float = 0.0
    time_gather_end: float = 0.0
    time_train_start: float = 0.0
    time_train_end: float = 0.0
    time_upload_start: float = 0.0
    time_upload_end: float = 0.0
    time_switch_start: float = 0.0
    time_switch_end: float = 0.0
    traceparents: list[str] = field(default_factory=list[str])
    """Trace context of each trajectory in the batch; traced, not written."""


class Scalars(Protocol):
    """The part of TensorBoard's writer that is used."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class MetricsWriter:
    """Writes each record wherever records go."""

    def __init__(self, folder: Path, scalars: Scalars, console: Console, *, steps: int) -> None:
        """`folder` gets `metrics.jsonl`, to whose end records are added."""
        folder.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = (folder / "metrics.jsonl").open("a", encoding="utf-8")
        self._scalars = scalars
        self._display = _Display(console, steps)
        self._tracer = trace.get_tracer("penstock.trainer")
        self._instruments = _Instruments()

    def begin_step(self, step: int) -> Span:
        """The step's span, in a trace of its own; `write` ends it."""
        return self._tracer.start_span("penstock.step", attributes={"penstock.step": step})

    def write(self, record: StepRecord, span: Span) -> None:
        """The step is over, its switch answered."""
        figures = figures_of(record)
        self._file.write(json.dumps(figures) + "\n")
        self._file.flush()
        for name, value in figures.items():
            if isinstance(value, int | float) and not name.startswith("time"):
                self._scalars.add_scalar(f"train/{name}", float(value), record.step)
        for reason, count in record.groups_dropped.items():
            self._scalars.add_scalar(f"train/groups_dropped/{reason}", float(count), record.step)
        self._scalars.flush()
        self._trace(record, span, record.traceparents)
        self._instruments.record(record)
        self._display.show(record)

    def restore(self, figures: Mapping[str, object], *, written_step: int) -> None:
        """Writes the record that a killed trainer left in its last checkpoint (`figures_of`), where the
        one of `written_step` is the last that was written."""
        known = {name.name for name in fields(StepRecord)}
        record = StepRecord(
            **cast("dict[str, Any]", {name: figures[name] for name in known & figures.keys()})
        )
        if record.step > written_step:
            self.write(record, self.begin_step(record.step))

    def close(self) -> None:
        """Flushes and ends the display."""
        self._file.close()
        self._scalars.close()
        self._display.close()

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
                "penstock.reward_mean": record.reward_mean,
                "penstock.lag_mean": record.lag_mean,
                "penstock.tokens": record.tokens,
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
        self._reward.record(record.reward_mean)
        self._lag.record(record.lag_mean)
        self._idle.record(record.idle_ratio)
        self._seconds.record(record.seconds)
        self._pause.record(record.pause_seconds)
        self._tokens.add(record.tokens)
        self._masked.add(record.tokens_masked)
        self._bytes.add(record.upload_bytes)
        self._failures.add(record.failures)
        self._unchanged.add(record.unchanged)
        for reason, count in record.groups_dropped.items():
            self._dropped.add(count, {"reason": reason})
        if record.probe_difference is not None:
            self._probe.record(record.probe_difference)


class _Display:
    """A live table in a terminal, plain lines otherwise."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._recent: list[StepRecord] = []
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        if self._live is not None:
            self._live.start()

    def show(self, record: StepRecord) -> None:
        if self._live is None:
            self._console.print(self._line(record), soft_wrap=True, highlight=False, markup=False)
            return
        self._recent = [*self._recent, record][-ROWS_SHOWN:]
        self._live.update(self._table(), refresh=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()

    def _line(self, r: StepRecord) -> str:
        return (
            f"step {r.step}/{self._steps}  reward {r.reward_mean:.3f}  lag {r.lag_mean:.2f}"
            f" (max {r.lag_max})  masked {r.tokens_masked}  tokens {r.tokens}"
            f"  seconds {r.seconds:.2f} = wait {r.seconds_wait:.2f} + train {r.seconds_train:.2f}"
            f" + upload {r.seconds_upload:.2f}  idle {r.idle_ratio:.0%}"
            f"  pause {r.pause_seconds:.3f}  {_sent(r)} MB"
            f"  logprob diff {r.logprob_diff_mean:.4f} (max {r.logprob_diff_max:.3f})"
            f"  no gradient {r.groups_without_gradient}/{r.groups}  failed {r.failures}"
            f"{_dropped(r)}"
            f"{'  unchanged!' if r.unchanged else ''}"
        )

    def _table(self) -> Table:
        table = Table(title=f"penstock train: step {self._recent[-1].step} of {self._steps}")
        names = (
            "step", "reward", "lag", "max", "masked", "tokens", "seconds", "wait", "train",
            "upload", "idle", "pause", "MB", "diff", "flat", "failed",
        )  # fmt: skip
        for name in names:
            table.add_column(name, justify="right")
        for r in self._recent:
            table.add_row(
                str(r.step),
                f"{r.reward_mean:.3f}",
                f"{r.lag_mean:.2f}",
                str(r.lag_max),
                str(r.tokens_masked),
                str(r.tokens),
                f"{r.seconds:.2f}",
                f"{r.seconds_wait:.2f}",
                f"{r.seconds_train:.2f}",
                f"{r.seconds_upload:.2f}",
                f"{r.idle_ratio:.0%}",
                f"{r.pause_seconds:.3f}",
                "unchanged!" if r.unchanged else _megabytes(r.upload_bytes),
                f"{r.logprob_diff_mean:.4f}",
                f"{r.groups_without_gradient}/{r.groups}",
                str(r.failures),
            )
        return table


def _dropped(record: StepRecord) -> str:
    """Groups that were dropped, by reason; nothing where none was."""
    counted = ", ".join(f"{reason} {n}" for reason, n in sorted(record.groups_dropped.items()))
    return f"  dropped {counted}" if counted else ""


def _sent(record: StepRecord) -> str:
    """Megabytes of the upload, beside those of the whole where a difference was sent."""
    sent = _megabytes(record.upload_bytes)
    return f"{sent} of {_megabytes(record.upload_dense_bytes)}" if record.delta else sent


def _megabytes(count: int) -> str:
    """Three digits, for a difference can be a thousandth of the whole."""
    return f"{count / 1e6:.{3 if count < 1e6 else 1 if count < 1e8 else 0}f}"


def figures_of(record: StepRecord) -> dict[str, object]:
    """What of it is written down."""
    figures = asdict(record)
    del figures["traceparents"]
    return figures


def keep_until(folder: Path, step: int) -> int:
    """Removes from `metrics.jsonl` what a resumed run is about to do again; all of it at step
    zero. Returns the last step it has, zero where it has none."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return 0
    kept: list[str] = []
    last = 0
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            row = json.loads(line)
            of = int(row["step"])
        except ValueError:
            break  # The killed trainer wrote half a line.
        if step and of <= step:
            kept.append(line)
            # An evaluation's line names its step too.
            last = max(last, of if "kind" not in row else 0)
    # As a whole: who is killed meanwhile keeps what there was.
    shorter = folder / ".metrics.jsonl"
    shorter.write_text("".join(kept), encoding="utf-8")
    shorter.replace(path)
    return last
