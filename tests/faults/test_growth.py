"""What counts as growth over a soak: leaks do, and levels that come and go do not."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from tests.faults.report import growth

FILE = 364_544
NOISE = 64 << 10
SEEDS = 500
LEVELS = (0.1, 0.3, 0.5, 0.7, 0.9)


def hopping(count: int, seed: int, every: int | None = None) -> Sequence[int]:
    """One file or two at random, and one more permanently after each `every` updates."""
    rng = random.Random(seed)
    share = LEVELS[seed % len(LEVELS)]
    begun = rng.randrange(every) if every else 0
    return [
        FILE * (1 + (rng.random() < share) + ((begun + update) // every if every else 0))
        + rng.randrange(4096)
        for update in range(count)
    ]


@pytest.mark.parametrize("count", [20, 200])
def test_levels_that_come_and_go_are_no_growth(count: int) -> None:
    assert all(growth(hopping(count, seed)) <= NOISE for seed in range(SEEDS))


@pytest.mark.parametrize(("count", "every"), [(20, 1), (20, 2), (200, 1), (200, 10)])
def test_a_leak_is_growth_whatever_comes_and_goes(count: int, every: int) -> None:
    assert all(growth(hopping(count, seed, every)) > NOISE for seed in range(SEEDS))


def test_two_files_lost_in_a_short_soak_mostly_show() -> None:
    """Two, because a file that comes and goes can by chance hide a single lost file."""
    found = sum(growth(hopping(20, seed, 10)) > NOISE for seed in range(SEEDS))
    assert found > 0.7 * SEEDS


@pytest.mark.parametrize("count", [20, 200])
def test_warming_up_and_a_moments_peak_are_no_growth(count: int) -> None:
    warm = [min(update, count // 4) * (1 << 20) for update in range(count)]
    assert growth(warm) == 0
    assert growth([*[FILE] * (count - 1), 9 * FILE]) == 0


def test_nothing_grows_in_less_than_two_values() -> None:
    assert growth([]) == growth([7]) == 0.0
