"""Engines that answer and sample nothing: their turns go on elsewhere, and they are tried again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.server.engine_silence import Silence
from penstock.server.pool_member import State
from penstock.v1 import rollout_service_pb2
from tests.fakes import FakeEngine, expected_tokens
from tests.harness import GetServerInfoRequest, Turn, sampling, until
from tests.pools import QUICK, Pool, serve_pool

PROMPT = [1, 2, 3]
SLOW = 0.01
PATIENT = replace(QUICK, silent_seconds=1.0)


@contextlib.asynccontextmanager
async def frozen(engine: FakeEngine) -> AsyncGenerator[None]:
    """Its loop stands still, and its server goes on answering."""
    async with engine._stepping:
        yield


async def begin(pool: Pool, name: str, tokens: int = 60) -> asyncio.Task[Turn]:
    """A turn that has begun."""
    turning = asyncio.create_task(pool.hub.generate(name, PROMPT, sampling_params=sampling(tokens)))
    await pool.hub.sampled(name, 3)
    return turning


def check(turn: Turn, tokens: int = 60) -> None:
    """Every token is there once, and is what its version samples there."""
    assert len(turn.tokens) == tokens
    assert (turn.tokens, pytest.approx(turn.logprobs)) == expected_tokens(PROMPT, turn.versions)


def holder(pool: Pool) -> int:
    """The engine that has a turn."""
    return next(n for n in range(len(pool.engines)) if pool.member(n).turns)


async def test_turns_of_an_engine_that_samples_nothing_go_on_at_the_exact_token_elsewhere(
    tmp_path: Path,
) -> None:
    async with serve_pool(tmp_path, 2, step_seconds=SLOW, rules=PATIENT) as pool:
        turning = await begin(pool, "a")
        silent = holder(pool)
        member = pool.member(silent)
        async with frozen(pool.engines[silent].engine):
            check(await turning)
            assert pool.engine.requests_lost == 1
            assert member.state is State.LOST and not member.turns
            info = await pool.hub.wire.GetServerInfo(GetServerInfoRequest())
            replica = info.replicas[silent]
            assert replica.state == rollout_service_pb2.REPLICA_STATE_UNAVAILABLE
            assert replica.problem == "sampled nothing for 1 s"
            # It answers all the while, and is given no turns for that.
            failures = member.failures
            await until(lambda: member.failures > failures)
            assert member.state is State.LOST and member.problem == replica.problem
            check(await pool.hub.generate("b", PROMPT, sampling_params=sampling(60)))
            assert member.given == 1
        await pool.serving()
        assert not member.failures
        given = member.given
        for turn in await asyncio.gather(*[await begin(pool, f"{n}") for n in range(4)]):
            check(turn)
        assert member.given > given and pool.engine.requests_lost == 1
        assert not pool.engines[silent].serving.store.records()


async def test_turns_of_the_only_engine_wait_until_it_samples_again(tmp_path: Path) -> None:
    async with serve_pool(tmp_path, 1, step_seconds=SLOW, rules=PATIENT) as pool:
        turning = await begin(pool, "a")
        async with frozen(pool.engines[0].engine):
            await until(lambda: pool.engine.stats().waiting == 1)
        check(await turning)


async def test_turns_of_a_silent_engine_that_is_not_listed_any_more_go_on_elsewhere(
    tmp_path: Path,
) -> None:
    async with serve_pool(tmp_path, 2, step_seconds=SLOW, rules=PATIENT) as pool:
        turning = await begin(pool, "a")
        silent = holder(pool)
        async with frozen(pool.engines[silent].engine):
            pool.engine.set_addresses([pool.engines[1 - silent].address])
            check(await turning)


async def test_an_engine_that_stands_still_for_other_weights_is_not_silent(tmp_path: Path) -> None:
    async with serve_pool(tmp_path, 1, step_seconds=SLOW, rules=PATIENT) as pool:
        engine = pool.engines[0].engine
        load = engine.load

        async def slowly(weights):  # type: ignore[no-untyped-def]
            await asyncio.sleep(2.5 * PATIENT.silent_seconds)
            await load(weights)

        engine.load = slowly  # type: ignore[method-assign]
        turning = await begin(pool, "a")
        await pool.hub.upload(1)
        turn = await turning
        check(turn)
        assert set(turn.versions) == {0, 1}
        assert not pool.engine.requests_lost


async def test_a_turn_that_waits_for_others_in_its_engine_is_not_lost(tmp_path: Path) -> None:
    async with serve_pool(tmp_path, 1, step_seconds=SLOW, rules=PATIENT) as pool:
        # It gets no more, as one that waits in the engine's own queue; shorter ones go past.
        pool.engines[0].engine.freeze_at = 20
        waiting = await begin(pool, "waiting")
        member = pool.member(0)
        began = member.clock()
        count = 0
        while member.clock() < began + 2.5 * PATIENT.silent_seconds:
            await pool.hub.generate(f"{count}", PROMPT, sampling_params=sampling(10))
            count += 1
        assert not pool.engine.requests_lost
        pool.engines[0].engine.freeze_at = None
        check(await waiting)


async def test_an_engine_without_turns_is_not_silent(tmp_path: Path) -> None:
    async with serve_pool(tmp_path, 1, step_seconds=SLOW, rules=PATIENT) as pool:
        for name in "ab":
            check(await pool.hub.generate(name, PROMPT, sampling_params=sampling(60)))
            await asyncio.sleep(1.5 * PATIENT.silent_seconds)
        assert not pool.engine.requests_lost and pool.member(0).state is State.SERVING
        assert pool.engine.turns.is_idle


# How long


def test_the_times_without_turns_are_left_out() -> None:
    # Its only turn is given up each time, for nothing comes.
    silence = Silence()
    for began in (0.0, 100.0, 200.0):
        silence = silence.given(began).left(began + 10.0)
        assert silence.seconds(began + 90.0) == pytest.approx(10.0 * (began / 100.0 + 1.0))


def test_a_token_ends_it_and_another_turn_does_not() -> None:
    silence = Silence().given(0.0).given(5.0)
    assert silence.seconds(8.0) == 8.0
    assert silence.broken(8.0).seconds(9.0) == 1.0
    assert silence.left(8.0).broken(9.0).seconds(20.0) == 0.0


@given(st.lists(st.tuples(st.sampled_from(["given", "left", "broken"]), st.floats(0.0, 50.0))))
def test_it_is_never_longer_than_since_the_last_token(acts: list[tuple[str, float]]) -> None:
    silence, now, spoke = Silence(), 0.0, 0.0
    for act, passed in acts:
        now += passed
        silence = getattr(silence, act)(now)
        if act == "broken":
            spoke = now
        assert 0.0 <= silence.seconds(now) <= now - spoke + 1e-6
