"""Trackers: services that receive the run's figures, in addition to the files in the run's folder.

A tracker can be slow or unreachable without delaying the run. Each has a separate thread, which takes
points from a bounded queue, in order. A tracker is made before anything else in the run, opened at the
first point, and closed after the last one, or left CLOSE_SECONDS after the end of the run.

A point is lost if the tracker cannot log it, cannot be opened for it, or if the queue is full. With the
next point the thread tries again, and opens the tracker first if necessary. The first of several failures
in a row is logged, all lost points are counted (`tracker_points_lost`), and `metrics.jsonl` has all steps.

A resumed run continues the same run in the tracker, identified by `trackers/KIND/id` in the run's folder.
Repeated steps are logged again. How their earlier points are treated depends on the tracker.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from penstock.common.distribution import pip_install
from penstock.common.functions import find_function
from penstock.trainer.config.metrics import CustomTrackerConfig, TrackerConfig, WandbConfig
from penstock.trainer.core.errors import ConfigInvalid, blaming, storing
from penstock.trainer.metrics.tracker import RunStart, Scalars, Tracker

log = logging.getLogger(__name__)

QUEUED_POINTS = 1000
# Shorter than the grace period that a supervisor gives a process, including shutdown work before this.
CLOSE_SECONDS = 20.0


Point = tuple[int, Mapping[str, float]]
"""A step, and the figures of the steps up to it."""


@dataclass(eq=False, repr=False)
class TrackerThread:
    """The queue and the thread of one tracker."""

    name: str
    tracker: Tracker
    start: RunStart
    capacity: int = QUEUED_POINTS

    def __post_init__(self) -> None:
        self._queue: queue.Queue[Point | bool] = queue.Queue(self.capacity + 1)
        """Points, and then whether the run is complete. There is room for that, so it never waits."""
        # Each counter is written by one thread only.
        self._sent = 0
        self._refused = 0
        self._logged = 0
        self._failed = 0
        self._reported = 0
        self._left = threading.Event()
        self._failing = False
        self._thread = threading.Thread(target=self._run, name=f"tracker-{self.name}", daemon=True)
        self._thread.start()

    def send(self, step: int, figures: Mapping[str, float]) -> None:
        """Queue a point, or drop it if the queue is full. Never waits."""
        if self._queue.qsize() >= self.capacity:
            self._refused += 1
            if self._refused == 1:
                log.warning("%s: %d points are queued; dropping more", self.name, self.capacity)
            return
        self._sent += 1
        self._queue.put_nowait((step, figures))

    def take_lost(self) -> int:
        """Return how many points were lost since the last call."""
        lost = self._refused + self._failed
        found, self._reported = lost - self._reported, lost
        return found

    def end(self, *, complete: bool) -> None:
        """Announce that no more points follow. Never waits."""
        self._queue.put_nowait(complete)

    def wait(self, seconds: float) -> None:
        """Wait this long for the thread to end; log how many points were lost."""
        self._thread.join(max(0.0, seconds))
        if self._thread.is_alive():
            self._left.set()
            log.warning("%s: not done after %g s; stopping without it", self.name, CLOSE_SECONDS)
        lost = self._refused + self._sent - self._logged
        if lost:
            log.warning("%s: %d points were not delivered; metrics.jsonl has them", self.name, lost)

    def _run(self) -> None:
        opened = False
        while not isinstance(item := self._queue.get(), bool):
            # The process is about to end: start nothing new.
            if self._left.is_set():
                return
            opened = self._tell(*item, opened)
        if opened and not self._left.is_set():
            self._attempt(lambda: self.tracker.close(item))

    def _tell(self, step: int, figures: Mapping[str, float], opened: bool) -> bool:
        """Log a point, opening the tracker if necessary; return whether it is open now."""
        if not opened and not self._attempt(lambda: self.tracker.open(self.start)):
            self._failed += 1
            return False
        if self._attempt(lambda: self.tracker.log(step, figures)):
            if self._failing:
                log.warning("%s: points are delivered again from step %d", self.name, step)
            self._logged += 1
            self._failing = False
        else:
            self._failed += 1
        return True

    def _attempt(self, call: Callable[[], None]) -> bool:
        """Run the call and return whether it succeeded. Warn of the first failure in a row."""
        try:
            call()
        except Exception as error:
            # The library may raise anything; only this point is lost.
            if not self._failing:
                kind = type(error).__name__
                log.warning("%s: cannot deliver points: %s: %s", self.name, kind, error)
            self._failing = True
            return False
        return True


@dataclass(slots=True)
class Trackers:
    """All trackers of a run."""

    made: Mapping[str, Tracker]
    """The trackers, by the name under which lost points are counted."""
    steps: int
    """The run's last step, as far as it is known."""
    _threads: list[TrackerThread] = field(default_factory=list[TrackerThread])
    _last_step: int = 0

    def begin(self, out: Path, run_id: str, config: Mapping[str, object], *, resumes: bool) -> None:
        """Start a thread for each tracker, with a folder in `out`. Raises StorageFailed."""
        for name, tracker in self.made.items():
            start = RunStart(run_id, out / "trackers" / name, config)
            with storing(start.folder):
                start.folder.mkdir(parents=True, exist_ok=True)
                if not resumes:
                    (start.folder / "id").unlink(missing_ok=True)
            self._threads.append(TrackerThread(name, tracker, start))

    def send(self, step: int, figures: Mapping[str, float]) -> None:
        """Queue a point for every tracker. Never waits."""
        # An evaluation's point has the step at which it began, and may follow points of later steps.
        self._last_step = max(self._last_step, step)
        for thread in self._threads:
            # A copy, because a tracker may modify it.
            thread.send(step, dict(figures))

    def take_lost(self) -> dict[str, int]:
        """Return how many points were lost since the last call, by tracker."""
        lost = {thread.name: thread.take_lost() for thread in self._threads}
        return {name: count for name, count in lost.items() if count}

    def close(self) -> None:
        """Wait for the queued points, CLOSE_SECONDS at most."""
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads:
            thread.end(complete=self._last_step >= self.steps)
        for thread in self._threads:
            thread.wait(deadline - time.monotonic())
        self._threads.clear()


@dataclass(slots=True)
class TrackedScalars:
    """Writes to TensorBoard and to trackers. Figures between two flushes form a point per step."""

    _scalars: Scalars
    _trackers: Trackers
    _points: dict[int, dict[str, float]] = field(default_factory=dict[int, dict[str, float]])

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self._scalars.add_scalar(tag, scalar_value, global_step)
        self._points.setdefault(global_step, {})[tag] = scalar_value

    def flush(self) -> None:
        """Flush TensorBoard and send the completed points to the trackers."""
        self._scalars.flush()
        for step, point in self._points.items():
            self._trackers.send(step, point)
        self._points = {}

    def close(self) -> None:
        """Close TensorBoard only. The trackers are closed last of all."""
        self._scalars.close()


def make_trackers(configs: Sequence[TrackerConfig], steps: int) -> Trackers:
    """Create the configured trackers. Raises ConfigInvalid if one cannot be used."""
    made = {config.kind: _make(config, f"metrics.trackers.{n}") for n, config in enumerate(configs)}
    return Trackers(made, steps)


def _make(config: TrackerConfig, section: str) -> Tracker:
    if isinstance(config, CustomTrackerConfig):
        with blaming(f"{section}.function {config.function}"):
            function = find_function(config.function, (), config.options)
            return cast("Tracker", function(**config.options))
    try:
        if isinstance(config, WandbConfig):
            from penstock.trainer.metrics.wandb import WandbTracker

            return WandbTracker(config, section)
        from penstock.trainer.metrics.mlflow import MlflowTracker

        return MlflowTracker(config)
    except ImportError as error:
        raise ConfigInvalid(
            f"{section}: {config.kind} is not installed: {pip_install(config.kind)}"
        ) from error
