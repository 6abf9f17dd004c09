"""The trainer's end of Exchange, against a scripted server on a real port."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from itertools import pairwise
from typing import Any

import grpc
import pytest

from penstock.trainer.core.errors import ServerFull, ServerGone, SessionRefused, WeightsRefused
from penstock.trainer.exchange.known_groups import KnownGroups
from penstock.trainer.exchange.stream import Exchange, Listeners, RunFacts
from penstock.v1 import weights_pb2
from penstock.wire.channel import client_options
from penstock.wire.messages import (
    GroupDelivery,
    Notice,
    Rejection,
    TrajectoryGroup,
    WeightReceipt,
    Welcome,
)
from penstock.wire.messages import StalenessContract as Contract
from tests.support.harness import Harness, hello
from tests.support.scripted_trainer_server import ScriptedServer, Session, refuse, unanswering


def delivery(delivery_id: int, group_id: str, redelivery_count: int = 0) -> Any:
    return GroupDelivery(
        delivery_id=delivery_id,
        group=TrajectoryGroup(group_id=group_id),
        redelivery_count=redelivery_count,
    )


async def nothing_to_restore(welcome: Any) -> None:
    pass


@contextlib.asynccontextmanager
async def exchanging(
    address: str,
    *,
    restore: Any = nothing_to_restore,
    seconds: float = 10.0,
    stopping: asyncio.Event | None = None,
    listeners: Listeners | None = None,
) -> AsyncGenerator[Exchange]:
    """An open exchange whose reader runs. Leaves when the reader has ended."""
    async with grpc.aio.insecure_channel(address, options=client_options()) as channel:
        exchange = Exchange(
            channel,
            RunFacts(
                run_id="run",
                contract=Contract(max_lag=3, groups_per_step=2),
                in_flight=weights_pb2.IN_FLIGHT_POLICY_KEEP,
                weight_version=5,
                step=7,
            ),
            give_up_after_seconds=seconds,
            stopping=stopping or asyncio.Event(),
            listeners=listeners,
        )
        await exchange.open()
        reader = asyncio.create_task(exchange.run(restore), name="exchange reader")
        try:
            async with asyncio.timeout(20):
                yield exchange
                await exchange.close()
                await reader
        finally:
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reader


async def greet(session: Session, active: int = 5, waiting: int = 0) -> Any:
    hello = await session.receive("hello")
    welcome = Welcome(active_weight_version=active, buffered_group_count=waiting)
    await session.send(welcome=welcome)
    return hello


async def test_one_round() -> None:
    hellos: list[Any] = []

    async def session(session: Session) -> None:
        hellos.append(await greet(session))
        assert (await session.receive("demand")).group_count == 2
        await session.send(delivery=delivery(11, "a"))
        await session.send(delivery=delivery(12, "b"))
        switch = await session.receive("switch_weights")
        assert switch.weight_version == 6
        assert switch.in_flight == weights_pb2.IN_FLIGHT_POLICY_KEEP
        receipt = await session.receive("receipt")
        assert (list(receipt.delivery_ids), receipt.step) == ([11, 12], 8)
        assert (await session.receive("checkpoint")).step == 8
        answer = WeightReceipt(weight_version=6, active_weight_version=6)
        answer.pause.FromMilliseconds(250)
        await session.send(weight_receipt=answer)
        with pytest.raises(StopAsyncIteration):
            await anext(session.requests)

    async with ScriptedServer(session) as server, exchanging(server.address) as exchange:
        exchange.demand(2)
        groups = [await exchange.next_group(), await exchange.next_group()]
        assert [group.group_id for group in groups] == ["a", "b"]
        switch = exchange.switch(6)
        assert exchange.held_version == 6
        exchange.receipt(groups, 8)
        exchange.checkpoint(8)
        assert (await switch).pause_seconds == 0.25
    (hello,) = hellos
    assert (hello.run_id, hello.weight_version, hello.resume_step) == ("run", 5, 7)
    assert (hello.staleness.max_lag, hello.staleness.groups_per_step) == (3, 2)
    assert hello.trainer_epoch > 0


async def test_a_lost_stream_loses_nothing_and_trains_nothing_twice() -> None:
    epochs: list[int] = []
    restored: list[int] = []
    lost = asyncio.Event()

    async def first(session: Session) -> None:
        epochs.append((await greet(session)).trainer_epoch)
        assert (await session.receive("demand")).group_count == 3
        await session.send(delivery=delivery(1, "trained"))
        await session.send(delivery=delivery(2, "in hand"))
        await session.receive("receipt")
        await refuse(session.context, grpc.StatusCode.UNAVAILABLE, "DRAINING", "going down")

    async def second(session: Session) -> None:
        hello = await greet(session, active=5)
        epochs.append(hello.trainer_epoch)
        # The trainer's state includes step 8, whether or not its receipt arrived.
        assert hello.resume_step == 8
        assert (await session.receive("checkpoint")).step == 7
        # One of three groups is still owed.
        assert (await session.receive("demand")).group_count == 1
        await session.send(delivery=delivery(3, "trained", 1))
        assert (await session.receive("demand")).group_count == 1
        again = await session.receive("receipt")
        assert (list(again.delivery_ids), again.step) == ([3], 8)
        await session.send(delivery=delivery(4, "in hand", 1))
        assert (await session.receive("demand")).group_count == 1
        await session.send(delivery=delivery(5, "new"))
        receipt = await session.receive("receipt")
        assert (list(receipt.delivery_ids), receipt.step) == ([4, 5], 9)

    async def restore(welcome: Any) -> None:
        restored.append(welcome.active_weight_version)
        lost.set()

    async with (
        ScriptedServer(first, second) as server,
        exchanging(server.address, restore=restore) as exchange,
    ):
        exchange.demand(3)
        trained, in_hand = await exchange.next_group(), await exchange.next_group()
        exchange.receipt([trained], 8)
        await lost.wait()
        new = await exchange.next_group()
        assert new.group_id == "new"
        exchange.receipt([in_hand, new], 9)
    assert epochs[1] > epochs[0]
    assert restored == [5]


async def test_a_server_that_refuses_to_be_brought_up_to_date_is_left_alone_for_a_while() -> None:
    tried: list[float] = []

    async def first(session: Session) -> None:
        await greet(session)

    async def there(session: Session) -> None:
        await greet(session)
        await session.receive("checkpoint")
        await session.receive("demand")
        await session.send(delivery=delivery(1, "a"))

    async def restore(welcome: Any) -> None:
        tried.append(asyncio.get_running_loop().time())
        if len(tried) < 4:
            raise ServerFull("DISK_FULL", 0.5 if len(tried) == 1 else 0.0)

    async with (
        ScriptedServer(first, first, first, first, there) as server,
        exchanging(server.address, restore=restore) as exchange,
    ):
        exchange.demand(1)
        assert (await exchange.next_group()).group_id == "a"
    pauses = [after - before for before, after in pairwise(tried)]
    # The pause is as long as the server asks, or grows with each attempt.
    assert pauses[0] >= 0.5 and pauses[1] >= 0.4 and pauses[2] >= 0.8


async def test_demand_waits_until_a_server_that_came_back_is_up_to_date() -> None:
    order: list[str] = []
    restoring, go_on = asyncio.Event(), asyncio.Event()

    async def first(session: Session) -> None:
        await greet(session)

    async def second(session: Session) -> None:
        await greet(session, active=0)
        assert (await session.receive("switch_weights")).weight_version == 5
        order.append("switched")
        await session.send(weight_receipt=WeightReceipt(weight_version=5, active_weight_version=5))
        await session.receive("checkpoint")
        assert (await session.receive("demand")).group_count == 4
        order.append("demanded")
        await session.send(delivery=delivery(1, "a"))

    async with ScriptedServer(first, second) as server:
        exchange: Exchange

        async def restore(welcome: Any) -> None:
            restoring.set()
            await go_on.wait()
            exchange.repeat_switch()

        async with exchanging(server.address, restore=restore) as exchange:
            await restoring.wait()
            exchange.demand(4)
            go_on.set()
            await exchange.next_group()
    assert order == ["switched", "demanded"]


async def test_a_refused_switch_fails_its_future() -> None:
    async def session(session: Session) -> None:
        await greet(session)
        await session.receive("switch_weights")
        rejection = Rejection(reason="WEIGHT_VERSION_NOT_STAGED", message="never saw it")
        await session.send(
            weight_receipt=WeightReceipt(
                weight_version=6, active_weight_version=5, rejection=rejection
            )
        )

    async with ScriptedServer(session) as server, exchanging(server.address) as exchange:
        with pytest.raises(WeightsRefused, match="stays at 5: WEIGHT_VERSION_NOT_STAGED"):
            await exchange.switch(6)


async def test_a_switch_whose_receipt_was_lost_succeeds_with_the_welcome() -> None:
    async def first(session: Session) -> None:
        await greet(session)
        await session.receive("switch_weights")

    async def second(session: Session) -> None:
        await greet(session, active=6)
        async for _ in session.requests:
            pass

    async with ScriptedServer(first, second) as server, exchanging(server.address) as exchange:
        receipt = await exchange.switch(6)
        assert receipt.pause_seconds == 0.0 and receipt.probe_difference is None


async def test_a_refused_group_is_named_and_not_taken_again() -> None:
    async def first(session: Session) -> None:
        await greet(session)
        await session.receive("demand")
        await session.send(delivery=delivery(1, "bad"))
        receipt = await session.receive("receipt")
        assert (receipt.step, receipt.rejection.reason) == (0, "ALL_FAILED")

    async def second(session: Session) -> None:
        await greet(session)
        await session.receive("checkpoint")
        await session.send(delivery=delivery(2, "bad", 1))
        assert (await session.receive("demand")).group_count == 1
        receipt = await session.receive("receipt")
        assert list(receipt.delivery_ids) == [2]
        assert (receipt.step, receipt.HasField("rejection")) == (0, True)
        await session.send(delivery=delivery(3, "good"))

    async with ScriptedServer(first, second) as server, exchanging(server.address) as exchange:
        exchange.demand(1)
        exchange.refuse(await exchange.next_group(), "ALL_FAILED", "nothing worked")
        assert (await exchange.next_group()).group_id == "good"


def test_no_refusal_makes_a_trained_group_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.trainer.exchange.known_groups.REMEMBERED_GROUPS", 2)
    known = KnownGroups({"t0": 1, "t1": 1, "t2": 2, "r0": 0, "r1": 0, "r2": 0})
    for number in range(3, 6):
        assert known.take(delivery(number, f"r{number}"))
        known.settle(f"r{number}", 0)
    names = ("t0", "t1", "t2", "r3", "r4", "r5")
    assert [known.take(delivery(9, name)) for name in names] == [
        True, False, False, True, False, False,
    ]  # fmt: skip
    answers = [known.answer(delivery(9, name), 1) for name in ("t1", "t2", "r5")]
    assert [answer and (answer.step, answer.rejection.reason) for answer in answers] == [
        (0, "TRAINED_BEFORE"),
        (2, ""),
        (0, "REFUSED_BEFORE"),
    ]


async def test_notices_are_logged_and_handed_on(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[str] = []
    noticed = asyncio.Event()

    async def session(session: Session) -> None:
        await greet(session)
        await session.send(notice=Notice(reason="GROUP_DROPPED", message="too old", group_id="g"))
        with contextlib.suppress(StopAsyncIteration):
            await anext(session.requests)

    def on_notice(notice: Any) -> None:
        seen.append(notice.group_id)
        noticed.set()

    listeners = Listeners(noticed=on_notice)
    async with ScriptedServer(session) as server, exchanging(server.address, listeners=listeners):
        await noticed.wait()
    assert seen == ["g"]
    assert "GROUP_DROPPED: too old" in caplog.text


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (grpc.StatusCode.ABORTED, "SESSION_REPLACED"),
        (grpc.StatusCode.FAILED_PRECONDITION, "STALE_EPOCH"),
        (grpc.StatusCode.INVALID_ARGUMENT, "FIELD_INVALID"),
        (grpc.StatusCode.PERMISSION_DENIED, "ROLE_NOT_ALLOWED"),
    ],
)
async def test_a_final_refusal_is_not_answered_with_another_attempt(
    code: grpc.StatusCode, reason: str
) -> None:
    async def session(session: Session) -> None:
        await session.receive("hello")
        await refuse(session.context, code, reason, "not you")

    async with ScriptedServer(session) as server:
        with pytest.raises(SessionRefused, match=f"{reason}: not you"):
            async with exchanging(server.address):
                pass


STALE = (grpc.StatusCode.FAILED_PRECONDITION, "STALE_EPOCH", "not you")
AHEAD = 2**62
"""An epoch from a clock that is far ahead."""


async def test_a_start_passes_the_epoch_of_a_clock_that_was_ahead_once() -> None:
    epochs: list[int] = []

    async def behind(session: Session) -> None:
        epochs.append((await session.receive("hello")).trainer_epoch)
        await refuse(session.context, *STALE, current=str(AHEAD))

    async def welcomed(session: Session) -> None:
        epochs.append((await greet(session)).trainer_epoch)

    async with ScriptedServer(behind, welcomed, behind) as server:
        # After a lost stream, another trainer has taken over. This one must not overtake it.
        with pytest.raises(SessionRefused, match="STALE_EPOCH"):
            async with exchanging(server.address):
                tasks = [t for t in asyncio.all_tasks() if t.get_name() == "exchange reader"]
                await asyncio.wait(tasks)
    assert epochs[0] < AHEAD
    assert epochs[1:] == [AHEAD + 1, AHEAD + 2]


async def test_a_start_that_is_passed_itself_gives_up() -> None:
    async def behind(session: Session) -> None:
        epoch = (await session.receive("hello")).trainer_epoch
        await refuse(session.context, *STALE, current=str(epoch + 1))

    async with ScriptedServer(behind, behind, behind) as server:
        with pytest.raises(SessionRefused, match="STALE_EPOCH"):
            async with exchanging(server.address):
                pass
        assert len(server._sessions) == 1


async def test_the_greatest_epoch_there_is_cannot_be_passed() -> None:
    async def last(session: Session) -> None:
        await session.receive("hello")
        await refuse(session.context, *STALE, current=str(2**63 - 1))

    async with ScriptedServer(last) as server:
        with pytest.raises(SessionRefused, match="STALE_EPOCH"):
            async with exchanging(server.address):
                pass


async def test_the_trainer_that_is_passed_is_replaced_for_good(harness: Harness) -> None:
    ahead = await hello(harness.wire, AHEAD)
    async with exchanging(harness.address) as exchange:
        assert exchange.trainer_epoch == AHEAD + 1
        assert await ahead.call.code() == grpc.StatusCode.ABORTED


async def test_a_replaced_session_ends_the_run() -> None:
    async def session(session: Session) -> None:
        await greet(session)
        await refuse(session.context, grpc.StatusCode.ABORTED, "SESSION_REPLACED", "newer")

    async with ScriptedServer(session) as server:
        with pytest.raises(SessionRefused, match="SESSION_REPLACED"):
            async with exchanging(server.address):
                # The reader ends, so that no caller waits for a group that cannot come.
                tasks = [t for t in asyncio.all_tasks() if t.get_name() == "exchange reader"]
                await asyncio.wait(tasks)


async def test_a_draining_server_is_tried_again_until_the_bound() -> None:
    async def session(session: Session) -> None:
        await session.receive("hello")
        await refuse(session.context, grpc.StatusCode.UNAVAILABLE, "DRAINING", "not now")

    async with ScriptedServer(*[session] * 20) as server:
        with pytest.raises(ServerGone, match=r"no server for 0\.7 s: DRAINING: not now"):
            async with exchanging(server.address, seconds=0.7):
                pass
        # The pauses between attempts grow.
        assert 2 <= 20 - len(server._sessions) <= 5


async def test_a_server_that_is_not_there_is_given_up() -> None:
    async with ScriptedServer() as server:
        port = server.port
    with pytest.raises(ServerGone, match=r"no server for 0\.3 s"):
        async with exchanging(f"127.0.0.1:{port}", seconds=0.3):
            pass


async def test_a_stop_ends_the_wait_for_the_first_connection() -> None:
    async with contextlib.AsyncExitStack() as stack:
        address, reached = await stack.enter_async_context(unanswering())
        channel = await stack.enter_async_context(
            grpc.aio.insecure_channel(address, options=client_options())
        )
        stopping = asyncio.Event()
        exchange = Exchange(
            channel,
            RunFacts(
                run_id="run",
                contract=Contract(max_lag=3, groups_per_step=2),
                in_flight=weights_pb2.IN_FLIGHT_POLICY_KEEP,
                weight_version=0,
                step=0,
            ),
            give_up_after_seconds=60.0,
            stopping=stopping,
        )
        opening = asyncio.create_task(exchange.open())
        await reached.wait()
        stopping.set()
        async with asyncio.timeout(20):
            assert await opening is None
        assert exchange.left.is_set()
        await exchange.close()


@pytest.mark.parametrize("asked_first", [True, False])
async def test_a_server_that_is_lost_is_left_where_the_run_is_to_stop(asked_first: bool) -> None:
    greeted = asyncio.Event()

    async def session(session: Session) -> None:
        await greet(session)
        greeted.set()
        await session.receive("never")

    stopping = asyncio.Event()
    async with (
        ScriptedServer(session) as server,
        exchanging(server.address, seconds=60.0, stopping=stopping) as exchange,
    ):
        await greeted.wait()
        if asked_first:
            stopping.set()
        await server.server.stop(0)
        stopping.set()
        async with asyncio.timeout(20):
            await exchange.left.wait()


async def test_a_server_that_is_not_up_to_date_yet_hears_nothing_after_a_stop() -> None:
    restoring, stopping, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
    heard: list[str] = []

    async def first(session: Session) -> None:
        await greet(session)
        await session.receive("demand")
        await session.send(delivery=delivery(1, "a"))

    async def second(session: Session) -> None:
        await greet(session)
        try:
            async for request in session.requests:
                heard.append(request.WhichOneof("message"))  # noqa: PERF401 - kept where cancelled
        finally:
            ended.set()

    async def restore(welcome: Any) -> None:
        restoring.set()
        await asyncio.Event().wait()

    async with ScriptedServer(first, second) as server:
        async with exchanging(server.address, restore=restore, stopping=stopping) as exchange:
            exchange.demand(1)
            group = await exchange.next_group()
            await restoring.wait()
            stopping.set()
            await exchange.left.wait()
            exchange.receipt([group], 8)
            exchange.checkpoint(8)
        await ended.wait()
    assert heard == []


async def test_a_stream_closed_while_the_server_was_away_closes_when_it_is_back() -> None:
    refused = asyncio.Event()
    heard: list[str] = []

    async def first(session: Session) -> None:
        await greet(session)

    async def second(session: Session) -> None:
        await session.receive("hello")
        asyncio.get_running_loop().call_later(0.05, refused.set)
        await refuse(session.context, grpc.StatusCode.UNAVAILABLE, "DRAINING", "not now")

    async def third(session: Session) -> None:
        await greet(session)
        heard.append(f"checkpoint {(await session.receive('checkpoint')).step}")
        async for _ in session.requests:
            pass
        heard.append("closed")

    async with (
        ScriptedServer(first, second, third) as server,
        exchanging(server.address) as exchange,
    ):
        await refused.wait()
        exchange.checkpoint(8)
    assert heard == ["checkpoint 8", "closed"]
