"""The interfaces of trackers, and of anything that figures are written to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class RunStart:
    """A run's description for a tracker."""

    run_id: str
    folder: Path
    """The tracker's own folder, which persists over restarts."""
    config: Mapping[str, object]
    """The configuration as JSON values, without the trackers."""

    @property
    def tracked_id(self) -> str:
        """The tracker's id of the run; empty until `keep` was called."""
        path = self.folder / "id"
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def keep(self, tracked_id: str) -> None:
        """Store the tracker's id of the run. Raises OSError."""
        (self.folder / "id").write_text(tracked_id, encoding="utf-8")


class Tracker(Protocol):
    """One tracking service.

    Its methods are called from one dedicated thread, and may take long. If one raises, the point is lost.
    """

    def open(self, start: RunStart) -> None:
        """Begin a run in the tracker, or continue the previous one. Called until it succeeds."""
        ...

    def log(self, step: int, point: Mapping[str, float]) -> None:
        """Log a point: the figures, by name, of the steps up to this one.

        Names that begin with `eval/` are figures of one evaluation. After a resume, steps may repeat.
        """
        ...

    def close(self, complete: bool) -> None:
        """End the run in the tracker: complete, or stopped before its last step."""
        ...


class Scalars(Protocol):
    """The methods of TensorBoard's writer that are used."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...
