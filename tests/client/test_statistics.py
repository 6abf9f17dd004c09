"""The line in which a worker reports its progress."""

from __future__ import annotations

import logging

import pytest

from penstock.client import Failed, Outcome
from penstock.client.statistics import STOPPED, Reporter, Statistics


@pytest.mark.parametrize(
    ("reasons", "expected"),
    [
        ([], ", 0 failed, 0 lost; "),
        ([STOPPED] * 64, ", 0 failed, 0 lost, 64 given back; "),
        (["KEY_ERROR"] * 2, ", 2 failed (KEY_ERROR 2), 0 lost; "),
        (
            ["A", "B", "C", "D", "E", *[STOPPED] * 3],
            ", 5 failed (A 1, B 1, C 1, D 1), 0 lost, 3 given back; ",
        ),
    ],
)
def test_attempts_given_back_when_a_worker_stops_are_no_failures(
    reasons: list[str], expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    statistics = Statistics()
    reporter = Reporter(statistics, 0.0)
    statistics.add(Outcome(1.0), 3)
    for reason in reasons:
        statistics.add(Failed(reason), 0)
    with caplog.at_level(logging.INFO, "penstock.rollout"):
        reporter.report(0, last=True)
    assert expected in caplog.messages[0]
    assert f"{1 + len(reasons)} attempts ended: reward 1.000" in caplog.messages[0]
