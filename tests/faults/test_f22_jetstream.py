"""F22: the journal on NATS JetStream. What was answered survives.

NATS, the server, or both are killed with SIGKILL at random moments and at failpoints. NATS also
stays away or is full, and another server takes over.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from penstock.server.groups.recovery import recover_from
from tests.faults.report import COUNT, Report
from tests.faults.test_f2_killed_server import POINTS, kill_at
from tests.faults.test_f13_disk import ENDED, submit_known, submit_until_refused
from tests.faults.workload import Workload
from tests.support.nats_server import NatsServer, find_program, nats_server
from tests.support.processes import Server, server_process

WHERE = "JetStream"
GROUPS = 16
STREAMS = itertools.count()
# The failpoints that a journal without files has, too.
HERE = tuple(
    point for point in POINTS if point not in ("journal.before_fsync", "journal.before_rotate")
)
OPTIONS = tuple(
    part
    for setting in (
        "leases.seconds=2",
        "leases.grace_seconds=1",
        "leases.max_attempts=1000",
    )
    for part in ("--set", setting)
)


@pytest.fixture(scope="module")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Generator[NatsServer]:
    """One NATS server for all tests of this file."""
    with nats_server(tmp_path_factory.mktemp("nats")) as server:
        yield server


@pytest.fixture(autouse=True)
def said_where_there_is_none(report: Report) -> None:
    """Add a verdict that explains a skip, if NATS is not installed."""
    try:
        find_program()
    except pytest.skip.Exception as error:
        report.skipped(WHERE, "killed at random", str(error))
        raise


def new_stream() -> str:
    """An unused stream name."""
    return f"F22_{next(STREAMS)}"


# Killed


@dataclass
class Killer:
    """Kills the processes that a run needs, until `left` is used up or the run ends."""

    server: Server
    nats: NatsServer
    rng: random.Random
    left: int
    kills: Counter[str] = field(default_factory=Counter[str])

    async def work(self) -> None:
        while self.left:
            await asyncio.sleep(self.rng.uniform(0.05, 0.8))
            await self._kill(self.rng.choice(("NATS", "NATS", "server", "both")))
            self.left -= 1

    async def _kill(self, which: str) -> None:
        self.kills[which] += 1
        back = self.rng.uniform(0.0, 0.4)
        if which == "server":
            await self.server.restart()
            return
        self.nats.kill()
        if which == "both":
            await self.server.kill()
        async with asyncio.TaskGroup() as starting:
            if which == "both":
                # It waits for NATS, which may start before it or after it.
                starting.create_task(self.server.start())
            await asyncio.sleep(back)
            await asyncio.to_thread(self.nats.start)


async def kill_at_random(folder: Path, nats: NatsServer, rng: random.Random, most: int) -> Killer:
    """One run from its first task to its last step, with kills until it is done."""
    folder.mkdir()
    stream = new_stream()
    step = ("--step-seconds", "0.005")
    async with server_process(folder, *OPTIONS, *step, journal=nats.settings(stream)) as server:
        workload = Workload(server.address, GROUPS, name=stream, filler_bytes=40_000)
        killer = Killer(server, nats, rng, most)
        killing = asyncio.create_task(killer.work())
        try:
            async with asyncio.timeout(240):
                running = asyncio.create_task(workload.run())
                await asyncio.wait([running, killing], return_when=asyncio.FIRST_COMPLETED)
                if not running.done():
                    killing.result()
                await running
        finally:
            killer.left = min(killer.left, 1)
            await asyncio.wait_for(asyncio.gather(killing, return_exceptions=True), 60)
        killing.result()
        assert "penstock serve:" not in server.log, server.log[-4000:]
        assert "Traceback" not in server.log, server.log[-4000:]
        workload.check()
        await server.kill()
        nats.kill()
        await asyncio.to_thread(nats.start)
        trained = {name for step in workload.ledger for name in step.group_ids}
        await check_stream(nats, stream, trained)
    return killer


async def check_stream(nats: NatsServer, stream: str, trained: set[str]) -> None:
    """Check that the stream is whole, that every task is known, and that no untrained group waits.

    A trained one may still be there: no surviving server learned that it was used.
    """
    from penstock.server.journal.jetstream.journal import JetStreamJournal

    journal = JetStreamJournal(nats.section(stream, max_bytes=1 << 30))
    await journal.open()
    state = await recover_from(journal)
    await journal.close()
    assert set(state.known) >= {f"{stream}-{number}" for number in range(GROUPS)}
    assert not state.pending
    assert set(state.finished) <= trained


async def test_kills_at_random_moments_lose_nothing(
    tmp_path: Path, nats: NatsServer, report: Report, request: pytest.FixtureRequest
) -> None:
    name, count = "NATS, server or both killed at random", report.count or COUNT
    kills: Counter[str] = Counter()
    runs = 0
    while (done := kills.total()) < count:
        seed = report.seed + runs
        try:
            rng = random.Random(f"{seed} {name}")
            killer = await kill_at_random(tmp_path / f"{runs}", nats, rng, count - done)
        except BaseException as error:
            node = request.node.nodeid
            error.add_note(f"again: {report.failed(WHERE, name, seed, node, done, count)}")
            raise
        kills += killer.kills
        runs += 1
    assert kills.total() == count
    parts = ", ".join(f"{kills[which]} {which}" for which in ("NATS", "server", "both"))
    report.survived(
        WHERE,
        name,
        count,
        "kills",
        f"{parts}; {runs} runs, {runs * GROUPS} groups trained once each",
    )


async def test_a_server_killed_at_named_points_loses_nothing(
    tmp_path: Path, nats: NatsServer, report: Report, request: pytest.FixtureRequest
) -> None:
    points = HERE if report.count else random.Random(report.seed).sample(HERE, 1)
    count = -(-report.count // 10) if report.count else 1
    for point in points:

        async def happen(rng: random.Random, point: str = point) -> None:
            folder = tmp_path / f"{point}-{rng.random()}"
            await kill_at(folder, point, rng, nats.settings(new_stream()))

        await report.repeat(WHERE, point, request.node.nodeid, count, happen)
        report.survived(WHERE, point, count)


# NATS that stays away or refuses, and a stream taken over by another server


async def test_nats_that_stays_away_ends_the_server_and_loses_nothing(
    tmp_path: Path, report: Report, request: pytest.FixtureRequest
) -> None:
    async def happen(rng: random.Random) -> None:
        folder = tmp_path / f"{rng.random()}"
        folder.mkdir()
        with nats_server(folder / "nats") as nats:
            settings = (*nats.settings(new_stream()), "journal.patience_seconds=1")
            async with server_process(folder, journal=settings) as server:
                submitting = asyncio.create_task(submit_until_refused(server, 5_000, 100_000))
                await asyncio.sleep(rng.uniform(0.0, 0.3))
                nats.kill()
                accepted, reason = await submitting
                assert reason in ENDED
                assert await server.wait() == 1
                assert "the journal cannot be written: NATS has not answered" in server.log
                nats.start()
                await server.start()
                again, _ = await submit_known(server, accepted)
                assert again == 0

    count = -(-report.count // 10) if report.count else 1
    name = "NATS stays away for longer than is waited"
    await report.repeat(WHERE, name, request.node.nodeid, count, happen)
    report.survived(WHERE, name, count)


async def test_a_full_stream_refuses_and_keeps_what_it_has(
    tmp_path: Path, nats: NatsServer, report: Report
) -> None:
    settings = nats.settings(new_stream())
    async with server_process(tmp_path, journal=settings) as server:
        await server.restart("--set", "journal.max_bytes=8388608")
        accepted, reason = await submit_until_refused(server)
        assert reason == "DISK_FULL"
        assert len(accepted) > 10
        # With more room the server continues.
        await server.restart()
        assert await submit_known(server, accepted) == (0, len(accepted))
        assert (await submit_known(server, ["later"]))[0] == 1
    report.survived(WHERE, "stream full", 1)


async def test_a_server_that_was_taken_over_from_writes_nothing_more(
    tmp_path: Path, nats: NatsServer, report: Report
) -> None:
    if report.count is None:
        pytest.skip("waits long for an owner; `make faults` does it, test_jetstream_journal.py too")
    # As if the first server's machine had been dark for so long that another one took over.
    settings = nats.settings(new_stream())
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    async with server_process(tmp_path / "first", journal=settings) as first:
        accepted, _ = await submit_until_refused(first, 100, 20, "a")
        os.kill(first.process.pid, signal.SIGSTOP)
        async with server_process(tmp_path / "second", journal=settings) as second:
            assert "s; taking over" in second.log
            assert await submit_known(second, accepted) == (0, len(accepted))
            more, _ = await submit_until_refused(second, 100, 20, "b")
            os.kill(first.process.pid, signal.SIGCONT)
            refused, reason = await submit_until_refused(first, 100, 20, "c")
            assert not refused and reason in ENDED
            assert await first.wait() == 1
            assert "another server writes to the stream" in first.log
            assert await submit_known(second, more) == (0, len(more))
            assert (await submit_known(second, ["c0"]))[0] == 1
    report.survived(WHERE, "taken over by another server", 1)
