"""A run with several servers, each of them scripted on a real port."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import grpc
import pytest

from penstock.trainer.core.errors import SessionRefused
from penstock.trainer.data.shards import Division
from penstock.trainer.exchange.servers import Servers
from penstock.trainer.exchange.stream import RunFacts
from penstock.v1 import weights_pb2
from penstock.wire.channel import client_options
from penstock.wire.messages import StalenessContract as Contract
from tests.support.scripted_trainer_server import ScriptedServer, Session, refuse
from tests.trainer.exchange.test_stream import Notice, delivery, greet

Script = Callable[[Session], Awaitable[None]]


async def nothing_to_restore(server: int, welcome: Any) -> None:
    pass


@contextlib.asynccontextmanager
async def exchanging(
    *scripts: tuple[Script, ...],
    restore: Any = nothing_to_restore,
    stopping: asyncio.Event | None = None,
) -> AsyncGenerator[tuple[Servers, list[ScriptedServer]]]:
    """Open exchanges with one server for each script, with running readers."""
    division = Division(3, len(scripts))
    async with contextlib.AsyncExitStack() as stack:
        servers: list[ScriptedServer] = []
        channels: list[tuple[str, grpc.aio.Channel]] = []
        for script in scripts:
            servers.append(await stack.enter_async_context(ScriptedServer(*script)))
            channel = grpc.aio.insecure_channel(servers[-1].address, options=client_options())
            await stack.enter_async_context(channel)
            channels.append((servers[-1].address, channel))
        facts = RunFacts(
            run_id="run",
            contract=Contract(max_lag=3),
            in_flight=weights_pb2.IN_FLIGHT_POLICY_KEEP,
            weight_version=5,
            step=7,
        )
        exchanges = Servers(
            channels,
            division,
            facts,
            give_up_after_seconds=10.0,
            stopping=stopping or asyncio.Event(),
        )
        assert await exchanges.open()
        reader = asyncio.create_task(exchanges.run(restore), name="exchanges reader")
        try:
            async with asyncio.timeout(20):
                yield exchanges, servers
                await exchanges.close()
                await reader
        finally:
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reader


async def test_each_server_is_told_its_part_and_receipted_its_own_groups() -> None:
    heard: dict[str, Any] = {}

    def script(name: str, *groups: str) -> Script:
        async def session(session: Session) -> None:
            heard[name] = (await greet(session)).staleness.groups_per_step
            demanded = (await session.receive("demand")).group_count
            assert demanded == len(groups)
            for number, group in enumerate(groups):
                await session.send(delivery=delivery(number + 1, group))
            if name == "second":
                refused = await session.receive("receipt")
                assert (refused.step, refused.rejection.reason) == (0, "OF_NO_USE")
            else:
                receipt = await session.receive("receipt")
                assert (list(receipt.delivery_ids), receipt.step) == ([1, 2], 8)
            assert (await session.receive("checkpoint")).step == 8
            with contextlib.suppress(StopAsyncIteration):
                await anext(session.requests)

        return session

    async with exchanging((script("first", "a", "b"),), (script("second", "c"),)) as (both, _):
        for exchange, part in zip(both, both.division.parts, strict=True):
            exchange.demand(part)
        groups = {group.group_id: group for group in [await both.next_group() for _ in "abc"]}
        assert {name: both.server_of(group) for name, group in groups.items()} == {
            "a": 0,
            "b": 0,
            "c": 1,
        }
        both.refuse(groups["c"], "OF_NO_USE", "not this one")
        both.receipt([groups["a"], groups["b"]], 8)
        both.checkpoint(8)
    assert heard == {"first": 2, "second": 1}


async def test_a_server_that_is_lost_is_restored_by_itself_and_notices_say_whose_they_are() -> None:
    restored: list[int] = []
    noticed: asyncio.Queue[tuple[int, str]] = asyncio.Queue()

    async def steady(session: Session) -> None:
        await greet(session)
        assert (await session.receive("demand")).group_count == 1
        with contextlib.suppress(StopAsyncIteration):
            await anext(session.requests)

    async def lost(session: Session) -> None:
        await greet(session)
        await refuse(session.context, grpc.StatusCode.UNAVAILABLE, "DRAINING", "going down")

    async def back(session: Session) -> None:
        hello = await greet(session)
        # Step 8 is complete everywhere, though this server had no group in it.
        assert hello.resume_step == 8
        await session.send(notice=Notice(reason="GROUP_DROPPED", group_id="g"))
        with contextlib.suppress(StopAsyncIteration):
            async for _ in session.requests:
                pass

    async def restore(server: int, welcome: Any) -> None:
        restored.append(server)

    async with exchanging((steady,), (lost, back), restore=restore) as (both, _):
        both.receipt([], 8)
        with both.notices_to(lambda server, notice: noticed.put_nowait((server, notice.reason))):
            assert await noticed.get() == (1, "GROUP_DROPPED")
        both[0].demand(1)
    assert restored == [1]


async def test_who_waits_for_a_group_is_told_that_it_was_taken_elsewhere() -> None:
    async def session(session: Session) -> None:
        await greet(session)
        for number, group in enumerate("ab"):
            await session.receive("demand")
            await session.send(delivery=delivery(number + 1, group))
        with contextlib.suppress(StopAsyncIteration):
            await anext(session.requests)

    async with exchanging((session,)) as (one, _):
        assert one.take_arrived(0) == []
        one[0].demand(1)
        while not one[0].arrived_count:
            await asyncio.sleep(0.01)
        waiting = asyncio.create_task(one.next_group())
        assert [group.group_id for group in one.take_arrived(0)] == ["a"]
        assert await waiting is None
        one[0].demand(1)
        assert (await one.next_group()).group_id == "b"


async def test_who_waits_for_a_group_is_told_that_no_more_of_what_waited_will_come() -> None:
    async def lost(session: Session) -> None:
        await greet(session)
        await session.receive("demand")
        await session.send(delivery=delivery(1, "a"))
        await session.receive("demand")

    async def back(session: Session) -> None:
        await greet(session, waiting=1)
        await session.receive("checkpoint")
        assert (await session.receive("demand")).group_count == 1
        await session.send(delivery=delivery(2, "a"))
        with contextlib.suppress(StopAsyncIteration):
            async for _ in session.requests:
                pass

    async with exchanging((lost, back)) as (one, _):
        one[0].demand(1)
        group = await one.next_group()
        assert group is not None and group.group_id == "a"
        one[0].demand(1)
        assert await one.next_group() is None
        assert one[0].all_seen


async def test_notices_that_nobody_took_yet_are_kept() -> None:
    async def session(session: Session) -> None:
        await greet(session)
        for name in ("g0", "g1"):
            await session.send(notice=Notice(reason="GROUP_DROPPED", group_id=name))
        await session.send(delivery=delivery(1, "after"))
        with contextlib.suppress(StopAsyncIteration):
            async for _ in session.requests:
                pass

    async with exchanging((session,)) as (one, _):
        await one.next_group()
        noticed: list[tuple[int, str]] = []

        def heed(server: int, notice: Any) -> None:
            noticed.append((server, notice.group_id))

        with one.notices_to(heed):
            assert noticed == [(0, "g0"), (0, "g1")]
        # The notices are handed over once.
        with one.notices_to(heed):
            assert len(noticed) == 2


async def test_where_one_is_left_all_are_and_nothing_more_is_sent() -> None:
    stopping = asyncio.Event()
    told: list[str] = []

    async def steady(session: Session) -> None:
        await greet(session)
        told.extend([request.WhichOneof("message") async for request in session.requests])

    async def lost(session: Session) -> None:
        await greet(session)
        await session.receive("never")

    async with exchanging((steady,), (lost,), stopping=stopping) as (both, servers):
        stopping.set()
        await servers[1].server.stop(0)
        await both.left.wait()
        assert all(exchange.left.is_set() for exchange in both)
        for exchange in both:
            exchange.switch(6)
        both.receipt([], 8)
        both.checkpoint(8)
    assert told == []


async def test_a_server_that_refuses_this_trainer_ends_the_run() -> None:
    async def steady(session: Session) -> None:
        await greet(session)
        with contextlib.suppress(StopAsyncIteration):
            await anext(session.requests)

    async def refusing(session: Session) -> None:
        await greet(session)
        await refuse(session.context, grpc.StatusCode.ABORTED, "SESSION_REPLACED", "newer")

    with pytest.raises(
        SessionRefused, match=r"the server at 127\.0\.0\.1:\d+ refuses this trainer"
    ):
        async with exchanging((steady,), (refusing,)):
            tasks = [t for t in asyncio.all_tasks() if t.get_name() == "exchanges reader"]
            await asyncio.wait(tasks)
