"""UpdateWeights: header -> payload -> commit, verified; and which versions are staged, active, held.

Order of an upload: header checked (order, epoch, base, manifest) -> READY -> payload (chunks of this
stream, a shared file, or a folder) -> commit -> every tensor verified, off the event loop, while
generation goes on -> STAGED -> with immediate activation, switched to -> ACTIVE.

What a failure does: anything refused, and a stream that ends without a commit, releases what was
staged and leaves the version in use exactly as it was. The same version and header again is answered with
what became of it. One upload runs at a time; an upload or switch of an older trainer is refused. A switch,
once begun, goes on to its end whether or not its caller is there to hear of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass

from penstock.server.engine import EngineDescription
from penstock.server.errors import DomainError, FieldInvalid
from penstock.server.held_weights import HeldWeights
from penstock.server.turns import TurnRunner
from penstock.server.weight_header import (
    Announced,
    InlineSource,
    SharedSource,
    header_digest,
    read_header,
)
from penstock.server.weight_manifest import WeightRefused
from penstock.server.weight_stage import Staged, Upload, WeightStage
from penstock.server.weight_switch import InFlight, Switched, WeightSwitch
from penstock.v1 import weights_pb2
from penstock.wire.codec import twin
from penstock.wire.reasons import Reason

logger = logging.getLogger(__name__)

UpdateWeightsResponse = twin(weights_pb2.UpdateWeightsResponse)

Respond = Callable[[weights_pb2.UpdateWeightsResponse], Awaitable[None]]
Requests = AsyncIterator[weights_pb2.UpdateWeightsRequest]


@dataclass(frozen=True, slots=True)
class _Version:
    """A version that was verified, and what it was announced as."""

    announced: Announced
    hashes: Mapping[str, int]
    changed_tensor_count: int
    """Against the version accepted before it."""


class WeightVersions:
    """Takes uploads and switches to them."""

    def __init__(
        self,
        stage: WeightStage,
        switch: WeightSwitch,
        turns: TurnRunner,
        in_flight: InFlight,
        description: EngineDescription,
        *,
        max_staged: int = 2,
        hold_active: bool = True,
    ) -> None:
        self._stage = stage
        self._switch = switch
        self._turns = turns
        self._in_flight = in_flight
        self._description = description
        self._max_staged = max_staged
        self._staged: dict[int, tuple[_Version, Staged]] = {}
        self._active: _Version | None = None
        self._held = HeldWeights(stage, description.checkpoint, enabled=hold_active)
        self._epoch = 0
        self._uploading: Announced | None = None
        self._uploader: asyncio.Task[object] | None = None
        self._outdated = False
        """Whether a newer trainer has ended the upload under way."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._activating = asyncio.Lock()
        self._switches: set[asyncio.Task[Switched]] = set()
        self.on_staged: Callable[[int, int], None] | None = None
        """Called with an upload's bytes and its changed tensors, for metrics."""
        self.on_switched: Callable[[Switched], None] | None = None
        """Called after every switch, for metrics."""
        self.on_trainer_version: Callable[[int], None] | None = None
        """Called when an immediate upload says which version the trainer holds."""

    @property
    def active_version(self) -> int:
        """The version now sampling."""
        return self._switch.active_version

    @property
    def staged_versions(self) -> list[int]:
        """Versions verified and not yet switched to, oldest first."""
        return sorted(self._staged)

    @property
    def delta_base_version(self) -> int:
        """The version a delta can apply to; zero for none."""
        return self._held.weight_version if self._delta_base() is not None else 0

    def fence(self, trainer_epoch: int) -> None:
        """Refuses uploads of trainers older than this one from now on; one under way ends."""
        self._epoch = trainer_epoch
        if self._uploading is not None and self._uploading.trainer_epoch < trainer_epoch:
            self._outdated = True
            if self._uploader is not None:
                self._uploader.cancel()

    def has(self, weight_version: int) -> bool:
        """Whether a version is staged or active."""
        return weight_version == self.active_version or weight_version in self._staged

    async def close(self) -> None:
        """Releases everything; no call is open any more and the engine is gone."""
        for task in self._switches:
            task.cancel()
        await asyncio.gather(*self._switches, return_exceptions=True)
        # A thread may still be reading what a cancelled upload left.
        await self._idle.wait()
        self._staged.clear()
        self._held.let_go()
        self._stage.close()

    async def update_weights(self, requests: Requests, respond: Respond) -> None:
        """Takes one upload; see the module's docstring."""
        first = await anext(requests, None)
        if first is None or first.WhichOneof("message") != "header":
            raise FieldInvalid("message", "must be a header first")
        digest = header_digest(first.header)
        announced = read_header(first.header, digest, self._description)
        if await self._repeated(announced, respond):
            return
        self._check_order(announced)
        version = announced.weight_version
        accepted = await self._exclusively(announced, requests, respond)
        if accepted is None:
            return
        await respond(self._response(version, weights_pb2.WEIGHT_STATE_STAGED, accepted))
        if announced.immediate:
            if announced.trainer_epoch < self._epoch:
                raise self._stale(announced)
            if self.on_trainer_version is not None:
                self.on_trainer_version(version)
            await self._activate_and_tell(accepted, respond)

    async def _exclusively(
        self, announced: Announced, requests: Requests, respond: Respond
    ) -> _Version | None:
        """Receives one upload while no other is received; that of an older trainer makes room."""
        if announced.trainer_epoch > self._epoch:
            self.fence(announced.trainer_epoch)
        if self._outdated:
            await self._idle.wait()
            self._check_order(announced)
        if self._uploading is not None:
            under_way = self._uploading.weight_version
            raise DomainError(
                Reason.UPLOAD_IN_PROGRESS,
                f"version {under_way} is being uploaded",
                {"weight_version": under_way},
                retry_after_seconds=1.0,
            )
        self._uploading, self._uploader = announced, asyncio.current_task()
        self._idle.clear()
        try:
            return await self._receive(announced, requests, respond)
        except WeightRefused as error:
            raise DomainError(error.reason, error.message, error.metadata) from error
        except asyncio.CancelledError:
            if not self._outdated or self._uploader is None or self._uploader.uncancel():
                raise
            raise self._stale(announced) from None
        finally:
            self._uploading = self._uploader = None
            self._outdated = False
            self._idle.set()

    def _stale(self, announced: Announced) -> DomainError:
        return DomainError(
            Reason.STALE_EPOCH,
            f"trainer epoch {announced.trainer_epoch} is older than {self._epoch}",
            {"trainer_epoch": announced.trainer_epoch, "current": self._epoch},
        )

    async def _repeated(self, announced: Announced, respond: Respond) -> bool:
        version = announced.weight_version
        accepted, _ = self._staged.get(version, (None, None))
        if accepted is not None and accepted.announced.digest == announced.digest:
            await respond(self._response(version, weights_pb2.WEIGHT_STATE_STAGED, accepted))
            if announced.immediate:
                await self._activate_and_tell(accepted, respond)
            return True
        active = self._active
        if (
            active is not None
            and self._switch.trusted
            and version == self.active_version
            and active.announced.digest == announced.digest
        ):
            await respond(self._response(version, weights_pb2.WEIGHT_STATE_ACTIVE, active))
            return True
        return False

    async def _activate_and_tell(self, accepted: _Version, respond: Respond) -> None:
        version = accepted.announced.weight_version
        switched = await self.activate(version, accepted.announced.in_flight)
        response = self._response(version, weights_pb2.WEIGHT_STATE_ACTIVE, accepted)
        response.pause.FromNanoseconds(int(switched.pause_seconds * 1e9))
        if switched.probe is not None:
            response.probe.CopyFrom(switched.probe.message())
        await respond(response)

    def _check_order(self, announced: Announced) -> None:
        version = announced.weight_version
        if announced.trainer_epoch < self._epoch:
            raise self._stale(announced)
        # Where the weights in use cannot be trusted, the version they should be may come once more.
        accepted = self.active_version if self._switch.trusted else self.active_version - 1
        newest = max([accepted, *self._staged])
        if version <= newest:
            raise DomainError(
                Reason.WEIGHT_VERSION_STALE,
                f"version {version} is not greater than {newest}",
                {"weight_version": version, "newest": newest},
            )

    async def _receive(
        self, announced: Announced, requests: Requests, respond: Respond
    ) -> _Version | None:
        """Stages and verifies one payload; None where the stream ended without a commit."""
        version = announced.weight_version
        upload = await self._begin(announced)
        try:
            await respond(self._response(version, weights_pb2.WEIGHT_STATE_READY, None))
            if not await self._payload(announced, upload, requests):
                return None
            staged = await upload.verify()
        finally:
            # Nothing, once it is staged.
            upload.release()
        accepted = self._keep(announced, staged)
        if self.on_staged is not None:
            self.on_staged(upload.length_bytes, accepted.changed_tensor_count)
        return accepted

    async def _begin(self, announced: Announced) -> Upload:
        base = self._base_of(announced)
        try:
            return await self._begin_upload(announced, base)
        except WeightRefused as error:
            if (
                error.reason is not Reason.DISK_FULL
                or base is not None
                or not self._held.weight_version
            ):
                raise
            # A new version matters more than the way back from it.
            logger.warning(
                "no room for version %s beside version %s, which is let go: %s",
                announced.weight_version,
                self._held.weight_version,
                error,
            )
            self._held.let_go()
            return await self._begin_upload(announced, base)

    async def _begin_upload(self, announced: Announced, base: Staged | None) -> Upload:
        version, manifest, source = announced.weight_version, announced.manifest, announced.source
        if isinstance(source, InlineSource):
            return await self._stage.begin_inline(version, manifest, source.length_bytes, base)
        if isinstance(source, SharedSource):
            return await self._stage.begin_shared(
                version, manifest, source.name, source.host_namespace, base
            )
        return await self._stage.begin_checkpoint(version, manifest, source.path)

    def _base_of(self, announced: Announced) -> Staged | None:
        """What a delta applies to; None for a full upload. Raises BASE_VERSION_MISMATCH."""
        if not announced.base_version:
            return None
        base = self._delta_base()
        if base is None or base.weight_version != announced.base_version:
            held = base.weight_version if base else 0
            raise DomainError(
                Reason.BASE_VERSION_MISMATCH,
                f"a delta of version {announced.base_version} does not apply: "
                f"version {self.active_version} is active, "
                + (f"and {held} is held" if held else "and its bytes are not held"),
                {"base": announced.base_version, "active": self.active_version, "held": held},
            )
        return base

    def _delta_base(self) -> Staged | None:
        return self._held.get(self.active_version) if self._switch.trusted else None

    async def _payload(self, announced: Announced, upload: Upload, requests: Requests) -> bool:
        """Takes chunks up to the commit; False where the stream ends before it."""
        async for request in requests:
            kind = request.WhichOneof("message")
            if kind == "chunk":
                if not isinstance(announced.source, InlineSource):
                    raise FieldInvalid("chunk", "may only follow a header with an inline source")
                chunk = request.chunk
                upload.write_chunk(chunk.offset_bytes, chunk.data, chunk.xxh3)
            elif kind == "commit":
                expected, actual = announced.digest, request.commit.header_sha256
                if actual != expected:
                    raise DomainError(
                        Reason.CHECKSUM_MISMATCH,
                        "header_sha256 is not that of the header this stream began with",
                        {"expected": expected.hex(), "actual": actual.hex()},
                    )
                return True
            else:
                raise FieldInvalid("message", "must be a chunk or the commit here", kind or "unset")
        return False

    def _keep(self, announced: Announced, staged: Staged) -> _Version:
        version = announced.weight_version
        newest = self._staged[max(self._staged)][0] if self._staged else self._active
        changed = sum(
            newest is None or newest.hashes.get(name) != value
            for name, value in staged.hashes.items()
        )
        if not changed:
            logger.warning("version %s changes no tensor of the version before it", version)
        accepted = _Version(announced, staged.hashes, changed)
        self._staged[version] = accepted, staged
        while len(self._staged) > self._max_staged:
            self._unstage(min(self._staged))
        return accepted

    async def activate(self, weight_version: int, in_flight: InFlight | None) -> Switched:
        """Switches to a staged version; one that is active already is no work.

        Raises WEIGHT_VERSION_NOT_STAGED, WEIGHT_LOAD_FAILED, PROBE_MISMATCH, WEIGHTS_INCONSISTENT,
        ENGINE_LOST.
        """
        task = asyncio.create_task(
            self._activate(weight_version, in_flight or self._in_flight),
            name=f"switch to version {weight_version}",
        )
        self._switches.add(task)
        task.add_done_callback(self._switch_ended)
        # A caller that is gone must not leave the engine paused, or half a version in it.
        return await asyncio.shield(task)

    def _switch_ended(self, task: asyncio.Task[Switched]) -> None:
        self._switches.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("%s: %s", task.get_name(), error)

    async def _activate(self, weight_version: int, in_flight: InFlight) -> Switched:
        async with self._activating:
            if weight_version == self.active_version and self._switch.trusted:
                return Switched(weight_version, 0.0)
            accepted, staged = self._staged.get(weight_version, (None, None))
            if accepted is None or staged is None or weight_version < self.active_version:
                raise DomainError(
                    Reason.WEIGHT_VERSION_NOT_STAGED,
                    f"version {weight_version} is not staged",
                    {"weight_version": weight_version, "active": self.active_version},
                )
            # While it is loaded, newer uploads must not make it give way.
            staged.retain()
            try:
                switched = await self._switch.switch(
                    staged.weights,
                    in_flight,
                    self._turns,
                    lambda: self._held.open(self.active_version),
                    accepted.announced.probe,
                )
            except BaseException:
                staged.release()
                # It may be uploaded once more.
                self._unstage(weight_version)
                if not self._switch.trusted:
                    self._held.let_go()
                raise
            for version in [v for v in self._staged if v <= weight_version]:
                self._unstage(version)
            self._active = accepted
            if self.on_switched is not None:
                self.on_switched(switched)
            await self._held.replace(staged)
            return switched

    def _unstage(self, version: int) -> None:
        if version in self._staged:
            self._staged.pop(version)[1].release()

    def _response(
        self,
        version: int,
        state: weights_pb2.WeightState.ValueType,
        accepted: _Version | None,
    ) -> weights_pb2.UpdateWeightsResponse:
        return UpdateWeightsResponse(
            weight_version=version,
            state=state,
            active_weight_version=self.active_version,
            changed_tensor_count=accepted.changed_tensor_count if accepted else 0,
        )
