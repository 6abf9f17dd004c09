"""Where the attempts of a group go when the engine with their shared
cache takes no more of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from penstock.server.config.pool import PoolSection
from penstock.server.engine.protocol import EngineRequest, Sampling
from penstock.server.engine.turn_limit import LimitRules
from penstock.server.pool import placing as pool_placing
from penstock.server.pool.member import Member, State
from penstock.server.pool.placing import BETWEEN_SECONDS, Placing
from penstock.server.pool.remote import EngineServer
from penstock.wire.security import Security
from tests.support.harness import until
from tests.support.pools import QUICK, changed, serve_pool

PROMPT = [1, 2, 3]


class Engines:
    """Three engines of a pool, and the object that places requests on them."""

    def __init__(self) -> None:
        self.now = 0.0
        self.members = [
            Member(
                EngineServer(f"127.0.0.1:{7001 + number}", Security()),
                LimitRules(),
                lambda: self.now,
                state=State.SERVING,
            )
            for number in range(3)
        ]
        self.placing = Placing(self._rotation, PoolSection())

    def _rotation(self) -> list[Member]:
        return [member for member in self.members if member.state is State.SERVING]

    async def place(self, first: int, count: int) -> list[Member]:
        """Place the attempts of one group, one after the other; return their engines."""
        found: list[Member] = []
        for number in range(first, first + count):
            name = f"a{number}"
            request = EngineRequest(
                name,
                np.array(PROMPT, np.int32),
                Sampling(max_tokens=1),
                cache_salt="",
                trajectory_id=name,
                group_id="g",
            )
            member = await self.placing.place(request)
            assert member is not None
            member.left(name)
            found.append(member)
        return found

    def request(self, trajectory_id: str) -> EngineRequest:
        """The request for the next turn of a trajectory."""
        prompt = np.array(PROMPT, np.int32)
        return EngineRequest(
            f"{trajectory_id}/turn", prompt, Sampling(1), cache_salt="", trajectory_id=trajectory_id
        )

    async def begin(self, *trajectory_ids: str) -> list[int]:
        """Place a turn of each trajectory; return the engine numbers."""
        placed = [await self.placing.place(self.request(name)) for name in trajectory_ids]
        assert all(placed)
        return [self.members.index(member) for member in placed if member is not None]

    def end(self, *trajectory_ids: str) -> None:
        """End the turns of these trajectories."""
        for name in trajectory_ids:
            request = self.request(name)
            (member,) = (m for m in self.members if request.request_id in m.turns)
            self.placing.ended(member, request)

    async def take(self, name: str, version: int = 0, priority: int = 0) -> Member | None:
        """Place a request that requires this version (0: any) and stays in
        its engine. Return the engine."""
        return await self.placing.place(
            EngineRequest(
                name,
                np.array(PROMPT, np.int32),
                Sampling(max_tokens=1),
                cache_salt="",
                priority=priority,
                required_weight_version=version,
            )
        )

    def close(self) -> None:
        """Close every engine at version 7."""
        for member in self.members:
            member.version = 7
            member.close_for(1.0)

    def reopen(self) -> None:
        """Open every engine again."""
        for member in self.members:
            member.closed_until = 0.0
        self.placing.wake()


async def test_who_waits_for_a_version_is_in_nobodys_way() -> None:
    engines = Engines()
    # No engine has this version.
    pinned = asyncio.create_task(engines.take("pinned", 7))
    await until(lambda: engines.placing.waiting_count == 1)
    async with asyncio.timeout(5):
        assert await engines.take("any") is not None
    assert engines.placing.leave("pinned") and await pinned is None


async def test_those_that_wait_are_served_by_priority_then_in_order_whatever_they_take() -> None:
    engines, served = Engines(), list[str]()
    engines.close()

    async def take(name: str, version: int, priority: int) -> None:
        assert await engines.take(name, version, priority) is not None
        served.append(name)

    waiting = [
        asyncio.create_task(take(name, version, priority))
        for name, version, priority in (
            ("low 7", 7, 2), ("low", 0, 2), ("mid 7", 7, 1), ("high", 0, 0), ("mid", 0, 1),
        )
    ]  # fmt: skip
    await until(lambda: engines.placing.waiting_count == len(waiting))
    engines.reopen()
    await asyncio.gather(*waiting)
    assert served == ["high", "mid 7", "mid", "low 7", "low"]


async def test_a_wake_looks_for_a_place_once_for_each_kind_that_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engines, looks = Engines(), 0
    engines.close()
    choose = engines.placing._choose

    def counted(homes: Sequence[Member], required: int) -> Member | None:
        nonlocal looks
        looks += 1
        return choose(homes, required)

    waiting = [
        asyncio.create_task(engines.take(f"{version}/{number}", version))
        for version in (0, 7, 8)
        for number in range(50)
    ]
    await until(lambda: engines.placing.waiting_count == len(waiting))
    monkeypatch.setattr(engines.placing, "_choose", counted)
    engines.placing.wake()
    assert looks == 3
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert engines.placing.waiting_count == 0 and not engines.placing._queues


@pytest.mark.parametrize("version", [0, 7])
async def test_those_that_were_left_are_let_go_of(version: int) -> None:
    engines = Engines()
    engines.close()
    first = asyncio.create_task(engines.take("first", version))
    await until(lambda: engines.placing.waiting_count == 1)
    for number in range(200):
        waiting = asyncio.create_task(engines.take(f"{number}", version))
        await until(lambda: engines.placing.waiting_count == 2)
        if number % 2:
            waiting.cancel()
        else:
            assert engines.placing.leave(f"{number}")
        await asyncio.wait([waiting])
    assert len(engines.placing._queues[version]) <= 3
    engines.reopen()
    assert await first is not None


async def test_what_is_between_two_turns_keeps_its_place_while_it_is_expected() -> None:
    engines = Engines()
    assert await engines.begin("a", "b", "c", "d") == [0, 1, 2, 0]
    engines.end("a", "d")
    # The first engine is idle now, but its trajectories are expected back.
    assert await engines.begin("e", "f") == [1, 2]
    assert await engines.begin("a") == [0]
    engines.end("a")
    assert engines.members[0].between == 2
    engines.now = BETWEEN_SECONDS / 2
    engines.placing.closed("a")
    assert engines.members[0].between == 1
    engines.placing.closed("never seen")
    assert await engines.begin("g") == [0]
    engines.end("g")
    # A longer gap means that a tool is running; the trajectory is no longer expected soon.
    engines.now = BETWEEN_SECONDS
    assert await engines.begin("h") == [0]
    assert engines.members[0].between == 1
    engines.now *= 2
    assert await engines.begin("i") == [0]
    assert [member.between for member in engines.members] == [0, 0, 0]


async def test_nothing_is_expected_at_an_engine_that_is_gone_or_another_process() -> None:
    engines = Engines()
    assert await engines.begin("a", "b") == [0, 1]
    engines.members[0].state = State.LOST
    engines.end("a", "b")
    assert [member.between for member in engines.members] == [0, 1, 0]
    engines.placing.forget(engines.members[1])
    assert [member.between for member in engines.members] == [0, 0, 0]


async def test_a_hub_expects_the_next_turn_of_a_trajectory_until_it_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_placing, "BETWEEN_SECONDS", 1e6)
    async with serve_pool(tmp_path, 2, rules=QUICK) as pool:
        members = [pool.member(number) for number in range(2)]
        for name in "abcd":
            await pool.hub.generate(name, PROMPT)
        assert [member.between for member in members] == [2, 2]
        for name in "ac":
            await pool.hub.complete(name)
        assert sum(member.between for member in members) == 2


@pytest.mark.parametrize("state", [State.LOST, State.DRAINING, State.JOINING, State.REFUSED])
async def test_siblings_have_one_home_again_after_theirs_has_left_the_rotation(
    state: State,
) -> None:
    engines = Engines()
    (home,) = set(await engines.place(0, 3))
    home.state = state
    (other,) = set(await engines.place(3, 6))
    assert other is not home
    # Most of the group is there by now.
    home.state = State.SERVING
    assert set(await engines.place(9, 3)) == {other}


async def test_siblings_go_back_to_a_home_that_only_switched_or_was_full() -> None:
    engines = Engines()
    (home,) = set(await engines.place(0, 3))
    home.state = State.SWITCHING
    assert home not in await engines.place(3, 2)
    home.state = State.SERVING
    assert set(await engines.place(5, 2)) == {home}
    home.close_for(1.0)
    assert home not in await engines.place(7, 2)
    home.closed_until = 0.0
    assert set(await engines.place(9, 2)) == {home}


@pytest.mark.parametrize("how", ["lost", "unlisted"])
async def test_siblings_stay_together_after_their_engine_has_gone(tmp_path: Path, how: str) -> None:
    # Large, so that an engine that looks slow on a busy machine keeps its turns.
    rules = changed(QUICK, margin=1e6)
    async with serve_pool(tmp_path, 4, rules=rules) as pool:

        async def sample(first: int, count: int) -> None:
            for index in range(first, first + count):
                fields = {"group_id": "g", "group_size": 10, "sample_index": index}
                await pool.hub.generate(f"g{index}", PROMPT, **fields)

        await sample(0, 2)
        members = [pool.member(number) for number in range(4)]
        home = next(number for number in range(4) if members[number].given)
        if how == "lost":
            await pool.engines[home].life.stop(0.0)
            await until(lambda: members[home].state is State.LOST)
        else:
            others = [engine.address for engine in pool.engines if engine is not pool.engines[home]]
            pool.engine.roster.set_addresses(others)
        await sample(2, 8)
        assert Counter(member.given for member in members) == {2: 1, 8: 1, 0: 2}
