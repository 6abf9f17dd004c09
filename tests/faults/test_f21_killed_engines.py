"""F21: kill -9 of the engine servers of a pool, at random, while a real trainer trains a tiny model.

The hub and its worker are in this process; each engine server is a process of its own, which is killed in
the middle of whatever it does, uploads of weights among it, and started again on the same port. At least
one is left alive. Afterwards, or meanwhile:

- every token the hub holds is what its version samples there, and no attempt failed for want of an engine;
- each accepted group is trained once, by its ledger, and no token with a lag above `max_lag`;
- groups are finished all the time: the longest pause is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.server.engine_server import EngineServer
from penstock.server.pool import PoolEngine
from penstock.server.pool_rules import PoolRules
from penstock.v1 import trajectory_pb2
from penstock.wire import codec
from tests.fakes import sampled
from tests.faults.report import COUNT, Report
from tests.faults.trainers import (
    GROUPS_PER_STEP,
    Accepted,
    Nursery,
    Stand,
    at_work,
    check_lineage,
)
from tests.harness import Harness
from tests.pools import serve_hub
from tests.processes import Server
from tests.test_trainer_end_to_end import configure

MAX_LAG = 2
STEP_SECONDS = "0.004"
STUCK_SECONDS = 60.0
WHERE = "F21 fake"
TEST = "tests/faults/test_f21_killed_engines.py::"
RULES = PoolRules(look_seconds=0.2, flush_seconds=0.02)


@dataclass
class Engines:
    """Engine servers, killed and started again."""

    rng: random.Random
    servers: list[Server] = field(default_factory=list[Server])
    alive: set[int] = field(default_factory=set[int])
    kills: int = 0

    async def fell(self, count: int) -> None:
        """Kills so many times; each comes back after a while, and one always lives."""
        self.alive = set(range(len(self.servers)))
        async with asyncio.TaskGroup() as starting:
            for _ in range(count):
                await asyncio.sleep(self.rng.uniform(0.0, 0.8))
                while len(self.alive) < 2:
                    await asyncio.sleep(0.01)
                number = self.rng.choice(sorted(self.alive))
                self.alive.discard(number)
                await self.servers[number].kill()
                self.kills += 1
                starting.create_task(self._start(number))

    async def _start(self, number: int) -> None:
        await asyncio.sleep(self.rng.uniform(0.0, 1.0))
        await self.servers[number].start()
        self.alive.add(number)


@dataclass
class Watch:
    """What the hub closes, looked at as it does."""

    closed: int = 0
    tokens: int = 0
    sampled_by: dict[int, int] = field(default_factory=dict[int, int])
    """What the engine server called the version that sampled the token after a prefix, by its hash: the
    fake engine samples by that number, which differs from the hub's where it had to be given one version
    twice."""
    problems: list[str] = field(default_factory=list[str])
    pauses: list[float] = field(default_factory=list[float])
    _last: float | None = None

    def over(self, hub: Harness, pool: PoolEngine) -> None:
        """From now on."""
        for member in pool.members:
            self._listen(member.server)
        store = hub.serving.store
        close = store.close

        def look(record: Any, outcome: Any) -> None:
            now = time.monotonic()
            self.pauses.append(now - (self._last or now))
            self._last = now
            try:
                self._check(record)
            except (AssertionError, KeyError) as error:
                # The hub goes on, and the test ends.
                self.problems.append(f"{record.trajectory_id}: {error!r}")
            close(record, outcome)

        store.close = look  # type: ignore[method-assign]

    def _listen(self, server: EngineServer) -> None:
        """Notes what the engine server says of each token."""
        generate = server.generate

        async def heard(message: Any, metadata: Any) -> AsyncGenerator[Any]:
            prefix = codec.token_ids(message.tokens).tobytes()
            async with contextlib.aclosing(generate(message, metadata)) as events:
                async for event in events:
                    if event.WhichOneof("event") == "segment":
                        for token in codec.token_ids(event.segment):
                            self.sampled_by[hash(prefix)] = event.segment.weight_version
                            prefix += token.tobytes()
                    yield event

        server.generate = heard  # type: ignore[method-assign]

    def _check(self, record: Any) -> None:
        prefix = b""
        for segment in record.segments:
            logprobs = np.frombuffer(segment.logprobs, np.float32)
            for place, token in enumerate(np.frombuffer(segment.tokens, np.int32)):
                if segment.author == trajectory_pb2.AUTHOR_POLICY:
                    wanted = sampled(prefix, self.sampled_by[hash(prefix)])
                    assert (int(token), float(logprobs[place])) == pytest.approx(wanted)
                    self.tokens += 1
                prefix += token.tobytes()
        self.closed += 1


@contextlib.asynccontextmanager
async def engine_processes(folder: Path, model: Path, count: int) -> AsyncGenerator[list[Server]]:
    """So many engine servers, each a process."""
    options = ("--model", str(model), "--step-seconds", STEP_SECONDS)
    servers: list[Server] = []
    try:
        for number in range(count):
            own = folder / f"engine-{number}"
            own.mkdir(parents=True)
            servers.append(Server(own, options))
        await asyncio.gather(*(server.start() for server in servers))
        yield servers
    finally:
        for process in [process for server in servers for process in server.processes]:
            process.kill()
            await process.wait()


@pytest.mark.timeout(0)
async def test_killed_engines_cost_a_pool_nothing_but_time(
    model: Path, nursery: Nursery, tmp_path: Path, report: Report
) -> None:
    # Where nobody says how often, a pool of two is enough to see whether it works at all.
    for engines in (2,) if report.count is None else (2, 4):
        name = f"one of {engines} engines killed while it trains"
        run = Engines(random.Random(f"{report.seed} {name}"))
        count = report.count or COUNT
        try:
            figures = await kill_and_train(
                model, nursery, tmp_path / f"{engines}", run, engines, count
            )
        except BaseException as error:
            test = f"{TEST}test_killed_engines_cost_a_pool_nothing_but_time"
            again = report.failed(WHERE, name, report.seed, test, run.kills, count)
            error.add_note(f"again: {again}")
            raise
        assert run.kills == count
        report.survived(WHERE, name, count, unit="kills", figures=figures)


async def kill_and_train(
    model: Path, nursery: Nursery, folder: Path, run: Engines, engines: int, count: int
) -> str:
    """One pool, from its first engine to the last look at what it did; returns what was measured."""
    watch, accepted = Watch(), Accepted()
    async with engine_processes(folder, model, engines) as servers:
        run.servers = servers
        addresses = [server.address for server in servers]
        async with (
            serve_hub(folder / "hub", addresses, rules=RULES) as (hub, pool),
            at_work(hub.address),
        ):
            watch.over(hub, pool)
            accepted.watch(hub)  # type: ignore[arg-type]
            steps = await train(hub, nursery, folder, model, accepted, run, count)
            assert not watch.problems, watch.problems[:5]
            assert set(hub.serving.closing.failures) <= {"RUNTIME_ERROR"}
    return (
        f"{steps} steps, {len(accepted.tasks)} groups trained once each, {watch.tokens} tokens "
        f"recomputed, {pool.requests_lost} turns placed again; longest time without a finished turn "
        f"{max(watch.pauses):.1f} s"
    )


async def train(
    hub: Harness,
    nursery: Nursery,
    folder: Path,
    model: Path,
    accepted: Accepted,
    run: Engines,
    count: int,
) -> int:
    """One trainer, for as long as engines are killed and a little longer; returns its steps."""
    config = configure(
        folder,
        model,
        hub.address,
        run={"steps": 100_000},
        data={"group_size": 2, "sampling": {"max_tokens": 48}},
        train={"groups_per_step": GROUPS_PER_STEP},
        staleness={"max_lag": MAX_LAG},
        checkpoint={"every_steps": 20},
    )
    stand = Stand(hub, folder, config, accepted, 0)  # type: ignore[arg-type]
    await nursery.begin(config, stand.log, resume=False)
    try:
        async with asyncio.timeout(120 + 20 * count):
            await run.fell(count)
            after = len(accepted.tasks) + 2 * GROUPS_PER_STEP
            while len(accepted.tasks) < after:
                assert not nursery.ended, stand.said
                await asyncio.sleep(0.05)
    finally:
        nursery.terminate()
    assert await nursery.end() == 0, stand.said
    rows = stand.rows()
    assert max(row["lag_max"] for row in rows) <= MAX_LAG
    stand.steps = len(rows)
    check_lineage(stand)
    return stand.steps
