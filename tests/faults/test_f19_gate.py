"""F19: the staleness gate under random lengths, failures and restarts, for very long.

    make faults ARGS="-k f19"

200 seeds of 10,000 steps each take some twenty minutes of one core. The simulation and the referee are
those of tests/server/groups/test_staleness_gate.py: every decision is judged, no token is trained too old, and every step
is made.
"""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from penstock.server.groups.staleness_gate import LatePolicy
from tests.faults.report import Report
from tests.server.groups.test_staleness_gate import random_run

POLICIES = tuple(LatePolicy)


def run(seed: int, steps: int) -> tuple[int, int]:
    """One run; how much older than allowed the oldest trained token was, and how many decisions."""
    simulation, _, referee, tally = random_run(POLICIES[seed % len(POLICIES)], seed, steps)
    assert tally.steps == steps
    return tally.oldest_trained - simulation.contract.max_lag, referee.decisions


def test_the_gate(report: Report, request: pytest.FixtureRequest) -> None:
    if report.count is None:
        pytest.skip(
            "tests/server/groups/test_staleness_gate.py has 200 shorter runs; these are for make faults"
        )
    steps: int = request.config.getoption("gate_steps")
    count, node, name = report.count, request.node.nodeid, "random runs"
    decisions = 0
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        seeds = range(report.seed, report.seed + count)
        runs = pool.map(run, seeds, [steps] * count)
        for case, seed in enumerate(seeds):
            try:
                beyond, made = next(runs)
                assert beyond <= 0, f"a token {beyond} versions too old was trained"
            except BaseException as error:
                error.add_note(f"again: {report.failed('F19', name, seed, node, case, count)}")
                raise
            decisions += made
    figures = f"{steps} steps each, {decisions} decisions judged, no token too old"
    report.survived("F19", name, count, "seeds", figures)
