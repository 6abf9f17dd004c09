"""Admits one upload at a time, from the newest trainer, and ends an older trainer's upload."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from penstock.server.core.errors import DomainError
from penstock.wire.reasons import Reason


@dataclass(frozen=True, slots=True)
class Claim:
    trainer_epoch: int
    doing: str
    """Tells another upload that arrives meanwhile."""
    metadata: Mapping[str, object]


class UploadSlot:
    """Held by at most one claim, from `take` to `free`."""

    def __init__(self, on_fence: Callable[[], None], check_newer: Callable[[int], None]) -> None:
        """`on_fence` is called when a newer trainer appears. `check_newer` raises if an upload of an epoch
        that is newer than any may not make itself the newest."""
        self.epoch = 0
        """Epoch of the newest trainer."""
        self._on_fence = on_fence
        self._check_newer = check_newer
        self._holder: Claim | None = None
        self._end: Callable[[], object] | None = None
        self.outdated = False
        """Whether a newer trainer has ended what is under way."""
        self._idle = asyncio.Event()
        self._idle.set()

    def fence(self, trainer_epoch: int) -> None:
        """Refuse trainers with a lower epoch from now on, and end what one of them has under way."""
        self.epoch = trainer_epoch
        self._on_fence()
        if self._holder is not None and self._holder.trainer_epoch < trainer_epoch:
            self.outdated = True
            if self._end is not None:
                self._end()

    def check_epoch(self, trainer_epoch: int) -> None:
        """Raise STALE_EPOCH if a newer trainer has appeared."""
        if trainer_epoch < self.epoch:
            raise self.stale(trainer_epoch)

    def stale(self, trainer_epoch: int) -> DomainError:
        return DomainError(
            Reason.STALE_EPOCH,
            f"trainer epoch {trainer_epoch} is older than {self.epoch}",
            {"trainer_epoch": trainer_epoch, "current": self.epoch},
        )

    async def take(self, claim: Claim, check: Callable[[], None]) -> None:
        """Hold the slot until `free`. Waits for an outdated holder to leave; `check` may then refuse the
        claim. Raises UPLOAD_IN_PROGRESS if the slot is taken."""
        if claim.trainer_epoch > self.epoch:
            self._check_newer(claim.trainer_epoch)
            self.fence(claim.trainer_epoch)
        if self.outdated:
            await self._idle.wait()
            check()
        if self._holder is not None:
            raise DomainError(
                Reason.UPLOAD_IN_PROGRESS,
                self._holder.doing,
                self._holder.metadata,
                retry_after_seconds=1.0,
            )
        self._holder = claim
        self._idle.clear()

    def end_by(self, end: Callable[[], object]) -> None:
        """Without one, a newer trainer waits for the holder."""
        self._end = end

    def free(self) -> None:
        self._holder = self._end = None
        self.outdated = False
        self._idle.set()

    async def wait_free(self) -> None:
        await self._idle.wait()
