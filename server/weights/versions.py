"""Which weight versions are staged, active and held, and the change from one to the next.

    accepted (verified, STAGED) -> switched to (ACTIVE) -> held, as the base of deltas and the way back

A version is accepted only if it is newer than every other, and switched to only once it is accepted. A
switch releases older versions that were never switched to. Once begun, it runs to its end even if
its caller is gone. A failed switch leaves the previous version in use and releases the failed one,
which may be uploaded again. The `Switcher` decides which weights the engine then holds and whether they
can be trusted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from penstock.server.core.aio import Broadcast, OwnTasks
from penstock.server.core.errors import DomainError
from penstock.server.engine.protocol import StagedWeights
from penstock.server.weights.header import Announced
from penstock.server.weights.held import HeldWeights
from penstock.server.weights.staging.incoming import Staged
from penstock.server.weights.staging.manifest import WeightRefused
from penstock.server.weights.staging.stage import WeightStage
from penstock.server.weights.staging.stage_memory import Buffer
from penstock.server.weights.switch import (
    InFlight,
    Switched,
    Switcher,
    Update,
    VersionBefore,
    WeightSwitch,
)
from penstock.wire.reasons import Reason

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Version:
    announced: Announced
    hashes: Mapping[str, int]
    changed_tensor_count: int
    """Tensors that differ from the version accepted before this one."""


@dataclass(eq=False)
class WeightVersions:
    stage: WeightStage
    held: HeldWeights
    state: WeightSwitch
    switcher: Switcher
    on_staged: Callable[[int, int], None]
    """Gets an upload's bytes and changed tensors."""
    on_switched: Callable[[Switched], Awaitable[None]]
    """Runs once a version is active."""
    in_flight: InFlight
    max_staged: int

    def __post_init__(self) -> None:
        self._staged: dict[int, tuple[Version, Staged]] = {}
        self._active: Version | None = None
        self._activating = asyncio.Lock()
        self._taking: int | None = None
        """The version switched to, until its uploader's memory is no longer read."""
        self._taken = Broadcast()
        self._switches = OwnTasks()

    @property
    def active_version(self) -> int:
        return self.state.active_version

    @property
    def trusted_version(self) -> int | None:
        """None if the weights in use cannot be trusted."""
        return self.active_version if self.state.trusted else None

    @property
    def staged_versions(self) -> list[int]:
        """Versions verified and not yet switched to, oldest first."""
        return sorted(self._staged)

    @property
    def delta_base_version(self) -> int:
        """Zero if there is none."""
        return self.held.weight_version if self.delta_base() is not None else 0

    def delta_base(self) -> Staged | None:
        return self.held.get(self.active_version) if self.state.trusted else None

    def base_of(self, announced: Announced) -> Staged | None:
        """None for a full upload. Raises BASE_VERSION_MISMATCH."""
        if not announced.base_version:
            return None
        base = self.delta_base()
        if base is None or base.weight_version != announced.base_version:
            held = base.weight_version if base else 0
            active = self.active_version
            raise DomainError(
                Reason.BASE_VERSION_MISMATCH,
                f"a delta of version {announced.base_version} does not apply: "
                f"version {active} is active, "
                + (f"and {held} is held" if held else "and its bytes are not held"),
                {"base": announced.base_version, "active": active, "held": held},
            )
        return base

    def has(self, weight_version: int) -> bool:
        """Whether a version is staged or active."""
        return weight_version == self.active_version or weight_version in self._staged

    def complete(self, weight_version: int) -> Staged | None:
        """A full version, staged or held, whose bytes are in memory and verified."""
        version, staged = self._staged.get(weight_version, (None, None))
        if version is not None and version.announced.adapter is None:
            return staged
        held = self.held.get(weight_version)
        return held if held is not None and held.hashes else None

    def memory_of(self, weight_version: int) -> Buffer | None:
        """Memory of a staged version, if this server owns it, for processes on this host to read."""
        _, staged = self._staged.get(weight_version, (None, None))
        return staged.buffer if staged is not None and staged.buffer.owned else None

    def staged(self, announced: Announced) -> Version | None:
        """The version that this exact announcement led to, if it is staged."""
        version, _ = self._staged.get(announced.weight_version, (None, None))
        same = version is not None and version.announced.digest == announced.digest
        return version if same else None

    def active(self, announced: Announced) -> Version | None:
        """The version that this exact announcement led to, if it is active."""
        active = self._active
        same = active is not None and active.announced.digest == announced.digest
        return active if same and self.trusted_version == announced.weight_version else None

    def not_staged(self, weight_version: int, problem: str) -> DomainError:
        return DomainError(
            Reason.WEIGHT_VERSION_NOT_STAGED,
            f"version {weight_version} {problem}",
            {"weight_version": weight_version, "active": self.active_version},
        )

    def check_order(self, version: int) -> None:
        """Raise WEIGHT_VERSION_STALE if a version is not newer than every other."""
        # If the weights in use cannot be trusted, their version may be uploaded again.
        accepted = self.active_version if self.state.trusted else self.active_version - 1
        newest = max([accepted, *self._staged])
        if version <= newest:
            raise DomainError(
                Reason.WEIGHT_VERSION_STALE,
                f"version {version} is not greater than {newest}",
                {"weight_version": version, "newest": newest},
            )

    def check_kind(self, announced: Announced) -> None:
        """Full weights and adapters mix only as allowed. Raises ADAPTER_ACTIVE or WEIGHTS_INCONSISTENT."""
        version, active = announced.weight_version, self.active_version
        if announced.adapter is None and self.state.active_adapter is not None:
            raise DomainError(
                Reason.ADAPTER_ACTIVE,
                f"version {version} is a full upload, but adapter version {active} is active, which was "
                "trained on the present full weights",
                {"weight_version": version, "active": active},
            )
        if announced.adapter is not None and not self.state.trusted:
            raise DomainError(
                Reason.WEIGHTS_INCONSISTENT,
                f"version {version} is an adapter, and there are no full weights for it; "
                "nothing is served until a full upload succeeds",
                {"weight_version": version},
            )

    def accept(self, announced: Announced, staged: Staged, length_bytes: int) -> Version:
        """May release the oldest staged version."""
        newest = self._staged[max(self._staged)][0] if self._staged else self._active
        changed = sum(
            newest is None or newest.hashes.get(name) != value
            for name, value in staged.hashes.items()
        )
        version = Version(announced, staged.hashes, changed)
        self._tell_staged(version, length_bytes)
        self._staged[announced.weight_version] = version, staged
        self.switcher.stage(Update(staged, announced.probe, announced.adapter))
        while len(self._staged) > self.max_staged:
            self._unstage(min(self._staged))
        return version

    def _tell_staged(self, version: Version, length_bytes: int) -> None:
        if not version.changed_tensor_count:
            logger.warning(
                "version %s changes no tensor of the previous version",
                version.announced.weight_version,
            )
        self.on_staged(length_bytes, version.changed_tensor_count)

    async def activate(
        self,
        weight_version: int,
        in_flight: InFlight | None,
        check: Callable[[], None] = lambda: None,
    ) -> Switched:
        """Does nothing if the version is active already. `check` raises if the switch is no longer allowed
        after a wait for another one. Raises WEIGHT_VERSION_NOT_STAGED, WEIGHT_LOAD_FAILED, PROBE_MISMATCH,
        WEIGHTS_INCONSISTENT or ENGINE_LOST."""
        # If the caller leaves, the engine must not stay paused or hold half a version.
        switching = self._activate(weight_version, in_flight or self.in_flight, check)
        return await asyncio.shield(
            self._switches.start(switching, f"switch to version {weight_version}")
        )

    async def settled(self) -> None:
        """Wait while the active version is read from its uploader's memory. The uploader may write there
        as soon as it learns that the version is active."""
        while self._taking == self.active_version:
            await self._taken.wait()

    async def _activate(
        self, weight_version: int, in_flight: InFlight, check: Callable[[], None]
    ) -> Switched:
        async with self._activating:
            check()
            if weight_version == self.trusted_version:
                return Switched(weight_version, 0.0)
            version, staged = self._staged.get(weight_version, (None, None))
            if version is None or staged is None or weight_version < self.active_version:
                raise self.not_staged(weight_version, "is not staged")
            # While it is loaded, newer uploads must not release it.
            staged.retain()
            self._taking = weight_version
            try:
                announced = version.announced
                self.check_kind(announced)
                update = Update(staged, announced.probe, announced.adapter)
                switched = await self.switcher.switch(update, in_flight, self._way_back)
                # Makes room for the bytes that are held.
                self._unstage_up_to(weight_version)
                await self._hold(announced, staged.retain())
            except BaseException:
                # It may be uploaded again.
                self._unstage(weight_version)
                self._release_if_untrusted()
                raise
            finally:
                staged.release()
                self._taking = None
                self._taken.notify()
            await self._adopt(version, switched)
            return switched

    async def _hold(self, announced: Announced, staged: Staged) -> None:
        """Keep what may be needed again. Raises WEIGHTS_INCONSISTENT if the uploader wrote to memory that
        the engine read, because it is then unknown what the engine holds."""
        try:
            if announced.adapter is None:
                await self.held.replace(staged)
            elif self.switcher.holds_adapters:
                await self.held.replace_adapter(staged)
            else:
                staged.release()
                self.held.release()
        except WeightRefused as error:
            problem = f"it was written to after it was verified: {error.message}"
            await self.switcher.spoiled(announced.weight_version, problem)

    async def change(
        self,
        announced: Announced,
        switch: Callable[[InFlight, VersionBefore], Awaitable[Switched]],
        check: Callable[[], None],
    ) -> tuple[Version, Switched]:
        """Change to a version that was never staged, which `switch` gives the engine. `check` raises if
        that is no longer allowed after a wait for another switch. Raises what both raise, and what
        `activate` raises."""
        async with self._activating:
            self.check_kind(announced)
            check()
            try:
                switched = await switch(announced.in_flight or self.in_flight, self._way_back)
            finally:
                self._release_if_untrusted()
            version = self._unseen(announced)
            self.held.release()
            self._tell_staged(version, sum(t.decoded_bytes for t in announced.manifest))
            await self._adopt(version, switched)
        return version, switched

    def _unseen(self, announced: Announced) -> Version:
        """A version in the engine whose bytes did not pass through this server."""
        before = self._active.hashes if self._active is not None else dict[str, int]()
        changed = sum(
            not tensor.xxh3 or before.get(tensor.name) != tensor.xxh3
            for tensor in announced.manifest
        )
        # A patch leaves other tensors as they were, so their hashes are unknown.
        whole = not announced.base_version
        hashes = {t.name: t.xxh3 for t in announced.manifest if t.xxh3 and whole}
        return Version(announced, hashes, changed)

    async def _adopt(self, version: Version, switched: Switched) -> None:
        self._unstage_up_to(version.announced.weight_version)
        self._active = version
        await self.on_switched(switched)

    def _way_back(self) -> AbstractAsyncContextManager[StagedWeights | None]:
        return self.held.open(self.active_version)

    def _release_if_untrusted(self) -> None:
        if not self.state.trusted:
            self.held.release()

    def _unstage_up_to(self, version: int) -> None:
        for older in [v for v in self._staged if v <= version]:
            self._unstage(older)

    def _unstage(self, version: int) -> None:
        if version in self._staged:
            self._staged.pop(version)[1].release()

    async def close(self) -> None:
        """Requires that no call is open any more and the engine is closed."""
        await self._switches.cancel()
        self._staged.clear()
        self.held.release()
        self.stage.close()
