"""Engines that join a pool, and hang or fail while they receive its version."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from penstock.server.pool import weights
from penstock.server.pool.member import State
from tests.server.pool.test_branches import sources
from tests.server.pool.test_switch import hang
from tests.server.weights.test_wire_peers import loaded, tensors_of
from tests.support.harness import GetServerInfoRequest, Harness, serve, until
from tests.support.pools import QUICK, Pool, changed, serve_pool


@pytest.fixture
def one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """One joining engine at a time is given the version."""
    monkeypatch.setattr(weights, "PLACES", 1)
    monkeypatch.setattr(weights, "PLACES_OF_HUNG", 1)


async def joining(
    stack: contextlib.AsyncExitStack, folder: Path, pool: Pool, count: int, host: str = ""
) -> list[Harness]:
    """Engine servers that the pool lists later."""
    engines: list[Harness] = []
    for _ in range(count):
        own = folder / f"late-{len(pool.engines) + len(engines)}"
        own.mkdir()
        engine = await stack.enter_async_context(serve(own, "weights.stage_folder=/dev/shm"))
        if host:
            engine.serving.info._host_id = host
        engines.append(engine)
    return engines


def listed(pool: Pool, *engines: Harness) -> None:
    """Add engines to the pool."""
    pool.engines += engines
    pool.engine.roster.set_addresses([engine.address for engine in pool.engines])


async def problems(pool: Pool) -> list[str]:
    """The problem of each engine, as in GetServerInfo."""
    info = await pool.hub.wire.GetServerInfo(GetServerInfoRequest())
    return [replica.problem for replica in info.replicas]


@pytest.mark.usefixtures("one_place")
async def test_one_that_hangs_is_given_up_says_so_and_lets_others_pass(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        pool = await stack.enter_async_context(serve_pool(tmp_path, 1))
        await pool.hub.upload(5)
        pool.engine.weights.rules = changed(QUICK, stage_seconds=0.5)
        hung, other = await joining(stack, tmp_path, pool, 2)
        gate = hang(hung)
        listed(pool, hung)
        await until(lambda: pool.member(1).problem == "is being given version 5")
        listed(pool, other)
        await pool.serving(2)
        assert other.engine.version == 5
        late = "did not have all of version 5 after 0.5 s"
        await until(lambda: late in pool.member(1).problem)
        # The problem is also reported during the next attempt.
        await until(lambda: pool.member(1).problem.startswith("is being given version 5"))
        assert late in (await problems(pool))[1]
        gate.set()
        await pool.serving()
        assert hung.engine.version == 5 and await problems(pool) == [""] * 3


@pytest.mark.usefixtures("one_place")
async def test_who_waits_for_others_says_so(tmp_path: Path) -> None:
    rules = changed(QUICK, stage_seconds=600.0)
    async with contextlib.AsyncExitStack() as stack:
        pool = await stack.enter_async_context(serve_pool(tmp_path, 1, rules=rules))
        await pool.hub.upload(5)
        hung, other = await joining(stack, tmp_path, pool, 2)
        gate = hang(hung)
        listed(pool, hung)
        await until(lambda: pool.member(1).problem == "is being given version 5")
        listed(pool, other)
        await until(lambda: pool.member(2).state is State.JOINING)
        await until(lambda: pool.member(2).problem != "")
        assert (await problems(pool))[2] == "waits to be given version 5, after other engines"
        gate.set()
        await pool.serving()


@pytest.mark.usefixtures("one_place")
async def test_one_that_hung_before_takes_no_place_of_others(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        pool = await stack.enter_async_context(serve_pool(tmp_path, 1))
        await pool.hub.upload(5)
        pool.engine.weights.rules = changed(QUICK, stage_seconds=0.3)
        hung, other = await joining(stack, tmp_path, pool, 2)
        gate = hang(hung)
        listed(pool, hung)
        await until(lambda: pool.member(1).problem.startswith("did not have all"))
        # From now on it never times out.
        pool.engine.weights.rules = changed(QUICK, stage_seconds=600.0)
        await until(lambda: pool.member(1).problem.startswith("is being given"))
        listed(pool, other)
        await pool.serving(2)
        assert pool.member(1).problem.startswith("is being given")
        gate.set()
        await pool.serving()
        assert not pool.member(1).hung


async def test_one_that_hangs_as_it_switches_is_given_up(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        pool = await stack.enter_async_context(serve_pool(tmp_path, 1))
        await pool.hub.upload(5)
        pool.engine.weights.rules = changed(QUICK, switch_seconds=0.3)
        (late,) = await joining(stack, tmp_path, pool, 1)
        load, gate = late.engine.load, asyncio.Event()

        async def held(weights):  # type: ignore[no-untyped-def]
            await gate.wait()
            await load(weights)

        late.engine.load = held  # type: ignore[method-assign]
        listed(pool, late)
        await until(lambda: "did not switch to version 5" in pool.member(1).problem)
        gate.set()
        await pool.serving()
        assert late.engine.version == 5


async def test_those_of_one_host_that_join_together_are_sent_a_version_once(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        pool = await stack.enter_async_context(serve_pool(tmp_path, 1, hosts="a"))
        await pool.hub.upload(5)
        late = await joining(stack, tmp_path, pool, 3, host="b")
        gates = [hang(engine) for engine in late]
        listed(pool, *late)
        given = "is being given version 5"
        await until(lambda: [pool.member(n).problem for n in (1, 2, 3)] == [given] * 3)
        for gate in gates:
            gate.set()
        await pool.serving()
        assert sorted(map(str, sources(pool)[1:])) == ["0", "memory", "memory"]
        for engine in pool.engines:
            assert loaded(engine) == tensors_of(5)
        assert not pool.engine.weights._sharing._open


async def test_one_that_joins_is_brought_up_by_its_neighbour(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        pool = await stack.enter_async_context(serve_pool(tmp_path, 4, hosts="abcd"))
        await pool.hub.upload(5)
        for late in await joining(stack, tmp_path, pool, 2, host="c"):
            listed(pool, late)
            await pool.serving()
            # From the engine that was there first, or from the previous one to join.
            assert sources(pool)[-1] in (2, 4)


async def test_each_version_that_joining_engines_are_given_is_let_go_of(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        pool = await stack.enter_async_context(serve_pool(tmp_path, 1, hosts="a"))
        await pool.hub.upload(5)
        (late,) = await joining(stack, tmp_path, pool, 1, host="b")
        gate = hang(late)
        listed(pool, late)
        await until(lambda: pool.member(1).problem == "is being given version 5")
        # When the engine has the version, it is no longer the pool's.
        await pool.hub.upload(6)
        gate.set()
        await pool.serving()
        assert late.engine.version == 6 and not pool.engine.weights._sharing._open
        # Unlisted while it receives a version: nothing of the upload is left.
        folder = tmp_path / "gone"
        folder.mkdir()
        gone = await stack.enter_async_context(serve(folder))
        hang(gone)
        listed(pool, gone)
        await until(lambda: pool.member(2).problem == "is being given version 6")
        pool.engine.roster.set_addresses([engine.address for engine in pool.engines[:2]])
        await until(lambda: not pool.engine.weights._sharing._open)
