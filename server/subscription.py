"""What one call on a turn reads: new tokens since it last looked, and the end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from penstock.server.turns import Turn
from penstock.v1 import trajectory_pb2


class Subscription:
    """New tokens of a turn, for one call.

    Made before the turn's task first runs, so that it misses nothing. It holds a cursor into the record:
    the segment and the token within it up to which it has given out.
    """

    def __init__(self, turn: Turn, *, flush_seconds: float, final_only: bool) -> None:
        assert turn.done is not None and turn.changed is not None
        self._record = turn.record
        self._turn, self._done, self._changed = turn, turn.done, turn.changed
        self._flush_seconds, self._final_only = flush_seconds, final_only
        self._segment = max(0, len(self._record.segments) - 1)
        self._token = self._record.segments[-1].token_count if self._record.segments else 0

    async def admitted(self) -> None:
        """Returns when the turn was admitted; raises its error where it failed before."""
        while self._turn.started_version is None:
            if self._done.is_set():
                if self._turn.error is not None:
                    raise self._turn.error
                return
            await self._changed.wait()

    async def segments(self) -> AsyncGenerator[trajectory_pb2.Segment]:
        """Yields twin Segments, one per weight version and flush; ends when the turn has ended.

        Raises the turn's error once everything it sampled was given out.
        """
        while True:
            if self._final_only:
                await self._done.wait()
            else:
                while not self._done.is_set() and self._at_end():
                    await self._changed.wait()
                if self._flush_seconds and not self._done.is_set():
                    # The end of the turn is not held back by the flush.
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(self._flush_seconds):
                            await self._done.wait()
            finished = self._done.is_set()
            for segment in self._take():
                yield segment
            if finished:
                if self._turn.error is not None:
                    raise self._turn.error
                return

    def _at_end(self) -> bool:
        last = len(self._record.segments) - 1
        return last < 0 or (
            self._segment == last and self._token >= self._record.segments[last].token_count
        )

    def _take(self) -> list[trajectory_pb2.Segment]:
        taken: list[trajectory_pb2.Segment] = []
        segments = self._record.segments
        while self._segment < len(segments):
            segment = segments[self._segment]
            if self._token < segment.token_count:
                taken.append(segment.message(self._token))
                self._token = segment.token_count
            if self._segment == len(segments) - 1:
                break
            self._segment, self._token = self._segment + 1, 0
        return taken
