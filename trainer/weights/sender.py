"""One server's end of the weights: which way they go there, and what is known to be there.

Where the transport can and nothing in the header has to be known first, an upload begins ahead, before the
copy is filled: the server verifies what is there while the rest is copied, and `upload` only commits. Until
then the server may forget it, and does where `leave_ahead` says so. What came to nothing, for whatever
reason, is sent once more in full, as any other version.

A version goes whole, where differences are sent:

    the first; each so many-th (the anchor); after `forget_base`, which a server that was away or that
    rejected a switch calls for; and at once where the server has another base, or the difference did not
    come out as it should. Every version does where there is no memory for two copies, and where the server
    turns out to keep no base.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import grpc

from penstock.trainer.core.errors import ServerFull, ServerLost, WeightsRefused
from penstock.trainer.weights.copy import WeightCopy
from penstock.trainer.weights.parcel import Delta, Parcel, can_differ, whole
from penstock.trainer.weights.payload import Payload
from penstock.trainer.weights.transports import Ahead, SharedMemory, Stream, Transport
from penstock.v1 import rollout_service_pb2, weights_pb2
from penstock.wire import codec
from penstock.wire.differences import NOT_THE_DIFFERENCE
from penstock.wire.failure import NO_ANSWER, Failure, read_failure
from penstock.wire.reasons import Reason
from penstock.wire.upload import NotStaged

log = logging.getLogger(__name__)
Number = TypeVar("Number", int, float)

GET_SERVER_INFO = "/penstock.v1.RolloutService/GetServerInfo"
INFO_TIMEOUT_SECONDS = 30.0
# What passes: an upload that broke off and that the server has not noticed yet, a flipped bit, an
# epoch that a reconnection of the exchange has just outdated.
PASSING = (Reason.UPLOAD_IN_PROGRESS, Reason.CHECKSUM_MISMATCH, Reason.STALE_EPOCH)
# A server that is configured to keep nothing refuses each difference; two can be chance.
REFUSALS_IN_A_ROW = 3
ATTEMPTS = 5
FIRST_PAUSE_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Sent:
    """What the upload of one version took."""

    bytes_sent: int
    """Of weights, through the stream those of failed attempts too."""
    dense_bytes: int
    """Size of the whole version."""
    delta: bool
    """Whether it went as a difference."""
    changed_elements_ratio: float | None
    """Elements that differ from the version before, of all; None where it went whole."""
    changed_tensors: int | None
    """Tensors that differ from what the server sampled, as it says; None where it did not say."""
    pause_seconds: float = 0.0
    """How long generation stood still, where the transport switches as it sends."""
    probe_difference: float | None = None
    """Of the probe, in nats, likewise."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """What a header says that goes out before the payload is filled."""

    trainer_epoch: int
    in_flight: weights_pb2.InFlightPolicy.ValueType


class Sender:
    """Uploads versions of a copy to one server; one at a time."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        copy: WeightCopy,
        *,
        transports: Sequence[Transport] = (),
        delta: Delta = "auto",
        anchor_every: int = 50,
        adapter: weights_pb2.LoraAdapter | None = None,
    ) -> None:
        """The first of `transports` is used; the next where the server cannot read from it. None
        given are shared memory, then `channel`, which must carry nothing else. With `adapter` what is
        uploaded is that, always whole.
        """
        self._channel = channel
        self._copy = copy
        self.transports = list(transports) or [SharedMemory(channel), Stream(channel)]
        self._place = 0
        self._delta = delta
        self._anchor_every = anchor_every
        self._adapter = adapter
        self._base_version = 0
        """Version the server is known to hold as a base; zero where none is."""
        self._deltas_since_anchor = 0
        self._refused_in_a_row = 0
        self._whole_only = False
        self._ahead: Ahead | None = None
        self.lock = asyncio.Lock()
        """Held by whoever uploads, and by whoever changes the copy."""

    @property
    def has_base(self) -> bool:
        """Whether the server holds what the copy makes differences from."""
        base = self._copy.base
        return base is not None and base.weight_version == self._base_version

    @property
    def sends_deltas(self) -> bool:
        """Whether what comes next can be a difference, once the server has a base."""
        if (
            self._adapter is not None
            or self._whole_only
            or not self._copy.has_room_for_two
            or self._anchor_every == 1
            or self._delta == "off"
        ):
            return False
        if self._copy.filled is not None and not can_differ(self._copy.filled):
            return False
        return self._delta == "on" or self._transport.prefers_deltas

    @property
    def next_in_chunks(self) -> bool:
        """Whether what comes next is a whole version in chunks, as far as is known."""
        return self._transport.sends_chunks and not self._may_differ()

    @property
    def _transport(self) -> Transport:
        return self.transports[self._place]

    @property
    def _bytes_sent(self) -> int:
        return sum(transport.bytes_sent for transport in self.transports)

    async def server_info(self) -> rollout_service_pb2.GetServerInfoResponse:
        """What the server is and holds. Raises ServerLost."""
        call = self._channel.unary_unary(
            GET_SERVER_INFO,
            request_serializer=codec.encode,
            response_deserializer=codec.decoder(rollout_service_pb2.GetServerInfoResponse),
        )
        request = rollout_service_pb2.GetServerInfoRequest()
        try:
            return await call(request, timeout=INFO_TIMEOUT_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise _lost_or(error, "GetServerInfo") from error

    def begin_ahead(self, payload: Payload, announcement: Announcement) -> None:
        """Begins the upload of what is about to be filled, where nothing speaks against it."""
        if self.has_base or self._copy.probe_is_chosen:
            # The header has the probe's score, which takes longer than what would be gained.
            return
        header = self._header(
            self._copy.version, 0, announcement.trainer_epoch, announcement.in_flight
        )
        self._ahead = self._transport.begin(header, payload)

    def leave_ahead(self) -> None:
        """The server forgets an upload that was begun ahead."""
        if self._ahead is not None:
            self._ahead.cancel()
            self._ahead = None

    async def upload(
        self,
        weight_version: int,
        *,
        trainer_epoch: Callable[[], int],
        in_flight: weights_pb2.InFlightPolicy.ValueType,
    ) -> Sent | None:
        """Stages a version on the server; returns once it is verified there.

        None means that the payload holds a newer one by now. `trainer_epoch` is asked for each
        attempt. Raises ServerLost where the server is away, and WeightsRefused where it says no.
        """
        async with self.lock:
            if self._copy.version != weight_version:
                return None
            try:
                return await self._commit_ahead() or await self._upload(trainer_epoch, in_flight)
            except grpc.aio.AioRpcError as error:
                raise _lost_or(error, f"version {weight_version}") from error
            except NotStaged as error:
                raise WeightsRefused(str(error)) from error

    def switched(self, weight_version: int) -> None:
        """The server samples this version: what comes next can be its difference from it."""
        if self._copy.filled is not None and weight_version == self._copy.version:
            self._base_version = 0
            if self.sends_deltas:
                self._copy.become_base()
                self._base_version = weight_version
        self._transport.switched(weight_version)

    def forget_base(self) -> None:
        """What the server holds is not known any more: the next upload is a whole one."""
        self._base_version = 0

    def close(self) -> None:
        """Ends what was begun, and frees what transports hold."""
        self.leave_ahead()
        for transport in self.transports:
            transport.close()

    def _may_differ(self) -> bool:
        return self.has_base and self._deltas_since_anchor + 1 < self._anchor_every

    async def _commit_ahead(self) -> Sent | None:
        """Ends what was begun ahead; None where there is nothing, or it came to nothing."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return None
        before = self._bytes_sent
        try:
            answer = await ahead.commit()
        except (grpc.aio.AioRpcError, NotStaged) as error:
            log.info(
                "version %d was begun while it was filled, and is sent anew: %s",
                self._copy.version,
                error.details() if isinstance(error, grpc.aio.AioRpcError) else error,
            )
            return None
        self._deltas_since_anchor = 0
        return _sent(whole(ahead.payload, ahead.weight_version), self._bytes_sent - before, answer)

    async def _upload(
        self,
        trainer_epoch: Callable[[], int],
        in_flight: weights_pb2.InFlightPolicy.ValueType,
    ) -> Sent:
        parcel = await self._copy.pack(as_difference=self._may_differ())
        before = self._bytes_sent
        answer: weights_pb2.UpdateWeightsResponse | None = None
        for attempt in range(ATTEMPTS):
            header = self._header(
                parcel.weight_version, parcel.base_weight_version, trainer_epoch(), in_flight
            )
            try:
                answer = await self._transport.send(header, parcel)
                break
            except NotStaged:
                # What it was sent ended too early, which a flipped bit can say.
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
                if await self._is_held():
                    break
                await asyncio.sleep(FIRST_PAUSE_SECONDS * 2**attempt)
        self._deltas_since_anchor = self._deltas_since_anchor + 1 if parcel.is_delta else 0
        if parcel.is_delta:
            self._refused_in_a_row = 0
        return _sent(parcel, self._bytes_sent - before, answer)

    def _header(
        self,
        weight_version: int,
        base_weight_version: int,
        trainer_epoch: int,
        in_flight: weights_pb2.InFlightPolicy.ValueType,
    ) -> weights_pb2.WeightHeader:
        """All but the tensors and their source."""
        return weights_pb2.WeightHeader(
            weight_version=weight_version,
            base_weight_version=base_weight_version,
            activation=weights_pb2.ACTIVATION_STAGED,
            in_flight=in_flight,
            trainer_epoch=trainer_epoch,
            probe=self._copy.measured,
            adapter=self._adapter,
        )

    def _instead(self, parcel: Parcel, failure: Failure) -> Parcel:
        """The whole version, after its difference was refused."""
        log.warning("%s: sending version %d whole", failure.message, parcel.weight_version)
        self.forget_base()
        self._refused_in_a_row += 1
        if self._refused_in_a_row == REFUSALS_IN_A_ROW:
            log.warning("the server keeps no base for differences: every version is sent whole")
            self._whole_only = True
        return whole(parcel.payload, parcel.weight_version)

    def _fall_back(self, failure: Failure) -> bool:
        """Whether the server cannot read from this transport and there is another one."""
        if self._place + 1 == len(self.transports) or not _cannot_read(failure):
            return False
        self._place += 1
        log.warning(
            "the server cannot read this host's memory (%s); weights go through the stream",
            failure.message,
        )
        return True

    async def _passes(self, failure: Failure) -> bool:
        """Whether another attempt may succeed, or none is needed."""
        if failure.reason == Reason.WEIGHT_VERSION_STALE:
            return await self._is_held()
        if failure.code == grpc.StatusCode.INTERNAL and not failure.reason:
            # What grpc makes of a refusal that comes while a message is being written: another attempt
            # is told why.
            return True
        return failure.reason in (*PASSING, *self._transport.passing)

    async def _is_held(self) -> bool:
        """Whether the server has this version already, from an upload whose answer was lost."""
        info = await self.server_info()
        held = (info.active_weight_version, *info.staged_weight_versions)
        return self._copy.version in held


def merge(sent: Sequence[Sent]) -> Sent:
    """What the uploads of one version to several servers took: sums, and the largest of the rest."""
    return Sent(
        bytes_sent=sum(one.bytes_sent for one in sent),
        dense_bytes=sum(one.dense_bytes for one in sent),
        delta=all(one.delta for one in sent),
        changed_elements_ratio=largest(one.changed_elements_ratio for one in sent),
        changed_tensors=largest(one.changed_tensors for one in sent),
        pause_seconds=max(one.pause_seconds for one in sent),
        probe_difference=largest(one.probe_difference for one in sent),
    )


def largest(values: Iterable[Number | None]) -> Number | None:
    """Of those that are known; None where none is."""
    return max((value for value in values if value is not None), default=None)


def _sent(
    parcel: Parcel, bytes_sent: int, answer: weights_pb2.UpdateWeightsResponse | None
) -> Sent:
    return Sent(
        bytes_sent=bytes_sent,
        dense_bytes=parcel.payload.length_bytes,
        delta=parcel.is_delta,
        changed_elements_ratio=parcel.changed_elements_ratio,
        changed_tensors=answer.changed_tensor_count if answer else None,
        pause_seconds=answer.pause.ToNanoseconds() / 1e9 if answer else 0.0,
        probe_difference=(
            answer.probe.mean_difference if answer and answer.HasField("probe") else None
        ),
    )


def _cannot_read(failure: Failure) -> bool:
    """What a server answers that does not see the memory, or does not know such a source."""
    if failure.reason == Reason.FIELD_INVALID:
        field = failure.metadata.get("field", "header.source")
        return field.startswith(("header.source", "header.shared_memory"))
    return failure.reason == Reason.SOURCE_UNAVAILABLE


def _lost_or(error: grpc.aio.AioRpcError, subject: str) -> ServerLost | WeightsRefused:
    failure = read_failure(error)
    text = f"{subject}: {failure.reason or failure.code.name}: {failure.message}"
    if failure.is_unanswered:
        return ServerLost(text)
    if failure.is_full:
        return ServerFull(text, failure.retry_after_seconds or 0.0)
    return WeightsRefused(text)
