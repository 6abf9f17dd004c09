"""Uploads weight versions to one server: chooses the transport, and tracks what the server holds.

If the transport allows it, and the header needs nothing that is not known yet, an upload begins
ahead: it starts before the payload is filled. The server then verifies the weights while the rest
is copied, and `upload` only commits. Before the commit the server may forget such an upload, and
`leave_ahead` makes it do so. If an upload that began ahead fails for any reason, the version is
sent again like any other.

If differences are enabled, these versions are still sent whole:

    - the first, and every `anchor_every`-th
    - the next one after `forget_base`, which is called after a lost server or a rejected switch
    - one whose difference the server refuses: it has another base, or the result fails verification
    - all of them, if memory does not suffice for two copies, or the server keeps no base
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
# Transient refusals: a broken upload that the server has not noticed yet, a flipped bit, an epoch
# that a reconnection of the exchange has just outdated.
PASSING = (Reason.UPLOAD_IN_PROGRESS, Reason.CHECKSUM_MISMATCH, Reason.STALE_EPOCH)
# A server that keeps no base refuses every difference; two refusals can be chance.
REFUSALS_IN_A_ROW = 3
ATTEMPTS = 5
FIRST_PAUSE_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Sent:
    """The costs of uploading one version."""

    bytes_sent: int
    """Bytes of weights; through the stream, those of failed attempts are included."""
    dense_bytes: int
    """Size of the whole version in bytes."""
    delta: bool
    """Whether the version was sent as a difference."""
    changed_elements_ratio: float | None
    """Share of elements that differ from the previous version; None if sent whole."""
    changed_tensors: int | None
    """Tensors that differ from what the server sampled; None if the server did not report it."""
    pause_seconds: float = 0.0
    """How long generation was paused, if the transport switches as it sends."""
    probe_difference: float | None = None
    """Difference of the probe in nats, if the transport switches as it sends."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """Header fields of an upload that begins before the payload is filled."""

    trainer_epoch: int
    in_flight: weights_pb2.InFlightPolicy.ValueType


class Sender:
    """Uploads versions of a copy to one server, one at a time."""

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
        """Starts with the first of `transports`; moves to the next if the server cannot read from
        it. The default is shared memory, then the stream over `channel`. Nothing else may use
        `channel`. With `adapter`, the adapter is uploaded instead of the model, always whole.
        """
        self._channel = channel
        self._copy = copy
        self.transports = list(transports) or [SharedMemory(channel), Stream(channel)]
        self._place = 0
        self._delta = delta
        self._anchor_every = anchor_every
        self._adapter = adapter
        self._base_version = 0
        """The version that the server holds as a base; zero if none is known."""
        self._deltas_since_anchor = 0
        self._refused_in_a_row = 0
        self._whole_only = False
        self._ahead: Ahead | None = None
        self.lock = asyncio.Lock()
        """Held during an upload and while the copy changes."""

    @property
    def has_base(self) -> bool:
        """Whether the server holds the base of the copy's differences."""
        base = self._copy.base
        return base is not None and base.weight_version == self._base_version

    @property
    def sends_deltas(self) -> bool:
        """Whether the next version can be a difference, once the server has a base."""
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
        """Whether the next version will, as far as is known, be sent whole and in chunks."""
        return self._transport.sends_chunks and not self._may_differ()

    @property
    def _transport(self) -> Transport:
        return self.transports[self._place]

    @property
    def _bytes_sent(self) -> int:
        return sum(transport.bytes_sent for transport in self.transports)

    async def server_info(self) -> rollout_service_pb2.GetServerInfoResponse:
        """Return the server's description and the versions it holds. Raises ServerLost."""
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
        """Begin the upload of what is about to be filled, if possible."""
        if self.has_base or self._copy.probe_is_chosen:
            # The header needs the probe's score, and waiting for that costs more than is gained.
            return
        header = self._header(
            self._copy.version, 0, announcement.trainer_epoch, announcement.in_flight
        )
        self._ahead = self._transport.begin(header, payload)

    def leave_ahead(self) -> None:
        """Cancel an upload that began ahead; the server forgets it."""
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
        """Stage a version on the server. Returns once the server has verified it.

        Returns None if the payload holds a newer version by now. `trainer_epoch` is called for each
        attempt. Raises ServerLost if the server is unreachable, WeightsRefused if it refuses.
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
        """Note that the server samples this version; the next one can be a difference from it."""
        if self._copy.filled is not None and weight_version == self._copy.version:
            self._base_version = 0
            if self.sends_deltas:
                self._copy.become_base()
                self._base_version = weight_version
        self._transport.switched(weight_version)

    def forget_base(self) -> None:
        """Assume nothing about the server's base: the next version is sent whole."""
        self._base_version = 0

    def close(self) -> None:
        """Cancel an upload that began ahead, and free what the transports hold."""
        self.leave_ahead()
        for transport in self.transports:
            transport.close()

    def _may_differ(self) -> bool:
        return self.has_base and self._deltas_since_anchor + 1 < self._anchor_every

    async def _commit_ahead(self) -> Sent | None:
        """Commit an upload that began ahead; None if there was none or it failed."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return None
        before = self._bytes_sent
        try:
            answer = await ahead.commit()
        except (grpc.aio.AioRpcError, NotStaged) as error:
            log.info(
                "version %d: the upload that began while it was filled failed; sending it again: %s",
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
        """Build a header without the tensors and their source."""
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
        """Return the whole version, to replace its refused difference."""
        log.warning("%s; sending version %d whole", failure.message, parcel.weight_version)
        self.forget_base()
        self._refused_in_a_row += 1
        if self._refused_in_a_row == REFUSALS_IN_A_ROW:
            log.warning("the server keeps no base for differences; sending every version whole")
            self._whole_only = True
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
        """Return whether another attempt may succeed, or none is needed."""
        if failure.reason == Reason.WEIGHT_VERSION_STALE:
            return await self._is_held()
        if failure.code == grpc.StatusCode.INTERNAL and not failure.reason:
            # grpc reports this for a refusal that arrives while a message is being written. Another
            # attempt gets the actual reason.
            return True
        return failure.reason in (*PASSING, *self._transport.passing)

    async def _is_held(self) -> bool:
        """Return whether the server already has this version, from an upload whose answer was lost."""
        info = await self.server_info()
        held = (info.active_weight_version, *info.staged_weight_versions)
        return self._copy.version in held


def merge(sent: Sequence[Sent]) -> Sent:
    """Merge the uploads of one version to several servers: sum the sizes, take the largest of the rest."""
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
    """Return the largest known value; None if none is known."""
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
    if failure.is_full:
        return ServerFull(text, failure.retry_after_seconds or 0.0)
    return WeightsRefused(text)
