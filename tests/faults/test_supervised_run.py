"""A whole run under `penstock up`, whose processes are killed at random all the time.

Real training of a tiny model, real workers, and the fake engine's server with its journal. What
happened to every group is decided afterwards, from the journal and the trainer's ledger alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from penstock.demo.tasks import write_printable
from penstock.demo.tiny import write_model
from penstock.up.processes import Command, Process
from tests.faults.history import lineage, violations
from tests.faults.history_sources import history_of, without_refusals_of_what_was_trained
from tests.faults.report import Report

TEST = "tests/faults/test_supervised_run.py::test_a_run_ends_whatever_is_killed"
STEPS_PER_KILL = 12
QUIET_SECONDS = 120.0
"""A run without a new step for this long is considered stuck."""

FILE = """
[up]
out = "{folder}/out"
restarts = 1000
restart_window_seconds = 3

[serve]
listen = "127.0.0.1:0"
leases = {{ seconds = 3, grace_seconds = 1, max_attempts = 1000 }}
[serve.engine]
model = "{folder}/model"
step-seconds = 0.002
enable-lora = {lora}
max-loras = 6

[rollout]
generate = "tests.faults.agents:generate"
concurrency = 8
agent-id = "{folder}/out"

[train]
run.steps = {steps}
run.save_model = false
model.dtype = "float32"
model.threads = 1
data.group_size = 2
data.sampling.max_tokens = 8
data.jsonl.path = "{folder}/tasks.jsonl"
train.groups_per_step = 2
train.learning_rate = 1e-2
checkpoint.every_steps = 3
"""
WAYS = {
    "shared memory": "",
    "differences": 'weights = { transport = "stream", delta = "on" }',
    "checkpoint": 'weights = { transport = "checkpoint" }',
    "adapter": "model.lora = { rank = 4, alpha = 8.0 }",
}
VICTIMS = {"server": "tests.support.fake_serve", "worker": "rollout", "trainer": "train"}


@dataclass
class Watched:
    """A run, and the number of its steps."""

    folder: Path
    process: Process
    stepped: asyncio.Event = field(default_factory=asyncio.Event)

    def pids(self, command: str) -> list[int]:
        """Its processes with this command on their command line."""
        found: list[int] = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                arguments = (folder / "cmdline").read_bytes().decode().split("\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if command in arguments and any(str(self.folder / "out") in a for a in arguments):
                found.append(int(folder.name))
        return found

    def kill(self, rng: random.Random) -> bool:
        """Kill one random role, if it is running at the moment."""
        killed = False
        for pid in self.pids(VICTIMS[rng.choice(list(VICTIMS))]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed = True
        return killed


def start(folder: Path, way: str, steps: int) -> Watched:
    write_model(folder / "model")
    write_printable(folder / "tasks.jsonl")
    lora = str(way == "adapter").lower()
    config = FILE.format(folder=folder, steps=steps, lora=lora) + WAYS[way] + "\n"
    (folder / "up.toml").write_text(config)
    command = (sys.executable, "-m", "tests.support.up_with_fakes", str(folder / "up.toml"))
    run: Watched

    def on_line(line: str) -> None:
        if re.match(r"step \d+/", line):
            run.stepped.set()

    run = Watched(folder, Process.start(Command("up", command, folder / "up.log"), on_line))
    return run


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("way", list(WAYS))
async def test_a_run_ends_whatever_is_killed(tmp_path: Path, report: Report, way: str) -> None:
    if report.count is None:
        pytest.skip("takes minutes; `make faults` does it, and test_up.py with one kill of each")
    count, rng = report.count, random.Random(f"{report.seed} {way}")
    run = start(tmp_path, way, STEPS_PER_KILL * count)
    killed = 0
    try:
        while killed < count and not (tmp_path / "out" / "metrics.jsonl").exists():
            await asyncio.wait_for(run.stepped.wait(), QUIET_SECONDS)
        while killed < count:
            run.stepped.clear()
            await asyncio.wait_for(run.stepped.wait(), QUIET_SECONDS)
            await asyncio.sleep(rng.uniform(0.0, 1.0))
            killed += run.kill(rng)
            # Sometimes kill another role before the first one is back.
            if rng.random() < 0.3:
                await asyncio.sleep(rng.uniform(0.0, 3.0))
                killed += run.kill(rng)
        async with asyncio.timeout(QUIET_SECONDS + count):
            assert await run.process.wait() == 0
        check(tmp_path / "out", STEPS_PER_KILL * count)
    except BaseException as error:
        note = report.failed(
            "up fake", f"killed at random, {way}", report.seed, TEST, killed, count
        )
        error.add_note(f"again: {note.replace('--fault-count 1', f'--fault-count {count}')}")
        error.add_note((tmp_path / "up.log").read_text()[-4000:])
        raise
    finally:
        run.process.kill()
        await run.process.wait()
    report.survived("up fake", f"killed at random, {way}", killed, unit="kills")


def check(out: Path, steps: int) -> None:
    history = history_of(out / "journal", out / "ledger.jsonl")
    wrong = violations(without_refusals_of_what_was_trained(history))
    assert not wrong, [str(one) for one in wrong[:10]]
    assert [step.step for step in lineage(history.ledger)] == list(range(1, steps + 1))
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert max(record["lag_max"] for record in metrics) <= 4
    assert sum(record["failures"] for record in metrics) == 0
