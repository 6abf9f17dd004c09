"""F17: soak. Many groups pass through a server that is killed and restarted, and that must not grow.

    make soak GROUPS=1000000

Everything but the model is real. `penstock serve`, with the fake engine and its journal on disk, is a
separate process. Agents and the trainer's end of `Exchange` are in this process and use the wire. The
server is killed (-9) every `--soak-restart-seconds`, and at least once; its callers see only a pause.
Another soak, with three tenths of the groups, runs without a kill.

The server's memory of the past is bounded, and already full at the start: the initial journal was left by a
server that had served more groups than it remembers. Tables read from the journal are as small as possible.
They double once, before all of their entries have been replaced. So memory within a life is measured only
after that; what grows then grows with every group. Lives that are too short for that are compared with each
other.

Afterwards, each task must have been trained exactly once, and the journal must hold nothing that waits. The
server's resident memory, its files and the journal's folder must not have grown. Memory is judged by the
median slope (`report.slope`).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

from penstock.client import connect
from penstock.client.client import Client
from penstock.client.errors import PenstockError, ServerUnavailable
from penstock.client.leases import Attempt
from penstock.client.outcome import Outcome
from penstock.client.sampling import SamplingParams
from penstock.client.tasks import Task
from penstock.server.groups import pending_tasks, task_queue
from penstock.server.groups.recovery import recover
from penstock.server.journal.disk.files import Reading, find_files, read_records
from penstock.server.journal.disk.journal import LogJournal
from penstock.server.journal.records import groups_ended, tasks_known
from penstock.server.turns.records import trajectory_closed
from penstock.server.turns.store import ClosedMark
from penstock.trainer.exchange.stream import Exchange, RunFacts
from penstock.v1 import trainer_service_pb2, weights_pb2
from penstock.wire.security import open_channel
from tests.faults.footprint import Footprint, footprint
from tests.faults.report import Report, slope
from tests.faults.workload import LOST, PATIENCE
from tests.support.harness import StalenessContract
from tests.support.processes import Server, server_process

T = TypeVar("T")

# A call that takes longer than this is stuck; the run itself may take hours.
pytestmark = pytest.mark.timeout(0)
STUCK_SECONDS = 120.0

GROUP_SIZE = 2
GROUPS_PER_STEP = 32
STEPS_AHEAD = 4
AGENTS = 2
CONCURRENCY = 96
TOKENS = 32
SEGMENT_BYTES = 8 << 20
PAST_BYTES = 64 << 20
"""Segment size at which the past fits without compaction, because no state would hold it."""
SAMPLES_OF_A_LIFE = 120
REMEMBERED = max(pending_tasks.MAX_PAST, task_queue.MAX_REMEMBERED_GROUPS)
"""Groups after which every entry that a server remembers was added in its own life."""

SLOPE_BYTES_PER_HOUR = 1 << 20
NOISE_BYTES = 4 << 20
"""Memory that an allocator may hold at one moment and have returned at the next."""
JOURNAL_BYTES = 192 << 20
"""Four times what is remembered, plus eight segments; see docs/operations/journal.md, "Compaction"."""
MORE_FILES = 4 + AGENTS + 2
"""Segments during compaction, a connection for each agent, and two for the trainer."""


@dataclass(frozen=True)
class Moment:
    """The server's resources at one time."""

    seconds: float
    """Seconds since the run began."""
    groups: int
    """Groups trained by then."""
    process: Footprint
    journal_bytes: int


@dataclass
class Soak:
    server: Server
    groups: int
    restart_seconds: float
    rng: random.Random
    kill: bool = True
    half: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when half of the tasks are trained; the server is first killed at this point at the latest."""
    killed: asyncio.Event = field(default_factory=asyncio.Event)
    trained: np.ndarray = field(init=False)
    """How often each task was trained, one byte each."""
    used: int = 0
    """Number of groups trained."""
    lives: list[list[Moment]] = field(default_factory=lambda: [[]])
    lost_attempts: int = 0
    deliveries: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.trained = np.zeros(self.groups, np.uint8)

    @property
    def kills(self) -> int:
        """Number of kills of the server."""
        return len(self.lives) - 1

    async def run(self) -> None:
        """Runs until every task is trained."""
        began = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            others = [tasks.create_task(self._agent(number)) for number in range(AGENTS)]
            others.append(tasks.create_task(self._fell(began)))
            await self._trainer()
            self.lives[-1].append(self._moment(time.monotonic() - began))
            for other in others:
                other.cancel()
        self.seconds = time.monotonic() - began

    # The server

    async def _fell(self, began: float) -> None:
        """Samples the server's resources, and kills it when its time has come."""
        while True:
            since = time.monotonic()
            while not self._due(since):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self.restart_seconds / SAMPLES_OF_A_LIFE):
                        first = self.kill and not self.kills
                        await (self.half if first else asyncio.Event()).wait()
                self.lives[-1].append(self._moment(time.monotonic() - began))
            await asyncio.sleep(self.rng.uniform(0.0, 0.05))
            await self.server.kill()
            self.lives.append([])
            self.killed.set()
            await self.server.start()

    def _due(self, since: float) -> bool:
        if not self.kill:
            return False
        if self.half.is_set() and not self.kills:
            return True
        return time.monotonic() - since >= self.restart_seconds

    def _moment(self, seconds: float) -> Moment:
        folder = self.server.folder / "journal"
        journal = 0
        for path in folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                journal += path.stat().st_blocks * 512
        return Moment(seconds, self.used, footprint(self.server.process.pid), journal)

    # Agents

    async def _agent(self, number: int) -> None:
        async with connect(self.server.address, patience=PATIENCE) as client:
            leases = client.lease_tasks(
                CONCURRENCY, agent_id=f"agent-{number}", resume_aborted=True
            )
            async with leases, asyncio.TaskGroup() as attempts:
                async for attempt in leases:
                    attempts.create_task(self._attempt(attempt))

    async def _attempt(self, attempt: Attempt) -> None:
        try:
            await attempt.trajectory.turn()
            await attempt.trajectory.complete(Outcome(1.0))
        except PenstockError as error:
            if error.reason not in LOST:
                raise
            self.lost_attempts += 1

    # The trainer

    async def _trainer(self) -> None:
        async with (
            open_channel(self.server.address, None, own_connection=True) as channel,
            connect(self.server.address, patience=PATIENCE) as client,
        ):
            exchange = Exchange(
                channel,
                RunFacts(
                    run_id="soak",
                    contract=StalenessContract(max_lag=8, groups_per_step=GROUPS_PER_STEP),
                    in_flight=weights_pb2.IN_FLIGHT_POLICY_KEEP,
                    weight_version=0,
                    step=0,
                ),
                give_up_after_seconds=STUCK_SECONDS,
                stopping=asyncio.Event(),
            )
            await exchange.open()
            reading = asyncio.ensure_future(exchange.run(_nothing_to_restore))
            stepping = asyncio.ensure_future(self._steps(exchange, client))
            try:
                await asyncio.wait([reading, stepping], return_when=asyncio.FIRST_COMPLETED)
                if not stepping.done():
                    reading.result()
                await stepping
            finally:
                for task in (reading, stepping):
                    task.cancel()
                await asyncio.gather(reading, stepping, return_exceptions=True)

    async def _steps(self, exchange: Exchange, client: Client) -> None:
        submitted = demanded = step = 0
        while self.used < self.groups:
            async with asyncio.timeout(STUCK_SECONDS):
                ahead = min(self.groups, self.used + STEPS_AHEAD * GROUPS_PER_STEP)
                if submitted < ahead:
                    await _submit(client, range(submitted, ahead))
                    submitted = ahead
                wanted = min(self.groups, self.used + 2 * GROUPS_PER_STEP)
                if demanded < wanted:
                    exchange.demand(wanted - demanded)
                    demanded = wanted
                count = min(GROUPS_PER_STEP, self.groups - self.used)
                batch = [await exchange.next_group() for _ in range(count)]
            for group in batch:
                assert len(group.trajectories) == GROUP_SIZE
                self.trained[int(group.task_id)] += 1
            self.used, step = self.used + count, step + 1
            exchange.receipt(batch, step)
            exchange.checkpoint(step)
            if self.kill and self.used * 2 >= self.groups:
                self.half.set()
                await self.killed.wait()
        async with asyncio.timeout(STUCK_SECONDS):
            await self._receive_again(exchange, client)
        self.deliveries = exchange.delivery_count
        await exchange.close(timeout_seconds=10.0)

    async def _receive_again(self, exchange: Exchange, client: Client) -> None:
        """Acknowledges groups that arrived before a kill of the server and were used after it.

        The restarted server lacks their receipts and waits for demand. The exchange recognises such a group
        when it arrives again, and sends its receipt then.
        """
        while waiting := (await _patiently(client.server_info)).load.buffered_group_count:
            wanted = exchange.delivery_count + waiting
            exchange.demand(waiting)
            while exchange.delivery_count < wanted:
                await asyncio.sleep(0.01)


async def _submit(client: Client, numbers: range) -> None:
    """Submits tasks until they are accepted. Tasks that a killed server accepted are known to the next."""
    await _patiently(lambda: client.submit_tasks([_task(number) for number in numbers]))


async def _patiently(ask: Callable[[], Awaitable[T]]) -> T:
    """Retries without a limit, because these calls of a client do not wait for a lost server."""
    while True:
        try:
            return await ask()
        except ServerUnavailable:
            await asyncio.sleep(0.1)


def _task(number: int) -> Task:
    return Task(
        f"{number:09d}",
        prompt=[1 + number % 200, 2, 3],
        group_size=GROUP_SIZE,
        index=number,
        sampling=SamplingParams(max_tokens=TOKENS),
    )


async def _nothing_to_restore(_: trainer_service_pb2.Welcome) -> None:
    """The fake engine's weights never change in this test."""


async def leave_past(folder: Path, count: int) -> None:
    """Writes the journal of a server that had served this many groups, all of them final."""
    journal = LogJournal(folder, durability="process", max_bytes=1 << 30, segment_bytes=PAST_BYTES)
    await journal.start(list)
    await journal.append([tasks_known(f"p{number:08d}" for number in range(count))])
    await journal.append([groups_ended(f"{number:016x}" for number in range(count))])
    names = [f"{number // 2:016x}-{number % 2}-0" for number in range(count)]
    closed = [
        trajectory_closed(
            name, ClosedMark(number.to_bytes(32), f"{number // 2:016x}", False, False), None
        )
        for number, name in enumerate(names)
    ]
    await journal.append(closed)
    await journal.close()


def check_journal(folder: Path) -> None:
    """Checks that the journal holds nothing that is still to be done."""
    found = recover(read_records(find_files(folder), Reading()))
    left = (found.pending, found.groups, found.finished, found.trajectories)
    assert not any(left), left


def settled(life: Sequence[Moment]) -> list[Moment]:
    """The samples taken after every remembered entry was added in this life."""
    return [moment for moment in life if moment.groups - life[0].groups >= REMEMBERED]


def by_hour(moments: Sequence[Moment]) -> float:
    """Median slope of resident memory, in bytes per hour."""
    between = (moments[-1].seconds - moments[0].seconds) / (len(moments) - 1)
    return slope([moment.process.resident_bytes for moment in moments]) / between * 3600


def beyond_noise(moments: Sequence[Moment]) -> float:
    """The same, without the noise that is possible over such a time."""
    return by_hour(moments) - NOISE_BYTES / ((moments[-1].seconds - moments[0].seconds) / 3600)


def over_lives(lives: Sequence[Sequence[Moment]]) -> float:
    """Median slope of a life's resources, from life to life, in bytes per hour."""
    if len(lives) < 2:
        return 0.0
    taken = [
        statistics.median(moment.process.resident_bytes for moment in life[len(life) // 2 :])
        for life in lives
    ]
    between = (lives[-1][0].seconds - lives[0][0].seconds) / (len(lives) - 1)
    return slope(taken) / between * 3600


@pytest.mark.parametrize("kill", [True, False], ids=["restarts", "one_life"])
async def test_groups_without_end_do_not_make_the_server_grow(
    report: Report, request: pytest.FixtureRequest, tmp_path: Path, kill: bool
) -> None:
    asked: int = request.config.getoption("soak_groups")
    restart_seconds: int = request.config.getoption("soak_restart_seconds")
    groups = asked if kill else asked * 3 // 10
    await leave_past(tmp_path / "journal", REMEMBERED if asked >= REMEMBERED // 100 else 100)
    options = ("--set", f"journal.segment_bytes={SEGMENT_BYTES}", "--set", "freshness=false")
    async with server_process(tmp_path, *options) as server:
        soak = Soak(server, groups, restart_seconds, random.Random(report.seed), kill)
        await soak.run()
        server.process.signal(signal.SIGTERM)
        assert await server.wait() == 0, server.log[-4000:]
        assert "Traceback" not in server.log
    check_journal(tmp_path / "journal")
    assert (soak.trained == 1).all(), np.flatnonzero(soak.trained != 1)[:20]
    judge(report, soak, asked, request.node.nodeid)


def judge(report: Report, soak: Soak, asked: int, test: str) -> None:
    """Adds verdicts on kills, memory, files and the journal's folder."""
    whole = [life for life in soak.lives if len(life) >= SAMPLES_OF_A_LIFE // 2]
    long = [life for life in map(settled, whole) if len(life) >= SAMPLES_OF_A_LIFE // 2]
    across = over_lives(whole)
    moments = [moment for life in soak.lives for moment in life]
    files = [moment.process.files for moment in moments]
    journal = max(moment.journal_bytes for moment in moments)
    growth = [
        f"{by_hour(life) / 2**20:+.2f} MB/h after {REMEMBERED:,} groups of a life" for life in long
    ]
    if len(whole) > 1:
        growth.append(f"{across / 2**20:+.2f} MB/h over lives")
    figures = (
        f"{soak.groups / soak.seconds:.0f} groups/s; {soak.kills} kills; {soak.lost_attempts} attempts "
        f"lost; {soak.deliveries - soak.groups} groups delivered again; memory "
        f"{', '.join(growth) or 'not judged'}; journal at most {journal >> 20} MiB"
    )
    if whole:
        report.lines += [_life(number, life) for number, life in enumerate(soak.lives, 1) if life]
        report.lines.append(figures)
    bounds = {
        "it was killed": soak.kills >= 1 or not soak.kill,
        "the journal's folder": journal <= JOURNAL_BYTES,
        "open files": max(files) - min(files) <= MORE_FILES,
        "memory within a life": all(beyond_noise(life) <= SLOPE_BYTES_PER_HOUR for life in long),
        "memory over lives": across <= SLOPE_BYTES_PER_HOUR + NOISE_BYTES / (soak.seconds / 3600),
    }
    missed = [name for name, met in bounds.items() if not met]
    name = "soak with restarts" if soak.kill else "soak in one life"
    if missed:
        options = f"--soak-groups {asked}"
        report.failed("server", name, report.seed, test, soak.groups, soak.groups, options)
    else:
        report.survived("server", name, soak.groups, unit="groups", figures=figures)
    assert not missed, f"{missed}: {figures}"


def _life(number: int, life: Sequence[Moment]) -> str:
    resident = [moment.process.resident_bytes / 2**20 for moment in life]
    half = resident[len(resident) // 2]
    return (
        f"life {number:<4}{life[-1].seconds - life[0].seconds:8.0f} s  "
        f"{life[-1].groups - life[0].groups:8,} groups  resident {resident[0]:.1f} -> {half:.1f} -> "
        f"{resident[-1]:.1f} MiB; {life[-1].process.files} files; journal "
        f"{max(m.journal_bytes for m in life) >> 20} MiB"
    )
