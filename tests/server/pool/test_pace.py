"""How the hub measures slow engines, and when it tries them again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.server.pool.health import FIRST_SECONDS, LONGEST_SECONDS, Pace, usual_pace

USUAL = 0.01


def slowness(*seconds_per_token: float) -> list[float]:
    """The slowness of engines with turns, each measured just now."""
    paces = [Pace(seconds, 1.0, 0.0) if seconds else Pace() for seconds in seconds_per_token]
    usual = usual_pace(paces)
    return [pace.slowness(usual, 1, 0.0) for pace in paces]


def test_slowness_is_against_the_median_and_never_below_one() -> None:
    assert slowness(0.01, 0.01, 0.04, 0.0, 0.005) == pytest.approx([1, 1, 4, 1, 1])
    assert slowness() == []
    assert slowness(0.0) == [1.0]


def test_of_two_engines_the_quicker_one_is_what_is_usual() -> None:
    assert slowness(0.01, 0.5) == pytest.approx([1, 50])


def test_turns_that_end_soon_after_another_move_the_pace_a_little() -> None:
    pace = after_many(100)
    assert pace.seconds_per_token == pytest.approx(USUAL)
    assert pace.after(11.0, 100, 1.0, USUAL).seconds_per_token == pytest.approx(0.02, rel=0.01)


def test_a_turn_of_a_few_tokens_moves_it_by_as_little() -> None:
    # Most of the time is the round trip.
    pace = after_many(512).after(0.1, 1, 1.0, USUAL)
    assert pace.slowness(USUAL, 1, 1.0) < 1.01


def after_many(tokens: int) -> Pace:
    """A pace measured over many turns of this length, at the usual pace."""
    pace = Pace()
    for _ in range(100):
        pace = pace.after(USUAL * tokens, tokens, 0.0, USUAL)
    return pace


def test_one_that_was_slow_once_is_tried_with_one_turn_and_is_as_quick_as_that() -> None:
    pace = Pace().after(5.0, 1, 100.0, USUAL)
    assert pace.slowness(USUAL, 0, 100.0 + 0.9 * FIRST_SECONDS) == pytest.approx(500)
    later = 100.0 + FIRST_SECONDS
    assert pace.slowness(USUAL, 0, later) == 1.0
    # It gets no other turn during the trial.
    assert pace.slowness(USUAL, 1, later) == pytest.approx(500)
    pace = pace.after(USUAL, 1, later + 1.0, USUAL)
    assert pace.slowness(USUAL, 1, later + 1.0) == 1.0
    assert not pace.slow_trials


def test_one_that_each_trial_finds_slow_is_left_alone_for_longer_each_time_up_to_a_bound() -> None:
    pace, now = Pace().after(5.0, 1, 0.0, USUAL), 0.0
    alone: list[float] = []
    for _ in range(8):
        began = now
        while not pace.is_due(now):
            now += 1.0
        alone.append(now - began)
        pace = pace.after(5.0, 1, now, USUAL)
    assert alone[:4] == [FIRST_SECONDS * 2**n for n in range(4)]
    assert alone[-1] == LONGEST_SECONDS
    # A trial that finds the engine fast ends the waiting.
    now += LONGEST_SECONDS
    pace = pace.after(USUAL, 1, now, USUAL)
    assert pace.is_due(now + FIRST_SECONDS)


@given(
    st.lists(
        st.tuples(st.floats(1e-4, 100.0), st.integers(1, 4096), st.floats(0.0, 1000.0)), max_size=30
    ),
    st.floats(0.0, 1.0),
)
def test_whatever_was_measured_a_turn_is_tried_in_the_end(
    measured: list[tuple[float, int, float]], usual: float
) -> None:
    pace, now = Pace(), 0.0
    for seconds, tokens, passed in measured:
        now += passed
        pace = pace.after(seconds, tokens, now, usual)
        assert pace.slowness(usual, 3, now) >= 1.0
    assert pace.slowness(usual, 0, now + LONGEST_SECONDS) == 1.0
