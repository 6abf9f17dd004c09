"""Trackers: services that are told of the run, beside what is in its folder.

A tracker is slow, and away at times; the run goes on all the same. Each has a thread of its own, which
takes points from a bounded queue:

    made     before anything else of the run: a library that is not installed, or an account that is
             missing, ends the start as ConfigInvalid
    opening  at the first point. The queue fills meanwhile
    open     points are logged, in their order, one after another
    closed   after the last point, or after CLOSE_SECONDS at the end of the run

What a failure does: a point that cannot be logged, or at which the tracker cannot be opened, is lost;
the next one is tried, opening it where it is not open. A point for which the queue has no room is lost.
The first of them is warned of, all are counted (`tracker_points_lost`), and nothing of it reaches the
run. `metrics.jsonl` has every step whatever becomes of them.

A run that resumes goes on in the tracker's same run: `trackers/KIND/id` in the run's folder says which
it is. Steps that are done again after a checkpoint was gone back to are told again; what becomes of
those that were told before is the tracker's.
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

from penstock.common.functions import FunctionInvalid, find_function
from penstock.trainer.config.metrics import CustomTrackerConfig, TrackerConfig, WandbConfig
from penstock.trainer.core.errors import ConfigInvalid, StorageFailed
from penstock.trainer.metrics.tracker import RunStart, Scalars, Tracker

log = logging.getLogger(__name__)

QUEUED_POINTS = 1000
# Less than whoever stops the process gives it, what was begun before included.
CLOSE_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class _Point:
    step: int
    figures: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class _End:
    complete: bool


class TrackerThread:
    """Tells one tracker."""

    def __init__(
        self, name: str, tracker: Tracker, start: RunStart, *, capacity: int = QUEUED_POINTS
    ) -> None:
        self.name = name
        self._tracker = tracker
        self._start = start
        self._capacity = capacity
        # One more for the end, which so never waits.
        self._queue: queue.Queue[_Point | _End] = queue.Queue(capacity + 1)
        # Each written by one thread alone.
        self._sent = 0
        self._refused = 0
        self._logged = 0
        self._failed = 0
        self._reported = 0
        self._left = threading.Event()
        self._failing = False
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def send(self, step: int, figures: Mapping[str, float]) -> None:
        """Never waits."""
        if self._queue.qsize() >= self._capacity:
            self._refused += 1
            if self._refused == 1:
                log.warning("%s: %d points wait; more are lost", self.name, self._capacity)
            return
        self._sent += 1
        self._queue.put_nowait(_Point(step, figures))

    def take_lost(self) -> int:
        """Points lost since this was asked last."""
        lost = self._refused + self._failed
        found, self._reported = lost - self._reported, lost
        return found

    def end(self, *, complete: bool) -> None:
        """No more points come. Never waits."""
        self._queue.put_nowait(_End(complete))

    def wait(self, seconds: float) -> None:
        """Waits for the end; gives up after so long, and says what is lost."""
        self._thread.join(max(0.0, seconds))
        if self._thread.is_alive():
            self._left.set()
            log.warning("%s: not done after %g s; leaving it", self.name, CLOSE_SECONDS)
        lost = self._refused + self._sent - self._logged
        if lost:
            log.warning("%s: %d points did not reach it; metrics.jsonl has them", self.name, lost)

    def _run(self) -> None:
        opened = False
        while isinstance(item := self._queue.get(), _Point):
            # What is under way ends; nothing else is begun, for the process is about to.
            if self._left.is_set():
                return
            opened = self._tell(item, opened)
        if opened and not self._left.is_set():
            self._attempt(lambda: self._tracker.close(item.complete))

    def _tell(self, point: _Point, opened: bool) -> bool:
        """Whether the tracker is open now."""
        if not opened and not self._attempt(lambda: self._tracker.open(self._start)):
            self._failed += 1
            return False
        if self._attempt(lambda: self._tracker.log(point.step, point.figures)):
            if self._failing:
                log.warning("%s: points reach it again, from step %d on", self.name, point.step)
            self._logged += 1
            self._failing = False
        else:
            self._failed += 1
        return True

    def _attempt(self, call: Callable[[], None]) -> bool:
        """Whether it succeeded; the first failure in a row is warned of."""
        try:
            call()
        except Exception as error:
            # Whatever the library raises: it costs the point, and no more.
            if not self._failing:
                kind = type(error).__name__
                log.warning("%s: points are lost: %s: %s", self.name, kind, error)
            self._failing = True
            return False
        return True


@dataclass(slots=True)
class Trackers:
    """All trackers of a run."""

    made: Mapping[str, Tracker]
    """By the names they are counted under."""
    steps: int
    """Of the whole run."""
    _threads: list[TrackerThread] = field(default_factory=list[TrackerThread])
    _last_step: int = 0

    def begin(self, out: Path, run_id: str, config: Mapping[str, object], *, resumes: bool) -> None:
        """The run begins, in this folder. Raises StorageFailed."""
        for name, tracker in self.made.items():
            start = RunStart(run_id, out / "trackers" / name, config)
            try:
                start.folder.mkdir(parents=True, exist_ok=True)
                if not resumes:
                    (start.folder / "id").unlink(missing_ok=True)
            except OSError as error:
                raise StorageFailed(f"{start.folder}: {error.strerror or error}") from error
            self._threads.append(TrackerThread(name, tracker, start))

    def send(self, step: int, figures: Mapping[str, float]) -> None:
        """A point for each of them, of these names. Never waits."""
        # An evaluation's point is at the step it began with, and may come after later steps'.
        self._last_step = max(self._last_step, step)
        for thread in self._threads:
            # Its own: what one makes of it is not the others'.
            thread.send(step, dict(figures))

    def take_lost(self) -> dict[str, int]:
        """Points lost since this was asked last, by tracker."""
        lost = {thread.name: thread.take_lost() for thread in self._threads}
        return {name: count for name, count in lost.items() if count}

    def close(self) -> None:
        """Waits for what is on its way, CLOSE_SECONDS at most."""
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads:
            thread.end(complete=self._last_step >= self.steps)
        for thread in self._threads:
            thread.wait(deadline - time.monotonic())
        self._threads.clear()


class TrackedScalars:
    """TensorBoard's writer and the trackers as one: what is written between two flushes is a point for each
    step of it."""

    def __init__(self, scalars: Scalars, trackers: Trackers) -> None:
        self._scalars = scalars
        self._trackers = trackers
        self._points: dict[int, dict[str, float]] = {}

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """One figure."""
        self._scalars.add_scalar(tag, scalar_value, global_step)
        self._points.setdefault(global_step, {})[tag] = scalar_value

    def flush(self) -> None:
        """The points are whole."""
        self._scalars.flush()
        for step, point in self._points.items():
            self._trackers.send(step, point)
        self._points = {}

    def close(self) -> None:
        """TensorBoard's; trackers are closed after all else."""
        self._scalars.close()


def make_trackers(configs: Sequence[TrackerConfig], steps: int) -> Trackers:
    """Those that are configured. Raises ConfigInvalid where one cannot be used."""
    made = {config.kind: _make(config, f"metrics.trackers.{n}") for n, config in enumerate(configs)}
    return Trackers(made, steps)


def _make(config: TrackerConfig, section: str) -> Tracker:
    if isinstance(config, CustomTrackerConfig):
        try:
            function = find_function(config.function, (), config.options)
        except FunctionInvalid as error:
            raise ConfigInvalid(f"{section}.function {config.function}: {error}") from error
        try:
            return cast("Tracker", function(**config.options))
        except Exception as error:
            # Whatever the function raises is its author's to read.
            kind = type(error).__name__
            raise ConfigInvalid(f"{section}.function {config.function}: {kind}: {error}") from error
    try:
        if isinstance(config, WandbConfig):
            from penstock.trainer.metrics.wandb import WandbTracker

            return WandbTracker(config, section)
        from penstock.trainer.metrics.mlflow import MlflowTracker

        return MlflowTracker(config)
    except ImportError as error:
        raise ConfigInvalid(
            f"{section}: {config.kind} is not installed: pip install 'penstock[{config.kind}]'"
        ) from error
