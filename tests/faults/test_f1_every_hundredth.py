"""F1, at every hundredth of a run: with `max_lag = 0` the curve equals that of an uninterrupted
run.

    make faults FAULTS=100 ARGS="-k every_hundredth"

Each trainer makes one step of a hundred, and the next one resumes. It is stopped mid-step, or
killed at a failpoint of the following step. The figures of each step and the final model are
compared exactly with those of an uninterrupted run.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.faults.report import Report
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
from tests.support.trainer_processes import ASKED

pytestmark = pytest.mark.asyncio(loop_scope="module")

FEW = 3
"""Interruptions in `make test`."""
HUNDREDTHS = 100
LIMIT_SECONDS = 1200
FIGURES = (
    "weight_version",
    "reward_mean",
    "reward_std",
    "loss",
    "grad_norm",
    "learning_rate",
    "entropy",
    "clip_fraction",
    "logprob_diff_mean",
    "logprob_diff_max",
    "tokens",
    "tokens_trained",
    "lag_mean",
    "lag_max",
)
POINTS = (
    "train.gathered@2",
    "train.computed@2",
    "train.noted@2",
    "train.published@2",
    "ledger.before_fsync@2",
    "exchange.before_demand@2",
    "exchange.after_switch_weights@2",
    "exchange.before_receipt@2",
    "checkpoint.policy_written@2",
    "checkpoint.before_rename@2",
    "checkpoint.after_rename@1",
    "checkpoint.before_notice@1",
)
"""A trainer killed at any of these points has saved exactly one more step."""


async def test_interrupted_at_every_hundredth(
    model: Path,
    nursery: Nursery,
    tmp_path: Path,
    report: Report,
    request: pytest.FixtureRequest,
) -> None:
    wanted = min(report.count or FEW, HUNDREDTHS)
    # The last step has none after it with which the run could resume.
    steps = wanted + 1
    where, what = "F1 trainer", "interrupted at every hundredth, max_lag 0"
    rng = random.Random(report.seed)
    began = time.monotonic()
    lives = 0
    try:
        async with asyncio.timeout(LIMIT_SECONDS):
            async with a_run(tmp_path / "whole", model, steps) as stand:
                await nursery.begin(stand.config, stand.log, resume=False)
                assert await nursery.end() == 0, stand.said
                curve, weights = curve_of(stand), model_of(stand)
            assert len({row["loss"] for row in curve}) > steps // 2, "nothing to compare"
            async with a_run(tmp_path / "interrupted", model, steps) as stand:
                while step_of(stand) < steps:
                    await live(nursery, stand, rng, resume=lives > 0)
                    lives += 1
                assert lives >= wanted
                # The last one may have been killed between its last checkpoint and its last upload.
                await nursery.begin(stand.config, stand.log, resume=True)
                assert await nursery.end() == 0, stand.said
                check_lineage(stand)
                check_weights(stand)
                assert curve_of(stand) == curve
                assert model_of(stand) == weights
            check_history(stand)
    except BaseException as error:
        options = "" if report.count is None else f"--fault-count {report.count}"
        nodeid = request.node.nodeid
        again = report.failed(where, what, report.seed, nodeid, lives, wanted, options)
        error.add_note(f"again: {again}; its files: {tmp_path}")
        raise
    seconds = (time.monotonic() - began) / lives
    report.survived(where, what, lives, "interruptions", f"{steps} steps, {seconds:.1f} s each")


def a_run(folder: Path, model: Path, steps: int) -> Any:
    return standing(folder, model, steps=steps, max_lag=0, every_steps=1)


async def live(nursery: Nursery, stand: Stand, rng: random.Random, *, resume: bool) -> None:
    """Run one trainer, which saves one more step."""
    if rng.random() < 0.5:
        name, _, hit = rng.choice(POINTS).partition("@")
        point = f"{name}=kill@{hit}"
        await nursery.begin(stand.config, stand.log, resume=resume, failpoints=point)
        # If no step follows its own, it runs to the end.
        assert await nursery.end() in (KILLED, 0), stand.said
        return
    await nursery.begin(stand.config, stand.log, resume=resume, failpoints="train.gathered=stop")
    # If no step is left, the trainer only writes what the previous one could not, and never stops.
    while not nursery.ended and not is_stopped(nursery.pid):
        await asyncio.sleep(0.005)
    if not nursery.ended:
        os.kill(nursery.pid, signal.SIGTERM)
        os.kill(nursery.pid, signal.SIGCONT)
    assert await nursery.end() in (ASKED, 0), stand.said


def is_stopped(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    return False


def rows_of(stand: Stand) -> list[dict[str, Any]]:
    path = stand.folder / "out" / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def step_of(stand: Stand) -> int:
    return max((row["step"] for row in rows_of(stand)), default=0)


def curve_of(stand: Stand) -> list[dict[str, Any]]:
    """The figures of each step that do not depend on time."""
    rows = rows_of(stand)
    assert [row["step"] for row in rows] == list(range(1, stand.steps + 1))
    return [{name: row[name] for name in FIGURES} for row in rows]
