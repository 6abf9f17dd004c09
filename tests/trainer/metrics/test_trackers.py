"""Trackers receive the run's figures and never hold it up."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from penstock.trainer.config.metrics import MetricsConfig
from penstock.trainer.config.trainer import TrainerConfig
from penstock.trainer.core.errors import ConfigInvalid
from penstock.trainer.metrics.reporting import (
    TrackedScalars,
    Trackers,
    TrackerThread,
    make_trackers,
)
from penstock.trainer.metrics.tracker import RunStart

SECONDS = 30.0


@dataclass
class Kept:
    """Records what it receives, unless it is set to fail."""

    fails_to_open: int = 0
    fails_at: tuple[int, ...] = ()
    may_log: threading.Event = field(default_factory=threading.Event)
    logging: threading.Event = field(default_factory=threading.Event)
    opened: list[RunStart] = field(default_factory=list[RunStart])
    points: list[tuple[int, dict[str, float]]] = field(
        default_factory=list[tuple[int, dict[str, float]]]
    )
    complete: bool | None = None

    def __post_init__(self) -> None:
        self.may_log.set()

    def open(self, start: RunStart) -> None:
        if self.fails_to_open:
            self.fails_to_open -= 1
            raise ConnectionError("nobody there")
        self.opened.append(start)

    def log(self, step: int, point: Mapping[str, float]) -> None:
        self.logging.set()
        assert self.may_log.wait(SECONDS)
        if step in self.fails_at:
            raise OSError("network unreachable")
        self.points.append((step, dict(point)))

    def close(self, complete: bool) -> None:
        self.complete = complete


@dataclass
class Tensorboard:
    written: list[tuple[str, float, int]]

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.written.append((tag, scalar_value, global_step))

    def flush(self) -> None: ...
    def close(self) -> None: ...


def told(tracker: Kept) -> list[int]:
    return [step for step, _ in tracker.points]


def start(folder: Path) -> RunStart:
    return RunStart("r", folder, {"run": {"id": "r"}})


def end(thread: TrackerThread, *, complete: bool = True) -> None:
    thread.end(complete=complete)
    thread.wait(SECONDS)


def test_points_come_in_their_order_and_the_end_last(tmp_path: Path) -> None:
    tracker = Kept()
    thread = TrackerThread("kept", tracker, start(tmp_path))
    for step in range(1, 6):
        thread.send(step, {"train/loss": step / 2})
    end(thread)
    assert tracker.points == [(step, {"train/loss": step / 2}) for step in range(1, 6)]
    assert (len(tracker.opened), tracker.complete, thread.take_lost()) == (1, True, 0)


def test_a_point_that_fails_is_lost_and_the_next_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = Kept(fails_at=(2, 3))
    thread = TrackerThread("kept", tracker, start(tmp_path))
    for step in range(1, 6):
        thread.send(step, {})
    end(thread, complete=False)
    assert (told(tracker), tracker.complete) == ([1, 4, 5], False)
    assert (thread.take_lost(), thread.take_lost()) == (2, 0)
    assert caplog.text.count("cannot deliver points: OSError: network unreachable") == 1
    assert "points are delivered again from step 4" in caplog.text
    assert "2 points were not delivered" in caplog.text


def test_a_tracker_that_does_not_open_is_tried_again_at_each_point(tmp_path: Path) -> None:
    tracker = Kept(fails_to_open=2)
    thread = TrackerThread("kept", tracker, start(tmp_path))
    for step in range(1, 5):
        thread.send(step, {})
    end(thread)
    assert (told(tracker), thread.take_lost()) == ([3, 4], 2)


def test_one_that_hangs_makes_nobody_wait(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracker = Kept()
    tracker.may_log.clear()
    thread = TrackerThread("kept", tracker, start(tmp_path), capacity=3)
    thread.send(1, {})
    assert tracker.logging.wait(SECONDS)
    for step in range(2, 10):
        thread.send(step, {})
    assert thread.take_lost() == 5
    thread.end(complete=True)
    thread.wait(0.0)
    assert "not done after" in caplog.text
    assert "9 points were not delivered" in caplog.text
    tracker.may_log.set()
    thread.wait(SECONDS)
    # The call in flight has ended, and no other was begun.
    assert (told(tracker), tracker.complete) == ([1], None)


def test_what_one_makes_of_a_point_is_not_the_others(tmp_path: Path) -> None:
    class Clearing(Kept):
        def log(self, step: int, point: Mapping[str, float]) -> None:
            cast("dict[str, float]", point).clear()
            super().log(step, point)

    clears, other = Clearing(), Kept()
    other.may_log.clear()
    trackers = Trackers({"clears": clears, "other": other}, steps=1)
    trackers.begin(tmp_path, "r", {}, resumes=False)
    trackers.send(1, {"train/loss": 0.5})
    clears.logging.wait(SECONDS)
    other.may_log.set()
    trackers.close()
    assert (clears.points, other.points) == ([(1, {})], [(1, {"train/loss": 0.5})])


def test_trackers_are_told_apart_and_of_the_whole_run(tmp_path: Path) -> None:
    one, other = Kept(), Kept(fails_at=(1, 2))
    trackers = Trackers({"one": one, "other": other}, steps=2)
    trackers.begin(tmp_path, "r", {}, resumes=False)
    written: list[tuple[str, float, int]] = []
    scalars = TrackedScalars(Tensorboard(written), trackers)
    for step in (1, 2):
        scalars.add_scalar("train/loss", 0.5, step)
        scalars.add_scalar("train/lag", 2.0, step)
        scalars.flush()
    trackers.close()
    assert one.points == [(step, {"train/loss": 0.5, "train/lag": 2.0}) for step in (1, 2)]
    assert written == [(f"train/{n}", v, s) for s in (1, 2) for n, v in (("loss", 0.5), ("lag", 2))]
    assert (one.complete, other.points) == (True, [])
    trackers.close()


def test_a_run_is_complete_though_an_evaluation_of_an_early_step_ended_last(tmp_path: Path) -> None:
    tracker = Kept()
    trackers = Trackers({"one": tracker}, steps=3)
    trackers.begin(tmp_path, "r", {}, resumes=False)
    for step in (1, 2, 3, 2):
        trackers.send(step, {"eval/held-out/reward_mean": 0.5})
    trackers.close()
    assert (told(tracker), tracker.complete) == ([1, 2, 3, 2], True)


def test_a_run_that_resumes_goes_on_in_its_run_and_one_that_does_not_in_another(
    tmp_path: Path,
) -> None:
    found: list[str] = []
    for resumes in (False, True, False):
        tracker = Kept()
        trackers = Trackers({"kept": tracker}, steps=2)
        trackers.begin(tmp_path, "r", {}, resumes=resumes)
        trackers.send(1, {})
        trackers.close()
        found.append(tracker.opened[0].tracked_id)
        tracker.opened[0].keep("theirs")
    assert found == ["", "theirs", ""]


@pytest.mark.parametrize("kind", ["wandb", "mlflow"])
def test_one_that_is_not_installed_ends_the_start(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, f"penstock.trainer.metrics.{kind}", raising=False)
    monkeypatch.setitem(sys.modules, kind, None)
    config = MetricsConfig.model_validate({"trackers": [{"kind": kind}]})
    with pytest.raises(ConfigInvalid, match=rf"pip install 'penstock-rl\[{kind}\]'"):
        make_trackers(config.trackers, 1)


class Broken:
    def __init__(self, path: str) -> None:
        raise RuntimeError(path)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("tests.nowhere:Tracker", "cannot import tests.nowhere"),
        ("tests.trainer.metrics.test_trackers:Kept", r"called with \(path\)"),
        ("tests.trainer.metrics.test_trackers:Broken", "RuntimeError: here"),
    ],
)
def test_one_of_your_own_that_cannot_be_made_ends_the_start(function: str, words: str) -> None:
    tracker = {"kind": "custom", "function": function, "options": {"path": "here"}}
    config = MetricsConfig.model_validate({"trackers": [tracker]})
    with pytest.raises(ConfigInvalid, match=words):
        make_trackers(config.trackers, 1)


@pytest.mark.parametrize(
    ("trackers", "words"),
    [
        ([{"kind": "neptune"}], "neptune"),
        ([{"kind": "mlflow"}, {"kind": "mlflow"}], "'mlflow' is listed more than once"),
        ([{"kind": "wandb", "tracking_uri": "x"}], "Extra inputs"),
    ],
)
def test_the_section_is_checked(trackers: list[dict[str, str]], words: str) -> None:
    document: dict[str, Any] = {
        "model": {"path": "m"},
        "data": {"reasoning_gym": {"name": "chain_sum"}},
        "metrics": {"trackers": trackers},
    }
    with pytest.raises(ValueError, match=words):
        TrainerConfig.model_validate(document)
