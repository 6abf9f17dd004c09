"""Weights into the servers' hands: staged, switched to, and once more where the switch is rejected.

Each server is handed a version by itself, all at the same time; the whole is done once each of them is:

    upload to each -> every one has it STAGED -> SwitchWeights to each -> a receipt: it samples the version
                                                                       -> a rejection: uploaded there once
                                                                            more, whole, and asked again

A version is asked for only when every server has it staged. One that was restarted since has it no more,
and says so by its rejection. One that has no room for a version is awaited, unless the run is to stop: it
is left then, as one that is away is. Whoever waits for a server here waits over its restarts, until its
exchange gives it up, which ends the run, or the run stops without it (`Exchanges.left`), which brings None.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from penstock.trainer.core.errors import ServerFull, ServerLost, SwitchRejected, WeightsRefused
from penstock.trainer.core.stopping import unless
from penstock.trainer.core.together import together
from penstock.trainer.exchange.stream import SwitchReceipt
from penstock.trainer.exchange.streams import Exchanges
from penstock.trainer.weights.publisher import Publisher
from penstock.trainer.weights.sender import Announcement, Sent, largest, merge
from penstock.v1 import weights_pb2
from penstock.wire.reasons import Reason

log = logging.getLogger(__name__)
T = TypeVar("T")

RETRY_SECONDS = 0.5
LONGEST_RETRY_SECONDS = 5.0
# The server has lost what was staged, or the engine did not take it, or does not compute with it: the
# version may still be good.
SENT_AGAIN = (
    Reason.WEIGHT_VERSION_NOT_STAGED,
    Reason.WEIGHT_LOAD_FAILED,
    Reason.PROBE_MISMATCH,
    Reason.WEIGHTS_INCONSISTENT,
)

Switches = Mapping[int, Awaitable[SwitchReceipt]]
"""The answers to a switch, by server."""


@dataclass(frozen=True, slots=True)
class Switched:
    """The servers sample a version."""

    receipt: SwitchReceipt
    """Of all of them: the longest pause, the largest difference, the time of the last."""
    sent_again: Sent | None = None
    """What sending it once more took, where the first switch was rejected."""


class Handover:
    """Stages versions and sees their switches through."""

    def __init__(
        self,
        exchanges: Exchanges,
        publisher: Publisher,
        in_flight: weights_pb2.InFlightPolicy.ValueType,
    ) -> None:
        self._exchanges = exchanges
        self._publisher = publisher
        self._in_flight = in_flight

    @property
    def servers(self) -> range:
        """All of them."""
        return range(len(self._exchanges.servers))

    @property
    def announcements(self) -> list[Announcement]:
        """What an upload that begins now says of itself, to each server."""
        return [Announcement(e.trainer_epoch, self._in_flight) for e in self._exchanges.servers]

    async def upload(self, server: int, weight_version: int) -> Sent | None:
        """One attempt; see `Sender.upload`."""
        exchange = self._exchanges.servers[server]
        return await self._publisher.senders[server].upload(
            weight_version,
            trainer_epoch=lambda: exchange.trainer_epoch,
            in_flight=self._in_flight,
        )

    async def stage(self, weight_version: int, servers: Sequence[int] | None = None) -> Sent | None:
        """Until these servers, or all, have the version that the payload holds."""
        sent = await together(
            self.ask(server, lambda server=server: self.upload(server, weight_version))
            for server in (self.servers if servers is None else servers)
        )
        took = [one for one in sent if one is not None]
        return merge(took) if took and len(took) == len(sent) else None

    async def confirm(self, weight_version: int, switches: Switches) -> Switched | None:
        """Waits for the answers to a switch. One that is rejected is asked for once more.

        Raises SwitchRejected, and WeightsRefused the second time.
        """
        answers = await together(
            self._confirm(server, weight_version, switch) for server, switch in switches.items()
        )
        switched = [one for one in answers if one is not None]
        if not switched or len(switched) < len(answers):
            return None
        receipts = [one.receipt for one in switched]
        again = [one.sent_again for one in switched if one.sent_again is not None]
        receipt = SwitchReceipt(
            weight_version,
            max(one.pause_seconds for one in receipts),
            largest(one.probe_difference for one in receipts),
            max(one.received_at for one in receipts),
        )
        return Switched(receipt, merge(again) if again else None)

    async def _confirm(
        self, server: int, weight_version: int, switch: Awaitable[SwitchReceipt]
    ) -> Switched | None:
        sender, sent_again = self._publisher.senders[server], None
        try:
            receipt = await self.answer(switch)
        except SwitchRejected as error:
            if error.reason not in SENT_AGAIN:
                raise
            log.warning("%s; sending it once more, whole", error)
            sender.forget_base()
            sent_again = await self.stage(weight_version, (server,))
            if sent_again is None:
                return None
            receipt = await self._last_chance(server, weight_version)
        if receipt is None:
            return None
        sender.switched(weight_version)
        return Switched(receipt, sent_again)

    async def _last_chance(self, server: int, weight_version: int) -> SwitchReceipt | None:
        try:
            return await self.answer(self._exchanges.servers[server].switch(weight_version))
        except SwitchRejected as error:
            raise WeightsRefused(
                f"version {weight_version} was sent whole and rejected again: "
                f"{error.reason}: {error.message}"
            ) from error

    async def answer(self, wait: Awaitable[T]) -> T | None:
        """What a server answers."""
        return await unless(self._exchanges.left, wait)

    async def all_restored(self) -> None:
        """Until every server that came back with less samples what it was given again."""
        await together(self.answer(one.restored.wait()) for one in self._exchanges.servers)

    async def ask(self, server: int, attempt: Callable[[], Awaitable[T]]) -> T | None:
        """Until it succeeds; each time this server is ready first. Where the run is to stop, a server that
        has no room for it is left."""
        exchange = self._exchanges.servers[server]
        trying = keep_trying(exchange.ready, attempt, stopping=exchange.stopping)
        try:
            return await self.answer(trying)
        except ServerFull as error:
            log.warning("%s; stopping without it", error)
            exchange.leave()
            return None

    async def ask_all(self, attempt: Callable[[int], Awaitable[T]]) -> list[T | None]:
        """The same of every server, at the same time."""
        return await together(
            self.ask(server, lambda server=server: attempt(server)) for server in self.servers
        )


async def keep_trying(
    ready: Callable[[], Awaitable[None]],
    attempt: Callable[[], Awaitable[T]],
    *,
    full_seconds: float = math.inf,
    stopping: asyncio.Event | None = None,
) -> T:
    """Until it succeeds; each time the server is `ready` first. One that is full is left alone for as long
    as it asks.

    Raises ServerFull where it is still full after `full_seconds` of waiting for room, since it was last
    away, and where it is full although the run is `stopping`.
    """
    pause, left = RETRY_SECONDS, full_seconds
    while True:
        await ready()
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
            # What was full may have room when it is back.
            left = full_seconds
        if stopping is None or stopping.is_set():
            await asyncio.sleep(wait)
        else:
            # Asked to stop meanwhile, it has one more attempt.
            await unless(stopping, asyncio.sleep(wait))
        pause = min(2 * pause, LONGEST_RETRY_SECONDS)
