"""Retries a call to a server over its restarts and while it is full."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from typing import TypeVar

from penstock.trainer.core.aio import unless
from penstock.trainer.core.errors import ServerFull, ServerLost

log = logging.getLogger(__name__)
T = TypeVar("T")

RETRY_SECONDS = 0.5
LONGEST_RETRY_SECONDS = 5.0


async def keep_trying(
    ready: asyncio.Event,
    attempt: Callable[[], Awaitable[T]],
    *,
    full_seconds: float = math.inf,
    stopping: asyncio.Event | None = None,
) -> T:
    """Retry `attempt` until it succeeds, waiting for `ready` before each try.

    A full server is left alone for as long as it asks. Raises ServerFull if the server is full although
    the run is `stopping`, or after `full_seconds` of waiting for room. That time starts again whenever the
    server was unreachable.
    """
    pause, left = RETRY_SECONDS, full_seconds
    while True:
        await ready.wait()
        try:
            return await attempt()
        except ServerFull as error:
            if left <= 0 or (stopping is not None and stopping.is_set()):
                raise
            log.warning("%s; trying again", error)
            wait = min(max(pause, error.retry_after_seconds), left)
            left -= wait
        except ServerLost as error:
            log.warning("%s; trying again", error)
            wait = max(pause, error.retry_after_seconds)
            # A server that was full may have room when it is back.
            left = full_seconds
        if stopping is None or stopping.is_set():
            await asyncio.sleep(wait)
        else:
            # If the run is asked to stop during the wait, there is one more attempt.
            await unless(stopping, asyncio.sleep(wait))
        pause = min(2 * pause, LONGEST_RETRY_SECONDS)
