"""Figures are declared once, and aggregate to the same values however the steps are divided."""

from __future__ import annotations

import json
import math
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.trainer.core.figures import Figure, aggregate, as_json, scalars
from penstock.trainer.metrics.step_record import FIGURES, StepRecord

BY_NAME = {each.name: each for each in FIGURES}
KEYS = ("gsm8k", "code", "chat")


def test_every_figure_is_there_once() -> None:
    assert len(BY_NAME) == len(FIGURES)
    line = StepRecord(1).line()
    assert list(line) == [each.name for each in FIGURES]
    assert {name for name, value in line.items() if isinstance(value, dict)} == {
        each.name for each in FIGURES if each.is_breakdown
    }


@pytest.mark.parametrize("each", FIGURES, ids=lambda each: each.name)
def test_a_mean_is_weighted_by_a_sum(each: Figure) -> None:
    assert each.description.endswith(".")
    if each.rule.kind == "weighted":
        by = BY_NAME[each.rule.by]
        assert by.rule.kind == "sum"
        assert each.is_breakdown or not by.is_breakdown


def any_line(random: Random, unknown: set[str]) -> dict[str, Any]:
    """An arbitrary line of a step. A mean without weight has an arbitrary value."""

    def number(each: Figure) -> float:
        if each.rule.kind == "sum":
            return random.choice((0, 1, random.randrange(1000)))
        return random.uniform(-100, 100)

    keys = random.sample(KEYS, random.randrange(4))
    return {
        each.name: {key: number(each) for key in keys}
        if each.is_breakdown
        else None
        if each.name in unknown
        else number(each)
        for each in FIGURES
    }


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32), st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_the_point_of_points_is_the_point_of_their_lines(seed: int, lengths: list[int]) -> None:
    random = Random(seed)
    # A figure that the configuration does not compute is missing from every step of the run.
    unknown = {e.name for e in FIGURES if e.rule.kind != "sum" and random.random() < 0.2}
    windows = [[any_line(random, unknown) for _ in range(length)] for length in lengths]
    whole = aggregate(FIGURES, [line for window in windows for line in window])
    parts = aggregate(FIGURES, [aggregate(FIGURES, window) for window in windows])
    assert whole.keys() == parts.keys()
    for name, value in whole.items():
        if value is None:
            assert parts[name] is None, name
        else:
            assert parts[name] == pytest.approx(value, rel=1e-9, abs=1e-9), name


def test_the_point_of_one_step_is_the_step_to_the_last_bit() -> None:
    record = StepRecord(1, steps=1, seconds=0.1, seconds_total=0.7, idle_ratio=1 / 3)
    point = aggregate(FIGURES, [record.line()])
    assert (point["seconds"], point["idle_ratio"]) == (0.1, 1 / 3)


def test_each_figure_goes_by_its_rule() -> None:
    one = {"tokens": 5, "lag_max": 3, "weight_version": 1, "time_train_start": 7.0, "steps": 1}
    one |= {"entropy": 1.0, "tokens_computed": 30, "seconds": 2.0}
    one |= {"reward_by_source": {"a": 1.0}, "attempts_by_source": {"a": 8}}
    other = {"tokens": 6, "lag_max": 1, "weight_version": 2, "time_train_start": 9.0, "steps": 1}
    other |= {"entropy": 2.0, "tokens_computed": 10, "seconds": 4.0}
    other |= {"reward_by_source": {"a": 0.0, "b": 0.5}, "attempts_by_source": {"a": 24, "b": 2}}
    point = aggregate(FIGURES, [one, other])
    assert (point["tokens"], point["lag_max"], point["weight_version"]) == (11, 3, 2)
    assert (point["time_train_start"], point["seconds"], point["steps"]) == (7.0, 3.0, 2)
    assert point["entropy"] == (1.0 * 30 + 2.0 * 10) / 40
    assert point["reward_by_source"] == {"a": 0.25, "b": 0.5}


def test_a_mean_is_of_the_steps_that_have_the_figure() -> None:
    steps = [{"probe_difference": value, "steps": 1} for value in (0.25, None, 0.75)]
    assert aggregate(FIGURES, steps)["probe_difference"] == 0.5


def test_what_was_not_computed_is_no_zero() -> None:
    idle = {"entropy": 0.0, "tokens_computed": 0, "kl_reference": None}
    busy = {"entropy": 2.0, "tokens_computed": 10, "kl_reference": None}
    point = aggregate(FIGURES, [idle, busy, idle])
    assert (point["entropy"], point["kl_reference"]) == (2.0, None)
    sent = scalars(FIGURES, aggregate(FIGURES, [idle]))
    assert "entropy" not in sent and "kl_reference" not in sent
    # The maximum of no values is not sent either.
    sent = scalars(FIGURES, aggregate(FIGURES, [StepRecord(1).line()]))
    assert "logprob_diff_max" not in sent


@pytest.mark.parametrize("first", [True, False])
def test_what_is_no_number_shows_in_every_rule(first: bool) -> None:
    bad = {"logprob_diff_max": math.nan, "grad_norm": math.nan, "updates": 1}
    good = {"logprob_diff_max": 1.0, "grad_norm": 1.0, "updates": 1}
    point = aggregate(FIGURES, [bad, good] if first else [good, bad])
    assert math.isnan(point["logprob_diff_max"]) and math.isnan(point["grad_norm"])  # type: ignore[arg-type]
    text = json.dumps(as_json(point), allow_nan=False)
    assert json.loads(text)["grad_norm"] is None


def test_times_of_day_are_not_sent_and_keys_are_flat() -> None:
    record = StepRecord(1, time=1.7e9, groups_dropped={"NO_SPREAD": 2})
    sent = scalars(FIGURES, aggregate(FIGURES, [record.line()]))
    assert sent["groups_dropped/NO_SPREAD"] == 2.0
    assert not any(name.startswith("time") for name in sent)
