"""Sends weight versions to one server, and sees their switches through.

    upload -> the server has it STAGED -> SwitchWeights -> a receipt: the server samples the version
                                                        -> a rejection: uploaded once more, whole, and
                                                             asked again

Every wait for the server lasts across its restarts (`Exchange.ask`). It ends in one of two other ways. The
exchange may give the server up, which ends the run. Or the run stops without the server (`Exchange.left`),
and the wait returns None. If the server has no room for a version, the trainer waits for room. If the run
is to stop, it abandons that server instead, as it abandons an unreachable one.

If the transport allows it, and the header needs nothing that is not known yet, an upload begins ahead: it
starts before the payload is filled. The server then verifies the weights while the rest is copied, and
`upload` only commits. If an upload that began ahead fails for any reason, the version is sent again like
any other.

If differences are enabled, these versions are still sent whole:

    - the first, and every `anchor_every`-th
    - the next one after `forget_base`, which is called after a lost server or a rejected switch
    - one whose difference the server refuses: it has another base, or the result fails verification
    - all of them, if memory does not suffice for two copies, or the server keeps no base
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Literal

import grpc

from penstock.trainer.core.errors import (
    ServerFull,
    ServerLost,
    SessionRefused,
    SwitchRejected,
    WeightsRefused,
)
from penstock.trainer.exchange.connection import GREATEST_EPOCH
from penstock.trainer.exchange.stream import Exchange, SwitchReceipt
from penstock.trainer.policy.adapter import check_taken
from penstock.trainer.weights.base import Base
from penstock.trainer.weights.catching_up import newest_version
from penstock.trainer.weights.copy import Parcel, WeightCopy, whole
from penstock.trainer.weights.payload import Payload
from penstock.trainer.weights.sent import Sent, Switched
from penstock.trainer.weights.transports import SharedMemory, Stream, Transport
from penstock.v1 import rollout_service_pb2, trainer_service_pb2, weights_pb2
from penstock.wire import methods
from penstock.wire.differences import NOT_THE_DIFFERENCE
from penstock.wire.failure import NO_ANSWER, Failure, read_failure
from penstock.wire.reasons import Reason
from penstock.wire.upload import Filling, NotStaged

log = logging.getLogger(__name__)

Delta = Literal["auto", "on", "off"]
"""Whether differences are sent; "auto" leaves it to the transport."""

INFO_TIMEOUT_SECONDS = 30.0
# Transient refusals: a broken upload that the server has not noticed yet, a flipped bit, an epoch
# that the server does not know yet because the exchange is reconnecting.
PASSING = (Reason.UPLOAD_IN_PROGRESS, Reason.CHECKSUM_MISMATCH, Reason.TRAINER_CONNECTED)
# Rejections after which the version may still be good: the server has lost what was staged, or the
# engine did not load it, or its results are off.
SENT_AGAIN = (
    Reason.WEIGHT_VERSION_NOT_STAGED,
    Reason.WEIGHT_LOAD_FAILED,
    Reason.PROBE_MISMATCH,
    Reason.WEIGHTS_INCONSISTENT,
)
ATTEMPTS = 5
FIRST_PAUSE_SECONDS = 0.2


@dataclass(eq=False, repr=False)
class Sender:
    channel: grpc.aio.Channel
    """Nothing else may use it."""
    copy: WeightCopy
    exchange: Exchange
    transports: Sequence[Transport] = ()
    """Starts with the first; moves to the next if the server cannot read from it. The default is shared
    memory, then the stream over `channel`."""
    delta: Delta = "auto"
    anchor_every: int = 50
    adapter: weights_pb2.LoraAdapter | None = None
    """If given, it is uploaded instead of the model, always whole."""

    def __post_init__(self) -> None:
        self.transports = self.transports or (SharedMemory(self.channel), Stream(self.channel))
        self._place = 0
        self._base = Base(self.anchor_every)
        self._ahead: Filling | None = None
        self.inherited = 0
        """The newest version that the server has from the previous trainer; zero once this trainer has
        reached it, or if there is none."""
        self.lock = asyncio.Lock()
        """Held during an upload and while the copy changes."""

    @property
    def has_base(self) -> bool:
        """Whether the server holds the base of the copy's differences."""
        base = self.copy.base
        return base is not None and base.weight_version == self._base.version

    @property
    def sends_deltas(self) -> bool:
        """Whether the next version can be a difference, once the server has a base."""
        filled = self.copy.filled
        if (
            self.adapter is not None
            or not self._base.may_exist
            or not self.copy.has_room_for_two
            or (filled is not None and not filled.can_differ)
        ):
            return False
        return self.delta == "on" or (self.delta == "auto" and self._transport.prefers_deltas)

    @property
    def next_in_chunks(self) -> bool:
        """Whether the next version will, as far as is known, be sent whole and in chunks."""
        return self._transport.sends_chunks and not self._may_differ()

    @property
    def _transport(self) -> Transport:
        return self.transports[self._place]

    @property
    def _bytes_sent(self) -> int:
        return sum(transport.bytes_sent for transport in self.transports)

    def check_adapter(self, info: rollout_service_pb2.GetServerInfoResponse) -> None:
        """Raises ConfigInvalid if the server does not take this run's adapter."""
        if self.adapter is not None:
            check_taken(self.adapter, info.lora.max_rank if info.HasField("lora") else None)

    async def server_info(self) -> rollout_service_pb2.GetServerInfoResponse:
        """Raises ServerLost, or WeightsRefused."""
        call = methods.unary(self.channel, rollout_service_pb2.GetServerInfoResponse)
        request = rollout_service_pb2.GetServerInfoRequest()
        try:
            return await call(request, timeout=INFO_TIMEOUT_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise _lost_or(error, "GetServerInfo") from error

    def begin_ahead(self, payload: Payload) -> None:
        """Begin the upload of what is about to be filled, if possible."""
        if self.has_base or self.copy.probe_is_chosen:
            # The header needs the probe's score, and waiting for that costs more than is gained.
            return
        self._ahead = self._transport.begin(self._header(self.copy.version, 0), payload)

    def leave_ahead(self) -> None:
        """The server forgets an upload that began ahead."""
        if self._ahead is not None:
            self._ahead.cancel()
            self._ahead = None

    async def stage(self, weight_version: int) -> Sent | None:
        """Call `upload` until it succeeds. Returns None too if the run stops without the server."""
        return await self.exchange.ask(lambda: self.upload(weight_version))

    async def upload(self, weight_version: int) -> Sent | None:
        """Returns once the server has the version staged, and None if the payload holds a newer one by now.
        Raises ServerLost if the server is unreachable, WeightsRefused if it refuses."""
        async with self.lock:
            if self.copy.version != weight_version:
                return None
            try:
                return await self._commit_ahead() or await self._upload()
            except grpc.aio.AioRpcError as error:
                raise _lost_or(error, f"version {weight_version}") from error
            except NotStaged as error:
                raise WeightsRefused(str(error)) from error

    def switch(self, weight_version: int) -> asyncio.Future[SwitchReceipt] | None:
        """Request a version, which the trainer holds as of this call. None if the server is past it."""
        if weight_version < self.inherited:
            self.exchange.held_version = weight_version
            return None
        self.inherited = 0
        return self.exchange.switch(weight_version)

    async def confirm(
        self, weight_version: int, switch: Awaitable[SwitchReceipt]
    ) -> Switched | None:
        """Wait for the answer to a switch. After a rejection, upload the version and ask once more.

        Raises SwitchRejected for a rejection that a second upload cannot help, and WeightsRefused if the
        second switch is rejected too. Returns None if the run stops without the server."""
        sent_again = None
        try:
            receipt = await self.exchange.answer(switch)
        except SwitchRejected as error:
            if error.reason not in SENT_AGAIN:
                raise
            log.warning("%s; sending it once more, whole", error)
            self.forget_base()
            sent_again = await self.stage(weight_version)
            if sent_again is None:
                return None
            try:
                receipt = await self.exchange.answer(self.exchange.switch(weight_version))
            except SwitchRejected as again:
                raise WeightsRefused(
                    f"version {weight_version} was sent whole and rejected again: "
                    f"{again.reason}: {again.message}"
                ) from again
        if receipt is None:
            return None
        self.switched(weight_version)
        return Switched(receipt, sent_again)

    async def restore(self, welcome: trainer_service_pb2.Welcome) -> bool:
        """Bring the server up to date, which came back with less state. Returns False if the payload is
        already newer than what the trainer holds; the next switch then does it.

        Raises ServerLost, and SessionRefused if the server samples what no trainer published."""
        exchange, held = self.exchange, self.exchange.held_version
        active, filled = welcome.active_weight_version, self.copy.version
        # With a transport that switches on upload, the server may sample a version whose answer was lost.
        if active > max(held, self.inherited, filled):
            raise SessionRefused(
                f"the server samples version {active}, which this trainer never published"
            )
        if self.inherited:
            # The server may have lost versions, which it can be given again.
            self.inherited = newest_version(await self.server_info())
        if active >= held:
            return True
        # The server has lost the base of delta uploads.
        self.forget_base()
        if self.copy.version != held:
            return False
        log.warning(
            "the server came back with version %d; publishing version %d again", active, held
        )
        exchange.restored.clear()
        if await self.upload(held) is None:
            exchange.restored.set()
            return False
        exchange.repeat_switch()
        return True

    async def restored(self) -> None:
        """Wait until a server that came back without its state samples its version again."""
        await self.exchange.answer(self.exchange.restored.wait())

    @property
    def is_restored(self) -> bool:
        """Whether `restored` would not wait."""
        return self.exchange.restored.is_set() or self.exchange.left.is_set()

    def switched(self, weight_version: int) -> None:
        """The server samples this version; the next one can be a difference from it."""
        if self.copy.filled is not None and weight_version == self.copy.version:
            self.forget_base()
            if self.sends_deltas:
                self.copy.become_base()
                self._base.version = weight_version
        self._transport.switched(weight_version)

    def forget_base(self) -> None:
        """Assume nothing about the server's base: the next version is sent whole."""
        self._base.version = None

    def close(self) -> None:
        self.leave_ahead()
        for transport in self.transports:
            transport.close()

    def _may_differ(self) -> bool:
        return self.has_base and not self._base.anchor_is_due

    async def _commit_ahead(self) -> Sent | None:
        """Commit an upload that began ahead; None if there was none or it failed."""
        ahead, self._ahead = self._ahead, None
        payload, version = self.copy.filled, self.copy.version
        if ahead is None or payload is None:
            return None
        try:
            answer = await ahead.commit(payload.checksums)
        except (grpc.aio.AioRpcError, NotStaged) as error:
            log.info(
                "version %d: the upload that began while it was filled failed; sending it again: %s",
                version,
                error.details() if isinstance(error, grpc.aio.AioRpcError) else error,
            )
            return None
        finally:
            ahead.cancel()
        self._transport.count(payload.length_bytes)
        self._base.sent(delta=False)
        return Sent.of(whole(payload, version), payload.length_bytes, answer)

    async def _upload(self) -> Sent:
        parcel = await self.copy.pack(as_difference=self._may_differ())
        before = self._bytes_sent
        answer: weights_pb2.UpdateWeightsResponse | None = None
        for attempt in range(ATTEMPTS):
            header = self._header(parcel.weight_version, parcel.base_weight_version)
            try:
                answer = await self._transport.send(header, parcel)
                break
            except NotStaged:
                # The server received an incomplete upload; a flipped bit can look like this.
                if attempt + 1 == ATTEMPTS:
                    raise
                await asyncio.sleep(FIRST_PAUSE_SECONDS * 2**attempt)
            except grpc.aio.AioRpcError as error:
                failure = read_failure(error)
                if attempt + 1 == ATTEMPTS or failure.code in NO_ANSWER:
                    raise
                if parcel.is_delta and failure.reason in NOT_THE_DIFFERENCE:
                    parcel = self._instead(parcel, failure)
                    continue
                if self._fall_back(failure):
                    continue
                if not await self._passes(failure):
                    raise
                if await self._is_held(parcel.weight_version):
                    break
                await asyncio.sleep(FIRST_PAUSE_SECONDS * 2**attempt)
        self._base.sent(delta=parcel.is_delta)
        return Sent.of(parcel, self._bytes_sent - before, answer)

    def _header(self, weight_version: int, base_weight_version: int) -> weights_pb2.WeightHeader:
        """Without the tensors and their source."""
        return weights_pb2.WeightHeader(
            weight_version=weight_version,
            base_weight_version=base_weight_version,
            activation=weights_pb2.ACTIVATION_STAGED,
            in_flight=self.exchange.in_flight,
            trainer_epoch=self.exchange.trainer_epoch,
            probe=self.copy.measured,
            adapter=self.adapter,
        )

    def _instead(self, parcel: Parcel, failure: Failure) -> Parcel:
        log.warning("%s; sending version %d whole", failure.message, parcel.weight_version)
        self._base.refused()
        if self._base.is_refused:
            log.warning("the server keeps no base for differences; sending every version whole")
        return whole(parcel.payload, parcel.weight_version)

    def _fall_back(self, failure: Failure) -> bool:
        """Move to the next transport if the server cannot read from this one; return whether it did."""
        if self._place + 1 == len(self.transports) or not _cannot_read(failure):
            return False
        self._place += 1
        log.warning(
            "the server cannot read this host's memory (%s); sending weights through the stream",
            failure.message,
        )
        return True

    async def _passes(self, failure: Failure) -> bool:
        """Whether another attempt may succeed, or none is needed."""
        if failure.reason == Reason.WEIGHT_VERSION_STALE:
            return await self._is_held(self.copy.version)
        if failure.code == grpc.StatusCode.INTERNAL and not failure.reason:
            # grpc reports this if a refusal arrives during a write. Another attempt gets the reason.
            return True
        if failure.reason == Reason.STALE_EPOCH:
            # The epoch of this trainer's own reconnection, or that of another one, which is final.
            current = int(failure.metadata.get("current", GREATEST_EPOCH))
            return current <= self.exchange.trainer_epoch
        return failure.reason in (*PASSING, *self._transport.passing)

    async def _is_held(self, weight_version: int) -> bool:
        """Whether the server already has a version, from an upload whose answer was lost."""
        info = await self.server_info()
        held = (info.active_weight_version, *info.staged_weight_versions)
        return weight_version in held


def _cannot_read(failure: Failure) -> bool:
    """Whether the server does not see the memory, or does not know this kind of source."""
    if failure.reason == Reason.FIELD_INVALID:
        field = failure.metadata.get("field", "header.source")
        return field.startswith(("header.source", "header.shared_memory"))
    return failure.reason == Reason.SOURCE_UNAVAILABLE


def _lost_or(error: grpc.aio.AioRpcError, subject: str) -> ServerLost | WeightsRefused:
    failure = read_failure(error)
    text = f"{subject}: {failure.reason or failure.code.name}: {failure.message}"
    if failure.is_unanswered:
        return ServerLost(text)
    if failure.reason == Reason.UPLOAD_IN_PROGRESS:
        # What a lost connection left: the server still reads it, which takes as long as its bytes.
        return ServerLost(text, failure.retry_after_seconds or 0.0)
    if failure.is_full:
        return ServerFull(text, failure.retry_after_seconds or 0.0)
    return WeightsRefused(text)
