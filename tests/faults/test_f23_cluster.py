"""F23: SIGKILL for each actor of a run that `penstock up` has placed on a local Ray cluster.

Real training of a tiny model, with a real hub and worker, and two engine servers around the fake
engine. In each round every role's actor is killed once, in random order, at a random moment after
the previous one has restarted. One of the two engines is always alive. Afterwards the run has
completed, the journal and the ledger show what happened to every group, and no process is left,
including Ray's.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from tests.faults.report import Report
from tests.faults.test_supervised_run import check
from tests.support.clusters import ROLES, all_gone, cluster

TEST = "tests/faults/test_f23_cluster.py::test_a_run_on_ray_ends_whatever_actor_is_killed"
WHERE, NAME = "F23 ray", "each actor killed, in random order"
STEPS_PER_ROUND = 600
"""More steps than fast cores make while five processes restart."""


@pytest.mark.timeout(7200)
async def test_a_run_on_ray_ends_whatever_actor_is_killed(tmp_path: Path, report: Report) -> None:
    pytest.importorskip("ray", reason="ray is not installed; `make faults` does it")
    if report.count is None:
        pytest.skip("takes minutes; `make faults` does it, test_ray_placement.py with one round")
    rounds, rng = report.count, random.Random(f"{report.seed} {NAME}")
    steps, killed = STEPS_PER_ROUND * rounds, 0
    try:
        async with cluster(tmp_path, "ray", steps) as running:
            await running.step()
            for _ in range(rounds):
                for name in rng.sample(ROLES, len(ROLES)):
                    await asyncio.sleep(rng.uniform(0.0, 1.0))
                    pid = await running.kill(name, actor=True)
                    killed += 1
                    await running.came_back(name, pid)
            assert await asyncio.wait_for(running.ending, 300 + steps) == 0
            check(running.out, steps)
            for name in ROLES:
                assert running.events.count(f"{name}: lost its actor") == rounds
            await all_gone(running.mark)
    except BaseException as error:
        again = report.failed(WHERE, NAME, report.seed, TEST, killed, rounds * len(ROLES))
        error.add_note(f"again: {again}")
        error.add_note((tmp_path / "up.log").read_text()[-4000:])
        raise
    figures = f"{steps} steps in {rounds} rounds, no process left"
    report.survived(WHERE, NAME, killed, unit="kills", figures=figures)
