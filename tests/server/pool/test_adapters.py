"""Adapters through a hub: every token comes from the adapter it names, whatever
happens to the engine servers."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.server.engine.protocol import Adapter, AdapterLimits, StagedWeights
from penstock.server.engine.turn_limit import LimitRules
from penstock.server.pool.member import KNOWN_VERSIONS, Member, State
from penstock.server.pool.remote import EngineServer
from penstock.server.weights.header import Announced
from penstock.server.weights.staging.incoming import IncomingUpload
from penstock.v1 import trajectory_pb2
from penstock.wire.failure import read_failure
from penstock.wire.security import Security
from tests.server.pool.test_branches import sources
from tests.server.weights.test_wire_adapters import (
    ACTIVE,
    MODULE,
    POLICIES,
    begin,
    info_of,
    probe,
    push,
    tensors_of,
)
from tests.support.fakes import (
    FakeEngine,
    expected_scores,
    expected_tokens,
    sampled,
)
from tests.support.harness import (
    Harness,
    Turn,
    begun,
    delta,
    hello,
    messages,
    sampling,
    serve,
    until,
)
from tests.support.harness import header as full_header
from tests.support.pools import Pool, is_idle, serve_hub, serve_pool
from tests.support.processes import Server
from tests.support.weight_checks import held_bytes

PROMPT = [1, 2, 3]
LIMITS = AdapterLimits(8, 2)
ADAPTER_BYTES = sum(tensor.nbytes for tensor in tensors_of(1).values())
SLOW = 0.005


class ByContent(FakeEngine):
    """Samples by the content of its weights, not by their version number.

    Each test version is filled with its own number, and so is each adapter's B. The tokens
    therefore prove which weights sampled them, whatever numbers the hub reports.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.choose = self._choose
        self._full = 0

    async def load(self, weights: StagedWeights) -> None:
        await super().load(weights)
        self._full = int(np.frombuffer(self.payloads[-1], np.float32, 1)[0])

    async def score(
        self, token_ids: NDArray[np.int32], adapter_version: int | None = None
    ) -> NDArray[np.float32]:
        await super().score(token_ids, adapter_version)
        return expected_scores([int(t) for t in token_ids], self._seed(adapter_version or 0))

    def _choose(self, prefix: bytes, version: int) -> tuple[int, float]:
        return sampled(prefix, self._seed(version))

    def _seed(self, version: int) -> int:
        tensors = self.adapters.get(version)
        if tensors is None:
            return self._full
        return seed(int(tensors[f"{MODULE}.lora_B.weight"].flat[0]), self._full)


def seed(version: int, full: int) -> int:
    """The seed of the tokens that an adapter samples on full weights."""
    return version + 1000 * full


def check(turn: Turn, prompt: Sequence[int] = PROMPT, *, full: int = 0) -> None:
    """Check every token against the version that it names. Versions
    above `full` are adapters on it."""
    versions = [v if v <= full else seed(v, full) for v in turn.versions]
    tokens, logprobs = expected_tokens(prompt, versions)
    assert turn.tokens == tokens
    assert turn.logprobs == pytest.approx(logprobs)


def lora_pool(folder: Path, count: int, *settings: str, **fields: Any) -> Any:
    """A pool whose engines accept adapters."""
    fields = {"adapters": LIMITS, "make_engine": ByContent, **fields}
    return serve_pool(folder, count, *settings, **fields)


@contextlib.asynccontextmanager
async def engine_server(folder: Path, **fields: Any) -> AsyncGenerator[Harness]:
    """An engine server outside any pool."""
    folder.mkdir()
    async with serve(folder, **{"adapters": LIMITS, "make_engine": ByContent, **fields}) as engine:
        yield engine


def listed(pool: Pool, *engines: Harness) -> None:
    """Set the engines of a pool."""
    pool.engines[:] = engines
    pool.engine.roster.set_addresses([engine.address for engine in engines])


def wire_numbers(pool: Pool) -> list[int]:
    """Each engine server's own number for its active version."""
    return [engine.serving.switch.active_version for engine in pool.engines]


# Switches


async def test_an_adapter_is_a_version_on_every_engine_and_nothing_pauses(tmp_path: Path) -> None:
    async with lora_pool(tmp_path, 2) as pool:
        check(await pool.hub.generate("base"))
        (*_, answer) = await push(pool.hub, 1)
        assert (answer.state, answer.active_weight_version) == (ACTIVE, 1)
        assert answer.pause.ToNanoseconds() == 0
        turns = [await pool.hub.generate(f"t{n}", [n + 1]) for n in range(4)]
        for n, turn in enumerate(turns):
            assert set(turn.versions) == {1}
            check(turn, [n + 1])
        for engine in pool.engines:
            assert engine.engine.adapters_added == [1] and engine.engine.pauses == 0
        info = await info_of(pool.hub)
        assert (info.lora.max_rank, info.lora.max_adapters) == (8, 2)
        assert (info.active_weight_version, info.full_weight_version) == (1, 0)
        assert list(info.adapter_weight_versions) == [1]
        assert info.delta_base_weight_version == 0
        assert [replica.active_weight_version for replica in info.replicas] == [1, 1]


async def test_a_hub_holds_the_newest_adapter_and_no_other(tmp_path: Path) -> None:
    async with lora_pool(tmp_path, 1) as pool:
        for version in (1, 2, 3):
            await push(pool.hub, version)
            assert held_bytes(pool.hub) == ADAPTER_BYTES


async def test_a_staged_adapter_is_on_every_engine_before_it_is_switched_to(
    tmp_path: Path,
) -> None:
    async with lora_pool(tmp_path, 2) as pool:
        exchange = await hello(pool.hub.wire, 1 << 62)
        await push(pool.hub, 1, staged=True)
        await until(lambda: all(e.serving.weights.staged_versions == [1] for e in pool.engines))
        assert set((await pool.hub.generate("before")).versions) == {0}
        exchange.send(switch_weights={"weight_version": 1})
        receipt = await exchange.receive("weight_receipt")
        assert receipt.active_weight_version == 1 and receipt.pause.ToNanoseconds() == 0
        after = await pool.hub.generate("after")
        check(after)
        assert set(after.versions) == {1}


async def test_full_weights_and_the_adapter_on_them_may_be_staged_together(tmp_path: Path) -> None:
    async with lora_pool(tmp_path, 2) as pool:
        exchange = await hello(pool.hub.wire, 1 << 62)
        await pool.hub.upload(1, staged=True)
        await push(pool.hub, 2, staged=True, probe=probe(seed(2, full=1)))
        for version in (1, 2):
            exchange.send(switch_weights={"weight_version": version})
            receipt = await exchange.receive("weight_receipt")
            assert receipt.active_weight_version == version
            turn = await pool.hub.generate(f"t{version}")
            check(turn, full=1)
            assert set(turn.versions) == {version}
        # The probe is scored once on each engine, whichever versions were staged before.
        assert [engine.engine.scores for engine in pool.engines] == [1, 1]
        assert (await info_of(pool.hub)).full_weight_version == 1


async def test_each_engine_takes_it_from_the_hub(tmp_path: Path) -> None:
    async with lora_pool(tmp_path, 4, hosts="aabc") as pool:
        await push(pool.hub, 1)
        assert sources(pool) == ["hub"] * 4
        assert wire_numbers(pool) == [1] * 4


@pytest.mark.parametrize("policy", POLICIES)
async def test_turns_in_flight_by_policy(tmp_path: Path, policy: str) -> None:
    async with lora_pool(tmp_path, 2, step_seconds=SLOW) as pool:
        await push(pool.hub, 1)
        calls = [begin(pool.hub, f"t{n}", [n + 1], 60) for n in range(4)]
        for n in range(4):
            await pool.hub.sampled(f"t{n}", 3)
        assert [len(pool.member(n).turns) for n in range(2)] == [2, 2]
        await push(pool.hub, 2, policy=policy)
        late = await pool.hub.generate("late", [9])
        check(late, [9])
        assert set(late.versions) == {2}
        for n, call in enumerate(calls):
            turn = await call
            check(turn, [n + 1])
            aborted = turn.finished.finish_reason == trajectory_pb2.FINISH_REASON_ABORTED
            assert aborted == (policy == "abort")
            if policy == "abort":
                rest = await pool.hub.resume(f"t{n}")
                check(rest, [n + 1, *turn.tokens])
                assert rest.versions == [2] * (60 - len(turn.tokens))
            else:
                assert len(turn.tokens) == 60
                assert set(turn.versions) == ({1, 2} if policy == "recompute" else {1})
        assert pool.engine.turns.lost_count == 0
        # Unneeded adapters are freed, and the hub learns of it.
        await until(lambda: pool.engine.weights.adapter_versions == [2])
        assert all(engine.engine.pauses == 0 for engine in pool.engines)


async def test_a_turn_that_requires_its_version_is_aborted_before_the_first_engine_switches(
    tmp_path: Path,
) -> None:
    async with lora_pool(tmp_path, 2, step_seconds=SLOW) as pool:
        await push(pool.hub, 1)
        pinned = begin(pool.hub, "pinned", PROMPT, 100, required_weight_version=1)
        await pool.hub.sampled("pinned")
        await push(pool.hub, 2, policy="keep")
        turn = await pinned
        assert turn.finished.finish_reason == trajectory_pb2.FINISH_REASON_ABORTED
        assert set(turn.versions) == {1}
        check(turn)
        new = await pool.hub.generate("new", PROMPT, required_weight_version=2)
        assert set(new.versions) == {2}
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await pool.hub.generate("old", PROMPT, required_weight_version=1)
        assert read_failure(refused.value).reason == "WEIGHT_VERSION_NOT_ACTIVE"


async def test_twelve_adapters_under_eight_turns_label_every_token(tmp_path: Path) -> None:
    chance, stop = random.Random(0), asyncio.Event()
    turns: list[tuple[list[int], Turn]] = []
    async with lora_pool(tmp_path, 3, step_seconds=SLOW) as pool:

        async def load(worker: int) -> None:
            while not stop.is_set():
                prompt = [worker + 1, len(turns) % 200]
                name = f"w{worker}-{len(turns)}"
                turn = await pool.hub.generate(name, prompt, sampling_params=sampling(40))
                while turn.finished.finish_reason == trajectory_pb2.FINISH_REASON_ABORTED:
                    more = await pool.hub.resume(name)
                    turn.segments += more.segments
                    turn.finished = more.finished
                turns.append((prompt, turn))

        workers = [asyncio.ensure_future(load(worker)) for worker in range(8)]
        for version in range(1, 13):
            fields: dict[str, Any] = {"probe": probe(version)} if chance.random() < 0.3 else {}
            await push(pool.hub, version, policy=chance.choice(list(POLICIES)), **fields)
            await asyncio.sleep(chance.random() * 0.05)
        stop.set()
        await asyncio.gather(*workers)
        for prompt, turn in turns:
            check(turn, prompt)
            assert len(turn.tokens) == 40
        assert sum(len(set(turn.versions)) > 1 for _, turn in turns) > 3
        assert len({v for _, turn in turns for v in turn.versions}) > 6
        assert is_idle(pool.engine.turns)


# Engines that join and leave


async def test_a_turn_goes_on_under_the_adapter_of_the_engine_it_is_placed_on_next(
    tmp_path: Path,
) -> None:
    async with lora_pool(tmp_path, 2, step_seconds=0.01) as pool:
        await push(pool.hub, 1)
        calls = [begin(pool.hub, f"t{n}", [n + 1], 150) for n in range(2)]
        for n in range(2):
            await pool.hub.sampled(f"t{n}", 3)
        # The second of two engines switches after the first, and is lost before it has switched.
        last = pool.engines[1]
        waits = asyncio.Event()

        async def never(adapter: Adapter) -> None:
            waits.set()
            await asyncio.Event().wait()

        async def later(announced: Announced) -> IncomingUpload:
            await until(lambda: pool.member(0).version == 2)
            return await begin_upload(announced)

        uploads = last.serving.uploads
        begin_upload, uploads._begin = uploads._begin, later  # type: ignore[method-assign]
        last.engine.add_adapter = never  # type: ignore[method-assign]
        pushing = asyncio.ensure_future(push(pool.hub, 2, policy="keep"))
        await waits.wait()
        await last.life._server.stop(0.0)
        await pushing
        turns = [await call for call in calls]
        for n, turn in enumerate(turns):
            check(turn, [n + 1])
            assert len(turn.tokens) == 150
        assert sorted(sorted(set(turn.versions)) for turn in turns) == [[1], [1, 2]]
        assert pool.engine.turns.lost_count == 1


async def test_one_that_joins_late_is_given_the_adapter_alone_where_the_base_is_the_model(
    tmp_path: Path,
) -> None:
    async with lora_pool(tmp_path, 1) as pool:
        for version in (1, 2):
            await push(pool.hub, version)
        async with engine_server(tmp_path / "late") as late:
            listed(pool, late)
            await pool.serving()
            assert (late.engine.loaded, late.engine.adapters_added) == ([], [2])
            turn = await pool.hub.generate("a")
            check(turn)
            assert set(turn.versions) == {2}


async def test_one_that_joins_late_is_given_the_full_weights_below_the_adapter_first(
    tmp_path: Path,
) -> None:
    async with lora_pool(tmp_path, 1) as pool:
        await pool.hub.upload(3)
        await push(pool.hub, 4)
        await push(pool.hub, 5)
        async with engine_server(tmp_path / "late") as late:
            # Another trainer has given it different full weights.
            await late.upload(1, trainer_epoch=7)
            listed(pool, late)
            await pool.serving()
            assert late.serving.switch.full_version < late.serving.switch.active_version
            turn = await pool.hub.generate("a")
            check(turn, full=3)
            assert set(turn.versions) == {5}
            assert pool.member(0).full_version == 3
            # It also takes the following adapters.
            await push(pool.hub, 6)
            turn = await pool.hub.generate("b")
            check(turn, full=3)
            assert set(turn.versions) == {6}


async def test_one_whose_full_weights_failed_to_load_is_given_them_again(tmp_path: Path) -> None:
    async with lora_pool(tmp_path, 1) as pool:
        await pool.hub.upload(1)
        await push(pool.hub, 2)
        async with engine_server(tmp_path / "late") as late:
            late.engine.fail_loads = 1
            with pytest.raises(grpc.aio.AioRpcError):
                await late.upload(1, trainer_epoch=7)
            assert not late.serving.switch.trusted
            listed(pool, late)
            await pool.serving()
            turn = await pool.hub.generate("a")
            check(turn, full=1)
            assert set(turn.versions) == {2}


async def test_somebody_else_s_adapter_is_replaced_under_the_next_number(tmp_path: Path) -> None:
    async with lora_pool(tmp_path, 1) as pool, engine_server(tmp_path / "other") as other:
        await push(pool.hub, 1)
        await push(other, 9, trainer_epoch=7)
        listed(pool, other)
        await pool.serving()
        assert wire_numbers(pool) == [10]
        turn = await pool.hub.generate("a")
        check(turn)
        assert set(turn.versions) == {1}
        await push(pool.hub, 2)
        assert wire_numbers(pool) == [11]
        check(await pool.hub.generate("b"))


async def test_an_adapter_on_other_full_weights_stays_out_and_says_so(tmp_path: Path) -> None:
    async with lora_pool(tmp_path, 1) as pool, engine_server(tmp_path / "other") as other:
        await push(pool.hub, 1)
        await other.upload(3, trainer_epoch=7)
        await push(other, 4, trainer_epoch=7)
        listed(pool, *pool.engines, other)
        await until(lambda: "full weights are not version 0" in pool.member(1).problem)
        for n in range(4):
            check(await pool.hub.generate(f"t{n}"))
        assert pool.member(1).given == 0
        assert other.engine.adapters_added == [4]


async def test_a_pool_of_full_weights_cannot_give_them_to_an_engine_with_an_adapter(
    tmp_path: Path,
) -> None:
    async with lora_pool(tmp_path, 1) as pool, engine_server(tmp_path / "other") as other:
        await pool.hub.upload(1)
        await push(other, 4, trainer_epoch=7)
        listed(pool, *pool.engines, other)
        await until(lambda: "ADAPTER_ACTIVE" in pool.member(1).problem)
        assert pool.member(1).state is State.JOINING
        check(await pool.hub.generate("a"), full=1)


async def test_who_joins_while_the_adapter_is_not_held_waits_for_the_next_one(
    tmp_path: Path,
) -> None:
    async with lora_pool(tmp_path, 1, "weights.hold_active=false") as pool:
        await push(pool.hub, 1)
        async with engine_server(tmp_path / "late") as late:
            listed(pool, *pool.engines, late)
            await until(lambda: "version 1 is not held" in pool.member(1).problem)
            assert held_bytes(pool.hub) == 0


async def test_a_hub_that_starts_again_has_the_trainer_publish_its_adapter_again(
    tmp_path: Path,
) -> None:
    journal = f"journal.folder={tmp_path / 'journal'}"
    async with engine_server(tmp_path / "engine") as engine:
        async with serve_hub(tmp_path / "hub", [engine.address], journal) as (hub, pooled):
            await until(lambda: len(pooled.roster.rotation) == 1)
            await push(hub, 4)
        async with serve_hub(tmp_path / "hub", [engine.address], journal) as (hub, pooled):
            member = pooled.roster.members[0]
            await until(lambda: "trainer" in member.problem)
            exchange = await hello(hub.wire, weight_version=4, epoch=1 << 62)
            await push(hub, 4)
            await until(lambda: member.state is State.SERVING)
            turn = await hub.generate("a")
            check(turn)
            assert set(turn.versions) == {4}
            assert engine.engine.adapters_added == [4, 5] and engine.engine.loaded == []
            exchange.half_close()


async def test_a_killed_engine_process_is_given_the_adapter_by_the_hub(tmp_path: Path) -> None:
    options = ("--enable-lora", "--max-loras", "2", "--step-seconds", "0.005")
    servers = [Server(tmp_path / f"{n}", options) for n in range(2)]
    try:
        for server in servers:
            server.folder.mkdir()
        await asyncio.gather(*(server.start() for server in servers))
        addresses = [server.address for server in servers]
        async with serve_hub(tmp_path / "hub", addresses) as (hub, pooled):
            await until(lambda: len(pooled.roster.rotation) == 2)
            for version in (1, 2):
                await push(hub, version)
            calls = [begin(hub, f"t{n}", [n + 1], 200) for n in range(4)]
            for n in range(4):
                await begun(hub.wire, f"t{n}", 3)
            await servers[0].restart()
            await until(lambda: len(pooled.roster.rotation) == 2)
            assert [member.version for member in pooled.roster.members] == [2, 2]
            calls += [begin(hub, f"u{n}", [n + 1], 20) for n in range(4)]
            for n, turn in enumerate([await call for call in calls]):
                # A restarted engine process has its pool's version numbers.
                assert turn.versions == [2] * len(turn.tokens)
                assert turn.tokens == expected_tokens([n % 4 + 1], turn.versions)[0]
            assert pooled.turns.lost_count == 2
            assert pooled.roster.members[0].given > 2
    finally:
        for process in [process for server in servers for process in server.processes]:
            process.kill()
            await process.wait()


# Refusals


async def test_an_engine_that_refuses_an_adapter_is_given_it_again_and_serves(
    tmp_path: Path,
) -> None:
    async with lora_pool(tmp_path, 2) as pool:
        pool.engines[0].engine.fail_adapters = 1
        assert (await push(pool.hub, 1))[-1].state == ACTIVE
        await pool.serving()
        assert [member.version for member in pool.engine.roster.members] == [1, 1]
        for n in range(4):
            turn = await pool.hub.generate(f"t{n}")
            check(turn)
            assert set(turn.versions) == {1}


@pytest.mark.parametrize("kind", ["full", "adapter"])
async def test_an_engine_whose_probe_is_off_takes_no_turns_until_it_holds(
    tmp_path: Path, kind: str
) -> None:
    async with lora_pool(tmp_path, 2) as pool:
        engine = pool.engines[0].engine
        score = engine.score

        async def off(token_ids: NDArray[np.int32], adapter: int | None = None) -> Any:
            return await score(token_ids, adapter) - 1.0

        engine.score = off  # type: ignore[method-assign]
        if kind == "full":
            # Version 0 is not stored as a folder, and the rollback needs a version to return to.
            await pool.hub.upload(1)
            await pool.hub.upload(2, probe=probe(2))
        else:
            await push(pool.hub, 2, probe=probe(2))
        await until(lambda: pool.member(0).failures >= 3)
        assert "PROBE_MISMATCH" in pool.member(0).problem
        given = pool.member(0).given
        for n in range(4):
            turn = await pool.hub.generate(f"t{n}")
            check(turn, full=2 if kind == "full" else 0)
            assert set(turn.versions) == {2}
        assert pool.member(0).given == given
        engine.score = score  # type: ignore[method-assign]
        await pool.serving()
        assert pool.member(0).version == 2


@pytest.mark.parametrize("by", ["load", "probe"])
async def test_an_adapter_that_every_engine_refuses_is_refused(tmp_path: Path, by: str) -> None:
    async with lora_pool(tmp_path, 2, step_seconds=SLOW) as pool:
        await push(pool.hub, 1)
        call = begin(pool.hub, "t", PROMPT, 60)
        await pool.hub.sampled("t")
        fields: dict[str, Any] = {"probe": probe(3)} if by == "probe" else {}
        for engine in pool.engines:
            engine.engine.fail_adapters = int(by == "load")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await push(pool.hub, 2, **fields)
        reason = "PROBE_MISMATCH" if by == "probe" else "WEIGHT_LOAD_FAILED"
        assert read_failure(refused.value).reason == reason
        info = await info_of(pool.hub)
        assert (info.active_weight_version, list(info.adapter_weight_versions)) == (1, [1])
        turn = await call
        check(turn)
        assert set(turn.versions) == {1}
        await pool.serving()
        (*_, answer) = await push(pool.hub, 2, probe=probe(2))
        assert answer.probe.mean_difference == pytest.approx(0.0, abs=1e-6)
        assert [member.version for member in pool.engine.roster.members] == [2, 2]


async def test_full_weights_after_an_adapter_are_refused_by_the_hub_itself(tmp_path: Path) -> None:
    async with lora_pool(tmp_path, 1) as pool:
        await push(pool.hub, 1)
        for head, data in (full_header(2), delta(2, 1)):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                async for _ in pool.hub.wire.UpdateWeights(iter(messages(head, data))):
                    pass
            assert read_failure(refused.value).reason == "ADAPTER_ACTIVE"
        check(await pool.hub.generate("a"))


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        (None, "start it with --enable-lora"),
        (AdapterLimits(4, 2), "max_rank of its LoRA adapters is 4, the pool's is 8"),
        (AdapterLimits(8, 1), "max_adapters of its LoRA adapters is 1, the pool's is 2"),
        (AdapterLimits(16, 4), ""),
    ],
)
async def test_an_engine_that_offers_less_than_the_pool_is_not_taken(
    tmp_path: Path, limits: AdapterLimits | None, said: str
) -> None:
    async with (
        lora_pool(tmp_path, 1) as pool,
        engine_server(tmp_path / "other", adapters=limits) as other,
    ):
        listed(pool, *pool.engines, other)
        await until(lambda: pool.member(1).state is (State.REFUSED if said else State.SERVING))
        assert said in (await info_of(pool.hub)).replicas[1].problem
        await push(pool.hub, 1)
        assert other.serving.switch.active_version == (0 if said else 1)


async def test_a_pool_without_adapters_takes_none_whoever_joins_it(tmp_path: Path) -> None:
    async with (
        serve_pool(tmp_path, 1) as pool,
        engine_server(tmp_path / "other") as other,
    ):
        listed(pool, *pool.engines, other)
        await pool.serving()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await push(pool.hub, 1)
        failure = read_failure(refused.value)
        assert (failure.reason, failure.metadata["field"]) == ("FIELD_INVALID", "header.adapter")
        assert "--enable-lora" in failure.message
        assert not (await info_of(pool.hub)).HasField("lora")
        await pool.hub.upload(1)
        assert wire_numbers(pool) == [1, 1]


# Version numbers


def test_the_number_of_the_full_weights_is_known_however_many_adapters_come() -> None:
    member = Member(EngineServer("127.0.0.1:1", Security()), LimitRules(), lambda: 0.0)
    full = member.reserve(1)
    member.settle(full, accepted=True)
    member.has(1, adapter=False)
    for version in range(2, 4 * KNOWN_VERSIONS):
        member.settle(member.reserve(version), accepted=True)
        member.has(version, adapter=True)
    assert member.pool_version(full) == 1
    assert member.pool_version(full + 1) is None
    assert len(member.wire_versions) == KNOWN_VERSIONS + 1
