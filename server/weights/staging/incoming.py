"""One weight version on its way in, from its first byte to being verified.

    write_chunk   a slice of an inline payload            )
    (nothing)     what is there already, is read then, or ) -> verify -> Staged
                  has been filled and looked at meanwhile )

Whatever is refused, and whoever is cancelled, `end` gives the memory back once nobody reads it any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import xxhash

from penstock.server.core.broadcast import Broadcast
from penstock.server.core.threads import run_to_its_end
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
    """One complete, verified version, and the memory it lies in."""

    weights: StagedWeights
    hashes: Mapping[str, int]
    """XXH3-64 of each tensor."""
    buffer: Buffer

    @property
    def weight_version(self) -> int:
        """The version."""
        return self.weights.weight_version

    def retain(self) -> Staged:
        """One more holder, who has to release it."""
        self.buffer.retain()
        return self

    def release(self) -> None:
        """One holder less; the last one gives the memory back."""
        self.buffer.release()


class Upload:
    """One version on its way in; made by `WeightStage`. A refusal releases it."""

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
        """As it was announced."""
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
        """What travels, or is read."""

    @classmethod
    def filling(
        cls,
        weight_version: int,
        manifest: Sequence[ManifestTensor],
        payload: Buffer,
        progress_offset_bytes: int,
    ) -> Upload:
        """One whose payload somebody else is still filling, which has to be ended."""
        filling = Filling(payload, manifest, progress_offset_bytes)
        return cls(
            weight_version, manifest, payload, payload, None, (), inline=False, filling=filling
        )

    def write_chunk(self, offset_bytes: int, data: bytes | memoryview, xxh3: int) -> None:
        """Takes one slice of an inline payload, in any order but each byte once.

        Raises WeightRefused.
        """
        try:
            self._take_chunk(offset_bytes, data, xxh3)
        except WeightRefused:
            self.release()
            raise

    def arriving(self) -> tuple[Buffer, memoryview] | None:
        """Where the bytes of a full version lie that comes in chunks; None for any other upload."""
        payload = self._payload
        if not self._inline or self._parts is not None or payload is None or payload.view is None:
            return None
        return payload, payload.view

    async def come(self, length_bytes: int) -> bool:
        """Returns once so many bytes from the beginning on are there; False where they never will be."""
        while self._in_order_bytes < length_bytes and not self._released:
            await self._progress.wait()
        return self._in_order_bytes >= length_bytes

    async def verify(self, xxh3: Sequence[int] = ()) -> Staged:
        """The complete version: nothing missing, each tensor with its checksum, and finite.

        `xxh3` has the checksums where the manifest does not. The event loop stays free. Raises
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
                # Also where chunks came in another order than that of the payload.
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
        """As `release`, once nobody reads the payload."""
        try:
            if self._filling is not None:
                await self._filling.end()
        finally:
            self.release()

    def release(self) -> None:
        """Gives the memory back, unless it was staged; safe to repeat."""
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
        """That every byte of an inline payload has come. Raises WeightRefused."""
        if self._inline and (gap := self._received.first_gap(self.length_bytes)):
            raise WeightRefused(
                Reason.FIELD_INVALID,
                f"chunks: bytes {gap[0]} to {gap[1]} of the payload never came",
                field="chunk.offset_bytes",
                begin=gap[0],
                end=gap[1],
            )

    def _take_chunk(self, offset: int, data: bytes | memoryview, xxh3: int) -> None:
        """Checksum, copy and the tensors' own checks by piece, each of which is read from memory once and
        then from the cache. What is written of a chunk that is refused goes with the upload."""
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
        """The payload that a chunk may be written to."""
        end = offset + length
        room = self._payload.view if self._payload is not None else None
        if not self._inline or self._released or room is None:
            raise WeightRefused(
                Reason.FIELD_INVALID, "chunk: this upload takes none", field="chunk"
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
                f"chunk: some of bytes {offset} to {end} had come before",
                field="chunk.offset_bytes",
                got=offset,
            )
        return room


def release_all(buffers: Sequence[Buffer]) -> None:
    """Gives back one reference to each."""
    for buffer in buffers:
        buffer.release()
