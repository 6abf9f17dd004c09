"""The trainer's weights to its servers: packed once, uploaded to each over a connection of its own.

    fill (compute thread) -> upload, to each: whole, or as a difference -> STAGED -> switched

The switch itself travels on the exchange. What goes to a server, when, and what follows a refusal, is its
`Sender`'s; the bytes are the `WeightCopy`'s. Uploads to several servers go on at the same time, and what
changes the copy waits for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack

from penstock.trainer.weights.copy import WeightCopy
from penstock.trainer.weights.payloads import Weights
from penstock.trainer.weights.sender import Announcement, Sender


class Publisher:
    """Weight versions, for every server of a run."""

    def __init__(self, copy: WeightCopy, senders: Sequence[Sender]) -> None:
        """`senders` upload `copy`, each to one server."""
        self._copy = copy
        self.senders = tuple(senders)

    @property
    def filled_version(self) -> int:
        """Version whose bytes the payload holds; zero before the first."""
        return self._copy.version

    @property
    def digest(self) -> str:
        """Checksum of the payload, equal for equal weights; empty before the first."""
        return self._copy.filled.digest if self._copy.filled else ""

    @property
    def length_bytes(self) -> int:
        """Size of a whole version."""
        return self._copy.filled.length_bytes if self._copy.filled else 0

    async def fill(
        self,
        weights: Weights,
        weight_version: int,
        dtype: str,
        announcements: Sequence[Announcement] = (),
    ) -> None:
        """Copies weights into the payload as this version, in the dtype the servers named, and scores
        the probe with them. With announcements, one for each server, uploads begin meanwhile, where they
        can.

        Waits for uploads that are under way.
        """
        async with AsyncExitStack() as stack:
            for sender in self.senders:
                await stack.enter_async_context(sender.lock)
            # Before the copy begins, so that nobody takes what it overwrites for a whole version.
            self._copy.relabel(weight_version)
            self._leave_ahead()
            if not any(sender.has_base for sender in self.senders):
                self._copy.base = None
            keeps_base = self._copy.base is not None or any(s.sends_deltas for s in self.senders)
            payload = self._copy.reusable(keeps_base=keeps_base)
            if payload is None:
                payload = await self._copy.allocate(weights, dtype, keeps_base=keeps_base)
            self._copy.filled = payload
            for sender, announcement in zip(self.senders, announcements, strict=False):
                sender.begin_ahead(payload, announcement)
            try:
                in_chunks = any(sender.next_in_chunks for sender in self.senders)
                await self._copy.fill(payload, weights, in_chunks=in_chunks)
            except BaseException:
                self._leave_ahead()
                raise

    def relabel(self, weight_version: int) -> None:
        """The bytes of the version before are this version's too: the step changed nothing."""
        self._copy.relabel(weight_version)
        self._leave_ahead()

    def close(self) -> None:
        """Frees the payloads."""
        for sender in self.senders:
            sender.close()
        self._copy.close()

    def _leave_ahead(self) -> None:
        for sender in self.senders:
            sender.leave_ahead()
