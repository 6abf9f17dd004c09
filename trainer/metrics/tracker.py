"""The seams of trackers: what a service is told of a run, and where whoever has figures puts them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class RunStart:
    """What a tracker is told of the run."""

    run_id: str
    folder: Path
    """The tracker's own, which stays over restarts."""
    config: Mapping[str, object]
    """The configuration as JSON has it, trackers left out."""

    @property
    def tracked_id(self) -> str:
        """What the tracker calls the run; empty where it has not said yet."""
        path = self.folder / "id"
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def keep(self, tracked_id: str) -> None:
        """Notes what the tracker calls the run. Raises OSError."""
        (self.folder / "id").write_text(tracked_id, encoding="utf-8")


class Tracker(Protocol):
    """One service. All methods are called from one thread, which is the tracker's own, and may take
    long; what they raise costs the point."""

    def open(self, start: RunStart) -> None:
        """Begins the run there, or goes on with the one of before. Called until it succeeds."""
        ...

    def log(self, step: int, point: Mapping[str, float]) -> None:
        """The figures of the steps up to this one, by name, or those of an evaluation of it, which all
        begin with `eval/`. After a resume, steps come again."""
        ...

    def close(self, complete: bool) -> None:
        """Ends the run there: done, or stopped before its last step."""
        ...


class Scalars(Protocol):
    """The part of TensorBoard's writer that is used."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...
