"""Says why the trainer waits: what its servers report, once a wait lasts, and then at intervals."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Sequence

import grpc

from penstock.v1 import rollout_service_pb2
from penstock.wire import methods
from penstock.wire.failure import read_failure, why_unreachable
from penstock.wire.words import ORDINARY, wait_in_words

log = logging.getLogger(__name__)

FIRST_SECONDS = 30.0
LONGEST_SECONDS = 600.0
"""The time between two reports doubles up to this."""
ANSWER_SECONDS = 5.0


@contextlib.asynccontextmanager
async def saying(
    what: str, servers: Sequence[tuple[str, grpc.aio.Channel]]
) -> AsyncGenerator[None]:
    """If the body takes long, logs that it waits for `what`, and what each server reports about it."""
    reporter = asyncio.create_task(_report(what, servers))
    try:
        yield
    finally:
        reporter.cancel()
        await asyncio.gather(reporter, return_exceptions=True)


async def _report(what: str, servers: Sequence[tuple[str, grpc.aio.Channel]]) -> None:
    since, pause = time.monotonic(), FIRST_SECONDS
    while True:
        await asyncio.sleep(pause)
        answers = await asyncio.gather(*(_ask(address, channel) for address, channel in servers))
        ordinary = all(is_ordinary for is_ordinary, _ in answers)
        log.log(
            logging.INFO if ordinary else logging.WARNING,
            "waiting for %s for %.0f s; %s",
            *(what, time.monotonic() - since, "; ".join(words for _, words in answers)),
        )
        pause = min(2 * pause, LONGEST_SECONDS)


async def _ask(address: str, channel: grpc.aio.Channel) -> tuple[bool, str]:
    """Whether nothing is wrong there, and the cause of the wait in words."""
    call = methods.unary(channel, rollout_service_pb2.GetServerInfoResponse)
    try:
        info = await call(rollout_service_pb2.GetServerInfoRequest(), timeout=ANSWER_SECONDS)
    except grpc.aio.AioRpcError as error:
        cause = await why_unreachable(channel) or read_failure(error).message
        return False, f"no answer from the server at {address}: {cause}"
    if not info.waits:
        return True, f"the server at {address} reports nothing to wait for"
    first = info.waits[0]
    return first.cause in ORDINARY, f"{address}: {wait_in_words(first)}"
