"""An event loop that stands still is noticed, with the place; one that waits is not."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time

import pytest

from penstock.common.loop_watch import LOG_SECONDS, STALL_SECONDS, LoopWatch


async def watched(work: object) -> tuple[LoopWatch, list[float]]:
    stalls: list[float] = []
    watch = LoopWatch("test", stalls.append)
    watch.start()
    await asyncio.sleep(0.05)
    await work  # type: ignore[misc]
    await asyncio.sleep(0.05)
    watch.stop()
    return watch, stalls


def blocks(seconds: float) -> None:
    time.sleep(seconds)


def computes(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@pytest.mark.parametrize("stand_still", [blocks, computes])
async def test_a_stall_is_measured_and_logged_with_its_place(
    stand_still: object, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        stand_still(LOG_SECONDS + 0.1)  # type: ignore[operator]

    watch, stalls = await watched(work())
    assert max(stalls) == watch.longest_seconds
    assert watch.longest_seconds > LOG_SECONDS
    (line,) = [r.getMessage() for r in caplog.records if "stood still" in r.getMessage()][:1]
    assert stand_still.__name__ in line and "test_loop_watch.py" in line  # type: ignore[attr-defined]


async def test_a_call_that_holds_the_lock_is_a_stall_too(caplog: pytest.LogCaptureFixture) -> None:
    """The watching thread cannot run meanwhile."""
    numbers = list(range(3_000_000))

    async def work() -> None:
        begun = time.thread_time()
        while time.thread_time() - begun < LOG_SECONDS + 0.1:
            # One call into C that takes long and keeps the lock.
            sorted(numbers, key=None, reverse=True)

    _, stalls = await watched(work())
    assert max(stalls) > STALL_SECONDS


async def test_a_place_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        for _ in range(3):
            blocks(LOG_SECONDS + 0.1)
            await asyncio.sleep(0.03)

    _, stalls = await watched(work())
    assert len([stall for stall in stalls if stall > LOG_SECONDS]) == 3
    assert len([r for r in caplog.records if "blocks" in r.getMessage()]) == 1


async def test_a_loop_that_waits_or_computes_elsewhere_does_not_stall() -> None:
    """Threads compute here, as a trainer's do; each takes the lock for its slice only."""

    async def work() -> None:
        data = bytes(1 << 20)
        for _ in range(20):
            await asyncio.to_thread(hashlib.sha256, data)
            await asyncio.sleep(0.01)

    watch, _ = await watched(work())
    assert watch.longest_seconds < LOG_SECONDS


async def test_nothing_is_logged_without_a_stall(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    await watched(asyncio.sleep(0.1))
    assert not [r for r in caplog.records if "stood still" in r.getMessage()]
