"""F4: an agent is killed with SIGKILL. Its attempts are leased again, and none is held past its lease."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

from tests.faults.report import COUNT, Report
from tests.faults.workers import GRACE_SECONDS, crew

TEST = "tests/faults/test_f4_killed_agent.py::test_what_a_killed_agent_held_is_leased_again"
MARGIN_SECONDS = 1.0


async def test_what_a_killed_agent_held_is_leased_again(tmp_path: Path, report: Report) -> None:
    count = report.count or COUNT
    held_in_all = 0
    async with crew(tmp_path) as site:

        async def kill(rng: random.Random) -> None:
            nonlocal held_in_all
            await site.submit(6)
            await asyncio.sleep(rng.uniform(0.0, 0.4))
            victim = rng.choice(list(site.workers))
            async with asyncio.timeout(20):
                while not (held := site.held_by(victim)):
                    if site.harness.serving.buffer.buffered_count == site.submitted:
                        await site.submit(6)
                    await asyncio.sleep(0.005)
            process = site.workers.pop(victim)
            held = site.held_by(victim)
            process.kill()
            held_in_all += len(held)
            # The kernel closes its connections, so only the grace of its leases remains.
            await site.lets_go(held, GRACE_SECONDS + MARGIN_SECONDS)
            await process.wait()
            site.start()
            await site.all_done()

        await report.repeat("F4 fake", "agent killed", TEST, count, kill)
        await site.check()
    assert held_in_all >= count
    report.survived("F4 fake", "agent killed", count, figures=f"{held_in_all} attempts held")
