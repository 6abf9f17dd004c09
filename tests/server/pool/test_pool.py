"""A hub in front of engine servers: turns and weights, and how both survive
engines that join and leave."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import grpc
import pytest

from penstock.server.engine.turn_limit import LimitRules
from penstock.server.pool.member import Member, State
from penstock.server.pool.remote import EngineRefused, EngineServer, StagedThere, Unanswered
from penstock.v1 import rollout_service_pb2, trajectory_pb2, weights_pb2
from penstock.wire.failure import Failure, read_failure
from penstock.wire.security import Security
from tests.support.fakes import expected_tokens
from tests.support.harness import (
    AbortRequest,
    ContinueRequest,
    GenerateRequest,
    GetServerInfoRequest,
    SwitchWeights,
    Turn,
    collect,
    hello,
    sampling,
    sequence,
    serve,
    until,
)
from tests.support.pools import QUICK, Pool, changed, is_idle, serve_hub, serve_pool

PROMPT = [1, 2, 3]
SLOW = 0.01


def check(turn: Turn, prompt: list[int] = PROMPT) -> None:
    """Check every token against the version that it names."""
    tokens, logprobs = expected_tokens(prompt, turn.versions)
    assert turn.tokens == tokens
    assert turn.logprobs == pytest.approx(logprobs)


async def begin(pool: Pool, name: str, tokens: int = 200, **fields: object) -> asyncio.Task[Turn]:
    """Start a long turn; return once it has tokens."""
    turning = asyncio.create_task(
        pool.hub.generate(name, PROMPT, sampling_params=sampling(tokens), **fields)
    )
    await pool.hub.sampled(name, 3)
    return turning


def holder(pool: Pool) -> int:
    """The number of the engine that has a turn."""
    return next(n for n in range(len(pool.engines)) if pool.member(n).turns)


async def test_a_turn_is_what_an_engine_samples_and_nothing_is_left_of_it_there(
    tmp_path: Path,
) -> None:
    async with serve_pool(tmp_path, 2) as pool:
        turn = await pool.hub.generate("a", PROMPT)
        check(turn)
        assert turn.finished.finish_reason == trajectory_pb2.FINISH_REASON_LENGTH
        assert turn.finished.policy_token_count == 16
        more = await collect(
            pool.hub.wire.Continue(ContinueRequest(trajectory_id="a", tokens=sequence([7, 8])))
        )
        check(more, [*PROMPT, *turn.tokens, 7, 8])
        for engine in pool.engines:
            assert not engine.serving.store.records()
        assert is_idle(pool.engine.turns)


async def test_a_trajectory_stays_where_its_cache_is_and_its_siblings_go_there_too(
    tmp_path: Path,
) -> None:
    async with serve_pool(tmp_path, 3) as pool:
        for index in range(4):
            fields = {"group_id": "g", "group_size": 4, "sample_index": index}
            await pool.hub.generate(f"g{index}", PROMPT, **fields)
            await collect(
                pool.hub.wire.Continue(
                    ContinueRequest(trajectory_id=f"g{index}", tokens=sequence([7]))
                )
            )
        asked = sorted(pool.member(number).given for number in range(3))
        assert asked == [0, 0, 8]
        assert pool.engine.placing.kept_home == 7


async def test_many_turns_are_spread_over_all(tmp_path: Path) -> None:
    async with serve_pool(tmp_path, 3, step_seconds=SLOW) as pool:
        turns = [await begin(pool, f"t{number}", 150) for number in range(9)]
        assert [len(pool.member(number).turns) for number in range(3)] == [3, 3, 3]
        for turn in await asyncio.gather(*turns):
            check(turn)


async def test_more_turns_than_places_wait_and_the_more_urgent_go_first(tmp_path: Path) -> None:
    rules = changed(QUICK, first_turns=1, most_turns=1)
    async with serve_pool(tmp_path, 1, step_seconds=SLOW, rules=rules) as pool:
        first = await begin(pool, "first", 20)
        ends: list[str] = []

        async def later(name: str, priority: int) -> None:
            await pool.hub.generate(name, PROMPT, priority=priority)
            ends.append(name)

        late = asyncio.create_task(later("late", 5))
        await until(lambda: pool.engine.stats().waiting == 1)
        soon = asyncio.create_task(later("soon", 1))
        await until(lambda: pool.engine.stats().waiting == 2)
        await asyncio.gather(first, late, soon)
        assert ends == ["soon", "late"]


@pytest.mark.parametrize("where", ["waiting", "sampling"])
async def test_an_abort_ends_a_turn_wherever_it_is(tmp_path: Path, where: str) -> None:
    rules = changed(QUICK, first_turns=1, most_turns=1)
    async with serve_pool(tmp_path, 1, step_seconds=SLOW, rules=rules) as pool:
        other = await begin(pool, "other")
        name = "other"
        waiting = asyncio.create_task(pool.hub.generate("waiting", PROMPT))
        await until(lambda: pool.engine.stats().waiting == 1)
        if where == "waiting":
            name = "waiting"
        request = AbortRequest()
        request.trajectories.trajectory_ids.append(name)
        answer = await pool.hub.wire.Abort(request)
        assert [turn.trajectory_id for turn in answer.aborted_turns] == [name]
        aborted = await (waiting if where == "waiting" else other)
        assert aborted.finished.finish_reason == trajectory_pb2.FINISH_REASON_ABORTED
        check(aborted)
        if where == "sampling":
            assert (await waiting).finished.policy_token_count == 16
            resumed = await pool.hub.resume(name)
            check(resumed, [*PROMPT, *aborted.tokens])
        else:
            await pool.hub.wire.Abort(_all())
            await other


def _all() -> AbortRequest:
    request = AbortRequest()
    request.all.SetInParent()
    return request


async def test_a_turn_whose_engine_stops_goes_on_at_the_exact_token_elsewhere(
    tmp_path: Path,
) -> None:
    async with serve_pool(tmp_path, 2, step_seconds=SLOW) as pool:
        turning = await begin(pool, "a")
        number = holder(pool)
        await pool.engines[number].life.stop(0.0)
        turn = await turning
        assert len(turn.tokens) == 200
        check(turn)
        assert pool.engine.turns.lost_count >= 1
        assert pool.member(1 - number).given == 1
        await until(lambda: pool.member(number).state is State.LOST)


async def test_with_no_engine_left_turns_wait_for_one_that_comes(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        pool = await stack.enter_async_context(serve_pool(tmp_path, 1, step_seconds=SLOW))
        turning = await begin(pool, "a", 100)
        await pool.engines[0].life.stop(0.0)
        await until(lambda: pool.engine.stats().waiting == 1)
        folder = tmp_path / "another"
        folder.mkdir()
        another = await stack.enter_async_context(serve(folder))
        pool.engine.roster.set_addresses([another.address])
        turn = await turning
        assert len(turn.tokens) == 100
        check(turn)


async def test_a_turn_of_which_only_the_end_is_lost_ends_as_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve_pool(tmp_path, 2) as pool:
        for member in pool.engine.roster.members:
            original = member.server.generate

            async def without_end(message, metadata, original=original):  # type: ignore[no-untyped-def]
                async for event in original(message, metadata):
                    if event.WhichOneof("event") == "finished":
                        from penstock.server.pool.remote import Unanswered

                        raise Unanswered("gone")
                    yield event

            monkeypatch.setattr(member.server, "generate", without_end)
        full = await pool.hub.generate("length", PROMPT)
        assert full.finished.finish_reason == trajectory_pb2.FINISH_REASON_LENGTH
        check(full)
        await pool.serving()
        stop = full.tokens[4]
        first = full.tokens.index(stop)
        params = sampling(16, stop_token_ids=[stop])
        ended = await pool.hub.generate("stop", PROMPT, sampling_params=params)
        assert ended.finished.finish_reason == trajectory_pb2.FINISH_REASON_STOP
        assert ended.tokens == full.tokens[: first + 1]
        await pool.serving()
        text = "".join(chr(token) for token in full.tokens[2:5])
        params = sampling(16, stop=[text])
        ended = await pool.hub.generate("text", PROMPT, sampling_params=params)
        assert ended.finished.finish_reason == trajectory_pb2.FINISH_REASON_STOP
        assert ended.tokens == full.tokens[: len(ended.tokens)] and len(ended.tokens) <= 5


def refuse(pool: Pool, number: int, code: grpc.StatusCode) -> Callable[[], None]:
    """Let an engine server refuse every turn, although it still answers.
    Call the result to repair it."""
    server = pool.member(number).server
    original = server.generate

    async def refused(message: object, metadata: object) -> AsyncGenerator[object]:
        raise EngineRefused(Failure(code, "broken"))
        yield

    def repair() -> None:
        server.generate = original  # type: ignore[method-assign]

    server.generate = refused  # type: ignore[method-assign,assignment]
    return repair


@pytest.mark.parametrize(
    "code",
    [
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
    ],
)
async def test_an_engine_that_refuses_turns_is_left_alone_and_they_go_elsewhere(
    tmp_path: Path, code: grpc.StatusCode
) -> None:
    async with serve_pool(tmp_path, 2, step_seconds=0.001) as pool:
        broken = pool.member(0)
        repair = refuse(pool, 0, code)

        async def agent(name: int) -> None:
            for number in range(5):
                check(await pool.hub.generate(f"{name}.{number}", PROMPT))

        await asyncio.gather(*(agent(name) for name in range(8)))
        assert 0 < broken.given < 20
        assert pool.engine.turns.lost_count == broken.given
        assert broken.state is State.SERVING
        assert broken.problem == f"refused a turn: {code.name}: broken"
        repair()
        given = broken.given
        while broken.given == given:
            check(await pool.hub.generate(f"repaired {pool.member(1).given}", PROMPT))
        assert broken.problem == "" and not broken.refusals


async def test_a_turn_that_breaks_engines_ends_with_the_third(tmp_path: Path) -> None:
    async with serve_pool(tmp_path, 4) as pool:
        repairs = [refuse(pool, number, grpc.StatusCode.INTERNAL) for number in range(4)]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await pool.hub.generate("a", PROMPT)
        assert read_failure(refused.value).reason == "INTERNAL_ERROR"
        assert sorted(member.given for member in pool.engine.roster.members) == [0, 1, 1, 1]
        for repair in repairs:
            repair()
        check(await pool.hub.generate("b", PROMPT))


def lose(pool: Pool, number: int) -> Callable[[], None]:
    """Let an engine server lose every turn, although it answers looks.
    Call the result to repair it."""
    server = pool.member(number).server
    original = server.generate

    async def lost(message: object, metadata: object) -> AsyncGenerator[object]:
        raise Unanswered("cut off")
        yield

    def repair() -> None:
        server.generate = original  # type: ignore[method-assign]

    server.generate = lost  # type: ignore[method-assign,assignment]
    return repair


async def test_an_engine_that_loses_turns_and_answers_looks_is_left_alone_for_longer_each_time(
    tmp_path: Path,
) -> None:
    async with serve_pool(tmp_path, 2) as pool:
        broken = pool.member(0)
        repair = lose(pool, 0)
        number = 0
        async with asyncio.timeout(30):
            while broken.refusals < 4:
                number += 1
                check(await pool.hub.generate(f"t{number}", PROMPT))
        assert broken.closed_until - broken.clock() > 1.0
        assert pool.engine.turns.lost_count == broken.given == 4
        repair()
        await pool.serving()
        async with asyncio.timeout(30):
            while broken.refusals:
                number += 1
                check(await pool.hub.generate(f"t{number}", PROMPT))


async def test_a_turn_that_every_engine_dies_of_fails(tmp_path: Path) -> None:
    async with serve_pool(tmp_path, 3) as pool:
        repairs = [lose(pool, number) for number in range(3)]
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            async with asyncio.timeout(30):
                await pool.hub.generate("a", PROMPT)
        found = read_failure(failed.value)
        assert found.reason == "INTERNAL_ERROR"
        assert "lost 8 times in a row before a token of it was sampled: cut off" in found.message
        assert sum(member.given for member in pool.engine.roster.members) == 8
        for repair in repairs:
            repair()
        check(await pool.hub.generate("b", PROMPT))


async def test_an_engine_server_that_takes_fewer_turns_than_it_is_given_takes_those_all_the_time(
    tmp_path: Path,
) -> None:
    limit = "limits.caller.turns_in_flight=2"
    async with serve_pool(tmp_path, 1, step_seconds=SLOW, of_engines=[limit]) as pool:
        turns = await asyncio.gather(*(pool.hub.generate(f"t{n}", PROMPT) for n in range(8)))
        for turn in turns:
            check(turn)
        member = pool.member(0)
        assert member.limit.proven and member.limit.value in (2, 3)
        assert member.closed_until == 0.0


async def test_an_engine_server_with_a_journal_serves_again_once_its_hub_has_given_it_weights(
    tmp_path: Path,
) -> None:
    settings = (f"journal.folder={tmp_path / 'journal'}", "journal.durability=process")
    own, again = tmp_path / "own", tmp_path / "again"
    for folder in (own, again):
        folder.mkdir()
    async with serve(own, *settings) as first:
        address = first.address
        async with contextlib.AsyncExitStack() as stack:
            hub, engine = await stack.enter_async_context(serve_hub(tmp_path / "hub", [address]))
            await until(lambda: engine.roster.members[0].state is State.SERVING)
            await hub.upload(1)
            await first.life.stop(0.0)
            await until(lambda: engine.roster.members[0].state is State.LOST)
            await stack.enter_async_context(serve(again, f"listen={address}", *settings))
            async with asyncio.timeout(20):
                turn = await hub.generate("t", PROMPT)
            assert set(turn.versions) == {1}


async def test_a_turn_that_is_too_large_for_the_engines_ends(tmp_path: Path) -> None:
    async with serve_pool(tmp_path, 2, of_engines=["limits.caller.message_bytes=1024"]) as pool:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async with asyncio.timeout(20):
                await pool.hub.generate("large", [1, 2, 3] * 120)
        # The hub admits a request that its engines refuse, so it is misconfigured.
        assert read_failure(refused.value).reason == "INTERNAL_ERROR"
        await pool.hub.generate("small")
        assert pool.engine.turns.lost_count == 0


async def test_a_turn_that_all_engines_refuse_ends_and_the_next_waits_for_the_first_to_be_tried(
    tmp_path: Path,
) -> None:
    async with serve_pool(tmp_path, 1) as pool:
        repair = refuse(pool, 0, grpc.StatusCode.INTERNAL)
        with pytest.raises(grpc.aio.AioRpcError):
            await pool.hub.generate("a", PROMPT)
        repair()
        check(await pool.hub.generate("b", PROMPT))


async def test_an_engine_of_another_model_is_not_taken(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        pool = await stack.enter_async_context(serve_pool(tmp_path, 1))
        folder = tmp_path / "other"
        folder.mkdir()
        other = await stack.enter_async_context(serve(folder, max_context=64))
        pool.engine.roster.set_addresses([pool.engines[0].address, other.address])
        pool.engines.append(other)
        await until(lambda: pool.member(1).state is State.REFUSED)
        info = await pool.hub.wire.GetServerInfo(GetServerInfoRequest())
        assert [replica.state for replica in info.replicas] == [
            rollout_service_pb2.REPLICA_STATE_SERVING,
            rollout_service_pb2.REPLICA_STATE_UNAVAILABLE,
        ]
        assert "max_context_length is 64" in info.replicas[1].problem
        # After it was unreachable for a moment, it still has the wrong model.
        pool.member(1).fail("out of reach")
        await until(lambda: pool.member(1).state is State.REFUSED)
        await pool.hub.generate("a", PROMPT)
        assert not pool.member(1).given


async def test_an_engine_of_a_longer_context_is_one_of_the_pool(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        pool = await stack.enter_async_context(serve_pool(tmp_path, 1))
        folder = tmp_path / "other"
        folder.mkdir()
        longest = pool.engine.description.max_context_length
        other = await stack.enter_async_context(serve(folder, max_context=2 * longest))
        pool.engine.roster.set_addresses([other.address])
        pool.engines = [other]
        await pool.serving()
        info = await pool.hub.wire.GetServerInfo(GetServerInfoRequest())
        assert info.max_context_length == longest
        params = sampling(max_tokens=2 * longest)
        turn = await pool.hub.generate("a", PROMPT, sampling_params=params)
        assert len(PROMPT) + len(turn.tokens) == longest


async def test_an_engine_that_is_listed_under_two_addresses_is_one_engine(tmp_path: Path) -> None:
    async with serve_pool(tmp_path, 1) as pool:
        await pool.hub.upload(1)
        fake, address = pool.engines[0].engine, pool.engines[0].address
        other = address.replace("127.0.0.1", "localhost")
        pool.engine.roster.set_addresses([address, other])
        members = {member.address: member for member in pool.engine.roster.members}
        await until(lambda: members[other].state is State.REFUSED)
        assert address in members[other].message().problem
        for _ in range(5):
            await asyncio.sleep(0.05)
            assert members[address].state is State.SERVING
        assert len(fake.payloads) == 1
        await pool.hub.upload(2)
        check(await pool.hub.generate("a", PROMPT))
        assert len(fake.payloads) == 2
        # With only this address listed, the pool uses this address.
        pool.engine.roster.set_addresses([other])
        await until(lambda: members[other].state is State.SERVING)
        turn = await pool.hub.generate("b", PROMPT)
        assert set(turn.versions) == {2}


def test_what_a_process_preempted_before_it_was_looked_at_does_not_lower_its_limit() -> None:
    member = Member(EngineServer("127.0.0.1:1", Security()), LimitRules(first=32), lambda: 0.0)
    for process, count in (("a", 7), ("b", 9)):
        load = rollout_service_pb2.ServerLoad(preemption_count=count)
        member.heard(rollout_service_pb2.GetServerInfoResponse(server_id=process, load=load))
        assert member.limit.value == 32


# Weights


@pytest.mark.parametrize("at_once", [False, True])
async def test_a_version_is_active_once_every_engine_has_it(tmp_path: Path, at_once: bool) -> None:
    rules = changed(QUICK, switch="all" if at_once else "rolling")
    async with serve_pool(tmp_path, 3, step_seconds=SLOW, rules=rules) as pool:
        turns = [await begin(pool, f"t{number}", 60) for number in range(3)]
        answers = await pool.hub.upload(3)
        assert answers[-1].state == weights_pb2.WEIGHT_STATE_ACTIVE
        assert [engine.engine.version for engine in pool.engines] == [3, 3, 3]
        assert [member.version for member in pool.engine.roster.members] == [3, 3, 3]
        assert pool.hub.serving.switch.active_version == 3
        for turn in await asyncio.gather(*turns):
            check(turn)
            assert set(turn.versions) == {0, 3}
        after = await pool.hub.generate("after", PROMPT)
        assert set(after.versions) == {3}


async def test_engines_of_another_host_take_a_version_from_the_first_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sources: list[str | None] = []
    stage = EngineServer.stage

    def note(
        server: EngineServer, header: weights_pb2.WeightHeader, payload: tuple[memoryview, ...] = ()
    ) -> StagedThere:
        sources.append(header.WhichOneof("source"))
        return stage(server, header, payload)

    monkeypatch.setattr(EngineServer, "stage", note)
    monkeypatch.setattr("penstock.server.pool.fanout.host_id", lambda: "elsewhere")
    # Other engines can take the version only if the first stages it in memory.
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        async with serve_pool(Path(folder), 3) as pool:
            await pool.hub.upload(3)
            assert [engine.engine.version for engine in pool.engines] == [3, 3, 3]
            assert sources == ["inline", "shared_memory", "shared_memory"]
            assert len({engine.engine.payloads[-1] for engine in pool.engines}) == 1


async def test_a_staged_version_is_on_every_engine_before_it_is_switched_to(
    tmp_path: Path,
) -> None:
    async with serve_pool(tmp_path, 2) as pool:
        exchange = await hello(pool.hub.wire, 1 << 62, weight_version=0)
        await pool.hub.upload(1, staged=True)
        await until(lambda: all(e.serving.weights.staged_versions == [1] for e in pool.engines))
        assert [engine.engine.version for engine in pool.engines] == [0, 0]
        exchange.send(switch_weights=SwitchWeights(weight_version=1))
        receipt = await exchange.receive("weight_receipt")
        assert receipt.active_weight_version == 1
        assert [engine.engine.version for engine in pool.engines] == [1, 1]


async def test_generation_goes_on_elsewhere_while_engines_switch_one_after_the_other(
    tmp_path: Path,
) -> None:
    async with serve_pool(tmp_path, 2, step_seconds=SLOW) as pool:
        slow = pool.engines[0].engine
        gate = asyncio.Event()
        original = slow.load

        async def held(weights):  # type: ignore[no-untyped-def]
            await gate.wait()
            await original(weights)

        slow.load = held  # type: ignore[method-assign]
        uploading = asyncio.create_task(pool.hub.upload(1))
        await until(lambda: pool.member(0).state is State.SWITCHING)
        turn = await pool.hub.generate("meanwhile", PROMPT)
        check(turn)
        gate.set()
        await uploading
        assert [engine.engine.version for engine in pool.engines] == [1, 1]


async def test_an_engine_that_refuses_a_version_is_brought_up_to_date_and_serves_again(
    tmp_path: Path,
) -> None:
    async with serve_pool(tmp_path, 2) as pool:
        pool.engines[0].engine.fail_loads = 1
        answers = await pool.hub.upload(1)
        assert answers[-1].state == weights_pb2.WEIGHT_STATE_ACTIVE
        await pool.serving()
        assert [member.version for member in pool.engine.roster.members] == [1, 1]
        assert pool.engines[0].engine.payloads[-1] == pool.engines[1].engine.payloads[-1]
        for number in range(6):
            turn = await pool.hub.generate(f"t{number}", PROMPT)
            tokens, _ = expected_tokens(PROMPT, [1] * 16)
            assert turn.tokens == tokens and set(turn.versions) == {1}


async def test_a_version_that_every_engine_refuses_is_refused(tmp_path: Path) -> None:
    async with serve_pool(tmp_path, 2) as pool:
        await pool.hub.upload(1)
        for engine in pool.engines:
            engine.engine.fail_loads = 1
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await pool.hub.upload(2)
        assert read_failure(refused.value).reason == "WEIGHT_LOAD_FAILED"
        assert pool.hub.serving.switch.active_version == 1
        await pool.serving()
        turn = await pool.hub.generate("after", PROMPT)
        check(turn)
        assert set(turn.versions) == {1}
        await pool.hub.upload(2)
        assert [member.version for member in pool.engine.roster.members] == [2, 2]


async def test_an_engine_that_joins_late_is_given_the_active_version(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        pool = await stack.enter_async_context(serve_pool(tmp_path, 1))
        await pool.hub.upload(5)
        folder = tmp_path / "late"
        folder.mkdir()
        late = await stack.enter_async_context(serve(folder))
        pool.engine.roster.set_addresses([pool.engines[0].address, late.address])
        pool.engines.append(late)
        await pool.serving()
        assert late.engine.version == 5
        assert late.engine.payloads[-1] == pool.engines[0].engine.payloads[-1]


async def test_an_engine_server_that_is_further_on_is_brought_to_the_pool_s_version(
    tmp_path: Path,
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        pool = await stack.enter_async_context(serve_pool(tmp_path, 1))
        await pool.hub.upload(2)
        folder = tmp_path / "further"
        folder.mkdir()
        further = await stack.enter_async_context(serve(folder))
        await further.upload(9, trainer_epoch=7)
        pool.engine.roster.set_addresses([further.address])
        pool.engines[0] = further
        await pool.serving()
        assert further.engine.version == 10
        turn = await pool.hub.generate("a", PROMPT)
        assert set(turn.versions) == {2}
        assert turn.tokens == expected_tokens(PROMPT, [10] * 16)[0]


async def test_a_hub_that_starts_again_trusts_no_weights_it_has_not_given(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        folder = tmp_path / "engine"
        folder.mkdir()
        engine = await stack.enter_async_context(serve(folder))
        journal = f"journal.folder={tmp_path / 'journal'}"
        async with serve_hub(tmp_path / "hub", [engine.address], journal) as (hub, pooled):
            await until(lambda: len(pooled.roster.rotation) == 1)
            await hub.upload(4)
        async with serve_hub(tmp_path / "hub", [engine.address], journal) as (hub, pooled):
            member = pooled.roster.members[0]
            await until(lambda: "trainer" in member.problem)
            assert member.state is State.JOINING
            (replica,) = (await hub.wire.GetServerInfo(GetServerInfoRequest())).replicas
            assert replica.problem == (
                "waits for the trainer's version; the version it samples is not known"
            )
            exchange = await hello(hub.wire, weight_version=4, epoch=1 << 62)
            await hub.upload(4)
            await until(lambda: member.state is State.SERVING)
            turn = await hub.generate("a", PROMPT)
            assert set(turn.versions) == {4}
            exchange.half_close()


async def test_an_engine_that_always_refuses_is_left_alone_for_longer_each_time(
    tmp_path: Path,
) -> None:
    async with serve_pool(tmp_path, 2) as pool:
        pool.engines[0].engine.fail_loads = 1000
        await pool.hub.upload(1)
        await until(lambda: pool.member(0).failures >= 3)
        tries = pool.engines[0].engine.fail_loads
        assert pool.member(0).retry_seconds >= 0.8
        assert 1000 - tries <= pool.member(0).failures + 1
        turn = await pool.hub.generate("a", PROMPT)
        assert set(turn.versions) == {1}
        pool.engines[0].engine.fail_loads = 0
        await pool.serving()
        assert pool.member(0).failures == 0


async def test_a_version_that_an_engine_does_not_take_is_offered_less_often_and_the_next_at_once(
    tmp_path: Path,
) -> None:
    async with serve_pool(tmp_path, 2) as pool:
        member, engine = pool.member(0), pool.engines[0].engine
        engine.fail_loads = 1000
        await pool.hub.upload(1)
        await until(lambda: member.declined is not None and member.declined.times == 4)
        assert member.declined is not None
        assert member.declined.until - member.clock() > 1.0
        tries = engine.fail_loads
        await asyncio.sleep(0.8)
        assert engine.fail_loads == tries
        engine.fail_loads = 0
        await pool.hub.upload(2)
        await pool.serving()
        assert (member.declined, member.version) == (None, 2)


async def test_who_joins_while_the_version_is_not_held_waits_for_the_next_one(
    tmp_path: Path,
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        pool = await stack.enter_async_context(serve_pool(tmp_path, 1, "weights.hold_active=false"))
        await pool.hub.upload(1)
        folder = tmp_path / "late"
        folder.mkdir()
        late = await stack.enter_async_context(serve(folder))
        pool.engine.roster.set_addresses([pool.engines[0].address, late.address])
        pool.engines.append(late)
        await until(lambda: "not held" in pool.member(1).problem)
        looks = 0
        original = pool.member(1).server.info

        async def counted(**wanted: bool) -> object:
            nonlocal looks
            looks += 1
            return await original(**wanted)

        pool.member(1).server.info = counted  # type: ignore[method-assign]
        await asyncio.sleep(0.5)
        # Ten looks at the pace of these tests, instead of as many as the time allows.
        assert looks < 30


async def test_an_engine_that_hangs_in_a_switch_is_given_up(tmp_path: Path) -> None:
    # The other engine has to switch in this time.
    rules = changed(QUICK, switch_seconds=3.0)
    async with serve_pool(tmp_path, 2, rules=rules) as pool:
        gate = asyncio.Event()
        original = pool.engines[0].engine.load

        async def held(weights):  # type: ignore[no-untyped-def]
            await gate.wait()
            await original(weights)

        pool.engines[0].engine.load = held  # type: ignore[method-assign]
        answers = await pool.hub.upload(1)
        assert answers[-1].state == weights_pb2.WEIGHT_STATE_ACTIVE
        assert pool.member(0).state is not State.SERVING
        turn = await pool.hub.generate("a", PROMPT)
        assert set(turn.versions) == {1}
        gate.set()
        await pool.serving()
        assert pool.member(0).version == 1


async def test_an_engine_that_is_not_listed_any_more_ends_its_turns_and_is_let_go(
    tmp_path: Path,
) -> None:
    async with serve_pool(tmp_path, 2, step_seconds=SLOW) as pool:
        turning = await begin(pool, "a", 40)
        number = holder(pool)
        member = pool.member(number)
        pool.engine.roster.set_addresses([pool.engines[1 - number].address])
        check(await turning)
        assert not pool.engine.turns.lost_count and not member.turns
        assert (await pool.hub.generate("b", PROMPT)).finished.policy_token_count == 16
        assert member.given == 1


async def test_somebody_else_s_weights_are_noticed_and_replaced(tmp_path: Path) -> None:
    async with serve_pool(tmp_path, 1, step_seconds=SLOW) as pool:
        await pool.hub.upload(1)
        turning = await begin(pool, "a", 100)
        epoch = pool.engine.weights._epoch + 1
        await pool.engines[0].upload(50, trainer_epoch=epoch)
        await until(lambda: pool.member(0).state is not State.SERVING)
        # To that engine server, this hub is no longer the newest.
        await until(lambda: "from a newer hub" in pool.member(0).problem)
        assert "STALE_EPOCH" in pool.member(0).problem
        await pool.hub.wire.Abort(_all())
        turn = await turning
        check(turn)
        assert set(turn.versions) == {1}


async def test_a_pinned_turn_is_of_one_version_or_none(tmp_path: Path) -> None:
    async with serve_pool(tmp_path, 2, step_seconds=SLOW) as pool:
        await pool.hub.upload(1)
        turning = await begin(pool, "pinned", 100, required_weight_version=1)
        await pool.hub.upload(2)
        turn = await turning
        assert turn.finished.finish_reason == trajectory_pb2.FINISH_REASON_ABORTED
        assert set(turn.versions) == {1}
        check(turn)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await pool.hub.generate("old", PROMPT, required_weight_version=1)
        assert read_failure(refused.value).reason == "WEIGHT_VERSION_NOT_ACTIVE"


@pytest.mark.parametrize("policy", ["ABORT", "DRAIN", "RECOMPUTE"])
async def test_turns_in_flight_by_policy(tmp_path: Path, policy: str) -> None:
    in_flight = getattr(weights_pb2, f"IN_FLIGHT_POLICY_{policy}")
    async with serve_pool(tmp_path, 2, step_seconds=SLOW) as pool:
        turns = [await begin(pool, f"t{number}", 60) for number in range(2)]
        await pool.hub.upload(1, in_flight=in_flight)
        for turn in await asyncio.gather(*turns):
            check(turn)
            aborted = turn.finished.finish_reason == trajectory_pb2.FINISH_REASON_ABORTED
            assert aborted == (policy == "ABORT")
            assert set(turn.versions) == ({0, 1} if policy == "RECOMPUTE" else {0})


async def test_a_single_turn_belongs_to_nothing(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await server.generate("a", group_id="g", group_size=1, single_turn=True)
        assert read_failure(refused.value).metadata["field"] == "single_turn"
        await server.generate("b", single_turn=True)
        assert not server.serving.store.records()
        # The id is free again.
        await server.generate("b", single_turn=True)
        call = server.wire.Generate(
            GenerateRequest(
                trajectory_id="c",
                tokens=sequence(PROMPT),
                sampling_params=sampling(400),
                single_turn=True,
            )
        )
        await call.read()
        call.cancel()
        await until(lambda: not server.serving.store.records())
