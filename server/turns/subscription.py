from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from penstock.server.turns.trajectory import Turn
from penstock.v1 import trajectory_pb2


class Subscription:
    """New tokens of one attempt at a turn, for one call.

    Created before the attempt's task first runs, so that it misses nothing. It stops where the attempt
    ended, so a slow caller does not receive what a later attempt has added since.
    """

    def __init__(self, turn: Turn, *, flush_seconds: float, final_only: bool) -> None:
        self.turn, self.attempt = turn, turn.attempt
        self._record = turn.record
        self._flush_seconds, self._final_only = flush_seconds, final_only
        self._taken = self._record.end
        """A cursor into the record: up to here it has been yielded."""

    @property
    def overtaken(self) -> bool:
        """Whether another call has continued the trajectory since this attempt ended."""
        return self._record.turn is not self.turn or self.turn.attempt is not self.attempt

    async def admitted(self) -> None:
        """Wait until the attempt is admitted. Raises its error if it fails before."""
        while self.attempt.started_version is None:
            if self.attempt.ended.is_set():
                if self.attempt.error is not None:
                    raise self.attempt.error
                return
            await self.attempt.changed.wait()

    async def segments(self) -> AsyncGenerator[trajectory_pb2.Segment]:
        """Yield twin Segments, one per weight version and flush, until the attempt has ended. Raises the
        attempt's error after everything it sampled."""
        ended = self.attempt.ended
        while True:
            if self._final_only:
                await ended.wait()
            else:
                while not ended.is_set() and self._taken == self._record.end:
                    await self.attempt.changed.wait()
                if self._flush_seconds and not ended.is_set():
                    # The flush must not delay the end of the attempt.
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(self._flush_seconds):
                            await ended.wait()
            finished = ended.is_set()
            end = self.attempt.record_end if finished else self._record.end
            for segment in self._record.segments_between(self._taken, end):
                yield segment
            self._taken = end
            if finished:
                if self.attempt.error is not None:
                    raise self.attempt.error
                return
