"""Deltas sent to hosts of a pool that hold the previous version, and whole
versions sent to the others."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.server.pool import differences as pool_differences
from penstock.server.pool.member import Member
from tests.server.pool.test_branches import sources
from tests.server.weights.test_wire_peers import loaded, tensors_of
from tests.support.harness import (
    InlineSource,
    Tensors,
    header,
    messages,
    payload_of,
    serve,
    until,
    weights_of,
)
from tests.support.pools import QUICK, Pool, changed, serve_hub, serve_pool

RULES = changed(QUICK, branches=1)


def bases(pool: Pool) -> list[int]:
    """The base version of each engine's last upload, in the engine's own
    numbers; 0 for a whole version."""
    found: list[int] = []
    for engine in pool.engines:
        active = engine.serving.weights._active
        assert active is not None
        found.append(active.announced.base_version)
    return found


async def holding(pool: Pool, version: int) -> None:
    """Wait until the hub knows that every engine holds a version."""
    await until(lambda: all(member.delta_base == version for member in pool.engine.roster.members))


async def test_each_host_is_sent_what_changed(tmp_path: Path) -> None:
    async with serve_pool(tmp_path, 4, rules=RULES, hosts="abcd") as pool:
        await pool.hub.upload(1)
        assert bases(pool) == [0, 0, 0, 0]
        assert sources(pool) == ["hub", 0, 1, 2]
        for version in (2, 3):
            await holding(pool, version - 1)
            await pool.hub.upload(version)
            assert bases(pool) == [version - 1] * 4
            assert sources(pool) == ["hub"] * 4
            for engine in pool.engines:
                assert loaded(engine) == tensors_of(version)


async def test_once_per_host(tmp_path: Path) -> None:
    shared = ["weights.stage_folder=/dev/shm"]
    async with serve_pool(tmp_path, 4, rules=RULES, hosts="aabb", of_engines=shared) as pool:
        await pool.hub.upload(1)
        await holding(pool, 1)
        await pool.hub.upload(2)
        assert sorted(bases(pool)) == [0, 0, 1, 1]
        assert sorted(map(str, sources(pool))) == ["hub", "hub", "memory", "memory"]
        for engine in pool.engines:
            assert loaded(engine) == tensors_of(2)


async def test_it_is_made_once_and_only_where_somebody_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def compared(*args: Any) -> Any:
        made.append(len(made))
        return original(*args)

    original = pool_differences._compare
    monkeypatch.setattr(pool_differences, "_compare", compared)
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    async with serve_pool(tmp_path / "here", 2, rules=RULES) as pool:
        for version in (1, 2):
            await pool.hub.upload(version)
            await holding(pool, version)
        assert not made
    async with serve_pool(tmp_path / "there", 3, rules=RULES, hosts="abc") as pool:
        for version in (1, 2):
            await pool.hub.upload(version)
            await holding(pool, version)
        assert len(made) == 1


async def test_who_does_not_hold_it_after_all_is_sent_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve_pool(tmp_path, 3, rules=RULES, hosts="abc") as pool:
        await pool.hub.upload(1)
        await holding(pool, 1)
        # The hub relies on the engine's earlier report until its next
        # look, which these tests block.
        monkeypatch.setattr(Member, "heard", lambda member, info: False)
        pool.engines[1].serving.weights.held.release()
        await pool.hub.upload(2)
        assert bases(pool) == [1, 0, 1]
        for engine in pool.engines:
            assert loaded(engine) == tensors_of(2)


async def test_it_is_told_in_each_engines_own_numbers(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        engine = await stack.enter_async_context(serve(tmp_path))
        engine.serving.info._host_id = "a"
        async with serve_hub(tmp_path / "first", [engine.address], rules=RULES) as (hub, _):
            await hub.upload(1)
            await hub.upload(2)
        hub, pool = await stack.enter_async_context(
            serve_hub(tmp_path / "second", [engine.address], rules=RULES)
        )
        running = Pool(hub, pool, [engine])
        await hub.upload(1)
        await holding(running, 1)
        await hub.upload(2)
        # The engine's own third and fourth versions.
        assert (engine.engine.version, bases(running)) == (4, [3])
        assert loaded(engine) == tensors_of(2)


def scrambled(seed: int) -> Tensors:
    """Random weights, so that a delta would not be smaller."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(size=tensor.shape).astype(np.float32)
        for name, tensor in weights_of(0).items()
    }


async def test_where_most_has_changed_the_whole_travels(tmp_path: Path) -> None:
    async with serve_pool(tmp_path, 4, rules=RULES, hosts="abcd") as pool:
        for version in (1, 2):
            data, specs = payload_of(scrambled(version))
            head, _ = header(version, tensors=specs, inline=InlineSource(length_bytes=len(data)))
            call = pool.hub.wire.UpdateWeights(iter(messages(head, data)))
            assert [answer async for answer in call]
            await holding(pool, version)
        assert bases(pool) == [0] * 4
        assert sources(pool) == ["hub", 0, 1, 2]


async def test_an_operator_may_want_the_whole(tmp_path: Path) -> None:
    rules = changed(RULES, differences=False)
    async with serve_pool(tmp_path, 2, rules=rules, hosts="ab") as pool:
        for version in (1, 2):
            await pool.hub.upload(version)
            await holding(pool, version)
        assert bases(pool) == [0, 0]
        assert sources(pool) == ["hub", 0]


async def test_a_base_that_cannot_be_read_is_not_compared_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(*_: object) -> None:
        raise OSError("told to fail")

    monkeypatch.setattr(pool_differences, "_compare", unreadable)
    async with serve_pool(tmp_path, 2, rules=RULES, hosts="ab") as pool:
        for version in (1, 2):
            await pool.hub.upload(version)
            await holding(pool, version)
        assert bases(pool) == [0, 0]
        for engine in pool.engines:
            assert loaded(engine) == tensors_of(2)
