"""Switches of a pool with one engine that is slow, hangs or leaves. The
other engines are not delayed."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import grpc
import pytest

from penstock.server.core.errors import DomainError
from penstock.server.pool.member import Member, State
from penstock.server.pool.remote import EngineRefused, StagedThere, Unanswered
from penstock.server.weights.header import Announced
from penstock.server.weights.staging.incoming import IncomingUpload
from penstock.v1 import weights_pb2
from penstock.wire.failure import Failure, read_failure
from penstock.wire.reasons import Reason
from penstock.wire.upload import Staging
from tests.support.harness import (
    Harness,
    Turn,
    header,
    messages,
    payload,
    sampling,
    send,
    serve,
    until,
)
from tests.support.pools import QUICK, changed, serve_pool

PATIENT = changed(QUICK, stage_seconds=600.0)
SHORT = changed(QUICK, stage_seconds=2.0)


def hang(engine: Harness) -> asyncio.Event:
    """Let an engine server answer calls but accept no upload until the returned event is set."""
    gate = asyncio.Event()
    original = engine.serving.uploads._begin

    async def held(announced: Announced) -> IncomingUpload:
        await gate.wait()
        return await original(announced)

    engine.serving.uploads._begin = held  # type: ignore[method-assign]
    return gate


async def test_engines_switch_while_another_is_still_being_staged(tmp_path: Path) -> None:
    async with serve_pool(tmp_path, 3, rules=PATIENT) as pool:
        gate = hang(pool.engines[0])
        uploading = asyncio.create_task(pool.hub.upload(1))
        await until(lambda: [e.engine.version for e in pool.engines] == [0, 1, 1])
        assert pool.member(0).state is State.SERVING
        assert pool.hub.serving.switch.active_version == 0
        gate.set()
        answers = await uploading
        assert answers[-1].state == weights_pb2.WEIGHT_STATE_ACTIVE
        assert [member.version for member in pool.engine.roster.members] == [1, 1, 1]


@pytest.mark.parametrize("at_once", [False, True])
async def test_an_engine_that_hangs_while_it_is_staged_is_given_up(
    tmp_path: Path, at_once: bool
) -> None:
    rules = changed(SHORT, switch="all" if at_once else "rolling")
    async with serve_pool(tmp_path, 3, rules=rules) as pool:
        gate = hang(pool.engines[0])
        answers = await pool.hub.upload(1)
        assert answers[-1].state == weights_pb2.WEIGHT_STATE_ACTIVE
        assert [engine.engine.version for engine in pool.engines] == [0, 1, 1]
        assert pool.member(0).state is not State.SERVING
        turn = await pool.hub.generate("a")
        assert set(turn.versions) == {1}
        gate.set()
        await pool.serving()
        assert pool.engines[0].engine.payloads[-1] == pool.engines[1].engine.payloads[-1]


async def test_turns_begin_until_all_have_what_they_switch_to_at_once(tmp_path: Path) -> None:
    rules = changed(PATIENT, switch="all")
    async with serve_pool(tmp_path, 2, rules=rules) as pool:
        gate = hang(pool.engines[0])
        uploading = asyncio.create_task(pool.hub.upload(1))
        await until(lambda: pool.engines[1].serving.weights.staged_versions == [1])
        turn = await pool.hub.generate("a")
        assert set(turn.versions) == {0}
        assert [engine.engine.version for engine in pool.engines] == [0, 0]
        gate.set()
        await uploading
        assert [engine.engine.version for engine in pool.engines] == [1, 1]


@pytest.mark.parametrize("part", ["staging", "switching", "switching with a turn"])
async def test_who_is_not_listed_any_more_is_not_waited_for(tmp_path: Path, part: str) -> None:
    async with serve_pool(tmp_path, 2, step_seconds=0.01, rules=PATIENT) as pool:
        load, gate = pool.engines[0].engine.load, asyncio.Event()

        async def held(weights):  # type: ignore[no-untyped-def]
            await gate.wait()
            await load(weights)

        if part == "staging":
            gate = hang(pool.engines[0])
        else:
            pool.engines[0].engine.load = held  # type: ignore[method-assign]
        member = pool.member(0)
        turns: list[asyncio.Task[Turn]] = []
        if part == "switching with a turn":
            # One turn on each engine. The hub closes the connection only after that turn.
            turns = [
                asyncio.create_task(
                    pool.hub.generate(name, sampling_params=sampling(max_tokens=100))
                )
                for name in ("a", "b")
            ]
            await until(lambda: all(member.turns for member in pool.engine.roster.members))
        uploading = asyncio.create_task(pool.hub.upload(1))
        if part == "staging":
            await until(lambda: pool.engines[1].engine.version == 1)
        else:
            await until(lambda: member.state is State.SWITCHING)
        pool.engine.roster.set_addresses([pool.engines[1].address])
        async with asyncio.timeout(30):
            answers = await uploading
        assert answers[-1].state == weights_pb2.WEIGHT_STATE_ACTIVE
        gate.set()
        await asyncio.gather(*turns)


async def test_one_that_is_still_at_an_upload_before_is_asked_again(tmp_path: Path) -> None:
    async with serve_pool(tmp_path, 2, rules=PATIENT) as pool:
        begin, refusals = pool.engines[0].serving.uploads._begin, 2

        async def busy(announced: Announced) -> IncomingUpload:
            nonlocal refusals
            if refusals:
                refusals -= 1
                raise DomainError(
                    Reason.UPLOAD_IN_PROGRESS, "that of before", retry_after_seconds=0.02
                )
            return await begin(announced)

        pool.engines[0].serving.uploads._begin = busy  # type: ignore[method-assign]
        answers = await pool.hub.upload(1)
        assert answers[-1].state == weights_pb2.WEIGHT_STATE_ACTIVE
        assert refusals == 0
        # The engine did not leave the rotation.
        assert pool.member(0).state is State.SERVING and pool.member(0).version == 1


async def test_a_version_that_nobody_has_in_time_is_refused_and_all_go_on(tmp_path: Path) -> None:
    async with serve_pool(tmp_path, 2, rules=SHORT) as pool:
        gates = [hang(engine) for engine in pool.engines]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await pool.hub.upload(1)
        assert read_failure(refused.value).reason == "WEIGHT_LOAD_FAILED"
        assert "did not have all of version 1 after 2 s" in read_failure(refused.value).message
        assert [member.state for member in pool.engine.roster.members] == [State.SERVING] * 2
        turn = await pool.hub.generate("a")
        assert set(turn.versions) == {0}
        for gate in gates:
            gate.set()
        await pool.hub.upload(1)
        assert [member.version for member in pool.engine.roster.members] == [1, 1]


async def test_who_refused_it_is_not_given_it_again_while_others_are_staged(tmp_path: Path) -> None:
    async with serve_pool(tmp_path, 3, rules=PATIENT) as pool:
        gate = hang(pool.engines[0])
        pool.engines[1].engine.fail_preparations = 1000
        uploading = asyncio.create_task(pool.hub.upload(1))
        await until(lambda: pool.engines[1].engine.fail_preparations < 1000)
        # It is out of rotation, and is brought up to date only after the switch.
        await until(lambda: pool.member(1).state is State.JOINING)
        tried = pool.engines[1].engine.fail_preparations
        for _ in range(10):
            await asyncio.sleep(0.05)
            assert pool.member(1).state is State.JOINING
        assert pool.engines[1].engine.fail_preparations == tried
        pool.engines[1].engine.fail_preparations = 0
        gate.set()
        await uploading
        await pool.serving()
        assert [member.version for member in pool.engine.roster.members] == [1, 1, 1]


async def test_who_refused_it_goes_on_with_the_version_before_where_no_other_takes_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve_pool(tmp_path, 2, rules=PATIENT) as pool:
        hang(pool.engines[0])
        pool.engines[1].engine.fail_preparations = 1
        uploading = asyncio.create_task(pool.hub.upload(1))
        await until(lambda: pool.member(1).state is State.JOINING)
        held = hold_looks(pool.member(0), monkeypatch)
        pool.engine.roster.lose(pool.member(0), "as if it were out of reach")
        turn = await pool.hub.generate("a")
        assert set(turn.versions) == {0}
        with pytest.raises(grpc.aio.AioRpcError):
            await uploading
        held.set()


def hold_looks(member: Member, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Delay every look at an engine until the returned event is set."""
    info, held = member.server.info, asyncio.Event()

    async def late(**how: bool) -> object:
        await held.wait()
        return await info(**how)

    monkeypatch.setattr(member.server, "info", late)
    return held


@pytest.mark.parametrize("how", ["its connection is gone", "it is seen to be lost"])
async def test_a_version_that_is_refused_is_taken_from_who_has_it_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    async with serve_pool(tmp_path, 2) as pool:
        await pool.hub.upload(1)
        pool.engines[1].engine.fail_preparations = 1
        activate = StagedThere.activate

        async def unheard(there: StagedThere, in_flight: object) -> object:
            await activate(there, in_flight)  # type: ignore[arg-type]
            if how == "it is seen to be lost":
                pool.engine.roster.lose(pool.member(0), how)
                await asyncio.sleep(3600)
            raise Unanswered(how)

        monkeypatch.setattr(StagedThere, "activate", unheard)
        held = hold_looks(pool.member(0), monkeypatch)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await pool.hub.upload(2)
        failure = read_failure(refused.value)
        assert failure is not None and failure.reason == "WEIGHT_LOAD_FAILED"
        assert pool.engines[0].engine.version == 2
        monkeypatch.setattr(StagedThere, "activate", activate)
        held.set()
        await pool.serving()
        assert [member.version for member in pool.engine.roster.members] == [1, 1]
        # The same number again with other bytes: no engine may count as having it.
        data, specs = payload(9)
        head, _ = header(2, tensors=specs)
        answers = await send(pool.hub, messages(head, data))
        assert answers[-1].state == weights_pb2.WEIGHT_STATE_ACTIVE
        await pool.serving()
        assert [member.version for member in pool.engine.roster.members] == [2, 2]
        assert pool.engines[0].engine.payloads[-1] == pool.engines[1].engine.payloads[-1]


async def test_who_was_lost_as_it_switched_and_comes_back_is_given_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve_pool(tmp_path, 3, rules=PATIENT) as pool:
        gate = hang(pool.engines[0])
        activate, calls = StagedThere.activate, 0

        async def lost_once(there: StagedThere, in_flight: object) -> object:
            nonlocal calls
            calls += 1
            if calls == 1:
                there.cancel()
                raise Unanswered("out of reach")
            return await activate(there, in_flight)  # type: ignore[arg-type]

        monkeypatch.setattr(StagedThere, "activate", lost_once)
        uploading = asyncio.create_task(pool.hub.upload(1))
        await until(lambda: [e.engine.version > 0 for e in pool.engines] == [False, True, True])
        assert calls == 3 and pool.hub.serving.switch.active_version == 0
        gate.set()
        await uploading
        assert [member.version for member in pool.engine.roster.members] == [1, 1, 1]


async def test_one_whose_call_breaks_off_during_a_write_is_given_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve_pool(tmp_path, 2, rules=PATIENT) as pool:
        gate = hang(pool.engines[0])
        staged, calls = Staging.staged, 0

        async def broken_once(there: Staging) -> weights_pb2.UpdateWeightsResponse:
            nonlocal calls
            answer = await staged(there)
            calls += 1
            if calls == 1:
                raise grpc.aio.AioRpcError(
                    grpc.StatusCode.INTERNAL,
                    grpc.aio.Metadata(),
                    grpc.aio.Metadata(),
                    "Internal error from Core",
                )
            return answer

        monkeypatch.setattr(Staging, "staged", broken_once)
        uploading = asyncio.create_task(pool.hub.upload(1))
        # The other engine does not have it yet, so the switch is still under way.
        await until(lambda: pool.member(1).version == 1 and pool.member(1).state is State.SERVING)
        assert calls == 2 and pool.hub.serving.switch.active_version == 0
        gate.set()
        await uploading
        assert [member.version for member in pool.engine.roster.members] == [1, 1]


async def test_one_that_has_the_version_no_more_is_given_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if another version had been staged in between and replaced it."""
    async with serve_pool(tmp_path, 2, rules=PATIENT) as pool:
        activate, calls = StagedThere.activate, 0

        async def gone(there: StagedThere, in_flight: object) -> object:
            nonlocal calls
            calls += 1
            if calls == 1:
                code = grpc.StatusCode.FAILED_PRECONDITION
                raise EngineRefused(Failure(code, "gone", "WEIGHT_VERSION_NOT_STAGED"))
            return await activate(there, in_flight)  # type: ignore[arg-type]

        monkeypatch.setattr(StagedThere, "activate", gone)
        await pool.hub.upload(1)
        assert calls == 3
        assert [member.version for member in pool.engine.roster.members] == [1, 1]
        assert all(member.state is State.SERVING for member in pool.engine.roster.members)
        assert not any(member.failures or member.setback for member in pool.engine.roster.members)
        await pool.hub.upload(2)
        assert [member.version for member in pool.engine.roster.members] == [2, 2] and calls == 5


async def test_a_turn_of_the_version_that_is_being_switched_to_waits_for_it(tmp_path: Path) -> None:
    async with serve_pool(tmp_path, 2, rules=PATIENT) as pool:
        gate = hang(pool.engines[0])
        uploading = asyncio.create_task(pool.hub.upload(1))
        await until(lambda: pool.member(1).version == 1)
        pinned = asyncio.create_task(pool.hub.generate("t", required_weight_version=1))
        await asyncio.sleep(0.2)
        assert not pinned.done() and pool.hub.serving.switch.active_version == 0
        gate.set()
        await uploading
        assert set((await pinned).versions) == {1}


@pytest.mark.parametrize("part", ["staging", "switched", "refused"])
async def test_another_process_at_the_address_of_one_is_given_it_from_the_beginning(
    tmp_path: Path, part: str
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        pool = await stack.enter_async_context(serve_pool(tmp_path, 2, rules=PATIENT))
        await pool.hub.upload(1)
        gates = [hang(engine) for engine in pool.engines]
        uploading = asyncio.create_task(pool.hub.upload(2))
        member, before = pool.member(1), pool.engines[1]
        if part == "switched":
            gates[1].set()
            await until(lambda: member.version == 2 and member.state is State.SERVING)
        elif part == "refused":
            before.engine.fail_preparations = 1000
            gates[1].set()
            await until(lambda: member.state is State.JOINING)
        else:
            await until(lambda: 2 in member.reserved)
        stopping = asyncio.create_task(before.life.stop(0.0))
        await until(lambda: member.state is State.LOST)
        gates[1].set()
        await stopping
        folder = tmp_path / "another"
        folder.mkdir()
        another = await stack.enter_async_context(serve(folder, f"listen={before.address}"))
        await until(lambda: member.version == 2 and member.state is State.SERVING)
        assert another.engine.version == 2
        gates[0].set()
        await uploading
        turns = [await pool.hub.generate(f"t{number}") for number in range(4)]
        assert {version for turn in turns for version in turn.versions} == {2}
        # The pool's version when it joined, and the version of the switch.
        assert len(another.engine.payloads) == 2
        assert pool.engine.turns.lost_count == 0


async def test_a_host_that_hangs_holds_up_none_that_would_take_it_from_there(
    tmp_path: Path,
) -> None:
    rules = changed(QUICK, branches=1, stage_seconds=4.0)
    async with serve_pool(tmp_path, 3, rules=rules, hosts="abc") as pool:
        gate = hang(pool.engines[0])
        await pool.hub.upload(1)
        assert [engine.engine.version for engine in pool.engines] == [0, 1, 1]
        gate.set()
        await pool.serving()
