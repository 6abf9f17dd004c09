"""The estimate of the time left, and its bounds."""

from __future__ import annotations

import random

import pytest

from penstock.trainer.metrics.pace import Pace, in_words

FIRST = 1e6


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def after(*durations: float, steps: int, step: int = 0) -> tuple[Pace, Clock]:
    """A pace that has seen steps of these durations, in a run of `steps`, and begins the next one."""
    clock = Clock()
    pace = Pace(steps, clock)
    # The first step of a process counts for nothing.
    for number, duration in enumerate((FIRST, *durations), step):
        pace.begin(number)
        clock.now += duration
    pace.begin(step + len(durations) + 1)
    return pace, clock


def test_nothing_is_said_before_a_step_is_over() -> None:
    clock = Clock()
    pace = Pace(10, clock)
    assert pace.remaining() is None
    pace.begin(1)
    clock.now += 5.0
    assert pace.remaining() is None


def test_even_steps_leave_no_doubt() -> None:
    pace, clock = after(*[2.0] * 10, steps=100)
    remaining = pace.remaining()
    assert remaining is not None and remaining.seconds == pytest.approx(180.0)
    assert (remaining.least, remaining.most) == pytest.approx((180.0, 180.0))
    assert str(remaining) == "about 3 min left"
    clock.now += 1.5
    remaining = pace.remaining()
    assert remaining is not None and remaining.seconds == pytest.approx(178.5)
    clock.now += 100.0
    # A step that already takes longer than any before raises the estimate before it ends.
    remaining = pace.remaining()
    assert remaining is not None and remaining.seconds > 500.0
    assert remaining.most is not None and remaining.most > 2 * remaining.seconds


def test_a_few_steps_give_no_bounds() -> None:
    pace, _ = after(3.0, 5.0, steps=10)
    remaining = pace.remaining()
    assert remaining is not None and remaining.least is None
    assert str(remaining).startswith("roughly 3")


def test_the_first_step_never_counts_because_everything_warms_up_in_it() -> None:
    pace, _ = after(steps=10)
    assert pace.remaining() is None
    pace, _ = after(2.0, steps=11)
    remaining = pace.remaining()
    assert remaining is not None and remaining.seconds == pytest.approx(20.0)


@pytest.mark.parametrize("durations", [(2.0,), (2.0, 2.0, 2.0, 2.0), (1.0, 3.0, 2.0, 4.0)])
def test_a_run_with_a_target_takes_at_most_as_long_as_all_its_steps(
    durations: tuple[float, ...],
) -> None:
    pace, _ = after(*durations, steps=200)
    pace.may_end_early = True
    remaining = pace.remaining()
    assert remaining is not None
    most = remaining.seconds if remaining.most is None else remaining.most
    assert str(remaining) == f"at most {in_words(most)} left"
    pace.afterwards = None
    assert str(pace.remaining()) == f"at most {in_words(most)} left before the last evaluation"


def test_a_long_step_every_so_often_counts_with_its_share() -> None:
    pace, _ = after(*([1.0] * 9 + [11.0]) * 5, steps=150)
    remaining = pace.remaining()
    assert remaining is not None
    assert remaining.seconds == pytest.approx(200.0, rel=0.1)
    assert remaining.least is not None and remaining.most is not None
    assert remaining.least < 200.0 < remaining.most


def test_what_comes_after_the_last_step_is_part_of_it() -> None:
    pace, _ = after(*[2.0] * 10, steps=100)
    pace.afterwards = 240.0
    remaining = pace.remaining()
    assert remaining is not None and remaining.seconds == pytest.approx(180.0 + 240.0)
    assert remaining.least == remaining.most == pytest.approx(420.0)
    assert str(remaining) == "about 7 min left"
    pace.afterwards = None
    assert str(pace.remaining()) == "about 3 min left before the last evaluation"
    pace, _ = after(2.0, steps=100)
    pace.afterwards = None
    assert str(pace.remaining()) == "roughly 3 min left before the last evaluation"


def test_after_a_resume_only_the_own_steps_count() -> None:
    pace, clock = after(5.0, 5.0, 5.0, 5.0, steps=100, step=90)
    remaining = pace.remaining()
    assert remaining is not None and remaining.seconds == pytest.approx(30.0)
    assert pace.elapsed == clock.now - 1000.0 == FIRST + 20.0


def test_recent_steps_weigh_more() -> None:
    pace, _ = after(*[1.0] * 60, *[3.0] * 40, steps=200)
    remaining = pace.remaining()
    assert remaining is not None and 240.0 < remaining.seconds < 300.0


@pytest.mark.parametrize("seen", [10, 100])
def test_four_of_five_runs_end_within_the_bounds(seen: int) -> None:
    rng, within, runs = random.Random(seen), 0, 400
    for _ in range(runs):
        durations = [rng.lognormvariate(0.0, 0.5) for _ in range(seen + 50)]
        pace, _ = after(*durations[:seen], steps=seen + 50)
        remaining = pace.remaining()
        assert remaining is not None
        assert remaining.least is not None and remaining.most is not None
        within += remaining.least <= sum(durations[seen:]) <= remaining.most
    assert 0.7 < within / runs < 0.9


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 s"), (119, "119 s"), (121, "2 min"), (3600, "60 min"), (9000, "2.5 h"),
        (100_000, "28 h"), (200_000, "2.3 d"), (2_000_000, "23 d"),
    ],
)  # fmt: skip
def test_a_duration_has_two_digits_or_so(seconds: float, words: str) -> None:
    assert in_words(seconds) == words
