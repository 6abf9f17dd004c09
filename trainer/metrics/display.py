"""The progress display of a run.

In a terminal: a bar with the remaining time, redrawn each second, and a table below it with a row
for each point. Elsewhere: one line for each point.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from penstock.trainer.core.figures import Line
from penstock.trainer.metrics.pace import Pace, in_words

ROWS_SHOWN = 16
BAR_WIDTH = 20
# Rows of the terminal reserved for the bar, the table's title and rules, and recent log lines.
ROWS_BESIDE = 8
# Smallest number of columns, however narrow the terminal is.
FEWEST_COLUMNS = 4


class Display:
    """A live bar and table in a terminal, plain lines otherwise."""

    def __init__(self, console: Console, steps: int, pace: Pace, *, step: int = 0) -> None:
        """`steps` is the number of the run's last step, `step` the last one already done."""
        self._console = console
        self._steps = steps
        self._pace = pace
        self._done = step
        self._doing = ""
        self._rows: list[tuple[int, Line]] = []
        self._live: Live | None = None
        if console.is_terminal:
            # A separate thread draws, so nothing it reads is modified in place.
            self._live = Live(console=console, refresh_per_second=1, get_renderable=self._draw)
            self._live.start()

    def step(self, step: int) -> None:
        self._done = step
        if self._live is not None:
            self._live.refresh()

    def end_with(self, step: int) -> None:
        """Takes this step for the last one: the run has reached its target."""
        self._steps = step

    def doing(self, what: str) -> None:
        """Shows what the run is doing, now that every step is done."""
        self._doing = what
        if self._live is not None:
            self._live.refresh()

    def show(self, step: int, point: Line) -> None:
        """Shows the figures of the steps up to this one."""
        if self._live is None:
            text = _line(step, self._steps, point)
            remaining = self._pace.remaining() if step < self._steps else None
            left = "" if remaining is None else f"  {remaining}"
            self.print(text + left)
            return
        self._rows = [*self._rows, (step, point)][-ROWS_SHOWN:]

    def print(self, text: str) -> None:
        """Prints lines, above the live table if there is one."""
        self._console.print(text, soft_wrap=True, highlight=False, markup=False, emoji=False)

    def close(self) -> None:
        """Stops drawing and leaves the last state on screen."""
        self._doing = ""
        if self._live is not None:
            self._live.stop()

    def _draw(self) -> RenderableType:
        rows = self._rows[-max(1, self._console.height - ROWS_BESIDE) :]
        if not rows:
            return self._bar()
        # As many columns as fit; the last ones are dropped first.
        tables = (_table(rows, columns) for columns in range(len(COLUMNS), FEWEST_COLUMNS, -1))
        width = self._console.width
        fitting = (table for table in tables if self._console.measure(table).maximum < width)
        return Group(self._bar(), next(fitting, _table(rows, FEWEST_COLUMNS)))

    def _bar(self) -> RenderableType:
        bar = Table.grid(padding=(0, 2))
        for _ in range(3):
            bar.add_column(no_wrap=True)
        remaining = self._pace.remaining() if self._done < self._steps else None
        elapsed = in_words(self._pace.elapsed)
        if self._done >= self._steps and self._doing:
            left = f"every step done, {self._doing}, {elapsed} so far"
        elif self._done >= self._steps:
            left = f"every step done, in {elapsed}"
        else:
            left = f"{remaining}, {elapsed} so far" if remaining else f"{elapsed} so far"
        reached = f"step {self._done} of {self._steps}"
        # With little room, the text takes precedence over the bar.
        room = self._console.width - len(reached) - len(left) - 6
        drawn = ProgressBar(
            total=self._steps, completed=self._done, width=min(max(room, 1), BAR_WIDTH)
        )
        bar.add_row(Text(reached), drawn, Text(left))
        return bar


def _line(step: int, steps: int, point: Line) -> str:
    count = int(_number(point, "steps"))
    which = f"step {step}" if count == 1 else f"steps {step - count + 1} to {step}"
    n, not_finite = _Numbers(point), _number(point, "updates_not_finite")
    return (
        f"{which}/{steps}  reward {n:reward_mean:.3f}  lag {n:lag_mean:.2f}"
        f" (max {n:lag_max:.0f})  masked {n:tokens_masked:.0f}  tokens {n:tokens:.0f}"
        f"  seconds {n:seconds:.2f} = wait {n:seconds_wait:.2f} + train {n:seconds_train:.2f}"
        f" + upload {n:seconds_upload:.2f}  idle {n:idle_ratio:.0%}"
        f"  pause {n:pause_seconds:.3f}  {_sent(point)} MB"
        f"  logprob diff {n:logprob_diff_mean:.4f} (max {n:logprob_diff_max:.3f})"
        f"  no gradient {n:groups_without_gradient:.0f}/{n:groups:.0f}  failed {n:failures:.0f}"
        f"{_counted('dropped', point, 'groups_dropped')}"
        f"{f'  updates not finite {not_finite:.0f}!' if not_finite else ''}"
        f"{_counted('not tracked', point, 'tracker_points_lost')}"
        f"{'  unchanged!' if point.get('unchanged') else ''}"
    )


COLUMNS = {
    "step": "",
    "reward": "reward_mean:.3f",
    "lag": "lag_mean:.2f",
    "tokens": "tokens:.0f",
    "tok/s": "tokens_trained_per_second:.0f",
    "seconds": "seconds:.2f",
    "idle": "idle_ratio:.0%",
    "flat": "",
    "failed": "failures:.0f",
    "max lag": "lag_max:.0f",
    "masked": "tokens_masked:.0f",
    "wait": "seconds_wait:.2f",
    "train": "seconds_train:.2f",
    "upload": "seconds_upload:.2f",
    "pause": "pause_seconds:.3f",
    "MB": "",
    "diff": "logprob_diff_mean:.4f",
}
"""Head of each column, and the format of its figure. Empty for columns composed of several figures."""


def _table(rows: list[tuple[int, Line]], columns: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    heads = list(COLUMNS)[:columns]
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for step, point in rows:
        n = _Numbers(point)
        made = {
            "step": str(step),
            "flat": f"{n:groups_without_gradient:.0f}/{n:groups:.0f}",
            "MB": "unchanged!" if point.get("unchanged") else _megabytes(point, "upload_bytes"),
        }
        table.add_row(*(made.get(head) or format(n, COLUMNS[head]) for head in heads))
    return table


class _Numbers:
    """A point's figures, formatted by a specification of name and format."""

    def __init__(self, point: Line) -> None:
        self._point = point

    def __format__(self, spec: str) -> str:
        name, _, form = spec.partition(":")
        value = self._point.get(name)
        if value is None or isinstance(value, Mapping):
            return "-"
        return format(value, form)


def _number(point: Line, name: str) -> float:
    value = point.get(name)
    return 0.0 if value is None or isinstance(value, Mapping) else float(value)


def _counted(what: str, point: Line, name: str) -> str:
    """Returns counts by key; empty if nothing was counted."""
    counts = cast("Mapping[str, int]", point.get(name) or {})
    counted = ", ".join(f"{key} {count}" for key, count in sorted(counts.items()))
    return f"  {what} {counted}" if counted else ""


def _sent(point: Line) -> str:
    """Returns the megabytes uploaded, and those of the full weights if a delta was sent."""
    sent = _megabytes(point, "upload_bytes")
    return f"{sent} of {_megabytes(point, 'upload_dense_bytes')}" if point.get("delta") else sent


def _megabytes(point: Line, name: str) -> str:
    """Three decimals for small counts, because a delta can be a thousandth of the whole."""
    count = _number(point, name)
    return f"{count / 1e6:.{3 if count < 1e6 else 1 if count < 1e8 else 0}f}"
