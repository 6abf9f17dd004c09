"""What a run's folder tells: `penstock runs`, `penstock logs` and `penstock up FOLDER --status`.

Runs of `penstock up`, `penstock demo` and `penstock train` alike: it reads what all of them write, and asks
the kernel whether a process holds a lock in the folder.
"""

from __future__ import annotations

import fcntl
import json
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from penstock.up.processes import read_tail
from penstock.up.state import EVENTS, STATE

METRICS = "metrics.jsonl"
LEDGER = "ledger.jsonl"
TRAINER = "trainer.toml"
MARKS = (STATE, METRICS, LEDGER)
"""A folder with one of these is a run's."""
TAIL_BYTES = 256 << 10
DEEPEST = 3
DEFAULT_STEPS = 100
"""The trainer's, for files that leave them out."""
RECENT = 5
"""Steps over which the shown reward is averaged."""
PACE = 20
"""Steps over which the duration of a step is averaged."""


@dataclass(frozen=True)
class RunState:
    """How far a run is."""

    folder: str
    state: str
    """`starting`, `running`, `done` or `stopped`."""
    step: int = 0
    steps: int | None = None
    """None if the folder does not tell."""
    reward: float | None = None
    """Mean reward of the last five steps."""
    seconds_left: float | None = None
    """An estimate by the last steps' durations; None if the run does not make steps."""
    started: float | None = None
    """In seconds since the epoch."""


def is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in MARKS)


def find_runs(folder: Path, depth: int = DEEPEST) -> Iterator[Path]:
    """The folders of runs at most `depth` levels below a folder, or itself.

    Raises OSError if it cannot be listed.
    """
    if is_run(folder):
        yield folder
        return
    for inner in sorted(folder.iterdir()):
        if depth and inner.is_dir():
            yield from find_runs(inner, depth - 1)


def read_run(folder: Path, now: float) -> RunState:
    """Reads the end of the run's figures. `now` is in seconds since the epoch. Raises OSError."""
    lines = _steps(folder)
    step = int(lines[-1]["step"]) if lines else 0
    settings = _settings(folder)
    steps = None if settings is None else int(settings.get("steps", DEFAULT_STEPS))
    runs = is_under_way(folder)
    done = steps is not None and (step >= steps or _at_target(lines, settings))
    under_way, over = "running" if lines else "starting", "done" if done else "stopped"
    left = None
    if runs and lines and steps is not None:
        mean = fmean(float(line["seconds"]) for line in lines[-PACE:])
        left = max(0.0, (steps - step) * mean - (now - float(lines[-1]["time"])))
    reward = fmean(float(line["reward_mean"]) for line in lines[-RECENT:]) if lines else None
    state = under_way if runs else over
    return RunState(str(folder), state, step, steps, reward, left, _started(folder))


def is_under_way(folder: Path) -> bool:
    """Whether a process makes the run."""
    return any(_is_locked(folder / name) for name in (EVENTS, LEDGER))


def log_files(folder: Path) -> dict[str, Path]:
    """The logs in a run's folder by the name of the role; `events` has what `penstock up` did."""
    return {path.stem: path for path in sorted(folder.glob("*.log"))}


def _steps(folder: Path) -> list[dict[str, Any]]:
    """The last lines of the figures that are about steps."""
    try:
        texts = read_tail(folder / METRICS, TAIL_BYTES)
    except FileNotFoundError:
        return []
    found: list[dict[str, Any]] = []
    for text in texts:
        try:
            line = json.loads(text)
        except ValueError:
            # The first line may be cut, and the last one half written.
            continue
        if line.get("kind", "step") == "step":
            found.append(line)
    return found


def _settings(folder: Path) -> dict[str, Any] | None:
    """The table [run] of the trainer's file; None if there is no file."""
    try:
        table = tomllib.loads((folder / TRAINER).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return table.get("run", {})


def _at_target(lines: list[dict[str, Any]], settings: dict[str, Any] | None) -> bool:
    """Whether the run has reached `run.target`, at which it ends before its last step."""
    target = (settings or {}).get("target")
    if target is None:
        return False
    patience = int(target.get("patience", 1))
    means = [line.get("reward_target_mean") for line in lines[-patience:]]
    return len(means) == patience and all(m is not None and m >= target["reward"] for m in means)


def _started(folder: Path) -> float | None:
    for name in (EVENTS, METRICS):
        try:
            with (folder / name).open(encoding="utf-8", errors="replace") as file:
                first = file.readline()
        except FileNotFoundError:
            continue
        try:
            if name == METRICS:
                return float(json.loads(first)["time_gather_start"])
            return datetime.strptime(first.split(" ")[0], "%Y-%m-%dT%H:%M:%S%z").timestamp()
        except (ValueError, KeyError, TypeError):
            continue
    return None


def _is_locked(path: Path) -> bool:
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False
