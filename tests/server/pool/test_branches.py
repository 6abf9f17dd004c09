"""Weight distribution between the hosts of a pool: who takes weights from whom,
and what happens on failures."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.server.engine.turn_limit import LimitRules
from penstock.server.pool.fanout import PEERS_TRIED, Branches
from penstock.server.pool.member import Member, State
from penstock.server.pool.remote import EngineServer
from penstock.server.weights.header import Announced
from penstock.server.weights.staging.incoming import IncomingUpload
from penstock.server.weights.staging.manifest import WeightRefused
from penstock.wire.reasons import Reason
from penstock.wire.security import Security
from tests.server.weights.test_wire_peers import loaded, tensors_of
from tests.support.harness import Harness, serve, until
from tests.support.pools import QUICK, Pool, changed, serve_pool


def member(number: int, *, hands_on: bool = True) -> Member:
    server = EngineServer(f"127.0.0.1:{number}", Security())
    return Member(server, LimitRules(), lambda: 0.0, hands_on=hands_on)


def built(most: int, count: int) -> list[int | None]:
    """The source of each of `count` hosts, as a host number, or None for the hub."""
    branches, hosts = Branches(most), [member(number) for number in range(count)]
    taken: list[int | None] = []
    for host in hosts:
        source = branches.take(())
        taken.append(None if source is None else hosts.index(source))
        branches.add([host])
    return taken


def test_one_branch_makes_a_chain() -> None:
    assert built(1, 5) == [None, 0, 1, 2, 3]


def test_two_make_a_tree() -> None:
    assert built(2, 8) == [None, None, 0, 0, 1, 1, 2, 2]


def test_without_branches_the_hub_sends_to_each() -> None:
    assert built(0, 4) == [None] * 4


@given(most=st.integers(1, 4), count=st.integers(1, 60))
def test_nobody_hands_it_on_to_more_than_may_be(most: int, count: int) -> None:
    taken = built(most, count)
    assert max(Counter(taken).values()) <= most
    # No cycles: each host takes it from an earlier one.
    assert all(source is None or source < number for number, source in enumerate(taken))


def test_who_cannot_hand_on_is_not_asked() -> None:
    branches = Branches(1)
    assert branches.take(()) is None
    branches.add([member(1, hands_on=False)])
    assert branches.take(()) is None


def test_a_host_that_failed_is_not_asked_any_more() -> None:
    branches, hosts = Branches(1), [member(number) for number in range(3)]
    branches.take(())
    branches.add(hosts)
    branches.drop(hosts[0])
    assert branches.take(()) is hosts[1]
    # A host does not ask a source again that already failed it.
    assert branches.take({hosts[1]}) is hosts[2]


def test_after_some_the_hub_is_asked() -> None:
    branches, hosts = Branches(4), [member(number) for number in range(8)]
    branches.add(hosts)
    for _ in range(4):
        branches.take(())
    assert branches.take(set(hosts[:PEERS_TRIED])) is None


def test_who_has_it_already_spares_the_hub() -> None:
    branches, holder = Branches(1, spare_hub=True), member(1)
    branches.add([holder])
    assert [branches.take(()), branches.take(())] == [holder, None]


# With servers


def announced_by(engine: Harness) -> Announced | None:
    """What announced the active version; None for the model as loaded at start."""
    active = engine.serving.weights._active
    return None if active is None else active.announced


def sources(pool: Pool) -> list[object]:
    """For each engine: "hub", "memory", the number of the engine that it
    took its version from, or None."""
    addresses = [engine.address for engine in pool.engines]
    found: list[object] = []
    for engine in pool.engines:
        announced = announced_by(engine)
        if announced is None:
            found.append(None)
        elif announced.source == "peer":
            found.append(addresses.index(announced.header.peer.address))
        else:
            found.append({"inline": "hub", "shared_memory": "memory"}[announced.source])
    return found


@pytest.mark.parametrize(
    ("branches", "expected"),
    [
        (0, ["hub", "hub", "hub", "hub"]),
        (1, ["hub", 0, 1, 2]),
        (2, ["hub", "hub", 0, 0]),
    ],
)
async def test_hosts_take_a_version_from_each_other(
    tmp_path: Path, branches: int, expected: list[object]
) -> None:
    rules = changed(QUICK, branches=branches, differences=False)
    async with serve_pool(tmp_path, 4, rules=rules, hosts="abcd") as pool:
        for version in (1, 2):
            await pool.hub.upload(version)
            assert sources(pool) == expected
            for engine in pool.engines:
                assert loaded(engine) == tensors_of(version)


async def test_once_per_host(tmp_path: Path) -> None:
    rules = changed(QUICK, branches=1)
    shared = ["weights.stage_folder=/dev/shm"]
    async with serve_pool(tmp_path, 4, rules=rules, hosts="aabb", of_engines=shared) as pool:
        await pool.hub.upload(1)
        found = sources(pool)
        assert found in (["hub", "memory", 0, "memory"], ["memory", "hub", 1, "memory"]), found
        for engine in pool.engines:
            assert loaded(engine) == tensors_of(1)


@pytest.mark.parametrize("how", ["refuses", "hangs"])
async def test_once_per_host_where_its_first_engine_fails(tmp_path: Path, how: str) -> None:
    # The next engine leads after half of `stage_seconds`; the other half
    # is enough on a busy machine.
    rules = changed(QUICK, stage_seconds=8.0)
    shared = ["weights.stage_folder=/dev/shm"]
    async with serve_pool(tmp_path, 4, rules=rules, hosts="aaaa", of_engines=shared) as pool:
        gate = asyncio.Event()

        async def fails(announced: Announced) -> IncomingUpload:
            if how == "hangs":
                await gate.wait()
            raise WeightRefused(Reason.DISK_FULL, "told to fail")

        first = pool.engines[0].serving.uploads
        original, first._begin = first._begin, fails  # type: ignore[method-assign]
        uploading = asyncio.create_task(pool.hub.upload(1))
        await until(lambda: None not in sources(pool)[1:])
        assert sorted(map(str, sources(pool)[1:])) == ["hub", "memory", "memory"]
        first._begin = original  # type: ignore[method-assign]
        gate.set()
        await uploading
        await pool.serving()
        for engine in pool.engines:
            assert loaded(engine) == tensors_of(1)


async def test_memory_that_cannot_be_read_is_gone_round(tmp_path: Path) -> None:
    # The stage is on disk, so what looks like one host shares no memory.
    async with serve_pool(tmp_path, 3, hosts="aaa") as pool:
        await pool.hub.upload(1)
        assert "memory" not in sources(pool)
        for engine in pool.engines:
            assert loaded(engine) == tensors_of(1)


async def test_a_host_that_gives_nothing_is_gone_round(tmp_path: Path) -> None:
    rules = changed(QUICK, branches=1)
    async with serve_pool(tmp_path, 3, rules=rules, hosts="abc") as pool:
        handout = pool.engines[0].serving.weights
        handout.complete = lambda weight_version: None  # type: ignore[method-assign]
        pool.engines[0].serving.uploads.arriving = None
        await pool.hub.upload(1)
        assert [engine.engine.version for engine in pool.engines] == [1, 1, 1]
        for engine in pool.engines:
            assert loaded(engine) == tensors_of(1)


async def test_a_host_that_dies_meanwhile_is_gone_round(tmp_path: Path) -> None:
    rules = changed(QUICK, branches=1, differences=False)
    async with serve_pool(tmp_path, 3, rules=rules, hosts="abc") as pool:
        await pool.hub.upload(1)
        await pool.engines[0].life.stop(0.0)
        await pool.hub.upload(2)
        assert [engine.engine.version for engine in pool.engines[1:]] == [2, 2]
        # The hub sends to one of the two, and that one passes it on.
        assert sources(pool)[1:] in (["hub", 1], [2, "hub"])


async def test_one_that_joins_late_is_brought_up_by_a_peer(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        pool = await stack.enter_async_context(serve_pool(tmp_path, 2, hosts="ab"))
        await pool.hub.upload(3)
        (tmp_path / "late").mkdir()
        late = await stack.enter_async_context(serve(tmp_path / "late"))
        late.serving.info._host_id = "c"
        addresses = [engine.address for engine in pool.engines]
        pool.engines.append(late)
        pool.engine.roster.set_addresses([*addresses, late.address])
        await pool.serving()
        announced = announced_by(late)
        assert announced is not None and announced.header.peer.address in addresses
        assert loaded(late) == tensors_of(3)


async def test_one_that_joins_late_is_brought_up_by_the_hub_where_no_peer_can(
    tmp_path: Path,
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        pool = await stack.enter_async_context(serve_pool(tmp_path, 1, hosts="a"))
        await pool.hub.upload(3)
        pool.engines[0].serving.weights.held.release()
        (tmp_path / "late").mkdir()
        late = await stack.enter_async_context(serve(tmp_path / "late"))
        late.serving.info._host_id = "b"
        pool.engines.append(late)
        pool.engine.roster.set_addresses([engine.address for engine in pool.engines])
        await until(lambda: len(pool.engine.roster.members) == 2)
        await pool.serving()
        assert sources(pool)[-1] == "hub"
        assert loaded(late) == tensors_of(3)
        assert pool.member(0).state is State.SERVING
