"""F20: a worker is killed with SIGKILL while all its attempts wait for tools. Each is leased again
and ends once.

`--fault-count N` is the number of waiting attempts, in groups of two.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.faults.agents import TOOL_ANSWERS
from tests.faults.report import Report
from tests.faults.workers import GRACE_SECONDS, GROUP_SIZE, Crew
from tests.support.harness import serve
from tests.support.processes import start_worker

WAITING = 400
# For work that is repeated by a server and a worker on the same machine.
SECONDS_EACH = 0.1


async def test_no_attempt_is_lost_with_the_worker_that_waits(
    tmp_path: Path, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = (report.count or WAITING) // GROUP_SIZE * GROUP_SIZE
    answers = tmp_path / "answers"
    monkeypatch.setenv(TOOL_ANSWERS, str(answers))
    settings = (
        "leases.seconds=60",
        f"leases.grace_seconds={GRACE_SECONDS}",
        f"limits.open_trajectories={2 * count + 1000}",
        f"limits.caller.open_trajectories={2 * count + 1000}",
        "limits.groups_without_trainer=1000000",
    )
    async with serve(tmp_path, *settings) as harness:
        site = Crew(harness, tmp_path)
        for _ in range(0, count // GROUP_SIZE, 500):
            await site.submit(min(500, count // GROUP_SIZE - site.submitted))
        first = start(site, "first", count)
        async with asyncio.timeout(30 + SECONDS_EACH * count):
            while waiting(site) < count:
                await asyncio.sleep(0.02)
        held = site.held_by("first")
        assert len(held) == count
        first.kill()
        await first.wait()
        second = start(site, "second", count)
        try:
            # Once the second worker's attempts wait too, no lease of the first one's is left.
            async with asyncio.timeout(30 + SECONDS_EACH * count):
                while len(site.held_by("second")) < count or waiting(site) < count:
                    await asyncio.sleep(0.02)
            assert not held & set(harness.serving.queue._attempts)
            answers.touch()
            await site.all_done(30 + SECONDS_EACH * count)
        finally:
            second.kill()
            await second.wait()
        # Each group once, with each of its samples once, and none failed.
        await site.check()
    report.survived("F20 fake", "worker killed while all wait", count, "attempts")


def start(site: Crew, agent_id: str, count: int):
    """A worker that takes all attempts at once."""
    return start_worker(
        site.folder,
        site.harness.address,
        *("--agent-id", agent_id, "--concurrency", str(count)),
        *("--generate", "tests.faults.agents:waits"),
        name=agent_id,
    )


def waiting(site: Crew) -> int:
    """Number of attempts that have ended their first turn; 0 while any turn is in flight."""
    serving = site.harness.serving
    if serving.turns.in_flight:
        return 0
    found = [serving.store.find(name) for name in serving.queue._attempts]
    return sum(record is not None and record.turn_count == 1 for record in found)
