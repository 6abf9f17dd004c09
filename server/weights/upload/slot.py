"""One upload at a time, of the newest trainer: who is at it, and how an older one is made to leave."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from penstock.server.core.errors import DomainError
from penstock.wire.reasons import Reason


@dataclass(frozen=True, slots=True)
class Claim:
    """Somebody's wish to be the one."""

    trainer_epoch: int
    doing: str
    """As another hears it who comes meanwhile."""
    metadata: Mapping[str, object] = field(default_factory=dict[str, object])


class UploadSlot:
    """Held by at most one claim, from `take` to `free`."""

    def __init__(self, on_fence: Callable[[], None]) -> None:
        """`on_fence` is called when a newer trainer has shown itself."""
        self.epoch = 0
        """Of the newest trainer."""
        self._on_fence = on_fence
        self._holder: Claim | None = None
        self._end: Callable[[], object] | None = None
        self.outdated = False
        """Whether a newer trainer has ended what is under way."""
        self._idle = asyncio.Event()
        self._idle.set()

    def fence(self, trainer_epoch: int) -> None:
        """Refuses trainers older than this one from now on; what one of them is at ends."""
        self.epoch = trainer_epoch
        self._on_fence()
        if self._holder is not None and self._holder.trainer_epoch < trainer_epoch:
            self.outdated = True
            if self._end is not None:
                self._end()

    def check_epoch(self, trainer_epoch: int) -> None:
        """Raises STALE_EPOCH where a newer trainer has shown itself."""
        if trainer_epoch < self.epoch:
            raise self.stale(trainer_epoch)

    def stale(self, trainer_epoch: int) -> DomainError:
        """What an older trainer is refused with."""
        return DomainError(
            Reason.STALE_EPOCH,
            f"trainer epoch {trainer_epoch} is older than {self.epoch}",
            {"trainer_epoch": trainer_epoch, "current": self.epoch},
        )

    async def take(self, claim: Claim, check: Callable[[], None]) -> None:
        """From here to `free` nobody else has it; an older trainer makes room.

        `check` may refuse what had to wait for that. Raises UPLOAD_IN_PROGRESS.
        """
        if claim.trainer_epoch > self.epoch:
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
        """Says how the holder is told to leave; without it, it is waited for."""
        self._end = end

    def free(self) -> None:
        """The holder has left."""
        self._holder = self._end = None
        self.outdated = False
        self._idle.set()

    async def wait_free(self) -> None:
        """Returns when nobody has it."""
        await self._idle.wait()
