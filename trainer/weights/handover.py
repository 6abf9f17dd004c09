"""Stages weight versions on the servers and sees their switches through, with one retry per
rejection.

All servers get a version concurrently and independently; a stage is complete once every server is
done:

    upload to each -> every one has it STAGED -> SwitchWeights to each -> a receipt: it samples the version
                                                                       -> a rejection: uploaded to it once
                                                                            more, whole, and asked again

A switch is requested only once every server has the version staged. A server that has restarted
since then has lost the staged version, and rejects the switch. If a server has no room for a
version, the trainer waits for room. If the run is to stop, it abandons that server instead, as it
abandons an unreachable one.

Every wait here lasts across the server's restarts. It ends in one of two other ways. The exchange
may give the server up, which ends the run. Or the run stops without the server (`Exchanges.left`),
and the wait returns None.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from penstock.trainer.core.aio import together, unless
from penstock.trainer.core.errors import ServerFull, ServerLost, SwitchRejected, WeightsRefused
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
# Rejections after which the version may still be good: the server has lost what was staged, or the
# engine did not load it, or its results are off.
SENT_AGAIN = (
    Reason.WEIGHT_VERSION_NOT_STAGED,
    Reason.WEIGHT_LOAD_FAILED,
    Reason.PROBE_MISMATCH,
    Reason.WEIGHTS_INCONSISTENT,
)

Switches = Mapping[int, Awaitable[SwitchReceipt]]
"""Pending answers to a switch, by server."""


@dataclass(frozen=True, slots=True)
class Switched:
    """A completed switch: every server samples the version."""

    receipt: SwitchReceipt
    """Merged over all servers: longest pause, largest difference, time of the last answer."""
    sent_again: Sent | None = None
    """Cost of the second upload, if a first switch was rejected."""


class Handover:
    """Stages versions and confirms their switches."""

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
        """Indices of all servers."""
        return range(len(self._exchanges.servers))

    @property
    def announcements(self) -> list[Announcement]:
        """Header fields, one per server, for an upload that begins now."""
        return [Announcement(e.trainer_epoch, self._in_flight) for e in self._exchanges.servers]

    async def upload(self, server: int, weight_version: int) -> Sent | None:
        """Attempt the upload once; see `Sender.upload`."""
        exchange = self._exchanges.servers[server]
        return await self._publisher.senders[server].upload(
            weight_version,
            trainer_epoch=lambda: exchange.trainer_epoch,
            in_flight=self._in_flight,
        )

    async def stage(self, weight_version: int, servers: Sequence[int] | None = None) -> Sent | None:
        """Stage the payload's version on these servers, or on all. None if one was abandoned."""
        sent = await together(
            self.ask(server, lambda server=server: self.upload(server, weight_version))
            for server in (self.servers if servers is None else servers)
        )
        took = [one for one in sent if one is not None]
        return merge(took) if took and len(took) == len(sent) else None

    async def confirm(self, weight_version: int, switches: Switches) -> Switched | None:
        """Wait for the answers to a switch. After a rejection, upload the version and ask once
        more.

        Raises SwitchRejected for a rejection that a second upload cannot help, and WeightsRefused
        if the second switch is rejected too. Returns None if a server was abandoned.
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
        """Wait for a server's answer; None once the run stops without the server."""
        return await unless(self._exchanges.left, wait)

    async def all_restored(self) -> None:
        """Wait until every server that came back without its state samples its version again."""
        await together(self.answer(one.restored.wait()) for one in self._exchanges.servers)

    async def ask(self, server: int, attempt: Callable[[], Awaitable[T]]) -> T | None:
        """Retry until it succeeds, waiting for the server to be ready before each attempt.

        If the run is to stop, a server without room is abandoned.
        """
        exchange = self._exchanges.servers[server]
        trying = keep_trying(exchange.ready, attempt, stopping=exchange.stopping)
        try:
            return await self.answer(trying)
        except ServerFull as error:
            log.warning("%s; stopping without it", error)
            exchange.leave()
            return None

    async def ask_all(self, attempt: Callable[[int], Awaitable[T]]) -> list[T | None]:
        """Call `ask` for every server concurrently."""
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
    """Retry `attempt` until it succeeds, awaiting `ready` before each try.

    A full server is left alone for as long as it asks. Raises ServerFull if the server is full
    although the run is `stopping`. Also raises it if the server is still full after `full_seconds`
    of waiting for room. That time starts again whenever the server was unreachable.
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
            # A server that was full may have room when it is back.
            left = full_seconds
        if stopping is None or stopping.is_set():
            await asyncio.sleep(wait)
        else:
            # If the run is asked to stop during the wait, there is one more attempt.
            await unless(stopping, asyncio.sleep(wait))
        pause = min(2 * pause, LONGEST_RETRY_SECONDS)
