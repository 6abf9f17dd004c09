"""Engines that are up but sample nothing, whether they answer or not. Their turns continue on other
engines, and the hub tries the silent engines again."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.server.pool import remote as engine_server
from penstock.server.pool.health import Silence
from penstock.server.pool.member import State
from penstock.v1 import rollout_service_pb2, trajectory_pb2
from tests.support.fakes import FakeEngine, expected_tokens
from tests.support.harness import GetServerInfoRequest, Turn, sampling, until
from tests.support.pools import QUICK, Pool, changed, is_idle, serve_hub, serve_pool
from tests.support.processes import Server

PROMPT = [1, 2, 3]
SLOW = 0.01
PATIENT = changed(QUICK, silent_seconds=1.0)


@contextlib.asynccontextmanager
async def frozen(engine: FakeEngine) -> AsyncGenerator[None]:
    """Stop the engine's loop, while its server still answers."""
    async with engine._stepping:
        yield


async def begin(pool: Pool, name: str, tokens: int = 60) -> asyncio.Task[Turn]:
    """Start a turn; return once it has tokens."""
    turning = asyncio.create_task(pool.hub.generate(name, PROMPT, sampling_params=sampling(tokens)))
    await pool.hub.sampled(name, 3)
    return turning


def check(turn: Turn, tokens: int = 60) -> None:
    """Check that every token occurs once and matches its version."""
    assert len(turn.tokens) == tokens
    assert (turn.tokens, pytest.approx(turn.logprobs)) == expected_tokens(PROMPT, turn.versions)


def holder(pool: Pool) -> int:
    """The number of the engine that has a turn."""
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
            assert pool.engine.turns.lost_count == 1
            assert member.state is State.LOST and not member.turns
            info = await pool.hub.wire.GetServerInfo(GetServerInfoRequest())
            replica = info.replicas[silent]
            assert replica.state == rollout_service_pb2.REPLICA_STATE_UNAVAILABLE
            assert replica.problem == "sampled nothing for 1 s"
            # The engine answers all the time, but that alone gets it no turns.
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
        assert member.given > given and pool.engine.turns.lost_count == 1
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
            pool.engine.roster.set_addresses([pool.engines[1 - silent].address])
            check(await turning)


async def test_a_turn_whose_engine_does_not_abort_it_ends_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_server, "ABORT_SECONDS", 0.5)
    async with serve_pool(tmp_path, 2, step_seconds=SLOW, rules=QUICK) as pool:
        await pool.hub.upload(1)
        pinned = asyncio.create_task(
            pool.hub.generate("a", PROMPT, sampling_params=sampling(60), required_weight_version=1)
        )
        await pool.hub.sampled("a", 3)
        hanging = holder(pool)
        member = pool.member(hanging)
        engine, answers = pool.engines[hanging].engine, asyncio.Event()
        abort = engine.abort

        async def late(request_ids: Sequence[str]) -> None:
            await answers.wait()
            await abort(request_ids)

        engine.abort = late  # type: ignore[method-assign]
        async with frozen(engine):
            # The upload first aborts turns pinned to one version, and waits for their end.
            uploading = asyncio.create_task(pool.hub.upload(2))
            try:
                async with asyncio.timeout(20):
                    turn = await pinned
            finally:
                # Otherwise the test could not stop anything here.
                asyncio.get_running_loop().call_later(1.0, answers.set)
            assert turn.finished.finish_reason == trajectory_pb2.FINISH_REASON_ABORTED
            assert 3 <= len(turn.tokens) < 60 and set(turn.versions) == {1}
            assert not member.turns and not pool.engine.turns.lost_count
        await uploading
        await pool.serving()
        assert member.version == 2
        check(await pool.hub.generate("b", PROMPT, sampling_params=sampling(60)))
        await until(lambda: not pool.engines[hanging].serving.store.records())


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
        assert not pool.engine.turns.lost_count


async def test_a_turn_that_waits_for_others_in_its_engine_is_not_lost(tmp_path: Path) -> None:
    async with serve_pool(tmp_path, 1, step_seconds=SLOW, rules=PATIENT) as pool:
        # The turn gets no more tokens, like a turn in the engine's own
        # queue; shorter turns overtake it.
        pool.engines[0].engine.freeze_at = 20
        waiting = await begin(pool, "waiting")
        member = pool.member(0)
        began = member.clock()
        count = 0
        while member.clock() < began + 2.5 * PATIENT.silent_seconds:
            await pool.hub.generate(f"{count}", PROMPT, sampling_params=sampling(10))
            count += 1
        assert not pool.engine.turns.lost_count
        pool.engines[0].engine.freeze_at = None
        check(await waiting)


async def test_an_engine_without_turns_is_not_silent(tmp_path: Path) -> None:
    async with serve_pool(tmp_path, 1, step_seconds=SLOW, rules=PATIENT) as pool:
        for name in "ab":
            check(await pool.hub.generate(name, PROMPT, sampling_params=sampling(60)))
            await asyncio.sleep(1.5 * PATIENT.silent_seconds)
        assert not pool.engine.turns.lost_count and pool.member(0).state is State.SERVING
        assert is_idle(pool.engine.turns)


# Engines that do not answer either


LOOK = 0.5
STANDS_STILL = """
import pathlib, signal, sys, time
from tests.support.fake_serve import main

def stand_still(*_):
    while pathlib.Path(sys.argv[-1]).exists():
        time.sleep(0.02)

signal.signal(signal.SIGUSR1, stand_still)
main()
"""


@contextlib.asynccontextmanager
async def unanswering(
    pool: Pool, number: int, looks: int | None = None
) -> AsyncGenerator[list[int]]:
    """Let an engine server leave looks unanswered: all of them, or the first `looks`. Yield a
    list with the count so far."""
    info = pool.engines[number].serving.info
    answer, left = info.get_server_info, [0]

    async def hang(request: Any) -> Any:
        if looks is None or left[0] < looks:
            left[0] += 1
            await asyncio.sleep(2 * LOOK)
        return await answer(request)

    info.get_server_info = hang  # type: ignore[method-assign]
    try:
        yield left
    finally:
        info.get_server_info = answer  # type: ignore[method-assign]


@pytest.fixture
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the timeout of looks."""
    monkeypatch.setattr(engine_server, "INFO_SECONDS", LOOK)


@pytest.mark.usefixtures("quick_looks")
async def test_turns_of_a_process_whose_event_loop_stands_still_go_on_elsewhere(
    tmp_path: Path,
) -> None:
    standing = tmp_path / "standing"
    servers: list[Server] = []
    try:
        for number in range(2):
            own = tmp_path / f"engine-{number}"
            own.mkdir()
            options = ("--step-seconds", f"{SLOW}", f"{standing}")
            servers.append(Server(own, options, command=("-c", STANDS_STILL)))
        await asyncio.gather(*(server.start() for server in servers))
        addresses = [server.address for server in servers]
        async with serve_hub(tmp_path / "hub", addresses) as (hub, engine):
            pool = Pool(hub, engine, [])
            members = engine.roster.members
            await until(lambda: all(member.state is State.SERVING for member in members))
            turning = [await begin(pool, f"{n}", 300) for n in range(4)]
            assert [len(member.turns) for member in members] == [2, 2]
            standing.touch()
            servers[0].process.signal(signal.SIGUSR1)
            for turn in await asyncio.gather(*turning):
                check(turn, 300)
            assert engine.turns.lost_count == 2
            assert members[0].state is State.LOST and not members[0].turns
            # Once the process answers, it is back in the pool.
            standing.unlink()
            await until(lambda: members[0].state is State.SERVING)
            given = members[0].given
            for turn in await asyncio.gather(*[await begin(pool, f"more {n}") for n in range(4)]):
                check(turn)
            assert members[0].given > given and engine.turns.lost_count == 2
    finally:
        for process in [process for server in servers for process in server.processes]:
            process.kill()
            await process.wait()


@pytest.mark.usefixtures("quick_looks")
async def test_one_look_that_runs_out_of_time_moves_no_turns(tmp_path: Path) -> None:
    async with serve_pool(tmp_path, 2, step_seconds=SLOW) as pool:
        turning = await begin(pool, "a", 300)
        number = holder(pool)
        async with (
            frozen(pool.engines[number].engine),
            unanswering(pool, number, looks=1) as left,
        ):
            await until(lambda: pool.member(number).state is State.LOST)
            await until(lambda: pool.member(number).state is State.SERVING)
        check(await turning, 300)
        assert left == [1] and not pool.engine.turns.lost_count


@pytest.mark.usefixtures("quick_looks")
async def test_an_engine_that_samples_and_is_too_busy_for_looks_keeps_its_turns(
    tmp_path: Path,
) -> None:
    async with serve_pool(tmp_path, 2, step_seconds=SLOW) as pool:
        turning = await begin(pool, "a", 300)
        number = holder(pool)
        async with unanswering(pool, number) as left:
            check(await turning, 300)
            assert pool.member(number).state is State.LOST and left[0] >= 3
        assert not pool.engine.turns.lost_count


@pytest.mark.usefixtures("quick_looks")
async def test_an_engine_that_does_not_answer_while_it_takes_weights_keeps_its_turns(
    tmp_path: Path,
) -> None:
    async with serve_pool(tmp_path, 1, step_seconds=SLOW) as pool:
        engine = pool.engines[0].engine
        load, loading = engine.load, asyncio.Event()

        async def slowly(weights: Any) -> None:
            async with unanswering(pool, 0) as left:
                loading.set()
                while left[0] < 4:
                    await asyncio.sleep(LOOK / 10)
            await load(weights)

        engine.load = slowly  # type: ignore[method-assign]
        turning = await begin(pool, "a")
        await pool.hub.upload(1)
        assert loading.is_set()
        await pool.serving()
        check(await turning)
        assert not pool.engine.turns.lost_count


# How long


def test_the_times_without_turns_are_left_out() -> None:
    # Its only turn is given up each time, because no token arrives.
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
