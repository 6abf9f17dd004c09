"""UpdateWeights: header -> payload -> commit, verified.

Order of an upload: header checked (order, epoch, base, manifest) -> READY -> payload -> commit -> every
tensor verified -> STAGED -> with immediate activation, switched to -> ACTIVE. Verification runs off the
event loop while generation continues. If the uploader is still filling a shared file, its bytes are
verified as they arrive and the commit carries the checksums.

Failures: a refused upload, or a stream that ends without a commit, releases what was staged and leaves the
active version exactly as it was. A repeated version and header is answered with the outcome of the first.
If the commit carries the checksums, that answer comes at the commit, and the checksums must match too.

With a collective (see `collective`) no byte passes through here, and nothing is staged or held afterwards.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from penstock.common.memory_file import host_namespace
from penstock.server.core.aio import SAY_AGAIN_SECONDS, OwnTasks, said_again
from penstock.server.core.errors import FieldInvalid
from penstock.server.engine.protocol import EngineDescription
from penstock.server.weights.header import Announced, read_header, read_in_flight
from penstock.server.weights.staging.incoming import IncomingUpload, Staged
from penstock.server.weights.staging.manifest import WeightRefused, end_of
from penstock.server.weights.staging.stage import WeightStage
from penstock.server.weights.switch import InFlight, Switched, engine_needed
from penstock.server.weights.upload.collective import (
    Collective,
    Join,
    Rounds,
    check_announced,
    kind_of,
    read_join,
)
from penstock.server.weights.upload.peers import PeerFetcher
from penstock.server.weights.upload.slot import Claim, UploadSlot
from penstock.server.weights.versions import Version, WeightVersions
from penstock.v1 import weights_pb2
from penstock.wire.messages import UpdateWeightsResponse
from penstock.wire.reasons import Reason
from penstock.wire.upload_messages import Chunk, Header, UploadMessage

logger = logging.getLogger(__name__)


Respond = Callable[[weights_pb2.UpdateWeightsResponse], Awaitable[None]]
Requests = AsyncIterator[UploadMessage]


class UploadService:
    """Takes uploads of the newest trainer, one at a time."""

    def __init__(
        self,
        versions: WeightVersions,
        stage: WeightStage,
        collective: Collective,
        description: EngineDescription,
        peers: PeerFetcher,
        on_trainer_version: Callable[[int], None],
        check_newer: Callable[[int], None],
    ) -> None:
        """`on_trainer_version` is called with the trainer's version when an upload activates it.
        `check_newer` is called with the epoch of an upload that is newer than any before, and raises if a
        trainer is connected."""
        self._versions = versions
        self._stage = stage
        self._collective = collective
        self._description = description
        self._peers = peers
        self._on_trainer_version = on_trainer_version
        # Otherwise the memory of a trainer that is gone would stay taken.
        self._slot = UploadSlot(stage.forget_shared, check_newer)
        self._tasks = OwnTasks()
        self.arriving: IncomingUpload | None = None

    def fence(self, trainer_epoch: int) -> None:
        """Refuse uploads of trainers with a lower epoch from now on, and end one under way."""
        self._slot.fence(trainer_epoch)

    async def close(self) -> None:
        """Requires that no call is open any more and the engine is closed."""
        await self._tasks.cancel()
        # A thread may still be reading what a cancelled upload left.
        await self._slot.wait_free()

    async def update_weights(self, requests: Requests, respond: Respond) -> None:
        first = await anext(requests, None)
        if isinstance(first, Header):
            announced = read_header(first, self._description)
            if announced.source == "collective":
                await self._take_collective(announced, requests, respond)
            else:
                async with said_again(respond, SAY_AGAIN_SECONDS) as say:
                    await self._take(announced, requests, say)
        elif first is not None and not isinstance(first, Chunk) and first.HasField("join"):
            await self._join(read_join(first.join), respond)
        else:
            raise FieldInvalid("message", "must be a header or a join first")

    async def _take(self, announced: Announced, requests: Requests, respond: Respond) -> None:
        if await self._repeated(announced, requests, respond):
            # The payload may follow anyway if the trainer did not wait for this answer.
            await self._activate_when_told(announced, requests, respond, skip_payload=True)
            return
        self._check_order(announced)
        self._versions.check_kind(announced)
        accepted = await self._exclusively(announced, requests, respond)
        if accepted is None:
            return
        await self._tell_staged(accepted, respond)
        await self._activate_when_told(announced, requests, respond)

    async def _activate_when_told(
        self,
        announced: Announced,
        requests: Requests,
        respond: Respond,
        *,
        skip_payload: bool = False,
    ) -> None:
        """Switch to what this stream has staged once it requests that, unless that was immediate."""
        if announced.immediate:
            return
        request = await anext(requests, None)
        while skip_payload and request is not None and kind_of(request) in ("chunk", "commit"):
            request = await anext(requests, None)
        if request is None:
            return
        if isinstance(request, Header | Chunk) or not request.HasField("activate"):
            raise FieldInvalid("message", "may only activate what this stream has staged")
        in_flight = read_in_flight(request.activate.in_flight)
        self._slot.check_epoch(announced.trainer_epoch)
        accepted = self._versions.staged(announced) or self._versions.active(announced)
        if accepted is None:
            raise self._versions.not_staged(announced.weight_version, "was released meanwhile")
        await self._activate(accepted, respond, in_flight)

    async def _repeated(self, announced: Announced, requests: Requests, respond: Respond) -> bool:
        """Answer a repeated upload from the earlier one's outcome. Returns False if there is none."""
        earlier = self._versions.staged(announced) or self._versions.active(announced)
        if earlier is None:
            return False
        if not announced.filling:
            return await self._answer_repeated(announced, respond)
        # Its bytes are not read again; the checksums show whether they are the same.
        version = announced.weight_version
        await respond(self._response(version, weights_pb2.WEIGHT_STATE_READY))
        checksums = await self._payload(announced, None, requests)
        if checksums is None:
            return True
        same = checksums == tuple(earlier.hashes[tensor.name] for tensor in announced.manifest)
        if same and await self._answer_repeated(announced, respond):
            return True
        # Different weights under the same number.
        self._versions.check_order(version)
        raise self._versions.not_staged(version, "was released meanwhile")

    async def _answer_repeated(self, announced: Announced, respond: Respond) -> bool:
        if (staged := self._versions.staged(announced)) is not None:
            await self._tell_staged(staged, respond)
            return True
        if (active := self._versions.active(announced)) is not None:
            version = announced.weight_version
            await respond(self._response(version, weights_pb2.WEIGHT_STATE_ACTIVE, active))
            return True
        return False

    async def _exclusively(
        self, announced: Announced, requests: Requests, respond: Respond
    ) -> Version | None:
        """Receive one upload while no other is received. An upload of an older trainer is ended for it."""
        await self._slot.take(_claim(announced), lambda: self._check_order(announced))
        uploader = asyncio.current_task()
        assert uploader is not None
        self._slot.end_by(uploader.cancel)
        try:
            return await self._receive(announced, requests, respond)
        except asyncio.CancelledError:
            if not self._slot.outdated or uploader.uncancel():
                raise
            raise self._slot.stale(announced.trainer_epoch) from None
        finally:
            self._slot.free()

    async def _tell_staged(self, accepted: Version, respond: Respond) -> None:
        """With immediate activation also switch to it, unless its trainer was replaced meanwhile."""
        await respond(self._staged_response(accepted))
        if accepted.announced.immediate:
            self._slot.check_epoch(accepted.announced.trainer_epoch)
            await self._activate(accepted, respond)

    async def _activate(
        self, accepted: Version, respond: Respond, in_flight: InFlight | None = None
    ) -> None:
        announced = accepted.announced
        self._on_trainer_version(announced.weight_version)
        policy = in_flight or announced.in_flight
        switched = await self._versions.activate(
            announced.weight_version,
            policy,
            lambda: self._slot.check_epoch(announced.trainer_epoch),
        )
        await respond(self._active_response(accepted, switched))

    def _check_order(self, announced: Announced) -> None:
        self._slot.check_epoch(announced.trainer_epoch)
        self._versions.check_order(announced.weight_version)

    # The payload

    async def _receive(
        self, announced: Announced, requests: Requests, respond: Respond
    ) -> Version | None:
        """None if the stream ended without a commit."""
        version = announced.weight_version
        upload = self.arriving = await self._begin(announced)
        try:
            await respond(self._response(version, weights_pb2.WEIGHT_STATE_READY))
            if announced.source == "peer":
                await self._peers.fetch(announced.header.peer, announced.manifest, upload)
            checksums = await self._payload(announced, upload, requests)
            if checksums is None:
                return None
            staged = await upload.verify(checksums)
            # No await between these two, so that a version being handed out is always arriving or accepted.
            return self._versions.accept(announced, staged, upload.length_bytes)
        finally:
            self.arriving = None
            # Without effect once it is staged.
            await upload.end()

    async def _begin(self, announced: Announced) -> IncomingUpload:
        base = self._versions.base_of(announced)
        try:
            return await self._begin_upload(announced, base)
        except WeightRefused as error:
            held = self._versions.held.weight_version
            if error.reason is not Reason.DISK_FULL or base is not None or not held:
                raise
            # A new version matters more than the way back from it.
            logger.warning(
                "no room for version %s next to held version %s; releasing the held one: %s",
                announced.weight_version,
                held,
                error,
            )
            self._versions.held.release()
            return await self._begin_upload(announced, base)

    async def _begin_upload(self, announced: Announced, base: Staged | None) -> IncomingUpload:
        version, manifest, header = announced.weight_version, announced.manifest, announced.header
        expected = announced.adapter.tensors if announced.adapter is not None else None
        if announced.source == "inline":
            length = header.inline.length_bytes
            return await self._stage.begin_inline(version, manifest, length, base, expected)
        if announced.source == "peer":
            return await self._stage.begin_inline(version, manifest, end_of(manifest))
        if announced.source == "checkpoint":
            return await self._stage.begin_checkpoint(version, manifest, header.checkpoint.path)
        shared = header.shared_memory
        return await self._stage.begin_shared(
            version,
            manifest,
            shared.name,
            shared.host_namespace,
            base,
            expected,
            progress_offset_bytes=shared.progress_offset_bytes if shared.filling else None,
        )

    async def _payload(
        self, announced: Announced, upload: IncomingUpload | None, requests: Requests
    ) -> tuple[int, ...] | None:
        """Returns the checksums of the tensors, or None if the stream ends before the commit."""
        async for request in requests:
            if isinstance(request, Chunk):
                if announced.source != "inline":
                    raise FieldInvalid("chunk", "may only follow a header with an inline source")
                if upload is not None:
                    upload.write_chunk(request.offset_bytes, request.data, request.xxh3)
                continue
            if isinstance(request, Header) or not request.HasField("commit"):
                raise FieldInvalid(
                    "message", "must be a chunk or the commit here", kind_of(request)
                )
            return announced.read_commit(request.commit)
        return None

    # By a collective

    async def _join(self, join: Join, respond: Respond) -> None:
        """The trainer gets READY at once, so that it can join too."""
        epoch = join.trainer_epoch
        self._slot.check_epoch(epoch)
        doing = f"the collective {join.backend!r} is being joined"
        claim = Claim(epoch, doing, {"backend": join.backend})
        await self._slot.take(claim, lambda: self._slot.check_epoch(epoch))
        # A join that waits for a vanished trainer must end before anything else begins.
        joining = self._tasks.start(
            self._collective.join(join),
            f"joining the collective {join.backend!r}",
            self._slot.free,
        )
        await respond(self._response(0, weights_pb2.WEIGHT_STATE_READY))
        with engine_needed():
            await asyncio.shield(joining)

    async def _take_collective(
        self, announced: Announced, requests: Requests, respond: Respond
    ) -> None:
        version = announced.weight_version
        self._check_order(announced)
        self._versions.check_kind(announced)
        self._check_collective(announced)
        await self._slot.take(_claim(announced), lambda: self._check_collective(announced))
        ready = self._response(version, weights_pb2.WEIGHT_STATE_READY)
        rounds = Rounds(
            self._collective,
            announced,
            requests,
            ready=lambda: respond(ready),
            on_commit=lambda: self._on_trainer_version(version),
        )
        self._slot.end_by(rounds.break_off)
        changing = self._tasks.start(
            self._change(announced, rounds), f"switch to version {version}", self._slot.free
        )
        try:
            accepted, switched = await asyncio.shield(changing)
        except asyncio.CancelledError:
            rounds.break_off()
            raise
        await respond(self._active_response(accepted, switched))

    def _check_collective(self, announced: Announced) -> None:
        self._check_order(announced)
        check_announced(
            announced, self._collective, self._description, self._versions.trusted_version
        )

    async def _change(self, announced: Announced, rounds: Rounds) -> tuple[Version, Switched]:
        try:
            return await self._versions.change(
                announced, rounds.switch, lambda: self._check_collective(announced)
            )
        except WeightRefused as error:
            if self._slot.outdated:
                raise self._slot.stale(announced.trainer_epoch) from error
            raise

    # Answers

    def _staged_response(self, accepted: Version) -> weights_pb2.UpdateWeightsResponse:
        announced = accepted.announced
        version = announced.weight_version
        response = self._response(version, weights_pb2.WEIGHT_STATE_STAGED, accepted)
        # Other sources leave the layout to this server. `lay_out` assembles a delta.
        told = announced.source in ("inline", "peer")
        memory = self._versions.memory_of(version) if told and not announced.adapter else None
        if memory is not None:
            response.memory.name = str(memory.path)
            response.memory.host_namespace = host_namespace(memory.descriptor)
        return response

    def _active_response(
        self, accepted: Version, switched: Switched
    ) -> weights_pb2.UpdateWeightsResponse:
        version = accepted.announced.weight_version
        response = self._response(version, weights_pb2.WEIGHT_STATE_ACTIVE, accepted)
        response.pause.FromNanoseconds(int(switched.pause_seconds * 1e9))
        if switched.probe is not None:
            response.probe.CopyFrom(switched.probe.message())
        return response

    def _response(
        self,
        version: int,
        state: weights_pb2.WeightState.ValueType,
        accepted: Version | None = None,
    ) -> weights_pb2.UpdateWeightsResponse:
        return UpdateWeightsResponse(
            weight_version=version,
            state=state,
            active_weight_version=self._versions.active_version,
            changed_tensor_count=accepted.changed_tensor_count if accepted else 0,
        )


def _claim(announced: Announced) -> Claim:
    version = announced.weight_version
    doing = f"version {version} is being uploaded"
    return Claim(announced.trainer_epoch, doing, {"weight_version": version})
