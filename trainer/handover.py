"""Weights into the server's hands: staged, switched to, and once more where the switch is rejected.

Whoever waits for the server here waits over its restarts, until the exchange gives it up, which ends the
run, or the run stops without it (`Exchange.left`), which brings None.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from penstock.trainer.errors import ServerLost, SwitchRejected, WeightsRefused
from penstock.trainer.exchange import Exchange, SwitchReceipt
from penstock.trainer.publisher import Announcement, Publisher, Sent
from penstock.trainer.stopping import unless
from penstock.v1 import weights_pb2
from penstock.wire.reasons import Reason

log = logging.getLogger(__name__)
T = TypeVar("T")

RETRY_SECONDS = 0.5
LONGEST_RETRY_SECONDS = 5.0
# The engine did not take, or does not compute with, what was staged: the version may still be good.
SENT_AGAIN = (Reason.WEIGHT_LOAD_FAILED, Reason.PROBE_MISMATCH, Reason.WEIGHTS_INCONSISTENT)


@dataclass(frozen=True, slots=True)
class Switched:
    """The server samples a version."""

    receipt: SwitchReceipt
    sent_again: Sent | None = None
    """What sending it once more took, where the first switch was rejected."""


class Handover:
    """Stages versions and sees their switches through."""

    def __init__(
        self,
        exchange: Exchange,
        publisher: Publisher,
        in_flight: weights_pb2.InFlightPolicy.ValueType,
    ) -> None:
        self._exchange = exchange
        self._publisher = publisher
        self._in_flight = in_flight

    @property
    def announcement(self) -> Announcement:
        """What an upload that begins now says of itself."""
        return Announcement(self._exchange.trainer_epoch, self._in_flight)

    async def upload(self, weight_version: int) -> Sent | None:
        """One attempt; see `Publisher.upload`."""
        return await self._publisher.upload(
            weight_version,
            trainer_epoch=lambda: self._exchange.trainer_epoch,
            in_flight=self._in_flight,
        )

    async def stage(self, weight_version: int) -> Sent | None:
        """Until the server has the version that the payload holds."""
        return await self.retry(lambda: self.upload(weight_version))

    async def confirm(
        self, weight_version: int, switch: Awaitable[SwitchReceipt]
    ) -> Switched | None:
        """Waits for the answer to a switch. One that is rejected is asked for once more.

        Raises SwitchRejected, and WeightsRefused the second time.
        """
        sent_again = None
        try:
            receipt = await self.answer(switch)
        except SwitchRejected as error:
            if error.reason not in SENT_AGAIN:
                raise
            log.warning("%s; sending it once more, whole", error)
            self._publisher.forget_base()
            sent_again = await self.stage(weight_version)
            if sent_again is None:
                return None
            receipt = await self._last_chance(weight_version)
        if receipt is None:
            return None
        self._publisher.switched(weight_version)
        return Switched(receipt, sent_again)

    async def _last_chance(self, weight_version: int) -> SwitchReceipt | None:
        try:
            return await self.answer(self._exchange.switch(weight_version))
        except SwitchRejected as error:
            raise WeightsRefused(
                f"version {weight_version} was sent whole and rejected again: "
                f"{error.reason}: {error.message}"
            ) from error

    async def answer(self, wait: Awaitable[T]) -> T | None:
        """What the server answers."""
        return await unless(self._exchange.left, wait)

    async def retry(self, attempt: Callable[[], Awaitable[T]]) -> T | None:
        """Until it succeeds."""
        return await self.answer(keep_trying(self._exchange.ready, attempt))


async def keep_trying(
    ready: Callable[[], Awaitable[None]], attempt: Callable[[], Awaitable[T]]
) -> T:
    """Until it succeeds; each time the server is `ready` first."""
    pause = RETRY_SECONDS
    while True:
        await ready()
        try:
            return await attempt()
        except ServerLost as error:
            log.warning("%s; trying again", error)
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_RETRY_SECONDS)
