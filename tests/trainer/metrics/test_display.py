"""The parts of the display that whole runs do not cover: the end of a run, and errors."""

from __future__ import annotations

import io

from rich.console import Console

from penstock.trainer.metrics.display import Display
from penstock.trainer.metrics.pace import Pace


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=120, height=30)


def drawn(display: Display) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(display._draw())
    found = console.file
    assert isinstance(found, io.StringIO)
    return found.getvalue()


def test_what_comes_after_the_last_step_is_named() -> None:
    display = Display(terminal(), 2, Pace(2))
    try:
        display.step(1)
        assert "every step done" not in drawn(display)
        display.step(2)
        assert "every step done, in" in drawn(display)
        display.doing("evaluating")
        shown = drawn(display)
        assert "every step done, evaluating," in shown and "so far" in shown
    finally:
        display.close()
    assert "evaluating" not in drawn(display)


def test_a_run_that_reached_its_target_has_done_every_step() -> None:
    display = Display(terminal(), 9, Pace(9))
    try:
        display.step(1)
        assert "step 1 of 9" in drawn(display)
        display.end_with(2)
        display.step(2)
        assert "step 2 of 2" in drawn(display)
        assert "every step done, in" in drawn(display)
    finally:
        display.close()


def test_updates_that_are_not_finite_are_in_the_line() -> None:
    console = Console(file=io.StringIO(), width=500)
    display = Display(console, 2, Pace(2))
    display.show(1, {"steps": 1, "updates_not_finite": 0})
    display.show(2, {"steps": 1, "updates_not_finite": 3})
    display.close()
    found = console.file
    assert isinstance(found, io.StringIO)
    first, second = found.getvalue().splitlines()
    assert "not finite" not in first
    assert "updates not finite 3!" in second
