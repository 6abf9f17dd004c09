"""F1: whenever the trainer is killed, the surviving model was trained on accepted groups, each
once.

    make faults FAULTS=200 ARGS="-k killed_trainer"

A run of a tiny model with a real server around the fake engine. Its trainer is killed with SIGKILL
repeatedly, at random moments or at a failpoint, and resumed each time, until the run ends. Then the
ledger is read from disk and compared with what the server accepted. Once all processes have ended,
it is also compared with the journal and the agents' logs.
"""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import pytest
import pytest_asyncio

from tests.faults.report import COUNT, Report
from tests.faults.trainers import (
    KILLED,
    Nursery,
    Stand,
    check_history,
    check_lineage,
    check_weights,
    model_of,
    standing,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

STEPS = 16
KILLS = 8
"""The most kills in one run."""
LIMIT_SECONDS = 300
LONGEST_LIFE_SECONDS = 0.6
POLICIES = ("mask", "mask", "wait")
POINTS = (
    "ledger.before_append",
    "ledger.before_fsync",
    "ledger.after_fsync",
    "train.gathered",
    "train.computed",
    "train.noted",
    "train.published",
    "exchange.before_hello",
    "exchange.after_hello",
    "exchange.before_demand",
    "exchange.after_demand",
    "exchange.before_switch_weights",
    "exchange.after_switch_weights",
    "exchange.before_receipt",
    "exchange.after_receipt",
    "exchange.before_checkpoint",
    "exchange.after_checkpoint",
    "checkpoint.begun",
    "checkpoint.policy_written",
    "checkpoint.before_sync",
    "checkpoint.before_rename",
    "checkpoint.after_rename",
    "checkpoint.before_prune",
    "checkpoint.before_notice",
)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def undisturbed(
    model: Path, nursery: Nursery, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, bytes]:
    """The model of a synchronous run without kills."""
    folder = tmp_path_factory.mktemp("undisturbed")
    async with standing(folder, model, steps=STEPS, max_lag=0, every_steps=STEPS) as stand:
        assert not await survive(nursery, stand, random.Random(), kills=0)
        return model_of(stand)


@pytest.mark.parametrize("max_lag", [0, 3], ids=["synchronous", "asynchronous"])
async def test_a_killed_trainer(
    max_lag: int,
    model: Path,
    nursery: Nursery,
    undisturbed: dict[str, bytes],
    tmp_path: Path,
    report: Report,
    request: pytest.FixtureRequest,
) -> None:
    wanted = report.count or COUNT
    where, what = "F1 trainer", f"killed, max_lag {max_lag}"
    kills = case = 0
    began = time.monotonic()
    while kills < wanted:
        seed = report.seed + case
        rng = random.Random(f"{seed} {what}")
        folder = tmp_path / str(case)
        try:
            async with (
                asyncio.timeout(LIMIT_SECONDS),
                standing(
                    folder,
                    model,
                    steps=STEPS,
                    max_lag=max_lag,
                    every_steps=rng.choice([1, 2, 5]),
                    staleness={"late_policy": rng.choice(POLICIES)},
                    weights={"transport": rng.choice(["shared_memory", "stream"])},
                ) as stand,
            ):
                kills += await survive(nursery, stand, rng, rng.randint(2, KILLS))
                check_lineage(stand)
                check_weights(stand)
                if not max_lag:
                    # No version was made twice, and each equals that of an uninterrupted run.
                    assert stand.server.engine.versions == list(range(1, STEPS + 1))
                    assert model_of(stand) == undisturbed
            check_history(stand)
        except BaseException as error:
            again = report.failed(where, what, seed, request.node.nodeid, kills, wanted)
            error.add_note(f"again: {again}; its files: {folder}")
            raise
        case += 1
    seconds = (time.monotonic() - began) / kills
    report.survived(where, what, kills, "kills", f"{case} runs, {seconds:.1f} s a kill")


async def survive(nursery: Nursery, stand: Stand, rng: random.Random, kills: int) -> int:
    """Complete a run, killing its trainer up to `kills` times; return the number of kills."""
    killed = 0
    while True:
        point = ""
        if killed < kills and rng.random() < 0.5:
            point = f"{rng.choice(POINTS)}=kill@{rng.randint(1, 3)}"
        await nursery.begin(stand.config, stand.log, resume=killed > 0, failpoints=point)
        ending = asyncio.ensure_future(nursery.end())
        if killed < kills and not point:
            await asyncio.wait([ending], timeout=rng.uniform(0.0, LONGEST_LIFE_SECONDS))
            if not ending.done():
                nursery.kill()
        code = await ending
        if code == 0:
            return killed
        assert code == KILLED, stand.said
        killed += 1
