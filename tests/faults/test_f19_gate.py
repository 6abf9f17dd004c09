"""F19: long runs of the staleness gate under random lengths, failures and restarts.

    make faults ARGS="-k f19"

200 seeds of 10,000 steps each take about twenty minutes of one core. The simulation and the referee
come from tests/server/groups/test_staleness_gate.py. They judge every decision. No token may be
trained too old, and every step must be made.
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
    """Simulate one run. Returns how far the oldest trained token exceeded `max_lag`, and the number
    of decisions.
    """
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
