"""Which weight versions are staged, active and held, and the change from one to the next.

    accepted (verified, STAGED) -> switched to (ACTIVE) -> held, as what a delta applies to and the way back

A version is accepted only above every other one, and switched to only once it is accepted. With it, those
below it that were never switched to are let go. A switch, once begun, goes on to its end whether or not its
caller is there to hear of it. One that fails leaves the version before in use, and lets go of the one that
failed, which may be uploaded once more; what the engine then holds, and whether it can be trusted, is for
`weight_switch` to say.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from penstock.server.core.broadcast import Broadcast
from penstock.server.core.errors import DomainError
from penstock.server.core.own_tasks import OwnTasks
from penstock.server.engine.protocol import StagedWeights
from penstock.server.turns.runner import TurnRunner
from penstock.server.weights.adapter_manifest import AdapterShape
from penstock.server.weights.adapter_versions import AdapterVersions
from penstock.server.weights.header import Announced
from penstock.server.weights.held import HeldWeights
from penstock.server.weights.probe import Probe
from penstock.server.weights.staging.incoming import Staged
from penstock.server.weights.staging.manifest import WeightRefused
from penstock.server.weights.staging.stage import WeightStage
from penstock.server.weights.staging.stage_memory import Buffer
from penstock.server.weights.switch import InFlight, Load, PoolUpdate, Switched, WeightSwitch
from penstock.wire.reasons import Reason

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Version:
    """A version that was verified, and what it was announced as."""

    announced: Announced
    hashes: Mapping[str, int]
    changed_tensor_count: int
    """Against the version accepted before it."""


class WeightVersions:
    """Keeps verified versions and switches to them."""

    def __init__(
        self,
        stage: WeightStage,
        switch: WeightSwitch,
        turns: TurnRunner,
        adapters: AdapterVersions,
        in_flight: InFlight,
        held: HeldWeights,
        *,
        max_staged: int = 2,
    ) -> None:
        self._stage = stage
        self._switch = switch
        self._turns = turns
        self._adapters = adapters
        self._in_flight = in_flight
        self._held = held
        self._max_staged = max_staged
        self._staged: dict[int, tuple[Version, Staged]] = {}
        self._active: Version | None = None
        self._activating = asyncio.Lock()
        self._taking: int | None = None
        """The version that is switched to, until nothing of it is read from memory of its uploader."""
        self._taken = Broadcast()
        self._switches = OwnTasks()
        self.on_staged: Callable[[int, int], None] | None = None
        """Called with an upload's bytes and its changed tensors, for metrics."""
        self.on_switched: Callable[[Switched], Awaitable[None]] | None = None
        """Called after every switch, once what it switched to is active."""
        self.on_accepted: Callable[[Staged, Probe | None, AdapterShape | None], None] | None = None
        """Called with every version that is staged, the probe it came with, and what it is where it is an
        adapter."""

    def open_version(
        self, weight_version: int
    ) -> AbstractAsyncContextManager[StagedWeights | None]:
        """A version that can be loaded again: the one held, or the base model; None where it is neither."""
        return self._held.open(weight_version)

    @property
    def active_version(self) -> int:
        """The version now sampling."""
        return self._switch.active_version

    @property
    def trusted_version(self) -> int | None:
        """The active version; None where the weights in use cannot be trusted."""
        return self.active_version if self._switch.trusted else None

    @property
    def staged_versions(self) -> list[int]:
        """Versions verified and not yet switched to, oldest first."""
        return sorted(self._staged)

    @property
    def delta_base_version(self) -> int:
        """The version a delta can apply to; zero for none."""
        return self._held.weight_version if self.delta_base() is not None else 0

    @property
    def held_version(self) -> int:
        """The version whose bytes are held; zero for none."""
        return self._held.weight_version

    def delta_base(self) -> Staged | None:
        """The bytes that a delta can apply to."""
        return self._held.get(self.active_version) if self._switch.trusted else None

    def has(self, weight_version: int) -> bool:
        """Whether a version is staged or active."""
        return weight_version == self.active_version or weight_version in self._staged

    def complete(self, weight_version: int) -> Staged | None:
        """A full version whose bytes are here and verified: staged or held."""
        version, staged = self._staged.get(weight_version, (None, None))
        if version is not None and version.announced.adapter is None:
            return staged
        held = self._held.get(weight_version)
        return held if held is not None and held.hashes else None

    def memory_of(self, weight_version: int) -> Buffer | None:
        """Where a staged version lies in memory of this server, for others of this host to read."""
        _, staged = self._staged.get(weight_version, (None, None))
        return staged.buffer if staged is not None and staged.buffer.owned else None

    def staged(self, announced: Announced) -> Version | None:
        """What became of this very announcement, where it is staged."""
        version, _ = self._staged.get(announced.weight_version, (None, None))
        same = version is not None and version.announced.digest == announced.digest
        return version if same else None

    def active(self, announced: Announced) -> Version | None:
        """What became of this very announcement, where it is the active version."""
        active = self._active
        same = active is not None and active.announced.digest == announced.digest
        return active if same and self.trusted_version == announced.weight_version else None

    def check_order(self, version: int) -> None:
        """Raises WEIGHT_VERSION_STALE where a version does not come after every other."""
        # Where the weights in use cannot be trusted, the version they should be may come once more.
        accepted = self.active_version if self._switch.trusted else self.active_version - 1
        newest = max([accepted, *self._staged])
        if version <= newest:
            raise DomainError(
                Reason.WEIGHT_VERSION_STALE,
                f"version {version} is not greater than {newest}",
                {"weight_version": version, "newest": newest},
            )

    def check_kind(self, announced: Announced) -> None:
        """That full weights and adapters do not meet where they cannot.

        Raises ADAPTER_ACTIVE, WEIGHTS_INCONSISTENT.
        """
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

    def accept(self, announced: Announced, staged: Staged, length_bytes: int) -> Version:
        """Keeps a verified payload of `length_bytes` as a staged version; the oldest may give way."""
        newest = self._staged[max(self._staged)][0] if self._staged else self._active
        changed = sum(
            newest is None or newest.hashes.get(name) != value
            for name, value in staged.hashes.items()
        )
        version = Version(announced, staged.hashes, changed)
        self._tell_staged(version, length_bytes)
        self._staged[announced.weight_version] = version, staged
        if self.on_accepted is not None:
            self.on_accepted(staged, announced.probe, announced.adapter)
        while len(self._staged) > self._max_staged:
            self._unstage(min(self._staged))
        return version

    def _tell_staged(self, version: Version, length_bytes: int) -> None:
        if not version.changed_tensor_count:
            logger.warning(
                "version %s changes no tensor of the version before it",
                version.announced.weight_version,
            )
        if self.on_staged is not None:
            self.on_staged(length_bytes, version.changed_tensor_count)

    async def activate(self, weight_version: int, in_flight: InFlight | None) -> Switched:
        """Switches to a staged version; one that is active already is no work.

        Raises WEIGHT_VERSION_NOT_STAGED, WEIGHT_LOAD_FAILED, PROBE_MISMATCH, WEIGHTS_INCONSISTENT,
        ENGINE_LOST.
        """
        # A caller that is gone must not leave the engine paused, or half a version in it.
        return await asyncio.shield(
            self._switches.start(
                self._activate(weight_version, in_flight or self._in_flight),
                f"switch to version {weight_version}",
            )
        )

    async def settled(self) -> None:
        """Waits while what is active already is still read from memory of its uploader, who may write to
        that as soon as it is told that it is."""
        while self._taking == self.active_version:
            await self._taken.wait()

    async def _activate(self, weight_version: int, in_flight: InFlight) -> Switched:
        async with self._activating:
            if weight_version == self.trusted_version:
                return Switched(weight_version, 0.0)
            version, staged = self._staged.get(weight_version, (None, None))
            if version is None or staged is None or weight_version < self.active_version:
                raise DomainError(
                    Reason.WEIGHT_VERSION_NOT_STAGED,
                    f"version {weight_version} is not staged",
                    {"weight_version": weight_version, "active": self.active_version},
                )
            # While it is loaded, newer uploads must not make it give way.
            staged.retain()
            self._taking = weight_version
            try:
                self.check_kind(version.announced)
                switched = await self._load(version.announced, staged, in_flight)
                # Room for what is held of it.
                self._unstage_up_to(weight_version)
                await self._hold(version.announced, staged.retain())
            except BaseException:
                # It may be uploaded once more.
                self._unstage(weight_version)
                self._let_go_of_what_is_lost()
                raise
            finally:
                staged.release()
                self._taking = None
                self._taken.notify()
            await self._adopt(version, switched)
            return switched

    async def _hold(self, announced: Announced, staged: Staged) -> None:
        """Keeps of what has been switched to whatever may be asked for again.

        Raises WEIGHTS_INCONSISTENT where the engine read it from memory of its uploader, who has written to
        that since: what the engine holds is anybody's guess. Engines of a pool find that out themselves.
        """
        version = announced.weight_version
        try:
            if announced.adapter is None:
                await self._held.replace(staged)
            elif self._switch.is_pool:
                # An engine that comes late is given it after the full weights.
                await self._held.replace_adapter(staged)
            else:
                # The engine has read it, and the full weights are there to stay.
                staged.release()
                self._held.let_go()
        except WeightRefused as error:
            problem = f"it was written to after it was verified: {error.message}"
            if not self._switch.is_pool:
                raise await self._switch.distrust(version, self._turns, problem) from error
            logger.error("version %s is not held: %s", version, problem)

    async def _load(self, announced: Announced, staged: Staged, in_flight: InFlight) -> Switched:
        """Full weights by a switch, an adapter beside what is there; a pool takes both by itself."""
        if self._switch.is_pool:
            update = PoolUpdate(staged.weights, announced.probe, announced.adapter)
            return await self._switch.switch_pool(update, in_flight, self._turns)
        if announced.adapter is None:
            return await self._switch.switch(
                staged.weights, in_flight, self._turns, self._way_back, announced.probe
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

    async def change(
        self, announced: Announced, load: Load, check: Callable[[], None]
    ) -> tuple[Version, Switched]:
        """Has the engine take a version that was never staged, by `load` while it is paused. `check` raises
        where it may not: what it was announced for may have changed while another switch was waited for.

        Raises what these two do, and as `activate`.
        """
        async with self._activating:
            self.check_kind(announced)
            check()
            try:
                switched = await self._switch.change(
                    announced.weight_version,
                    load,
                    announced.in_flight or self._in_flight,
                    self._turns,
                    self._way_back,
                    announced.probe,
                )
            finally:
                self._let_go_of_what_is_lost()
            version = self._unseen(announced)
            self._held.let_go()
            self._tell_staged(version, sum(t.decoded_bytes for t in announced.manifest))
            await self._adopt(version, switched)
        return version, switched

    def _unseen(self, announced: Announced) -> Version:
        """A version that the engine has and this server never saw a byte of."""
        before = self._active.hashes if self._active is not None else dict[str, int]()
        changed = sum(
            not tensor.xxh3 or before.get(tensor.name) != tensor.xxh3
            for tensor in announced.manifest
        )
        # A patch leaves other tensors as they were, of whatever version they are.
        whole = not announced.base_version
        hashes = {t.name: t.xxh3 for t in announced.manifest if t.xxh3 and whole}
        return Version(announced, hashes, changed)

    async def _adopt(self, version: Version, switched: Switched) -> None:
        self._unstage_up_to(version.announced.weight_version)
        self._active = version
        if self.on_switched is not None:
            await self.on_switched(switched)

    def _way_back(self) -> AbstractAsyncContextManager[StagedWeights | None]:
        return self._held.open(self.active_version)

    def _let_go_of_what_is_lost(self) -> None:
        if not self._switch.trusted:
            self._held.let_go()

    def let_go_of_held(self) -> None:
        """Gives up the way back and the base of deltas, for the room they take."""
        self._held.let_go()

    def _unstage_up_to(self, version: int) -> None:
        for older in [v for v in self._staged if v <= version]:
            self._unstage(older)

    def _unstage(self, version: int) -> None:
        if version in self._staged:
            self._staged.pop(version)[1].release()

    async def close(self) -> None:
        """Releases everything; no call is open any more and the engine is gone."""
        await self._switches.cancel()
        await self._adapters.close()
        self._staged.clear()
        self._held.let_go()
        self._stage.close()
