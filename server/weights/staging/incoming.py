"""One weight version being received, from its first byte until it is verified.

    write_chunk   a slice of an inline payload                  )
    (nothing)     other payloads are there already, or were     ) -> verify -> Staged
                  verified while their uploader filled them     )

After a refusal or a cancellation, `end` releases the memory once no thread reads it any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import xxhash

from penstock.server.core.aio import Broadcast, run_to_its_end
from penstock.server.engine.protocol import StagedTensor, StagedWeights
from penstock.server.weights.staging.assembly import Part, assemble
from penstock.server.weights.staging.filling import Filling
from penstock.server.weights.staging.intervals import Intervals
from penstock.server.weights.staging.manifest import ManifestTensor, WeightRefused
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


class Upload:
    """One version being received; created by `WeightStage`. A refusal releases its memory."""

    def __init__(
        self,
        weight_version: int,
        manifest: Sequence[ManifestTensor],
        payload: Buffer | None,
        target: Buffer,
        parts: Sequence[Part] | None,
        sources: Sequence[Buffer],
        *,
        inline: bool,
        filling: Filling | None = None,
    ) -> None:
        """`target` is filled from `parts`, which read `sources`; without parts it is the payload itself."""
        self.manifest = manifest
        """The tensors as announced."""
        self._payload = payload
        self._target = target
        self._parts = parts
        self._sources = sources
        self._inline = inline
        self._filling = filling
        self._received = Intervals()
        self._running = RunningCheck(manifest)
        self._in_order_bytes = 0
        self._released = False
        self._progress = Broadcast()
        self.weight_version = weight_version
        self.length_bytes = (payload or target).length_bytes
        """Bytes that are sent or read."""

    @classmethod
    def filling(
        cls,
        weight_version: int,
        manifest: Sequence[ManifestTensor],
        payload: Buffer,
        progress_offset_bytes: int,
    ) -> Upload:
        """An upload whose payload the uploader is still filling; it must be ended with `end`."""
        filling = Filling(payload, manifest, progress_offset_bytes)
        return cls(
            weight_version, manifest, payload, payload, None, (), inline=False, filling=filling
        )

    def write_chunk(self, offset_bytes: int, data: bytes | memoryview, xxh3: int) -> None:
        """Take one slice of an inline payload, in any order but each byte once.

        Raises WeightRefused.
        """
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

    async def come(self, length_bytes: int) -> bool:
        """Return when the first `length_bytes` bytes are there. False means that they never will be."""
        while self._in_order_bytes < length_bytes and not self._released:
            await self._progress.wait()
        return self._in_order_bytes >= length_bytes

    async def verify(self, xxh3: Sequence[int] = ()) -> Staged:
        """Verify that the version is complete and finite, and that each tensor has its checksum.

        `xxh3` has the checksums if the manifest does not. Does not block the event loop. Raises
        WeightRefused.
        """
        hashes = dict(
            zip(
                (tensor.name for tensor in self.manifest),
                xxh3 or [tensor.xxh3 for tensor in self.manifest],
                strict=True,
            )
        )
        try:
            self.check_complete()
            if self._inline:
                # Also correct if chunks arrived in another order than that of the payload.
                self._in_order_bytes = self.length_bytes
                self._progress.notify()
            if self._filling is not None:
                await self._filling.finish(list(hashes.values()))
            places = await self._fill_target()
        except BaseException:
            await self.end()
            raise
        self._released = True
        release_all(self._sources)
        weights = StagedWeights(self.weight_version, self._target.path, places)
        return Staged(weights, hashes, self._target)

    async def end(self) -> None:
        """Release the memory once no thread reads the payload."""
        try:
            if self._filling is not None:
                await self._filling.end()
        finally:
            self.release()

    def release(self) -> None:
        """Release the memory unless the version was staged. Safe to repeat."""
        if not self._released:
            self._released = True
            release_all([self._target, *self._sources])
            self._progress.notify()

    async def _fill_target(self) -> tuple[StagedTensor, ...]:
        target, parts = self._target, self._parts
        if parts is None:
            if self._filling is None:
                begun = self._running.begun
                await run_to_its_end(lambda: verify_tensors(target, self.manifest, begun))
            return tuple(
                StagedTensor(t.name, t.shape, t.dtype, t.offset_bytes, t.length_bytes)
                for t in self.manifest
            )
        await run_to_its_end(lambda: assemble(target, parts))
        return tuple(part.tensor for part in parts)

    def check_complete(self) -> None:
        """Raise WeightRefused if bytes of an inline payload are missing."""
        if self._inline and (gap := self._received.first_gap(self.length_bytes)):
            raise WeightRefused(
                Reason.FIELD_INVALID,
                f"chunks: bytes {gap[0]} to {gap[1]} of the payload are missing",
                field="chunk.offset_bytes",
                begin=gap[0],
                end=gap[1],
            )

    def _take_chunk(self, offset: int, data: bytes | memoryview, xxh3: int) -> None:
        """Copy a chunk and update its checksum and its tensors' checks.

        This goes by pieces, so that each is read from memory once and then from the cache. A refused
        chunk may be partly written, but its upload is released.
        """
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
        if not self._inline or self._released or room is None:
            raise WeightRefused(
                Reason.FIELD_INVALID, "chunk: this upload takes no chunks", field="chunk"
            )
        if offset < 0 or end > self.length_bytes or not length:
            raise WeightRefused(
                Reason.FIELD_INVALID,
                f"chunk: bytes {offset} to {end} of a payload of {self.length_bytes}",
                field="chunk.offset_bytes",
                got=offset,
            )
        if not self._received.add(offset, end):
            raise WeightRefused(
                Reason.FIELD_INVALID,
                f"chunk: some of bytes {offset} to {end} were sent before",
                field="chunk.offset_bytes",
                got=offset,
            )
        return room


def release_all(buffers: Sequence[Buffer]) -> None:
    """Release one reference to each buffer."""
    for buffer in buffers:
        buffer.release()
