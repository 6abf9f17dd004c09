"""The trainer's weights to the server: packed, described, uploaded over a connection of their own.

    fill (compute thread) -> upload: whole, or as a difference -> STAGED -> switched

Where the transport can and nothing in the header has to be known first, `fill` begins the upload ahead:
the server verifies what is there while the rest is copied, and `upload` only commits. Until then the
server may forget it, and does where `cancel` says so: a payload that is filled again, gets another number
or is closed. What came to nothing, for whatever reason, is sent once more in full, as any other version.

The switch itself travels on the exchange. The payload keeps the bytes of the newest version until
the next `fill`, so that a server that comes back empty can be given them again without the model.

Where differences are sent there are two payloads: one has what the server samples, and the other is
filled, compared with it, and takes its place once the server has switched. A version goes whole:

    the first; each so many-th (the anchor); after `forget_base`, which a server that was away or that
    rejected a switch calls for; and at once where the server has another base, or the difference did not
    come out as it should. Every version does where there is no memory for the second payload, and where
    the server turns out to keep no base.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc

from penstock.trainer.compute import ComputeThread
from penstock.trainer.errors import ServerLost, WeightsRefused
from penstock.trainer.parcel import Delta, Held, Parcel, can_differ, difference, whole
from penstock.trainer.payload import Payload
from penstock.trainer.payloads import Payloads, Weights
from penstock.trainer.probe import Probe
from penstock.trainer.transports import Ahead, SharedMemory, Stream, Transport
from penstock.v1 import rollout_service_pb2, weights_pb2
from penstock.wire import codec
from penstock.wire.failure import NO_ANSWER, Failure, read_failure
from penstock.wire.reasons import Reason
from penstock.wire.upload import NotStaged

log = logging.getLogger(__name__)

GET_SERVER_INFO = "/penstock.v1.RolloutService/GetServerInfo"
INFO_TIMEOUT_SECONDS = 30.0
# What passes: an upload that broke off and that the server has not noticed yet, a flipped bit, an
# epoch that a reconnection of the exchange has just outdated.
PASSING = (Reason.UPLOAD_IN_PROGRESS, Reason.CHECKSUM_MISMATCH, Reason.STALE_EPOCH)
# What a difference can be refused for and the whole version cannot.
NOT_THE_BASE = (Reason.BASE_VERSION_MISMATCH, Reason.CHECKSUM_MISMATCH)
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


class Publisher:
    """Uploads weight versions; one at a time."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        compute: ComputeThread,
        *,
        transports: Sequence[Transport] = (),
        delta: Delta = "auto",
        anchor_every: int = 50,
        probe: Probe | None = None,
        adapter: weights_pb2.LoraAdapter | None = None,
    ) -> None:
        """The first of `transports` is used; the next where the server cannot read from it. None
        given are shared memory, then `channel`, which must carry nothing else. With `adapter` what is
        uploaded is that, always whole.
        """
        self._channel = channel
        self._compute = compute
        self._transports = list(transports) or [SharedMemory(channel), Stream(channel)]
        self._place = 0
        self._delta = delta
        self._anchor_every = anchor_every
        self._probe = probe
        self._adapter = adapter
        self._payloads = Payloads()
        self._filled: Payload | None = None
        self._filled_version = 0
        self._base: Held | None = None
        self._deltas_since_anchor = 0
        self._refused_in_a_row = 0
        self._whole_only = False
        self._measured: weights_pb2.WeightProbe | None = None
        self._ahead: Ahead | None = None
        self._lock = asyncio.Lock()

    @property
    def filled_version(self) -> int:
        """Version whose bytes the payload holds; zero before the first."""
        return self._filled_version

    @property
    def digest(self) -> str:
        """Checksum of the payload, equal for equal weights; empty before the first."""
        return self._filled.digest if self._filled else ""

    @property
    def length_bytes(self) -> int:
        """Size of a whole version."""
        return self._filled.length_bytes if self._filled else 0

    @property
    def _transport(self) -> Transport:
        return self._transports[self._place]

    @property
    def _bytes_sent(self) -> int:
        return sum(transport.bytes_sent for transport in self._transports)

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

    async def fill(
        self,
        weights: Weights,
        weight_version: int,
        dtype: str,
        announcement: Announcement | None = None,
    ) -> None:
        """Copies weights into the payload as this version, in the dtype the server named, and scores
        the probe with them. With an announcement the upload begins meanwhile, where it can.

        Waits for an upload that is under way.
        """
        async with self._lock:
            # Before the copy begins, so that nobody takes what it overwrites for a whole version.
            self._filled_version = weight_version
            self._leave_ahead()
            payload = self._reusable_payload()
            if payload is None:
                payload = await self._compute.run(self._free_payload, weights, dtype)
            self._filled = payload
            self._begin_ahead(payload, announcement)
            try:
                await self._compute.run(self._fill, payload, weights)
            except BaseException:
                self._leave_ahead()
                raise

    def relabel(self, weight_version: int) -> None:
        """The bytes of the version before are this version's too: the step changed nothing."""
        self._filled_version = weight_version
        self._leave_ahead()

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
        async with self._lock:
            if self._filled_version != weight_version:
                return None
            try:
                return await self._commit_ahead() or await self._upload(trainer_epoch, in_flight)
            except grpc.aio.AioRpcError as error:
                raise _lost_or(error, f"version {weight_version}") from error
            except NotStaged as error:
                raise WeightsRefused(str(error)) from error

    def switched(self, weight_version: int) -> None:
        """The server samples this version: what comes next can be its difference from it."""
        if self._filled is not None and weight_version == self._filled_version:
            self._base = Held(self._filled, weight_version) if self._sends_deltas() else None
        self._transport.switched(weight_version)

    def forget_base(self) -> None:
        """What the server holds is not known any more: the next upload is a whole one."""
        self._base = None

    def close(self) -> None:
        """Frees the payloads."""
        self._leave_ahead()
        self._payloads.close()
        self._filled = self._base = None
        for transport in self._transports:
            transport.close()

    # In the compute thread.

    def _fill(self, payload: Payload, weights: Weights) -> None:
        payload.fill(weights())
        if self._probe is not None:
            self._measured = self._probe.measure(payload.tensors())

    def _free_payload(self, weights: Weights, dtype: str) -> Payload:
        """One that does not hold the base, where the base is to be kept."""
        if self._base is None and self._whole_only:
            self._payloads.keep_one()
        payload = self._payloads.free(weights, dtype, self._base.payload if self._base else None)
        if payload is not None:
            return payload
        assert self._base is not None
        payload = self._base.payload
        self._whole_only, self._base = True, None
        return payload

    def _pack(self) -> Parcel:
        payload, base = self._filled, self._base
        if payload is None:
            raise RuntimeError("fill comes before upload")
        if base is None or self._deltas_since_anchor + 1 >= self._anchor_every:
            return whole(payload, self._filled_version)
        return difference(payload, self._filled_version, base)

    # On the event loop.

    def _reusable_payload(self) -> Payload | None:
        """What `_free_payload` returns where it has nothing to do: the upload begins the sooner."""
        if self._whole_only:
            return None
        return self._payloads.reusable(self._base.payload if self._base else None)

    def _begin_ahead(self, payload: Payload, announcement: Announcement | None) -> None:
        """Begins the upload of what is about to be filled, where nothing speaks against it."""
        if announcement is None or self._base is not None:
            return
        if self._probe is not None and self._probe.token_ids:
            # The header has its score, which takes longer than what would be gained.
            return
        header = self._header(
            self._filled_version, 0, announcement.trainer_epoch, announcement.in_flight
        )
        self._ahead = self._transport.begin(header, payload)

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
                self._filled_version,
                error.details() if isinstance(error, grpc.aio.AioRpcError) else error,
            )
            return None
        self._deltas_since_anchor = 0
        return _sent(whole(ahead.payload, ahead.weight_version), self._bytes_sent - before, answer)

    def _leave_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead.cancel()
            self._ahead = None

    async def _upload(
        self,
        trainer_epoch: Callable[[], int],
        in_flight: weights_pb2.InFlightPolicy.ValueType,
    ) -> Sent:
        parcel = await self._compute.run(self._pack)
        before = self._bytes_sent
        answer: weights_pb2.UpdateWeightsResponse | None = None
        for attempt in range(ATTEMPTS):
            header = self._header(
                parcel.weight_version, parcel.base_weight_version, trainer_epoch(), in_flight
            )
            try:
                answer = await self._transport.send(header, parcel)
                break
            except grpc.aio.AioRpcError as error:
                failure = read_failure(error)
                if attempt + 1 == ATTEMPTS or failure.code in NO_ANSWER:
                    raise
                if parcel.is_delta and failure.reason in NOT_THE_BASE:
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
            probe=self._measured,
            adapter=self._adapter,
        )

    def _sends_deltas(self) -> bool:
        if (
            self._adapter is not None
            or self._whole_only
            or self._anchor_every == 1
            or self._delta == "off"
        ):
            return False
        if self._filled is not None and not can_differ(self._filled):
            return False
        return self._delta == "on" or self._transport.prefers_deltas

    def _instead(self, parcel: Parcel, failure: Failure) -> Parcel:
        """The whole version, after its difference was refused."""
        log.warning("%s: sending version %d whole", failure.message, parcel.weight_version)
        self._base = None
        self._refused_in_a_row += 1
        if self._refused_in_a_row == REFUSALS_IN_A_ROW:
            log.warning("the server keeps no base for differences: every version is sent whole")
            self._whole_only = True
        return whole(parcel.payload, parcel.weight_version)

    def _fall_back(self, failure: Failure) -> bool:
        """Whether the server cannot read from this transport and there is another one."""
        if self._place + 1 == len(self._transports) or not _cannot_read(failure):
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
        return self._filled_version in held


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
    return WeightsRefused(text)
