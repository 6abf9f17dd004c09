"""UpdateWeights: header -> payload -> commit, verified; and which versions are staged, active, held.

Order of an upload: header checked (order, epoch, base, manifest) -> READY -> payload (chunks of this
stream, a shared file, or a folder) -> commit -> every tensor verified, off the event loop, while
generation goes on -> STAGED -> with immediate activation, switched to -> ACTIVE.

What a failure does: anything refused, and a stream that ends without a commit, releases what was
staged and leaves the version in use exactly as it was. The same version and header again is answered with
what became of it. One upload runs at a time; an upload or switch of an older trainer is refused. A switch,
once begun, goes on to its end whether or not its caller is there to hear of it.

By a collective (see `weight_collective`) no byte passes here: header -> gate closed, engine paused ->
READY -> rounds -> commit -> ACTIVE. Nothing is staged, and nothing held afterwards.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from penstock.server.adapter_versions import AdapterVersions
from penstock.server.engine import EngineDescription, EngineLost
from penstock.server.errors import DomainError, FieldInvalid
from penstock.server.held_weights import HeldWeights
from penstock.server.turns import TurnRunner
from penstock.server.upload_slot import Claim, UploadSlot
from penstock.server.weight_collective import (
    Collective,
    Join,
    Rounds,
    check_announced,
    read_join,
)
from penstock.server.weight_header import (
    Announced,
    CheckpointSource,
    CollectiveSource,
    InlineSource,
    SharedSource,
    read_header,
)
from penstock.server.weight_manifest import WeightRefused
from penstock.server.weight_stage import Staged, Upload, WeightStage
from penstock.server.weight_switch import InFlight, Switched, WeightSwitch
from penstock.v1 import weights_pb2
from penstock.wire.codec import twin
from penstock.wire.reasons import Reason
from penstock.wire.upload_messages import Chunk, Header, UploadMessage

logger = logging.getLogger(__name__)

T = TypeVar("T")

UpdateWeightsResponse = twin(weights_pb2.UpdateWeightsResponse)

Respond = Callable[[weights_pb2.UpdateWeightsResponse], Awaitable[None]]
Requests = AsyncIterator[UploadMessage]


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
        adapters: AdapterVersions,
        collective: Collective,
        in_flight: InFlight,
        description: EngineDescription,
        *,
        max_staged: int = 2,
        hold_active: bool = True,
    ) -> None:
        self._stage = stage
        self._switch = switch
        self._turns = turns
        self._adapters = adapters
        self._collective = collective
        self._in_flight = in_flight
        self._description = description
        self._max_staged = max_staged
        self._staged: dict[int, tuple[_Version, Staged]] = {}
        self._active: _Version | None = None
        self._held = HeldWeights(stage, description.checkpoint, enabled=hold_active)
        # A trainer that is gone would otherwise leave its memory taken.
        self._slot = UploadSlot(stage.forget_shared)
        self._activating = asyncio.Lock()
        self._switches: set[asyncio.Task[object]] = set()
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
        self._slot.fence(trainer_epoch)

    def has(self, weight_version: int) -> bool:
        """Whether a version is staged or active."""
        return weight_version == self.active_version or weight_version in self._staged

    async def close(self) -> None:
        """Releases everything; no call is open any more and the engine is gone."""
        for task in self._switches:
            task.cancel()
        await asyncio.gather(*self._switches, return_exceptions=True)
        # A thread may still be reading what a cancelled upload left.
        await self._slot.wait_free()
        await self._adapters.close()
        self._staged.clear()
        self._held.let_go()
        self._stage.close()

    async def update_weights(self, requests: Requests, respond: Respond) -> None:
        """Takes one upload; see the module's docstring."""
        first = await anext(requests, None)
        if isinstance(first, Header):
            await self._take(read_header(first, self._description), requests, respond)
        elif first is not None and not isinstance(first, Chunk) and first.HasField("join"):
            await self._join(read_join(first.join), respond)
        else:
            raise FieldInvalid("message", "must be a header or a join first")

    async def _take(self, announced: Announced, requests: Requests, respond: Respond) -> None:
        by_collective = isinstance(announced.source, CollectiveSource)
        if not by_collective and await self._repeated(announced, respond):
            return
        self._check_order(announced)
        self._check_kind(announced)
        if by_collective:
            await self._take_collective(announced, requests, respond)
            return
        version = announced.weight_version
        accepted = await self._exclusively(announced, requests, respond)
        if accepted is None:
            return
        await respond(self._response(version, weights_pb2.WEIGHT_STATE_STAGED, accepted))
        if announced.immediate:
            self._slot.check_epoch(announced.trainer_epoch)
            if self.on_trainer_version is not None:
                self.on_trainer_version(version)
            await self._activate_and_tell(accepted, respond)

    async def _exclusively(
        self, announced: Announced, requests: Requests, respond: Respond
    ) -> _Version | None:
        """Receives one upload while no other is received; that of an older trainer makes room."""
        await self._slot.take(_claim(announced), lambda: self._check_order(announced))
        uploader = asyncio.current_task()
        assert uploader is not None
        self._slot.end_by(uploader.cancel)
        try:
            return await self._receive(announced, requests, respond)
        except WeightRefused as error:
            raise DomainError(error.reason, error.message, error.metadata) from error
        except asyncio.CancelledError:
            if not self._slot.outdated or uploader.uncancel():
                raise
            raise self._slot.stale(announced.trainer_epoch) from None
        finally:
            self._slot.free()

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
        await respond(self._active_response(accepted, switched))

    def _check_order(self, announced: Announced) -> None:
        version = announced.weight_version
        self._slot.check_epoch(announced.trainer_epoch)
        # Where the weights in use cannot be trusted, the version they should be may come once more.
        accepted = self.active_version if self._switch.trusted else self.active_version - 1
        newest = max([accepted, *self._staged])
        if version <= newest:
            raise DomainError(
                Reason.WEIGHT_VERSION_STALE,
                f"version {version} is not greater than {newest}",
                {"weight_version": version, "newest": newest},
            )

    def _check_kind(self, announced: Announced) -> None:
        """That full weights and adapters do not meet where they cannot."""
        version, active = announced.weight_version, self.active_version
        if announced.adapter is None and self._switch.active_adapter is not None:
            raise DomainError(
                Reason.ADAPTER_ACTIVE,
                f"version {version} is a full upload, but adapter version {active} is active, which was "
                "trained on the full weights that are there",
                {"weight_version": version, "active": active},
            )
        if announced.adapter is not None and not self._switch.trusted:
            raise DomainError(
                Reason.WEIGHTS_INCONSISTENT,
                f"version {version} is an adapter, and there are no full weights for it; "
                "nothing is served until a full upload succeeds",
                {"weight_version": version},
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
        expected = announced.adapter.tensors if announced.adapter is not None else None
        if isinstance(source, InlineSource):
            return await self._stage.begin_inline(
                version, manifest, source.length_bytes, base, expected
            )
        if isinstance(source, SharedSource):
            return await self._stage.begin_shared(
                version, manifest, source.name, source.host_namespace, base, expected
            )
        assert isinstance(source, CheckpointSource)
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
            if isinstance(request, Chunk):
                if not isinstance(announced.source, InlineSource):
                    raise FieldInvalid("chunk", "may only follow a header with an inline source")
                upload.write_chunk(request.offset_bytes, request.data, request.xxh3)
                continue
            if isinstance(request, Header):
                raise FieldInvalid("message", "must be a chunk or the commit here", "header")
            if (kind := request.WhichOneof("message")) != "commit":
                raise FieldInvalid("message", "must be a chunk or the commit here", kind or "unset")
            announced.check_commit(request.commit)
            return True
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
        # A caller that is gone must not leave the engine paused, or half a version in it.
        return await asyncio.shield(self._track(task))

    def _track_claimed(self, task: asyncio.Task[T]) -> asyncio.Task[T]:
        """Frees what was claimed when the task ends, however early, and before anybody hears of it."""
        task.add_done_callback(lambda _: self._slot.free())
        return self._track(task)

    def _track(self, task: asyncio.Task[T]) -> asyncio.Task[T]:
        self._switches.add(task)
        task.add_done_callback(self._switch_ended)
        return task

    def _switch_ended(self, task: asyncio.Task[T]) -> None:
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
                self._check_kind(accepted.announced)
                switched = await self._load(accepted.announced, staged, in_flight)
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
            if accepted.announced.adapter is None:
                await self._held.replace(staged)
            else:
                # The engine has read it, and the full weights are there to stay.
                staged.release()
                self._held.let_go()
            return switched

    async def _load(self, announced: Announced, staged: Staged, in_flight: InFlight) -> Switched:
        """Full weights by a switch, an adapter beside what is there."""
        if announced.adapter is None:
            return await self._switch.switch(
                staged.weights,
                in_flight,
                self._turns,
                lambda: self._held.open(self.active_version),
                announced.probe,
            )
        copy = await self._own_copy(staged)
        try:
            return await self._adapters.switch(
                copy.weights, announced.adapter, in_flight, announced.probe
            )
        finally:
            copy.release()

    async def _own_copy(self, staged: Staged) -> Staged:
        """What is staged, in memory that its uploader cannot write to; somebody else's is checked again."""
        try:
            return await self._stage.hold(staged.retain())
        except WeightRefused as error:
            raise DomainError(error.reason, error.message, error.metadata) from error

    async def _join(self, join: Join, respond: Respond) -> None:
        """Has the engine join a collective; the trainer hears at once that it may come too."""
        epoch = join.trainer_epoch
        self._slot.check_epoch(epoch)
        doing = f"the collective {join.backend!r} is being joined"
        claim = Claim(epoch, doing, {"backend": join.backend})
        await self._slot.take(claim, lambda: self._slot.check_epoch(epoch))
        # One that waits for a trainer that is gone has to end before anything else begins.
        joining = self._track_claimed(
            asyncio.create_task(
                self._collective.join(join), name=f"joining the collective {join.backend!r}"
            )
        )
        await respond(self._response(0, weights_pb2.WEIGHT_STATE_READY, None))
        try:
            await asyncio.shield(joining)
        except WeightRefused as error:
            raise DomainError(error.reason, error.message, error.metadata) from error
        except EngineLost as error:
            raise DomainError(Reason.ENGINE_LOST, f"the engine is lost: {error}") from error

    async def _take_collective(
        self, announced: Announced, requests: Requests, respond: Respond
    ) -> None:
        version = announced.weight_version
        self._check_collective(announced)
        await self._slot.take(_claim(announced), lambda: self._check_collective(announced))

        def commit() -> None:
            if self.on_trainer_version is not None:
                self.on_trainer_version(version)

        ready = self._response(version, weights_pb2.WEIGHT_STATE_READY, None)
        rounds = Rounds(self._collective, announced, requests, lambda: respond(ready), commit)
        self._slot.end_by(rounds.break_off)
        changing = self._track_claimed(
            asyncio.create_task(
                self._change_by_collective(announced, rounds), name=f"switch to version {version}"
            )
        )
        try:
            accepted, switched = await asyncio.shield(changing)
        except asyncio.CancelledError:
            rounds.break_off()
            raise
        await respond(self._active_response(accepted, switched))

    def _check_collective(self, announced: Announced) -> None:
        self._check_order(announced)
        active = self.active_version if self._switch.trusted else None
        try:
            check_announced(announced, self._collective, self._description, active)
        except WeightRefused as error:
            raise DomainError(error.reason, error.message, error.metadata) from error

    async def _change_by_collective(
        self, announced: Announced, rounds: Rounds
    ) -> tuple[_Version, Switched]:
        version = announced.weight_version
        try:
            async with self._activating:
                self._check_kind(announced)
                switched = await self._switch.change(
                    version,
                    rounds.load,
                    announced.in_flight or self._in_flight,
                    self._turns,
                    lambda: self._held.open(self.active_version),
                    announced.probe,
                )
                accepted = self._arrived(announced)
        except WeightRefused as error:
            if self._slot.outdated:
                raise self._slot.stale(announced.trainer_epoch) from error
            raise DomainError(error.reason, error.message, error.metadata) from error
        finally:
            if not self._switch.trusted:
                self._held.let_go()
        if self.on_switched is not None:
            self.on_switched(switched)
        return accepted, switched

    def _arrived(self, announced: Announced) -> _Version:
        """Takes note of a version that the engine has and this server never saw a byte of."""
        hashes = {t.name: t.xxh3 for t in announced.manifest if t.xxh3}
        before = self._active.hashes if self._active is not None else dict[str, int]()
        changed = sum(
            not tensor.xxh3 or before.get(tensor.name) != tensor.xxh3
            for tensor in announced.manifest
        )
        if not changed:
            logger.warning(
                "version %s changes no tensor of the version before it", announced.weight_version
            )
        for version in [v for v in self._staged if v <= announced.weight_version]:
            self._unstage(version)
        # A patch leaves other tensors as they were, of whatever version they are.
        self._active = _Version(announced, {} if announced.base_version else hashes, changed)
        self._held.let_go()
        if self.on_staged is not None:
            self.on_staged(sum(t.decoded_bytes for t in announced.manifest), changed)
        return self._active

    def _unstage(self, version: int) -> None:
        if version in self._staged:
            self._staged.pop(version)[1].release()

    def _active_response(
        self, accepted: _Version, switched: Switched
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
        accepted: _Version | None,
    ) -> weights_pb2.UpdateWeightsResponse:
        return UpdateWeightsResponse(
            weight_version=version,
            state=state,
            active_weight_version=self.active_version,
            changed_tensor_count=accepted.changed_tensor_count if accepted else 0,
        )


def _claim(announced: Announced) -> Claim:
    version = announced.weight_version
    doing = f"version {version} is being uploaded"
    return Claim(announced.trainer_epoch, doing, {"weight_version": version})
