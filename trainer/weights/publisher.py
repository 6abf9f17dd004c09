"""Publishes the trainer's weights: packs each version once and uploads it to every server.

    fill (compute thread) -> upload to each server: whole, or as a difference -> STAGED -> switched

The switch itself travels on the exchange. Each server has a separate connection and a `Sender`,
which decides what to send when, and how to react to a refusal. The `WeightCopy` owns the bytes.
Uploads to several servers run concurrently, and a change of the copy waits for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack

from penstock.trainer.weights.copy import WeightCopy
from penstock.trainer.weights.payloads import Weights
from penstock.trainer.weights.sender import Announcement, Sender


class Publisher:
    """Publishes weight versions to every server of a run."""

    def __init__(self, copy: WeightCopy, senders: Sequence[Sender]) -> None:
        """Each of `senders` uploads `copy` to one server."""
        self._copy = copy
        self.senders = tuple(senders)

    @property
    def filled_version(self) -> int:
        """The version whose bytes the payload holds; zero before the first."""
        return self._copy.version

    @property
    def digest(self) -> str:
        """Checksum of the payload, equal for equal weights; empty before the first version."""
        return self._copy.filled.digest if self._copy.filled else ""

    @property
    def length_bytes(self) -> int:
        """Size of a whole version in bytes."""
        return self._copy.filled.length_bytes if self._copy.filled else 0

    async def fill(
        self,
        weights: Weights,
        weight_version: int,
        dtype: str,
        announcements: Sequence[Announcement] = (),
    ) -> None:
        """Copy weights into the payload as this version, and score the probe with them.

        `dtype` is the one the servers asked for. With `announcements`, one per server, uploads
        begin during the copy if they can. Waits for uploads in progress.
        """
        async with AsyncExitStack() as stack:
            for sender in self.senders:
                await stack.enter_async_context(sender.lock)
            # Before the copy begins, so that a partly overwritten payload never counts as a
            # version.
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
        """Give the current bytes a new version number: the step changed nothing."""
        self._copy.relabel(weight_version)
        self._leave_ahead()

    def close(self) -> None:
        """Close the senders and free the payloads."""
        for sender in self.senders:
            sender.close()
        self._copy.close()

    def _leave_ahead(self) -> None:
        for sender in self.senders:
            sender.leave_ahead()
