"""Writes evaluation records: as separate lines in `metrics.jsonl`, to TensorBoard and to the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import cast

from rich.console import Console

from penstock.trainer.core.errors import storing
from penstock.trainer.evaluation.record import EvaluationRecord, Figures
from penstock.trainer.metrics.tracker import Scalars

FILE = "metrics.jsonl"
KIND = "evaluation"


class EvaluationWriter:
    """Writes each record to all destinations."""

    def __init__(self, folder: Path, scalars: Scalars, console: Console) -> None:
        """`folder` contains the run's `metrics.jsonl`, to which a line is appended for each record."""
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / FILE
        self._scalars = scalars
        self._console = console

    def write(self, record: EvaluationRecord) -> None:
        """Writes the record of an evaluation that ended. Raises StorageFailed."""
        line = as_line(record)
        with storing(self._path.parent):
            # Opened each time, because `keep_until` replaces the file.
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            show(line, self._scalars)
        # Above the live table, if there is one.
        self._console.print(as_text(record), soft_wrap=True, highlight=False, markup=False)


def show(line: Mapping[str, object], scalars: Scalars) -> None:
    """Writes the line of an evaluation as points of its step."""
    for name, value in _points(line):
        scalars.add_scalar(f"eval/{line['name']}/{name}", value, cast("int", line["step"]))
    scalars.flush()


def lines_from(folder: Path, step: int) -> list[Mapping[str, object]]:
    """Returns the lines of evaluations that began at this step or later."""
    return [line for line in _lines(folder) if cast("int", line["step"]) >= step]


def as_line(record: EvaluationRecord) -> dict[str, object]:
    """Returns the line of a record: its own fields, merged with the figures of all prompts."""
    own = cast("dict[str, object]", asdict(record))
    figures = cast("dict[str, object]", own.pop("figures"))
    return {"kind": KIND, **own, **figures}


def as_text(record: EvaluationRecord) -> str:
    """Returns the line of a record for people."""
    figures = record.figures
    parts = [
        f"eval {record.name}  version {versions(record)}",
        f"reward {number(figures.reward_mean)} ± {number(figures.reward_stderr)}",
        *(f"pass@{k} {share:.3f}" for k, share in figures.pass_at.items()),
        f"prompts {figures.prompts}/{record.prompts_asked}",
        f"tokens {number(figures.tokens_mean, '.1f')}",
        f"truncated {number(figures.truncated_share, '.0%')}",
        f"failed {figures.failures}",
        f"mixed {record.mixed_share:.0%}",
        f"lag {record.lag}",
        f"seconds {record.seconds:.1f}, held {record.seconds_held:.1f}",
    ]
    if record.skipped:
        parts.append(f"skipped {record.skipped}")
    if len(record.by_source) > 1:
        parts += [f"{name} {number(f.reward_mean)}" for name, f in record.by_source.items()]
    return "  ".join(parts)


def last_steps(folder: Path) -> dict[str, int]:
    """Returns the step of the last record of each set. Ignores a line that a killed trainer left
    incomplete."""
    found: dict[str, int] = {}
    for line in _lines(folder):
        name, step = str(line["name"]), cast("int", line["step"])
        found[name] = max(step, found.get(name, step))
    return found


def _lines(folder: Path) -> Iterator[Mapping[str, object]]:
    path = folder / FILE
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            line = cast("Mapping[str, object]", json.loads(text))
        except ValueError:
            return
        if line.get("kind") == KIND:
            yield line


def _points(line: Mapping[str, object]) -> Iterator[tuple[str, float]]:
    yield from _figures(line)
    by_source = cast("Mapping[str, Mapping[str, object]]", line["by_source"])
    if len(by_source) > 1:
        for source, figures in by_source.items():
            yield from ((f"source/{source}/{name}", value) for name, value in _figures(figures))
    for name in ("mixed_share", "lag", "prompts_missing", "skipped", "seconds", "seconds_held"):
        yield name, float(cast("float", line[name]))


def _figures(table: Mapping[str, object]) -> Iterator[tuple[str, float]]:
    for name in (one.name for one in fields(Figures)):
        value = table[name]
        if isinstance(value, int | float):
            yield name, float(value)
    for k, share in cast("Mapping[str, float]", table["pass_at"]).items():
        yield f"pass_at/{k}", share


def versions(record: EvaluationRecord) -> str:
    """Returns the version that was measured, or the range from oldest to newest."""
    oldest, newest = record.oldest_weight_version, record.newest_weight_version
    if oldest is None or oldest == newest:
        return str(record.weight_version if oldest is None else oldest)
    return f"{oldest} to {newest}"


def number(value: float | None, form: str = ".3f") -> str:
    return "-" if value is None else format(value, form)
