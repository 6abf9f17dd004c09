"""One weight version being received, from its first byte until it is verified.

RECEIVING   `write_chunk` takes slices of an inline payload. Other payloads are there already, or are
            verified while their uploader fills them
VERIFYING   every byte was sent, and is read once more where needed
STAGED      complete and verified: now a `Staged`, which owns the memory
ENDED       refused, cancelled or given up; the memory is released
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

import xxhash

from penstock.server.core.aio import Broadcast, run_to_its_end
from penstock.server.engine.protocol import StagedTensor, StagedWeights
from penstock.server.weights.staging.assembly import Part, assemble
from penstock.server.weights.staging.filling import Filling
from penstock.server.weights.staging.manifest import ManifestTensor, WeightRefused, field_refused
from penstock.server.weights.staging.stage_memory import Buffer
from penstock.server.weights.staging.verify import RunningCheck, pieces, verify_tensors
from penstock.wire.reasons import Reason


@dataclass(frozen=True, slots=True, eq=False)
class Staged:
    """One complete, verified version and its memory."""

    weights: StagedWeights
    hashes: Mapping[str, int]
    """XXH3-64 of each tensor."""
    buffer: Buffer

    @property
    def weight_version(self) -> int:
        return self.weights.weight_version

    def retain(self) -> Staged:
        """Add a holder, which must `release` it."""
        self.buffer.retain()
        return self

    def release(self) -> None:
        """Remove a holder. The last one releases the memory."""
        self.buffer.release()


class UploadPhase(Enum):
    RECEIVING = "receiving"
    VERIFYING = "verifying"
    STAGED = "staged"
    ENDED = "ended"


_TRANSITIONS: Mapping[UploadPhase, frozenset[UploadPhase]] = {
    UploadPhase.RECEIVING: frozenset({UploadPhase.VERIFYING, UploadPhase.ENDED}),
    UploadPhase.VERIFYING: frozenset({UploadPhase.STAGED, UploadPhase.ENDED}),
    UploadPhase.STAGED: frozenset(),
    UploadPhase.ENDED: frozenset(),
}


class IncomingUpload:
    """One version being received; created by `WeightStage`. A refusal releases its memory."""

    def __init__(
        self,
        weight_version: int,
        manifest: Sequence[ManifestTensor],
        payload: Buffer | None,
        target: Buffer,
        parts: Sequence[Part] | None = None,
        sources: Sequence[Buffer] = (),
        *,
        inline: bool,
        filling: Filling | None = None,
    ) -> None:
        """`target` is filled from `parts`, which read `sources`; without parts it is the payload itself.
        End an upload with `filling` by `end`, because a thread reads it."""
        self.manifest = manifest
        self._payload = payload
        self._target = target
        self._parts = parts
        self._sources = sources
        self._inline = inline
        self._filling = filling
        self._received = _Intervals()
        self._running = RunningCheck(manifest)
        self._in_order_bytes = 0
        self.phase = UploadPhase.RECEIVING
        self._progress = Broadcast()
        self.weight_version = weight_version
        self.length_bytes = (payload or target).length_bytes
        """Bytes that are sent or read."""

    def _move(self, phase: UploadPhase) -> None:
        if phase not in _TRANSITIONS[self.phase]:
            raise RuntimeError(f"an upload cannot go from {self.phase} to {phase}")
        self.phase = phase
        self._progress.notify()

    @property
    def _over(self) -> bool:
        return self.phase in (UploadPhase.STAGED, UploadPhase.ENDED)

    def write_chunk(self, offset_bytes: int, data: bytes | memoryview, xxh3: int) -> None:
        """In any order, but each byte once. Raises WeightRefused."""
        try:
            self._take_chunk(offset_bytes, data, xxh3)
        except WeightRefused:
            self.release()
            raise

    def arriving(self) -> tuple[Buffer, memoryview] | None:
        """Memory of a full version that arrives in chunks; None for any other upload."""
        payload = self._payload
        if not self._inline or self._parts is not None or payload is None or payload.view is None:
            return None
        return payload, payload.view

    async def wait_for(self, length_bytes: int) -> bool:
        """Return when the first `length_bytes` bytes are there. False means that they never will be."""
        while self._in_order_bytes < length_bytes and not self._over:
            await self._progress.wait()
        return self._in_order_bytes >= length_bytes

    async def verify(self, xxh3: Sequence[int] = ()) -> Staged:
        """`xxh3`: checksums if the manifest has none. Does not block the event loop. Raises
        WeightRefused."""
        xxh3 = xxh3 or [tensor.xxh3 for tensor in self.manifest]
        hashes = {t.name: found for t, found in zip(self.manifest, xxh3, strict=True)}
        try:
            self.check_complete()
            if self._inline:
                # Also correct if chunks arrived in another order than that of the payload.
                self._in_order_bytes = self.length_bytes
            self._move(UploadPhase.VERIFYING)
            if self._filling is not None:
                await self._filling.finish(xxh3)
            places = await self._fill_target(hashes)
        except BaseException:
            await self.end()
            raise
        self._move(UploadPhase.STAGED)
        release_all(self._sources)
        weights = StagedWeights(self.weight_version, self._target.path, places)
        return Staged(weights, hashes, self._target)

    async def end(self) -> None:
        """Release the memory, unless the version was staged, once no thread reads the payload."""
        try:
            if self._filling is not None:
                await self._filling.end()
        finally:
            self.release()

    def release(self) -> None:
        """Release the memory unless the version was staged. Safe to repeat."""
        if not self._over:
            self._move(UploadPhase.ENDED)
            release_all([self._target, *self._sources])

    async def _fill_target(self, hashes: Mapping[str, int]) -> tuple[StagedTensor, ...]:
        target, parts = self._target, self._parts
        if parts is None:
            if self._filling is None:
                begun = self._running.begun
                await run_to_its_end(lambda: verify_tensors(target, self.manifest, hashes, begun))
            return tuple(
                StagedTensor(t.name, t.shape, t.dtype, t.offset_bytes, t.length_bytes)
                for t in self.manifest
            )
        await run_to_its_end(lambda: assemble(target, parts))
        return tuple(part.tensor for part in parts)

    def check_complete(self) -> None:
        """Raise WeightRefused if bytes of an inline payload are missing."""
        if self._inline and (gap := self._received.first_gap(self.length_bytes)):
            begin, end = gap
            problem = f"chunks: bytes {begin} to {end} of the payload are missing"
            raise field_refused("chunk.offset_bytes", problem, begin=begin, end=end)

    def _take_chunk(self, offset: int, data: bytes | memoryview, xxh3: int) -> None:
        """By pieces, so that each is read from memory once and then from the cache. A refused chunk may be
        partly written, but its upload is released."""
        room = self._room_for(offset, len(data))
        in_order = offset == self._in_order_bytes and self._parts is None
        digest = xxhash.xxh3_64()
        end = offset
        for piece in pieces(memoryview(data)):
            digest.update(piece)
            begin, end = end, end + len(piece)
            room[begin:end] = piece
            if in_order:
                self._running.follow(room, end)
        if (got := digest.intdigest()) != xxh3:
            raise WeightRefused(
                Reason.CHECKSUM_MISMATCH,
                f"chunk at {offset}: XXH3 is {got:016x}, announced {xxh3:016x}",
                field="chunk.data",
                offset_bytes=offset,
            )
        if in_order:
            self._in_order_bytes = end
            self._progress.notify()

    def _room_for(self, offset: int, length: int) -> memoryview:
        """The payload, if the chunk may be written to it. Raises WeightRefused."""
        end = offset + length
        room = self._payload.view if self._payload is not None else None
        if not self._inline or self._over or room is None:
            raise field_refused("chunk", "chunk: this upload takes no chunks")
        if offset < 0 or end > self.length_bytes or not length:
            problem = f"chunk: bytes {offset} to {end} of a payload of {self.length_bytes}"
            raise field_refused("chunk.offset_bytes", problem, got=offset)
        if not self._received.add(offset, end):
            problem = f"chunk: some of bytes {offset} to {end} were sent before"
            raise field_refused("chunk.offset_bytes", problem, got=offset)
        return room


def release_all(buffers: Sequence[Buffer]) -> None:
    for buffer in buffers:
        buffer.release()


class _Intervals:
    """Disjoint byte ranges, merged where they touch."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []

    def add(self, begin: int, end: int) -> bool:
        """Returns False if [begin, end) overlaps an existing range."""
        begins, ends = self._begins, self._ends
        at = bisect.bisect_right(ends, begin)
        if at < len(begins) and begins[at] < end:
            return False
        if at < len(begins) and begins[at] == end:
            end = ends.pop(at)
            del begins[at]
        if at and ends[at - 1] == begin:
            ends[at - 1] = end
        else:
            begins.insert(at, begin)
            ends.insert(at, end)
        return True

    def first_gap(self, length: int) -> tuple[int, int] | None:
        """Of [0, length). None if nothing is missing."""
        edges = [(0, 0), *zip(self._begins, self._ends, strict=True), (length, length)]
        return next(((a[1], b[0]) for a, b in pairwise(edges) if a[1] < b[0]), None)
