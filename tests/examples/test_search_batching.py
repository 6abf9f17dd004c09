"""The search example's request batching, and its replicas that come and go, without a network."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Sequence

import pytest
from research.batching import Batcher, Closed, Full, Limits
from research.replicas import BackOff, NoReplica, ReplicaFailed, Replicas

HOUR = 3600.0


class Doubler:
    """Doubles the requests of a batch, records the batches, and waits for its gate."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, requests: Sequence[int]) -> list[int]:
        self.batches.append(list(requests))
        assert self.gate.wait(20)
        if 13 in requests:
            raise ArithmeticError("unlucky")
        return [2 * request for request in requests]


async def test_a_full_batch_does_not_wait_for_its_window() -> None:
    compute = Doubler()
    batcher = Batcher(compute, Limits(window_seconds=HOUR, max_batch=4))
    answers = await asyncio.gather(*(batcher.submit(number) for number in range(8)))
    assert answers == [2 * number for number in range(8)]
    assert compute.batches == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert (batcher.batches, batcher.requests) == (2, 8)
    await batcher.close()


async def test_a_window_that_is_over_closes_a_batch() -> None:
    compute = Doubler()
    batcher = Batcher(compute, Limits(window_seconds=0.02, max_batch=100))
    answers = await asyncio.gather(*(batcher.submit(number) for number in range(3)))
    assert answers == [0, 2, 4] and compute.batches == [[0, 1, 2]]
    assert await batcher.submit(5) == 10
    assert compute.batches == [[0, 1, 2], [5]]
    await batcher.close()


async def test_an_error_reaches_its_batch_and_no_other() -> None:
    batcher = Batcher(Doubler(), Limits(window_seconds=HOUR, max_batch=2))
    answers = await asyncio.gather(
        *(batcher.submit(number) for number in (1, 13, 2, 3)), return_exceptions=True
    )
    assert [type(answer) for answer in answers] == [ArithmeticError, ArithmeticError, int, int]
    await batcher.close()


async def test_who_gave_up_is_not_computed_and_a_full_queue_refuses() -> None:
    compute = Doubler()
    compute.gate.clear()
    batcher = Batcher(compute, Limits(window_seconds=0.0, max_batch=1, max_waiting=2))
    first = asyncio.create_task(batcher.submit(1))
    while not compute.batches:
        await asyncio.sleep(0.001)
    waiting = [asyncio.create_task(batcher.submit(number)) for number in (2, 3)]
    await asyncio.sleep(0)
    with pytest.raises(Full):
        await batcher.submit(4)
    waiting[0].cancel()
    compute.gate.set()
    assert await first == 2 and await waiting[1] == 6
    assert compute.batches == [[1], [3]]
    closing = asyncio.create_task(batcher.close())
    await closing
    with pytest.raises(Closed):
        await batcher.submit(5)


async def test_close_answers_what_was_accepted() -> None:
    batcher = Batcher(Doubler(), Limits(window_seconds=HOUR, max_batch=100))
    asked = [asyncio.create_task(batcher.submit(number)) for number in range(3)]
    await asyncio.sleep(0)
    await batcher.close()
    assert await asyncio.gather(*asked) == [0, 2, 4]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


EXACT = BackOff(first_seconds=1.0, longest_seconds=8.0, jitter=0.0)


async def test_round_robin_takes_turns_and_least_outstanding_takes_the_idle() -> None:
    turns = Replicas(["http://a/", "http://b", "http://c"], "round_robin")
    assert [turns.choose().url for _ in range(4)] == [
        "http://a",
        "http://b",
        "http://c",
        "http://a",
    ]  # type: ignore[union-attr]
    least = Replicas(["a", "b", "c"], "least_outstanding")
    gate = asyncio.Event()
    asked: list[str] = []

    async def ask(url: str) -> str:
        asked.append(url)
        await gate.wait()
        return url

    calls = [asyncio.create_task(least.call(ask)) for _ in range(6)]
    while len(asked) < 6:
        await asyncio.sleep(0)
    assert Counter(asked) == {"a": 2, "b": 2, "c": 2}
    gate.set()
    await asyncio.gather(*calls)
    assert [replica.outstanding for replica in least.replicas] == [0, 0, 0]
    with pytest.raises(ValueError, match="replica"):
        Replicas([])


async def test_a_failing_replica_backs_off_twice_as_long_and_is_tried_once() -> None:
    clock = Clock()
    replicas = Replicas(["bad", "good"], "round_robin", EXACT, clock=clock)
    asked: list[str] = []
    broken = True

    async def ask(url: str) -> str:
        asked.append(url)
        if url == "bad" and broken:
            raise ReplicaFailed("told to")
        return url

    away: list[float] = []
    for _ in range(5):
        assert await replicas.call(ask) == "good"
        # While a replica is away, calls skip it.
        assert await replicas.call(ask) == "good"
        away.append(replicas.replicas[0].away_until - clock.now)
        clock.now = replicas.replicas[0].away_until
    assert away == [1.0, 2.0, 4.0, 8.0, 8.0]
    assert Counter(asked) == {"bad": 5, "good": 10}
    broken = False
    assert {await replicas.call(ask), await replicas.call(ask)} == {"bad", "good"}
    assert replicas.replicas[0].failures == 0


async def test_one_call_at_a_time_tries_a_replica_that_failed() -> None:
    clock = Clock()
    replicas = Replicas(["bad", "good"], "least_outstanding", EXACT, clock=clock)
    gate = asyncio.Event()
    asked: list[str] = []

    async def ask(url: str) -> str:
        asked.append(url)
        if len(asked) == 1:
            raise ReplicaFailed("told to")
        await gate.wait()
        return url

    first = asyncio.create_task(replicas.call(ask))
    await asyncio.sleep(0)
    clock.now += 1.0
    calls = [asyncio.create_task(replicas.call(ask)) for _ in range(9)]
    while len(asked) < 11:
        await asyncio.sleep(0)
    assert Counter(asked[1:]) == {"bad": 1, "good": 9}
    gate.set()
    await asyncio.gather(first, *calls)


async def test_a_trial_that_takes_long_holds_up_no_replica_whose_time_is_over() -> None:
    replicas = Replicas(["hangs", "good"], "round_robin", BackOff(first_seconds=0.05, jitter=0.0))
    hangs, good = replicas.replicas
    hangs.failures = 1
    gate = asyncio.Event()

    async def ask(url: str) -> str:
        if url == "hangs":
            await gate.wait()
        return url

    trial = asyncio.create_task(replicas.call(ask))
    await asyncio.sleep(0)
    good.failures, good.away_until = 1, time.monotonic() + 0.1
    async with asyncio.timeout(10):
        assert await replicas.call(ask) == "good"
    gate.set()
    assert await trial == "hangs"


async def test_where_all_fail_the_patience_ends_it_and_says_why() -> None:
    replicas = Replicas(
        ["a", "b"], back_off=BackOff(first_seconds=0.01, longest_seconds=0.02), patience_seconds=0.2
    )
    asked: list[str] = []

    async def ask(url: str) -> str:
        asked.append(url)
        raise ReplicaFailed("HTTP 500")

    with pytest.raises(NoReplica, match="HTTP 500"):
        await replicas.call(ask)
    assert min(Counter(asked).values()) >= 2
    assert [replica.outstanding for replica in replicas.replicas] == [0, 0]


async def test_what_is_no_fault_of_a_replica_is_not_tried_again() -> None:
    replicas = Replicas(["a", "b"])
    asked: list[str] = []

    async def ask(url: str) -> str:
        asked.append(url)
        raise ValueError("a bad request")

    with pytest.raises(ValueError, match="a bad request"):
        await replicas.call(ask)
    assert asked == ["a"] and replicas.replicas[0].failures == 0
