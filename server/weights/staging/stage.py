"""Receiving and verifying one weight version, without touching what serves.

    begin_inline, begin_shared, begin_checkpoint -> IncomingUpload -> verify -> Staged

With a base, the payload is a delta, and the base with the delta applied is staged. So a `Staged` is always
one complete, dense, verified version. Later code does not depend on how it was sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from penstock.server.core.aio import run_to_its_end
from penstock.server.engine.protocol import StagedTensor, StagedWeights, TensorMeta
from penstock.server.weights.staging.assembly import Part, Patch, assemble, lay_out
from penstock.server.weights.staging.checkpoint import Checkpoint, Stored, open_checkpoint
from penstock.server.weights.staging.filling import Filling
from penstock.server.weights.staging.incoming import IncomingUpload, Staged, release_all
from penstock.server.weights.staging.manifest import (
    FLOATS,
    Encoding,
    ManifestTensor,
    WeightRefused,
    check_delta,
    check_full,
    check_length,
    check_progress,
    check_unplaced,
    field_refused,
)
from penstock.server.weights.staging.shared_memory import SharedFiles
from penstock.server.weights.staging.stage_memory import Buffer, StageMemory
from penstock.server.weights.staging.verify import verify_tensors


class WeightStage:
    def __init__(
        self, folder: Path | None, expected: Mapping[str, TensorMeta], weight_dtype: str
    ) -> None:
        """`folder` is where versions are staged; see `StageMemory`."""
        if weight_dtype not in FLOATS:
            raise ValueError(f"weights can be {', '.join(FLOATS)}, got {weight_dtype!r}")
        self._memory = StageMemory(folder)
        self._shared = SharedFiles()
        self._expected = expected
        self._weight_dtype = weight_dtype

    @property
    def held_bytes(self) -> int:
        """Bytes of this server's memory not yet released."""
        return self._memory.held_bytes

    async def begin_inline(
        self,
        weight_version: int,
        manifest: Sequence[ManifestTensor],
        length_bytes: int,
        base: Staged | None = None,
        expected: Mapping[str, TensorMeta] | None = None,
    ) -> IncomingUpload:
        """`expected` lists its tensors if they are not those of the model itself. Raises WeightRefused."""
        self._check(manifest, length_bytes, base, expected)
        check_length(manifest, length_bytes)
        # Before the first await, because a switch may release the base meanwhile.
        if base is not None:
            base.retain()
        try:
            payload = await self._memory.allocate(length_bytes)
        except BaseException:
            if base is not None:
                base.release()
            raise
        return await self._begin(weight_version, manifest, payload, base, inline=True)

    async def begin_shared(
        self,
        weight_version: int,
        manifest: Sequence[ManifestTensor],
        name: str,
        host_namespace: str,
        base: Staged | None = None,
        expected: Mapping[str, TensorMeta] | None = None,
        *,
        progress_offset_bytes: int | None = None,
    ) -> IncomingUpload:
        """The payload is a file in memory of this host; see `begin_inline`. With `progress_offset_bytes`
        it is still being filled, and the upload must be full; zero means that it has no progress word."""
        descriptor, length, view = self._shared.open(name, host_namespace)
        payload = self._memory.adopt(descriptor, length, view)
        try:
            self._check(manifest, length, base, expected)
            if progress_offset_bytes is not None:
                check_progress(manifest, progress_offset_bytes, length)
        except WeightRefused:
            payload.release()
            raise
        if progress_offset_bytes is not None:
            filling = Filling(payload, manifest, progress_offset_bytes)
            return IncomingUpload(
                weight_version, manifest, payload, payload, inline=False, filling=filling
            )
        if base is not None:
            base.retain()
        return await self._begin(weight_version, manifest, payload, base, inline=False)

    async def begin_checkpoint(
        self, weight_version: int, manifest: Sequence[ManifestTensor], folder: str
    ) -> IncomingUpload:
        """The bytes are in a folder of safetensors files. Raises WeightRefused."""
        if not folder.startswith("/"):
            problem = f"checkpoint.path must be absolute, got {folder!r}"
            raise field_refused("header.checkpoint.path", problem, got=folder)
        check_unplaced(manifest, self._expected, self._weight_dtype, "in a checkpoint")
        target, parts, sources = await self._open(
            Path(folder), lambda found: [(*found.find(wanted), wanted.xxh3) for wanted in manifest]
        )
        return IncomingUpload(weight_version, manifest, None, target, parts, sources, inline=False)

    async def hold(self, staged: Staged) -> Staged:
        """The same version in own memory. Takes over the reference to `staged`. What an uploader shares is
        copied and verified again, because the uploader may write to it. Raises WeightRefused."""
        if staged.buffer.owned:
            return staged
        source = staged.weights.tensors
        try:
            places, length = lay_out((t.name, t.shape, t.dtype, t.length_bytes) for t in source)
            target = await self._memory.allocate(length)
            parts = [
                Part(place, staged.buffer, tensor.offset_bytes, staged.hashes[tensor.name])
                for place, tensor in zip(places, source, strict=True)
            ]
            await _assembled(target, parts)
        finally:
            staged.release()
        weights = replace(staged.weights, path=target.path, tensors=places)
        return Staged(weights, staged.hashes, target)

    async def check_again(self, staged: Staged) -> None:
        """Raises WeightRefused if the version was written to since it was verified."""
        if not staged.buffer.owned:
            tensors, hashes = staged.weights.tensors, staged.hashes
            await run_to_its_end(lambda: verify_tensors(staged.buffer, tensors, hashes, {}))

    async def read_base_model(self, weight_version: int, folder: Path) -> Staged:
        """In the dtypes stored in `folder`. Raises WeightRefused."""
        target, parts, sources = await self._open(
            folder, lambda found: [(*stored, None) for stored in found.tensors.values()]
        )
        try:
            await _assembled(target, parts)
        finally:
            release_all(sources)
        places = tuple(part.tensor for part in parts)
        return Staged(StagedWeights(weight_version, target.path, places), {}, target)

    def forget_shared(self) -> None:
        """Release what uploaders shared, except what is in use."""
        self._shared.forget()

    def close(self) -> None:
        """Release all memory, including buffers still in use."""
        self._memory.close()
        self._shared.forget()

    async def _open(
        self, folder: Path, choose: Callable[[Checkpoint], Sequence[tuple[*Stored, int | None]]]
    ) -> tuple[Buffer, Sequence[Part], Sequence[Buffer]]:
        """Allocate room for the tensors of a checkpoint that `choose` returns, with the XXH3-64 that each
        must have. Also returns its parts and the files that they read. Raises WeightRefused."""
        checkpoint = await run_to_its_end(lambda: open_checkpoint(folder), Checkpoint.close)
        files = {file: self._memory.adopt(file, 0) for file in checkpoint.descriptors}
        sources = tuple(files.values())
        try:
            chosen = choose(checkpoint)
            places, length = lay_out(
                (s.name, s.shape, s.dtype, s.length_bytes) for _, s, _ in chosen
            )
            target = await self._memory.allocate(length)
        except BaseException:
            release_all(sources)
            raise
        parts = [
            Part(place, files[file], stored.offset_bytes, xxh3)
            for place, (file, stored, xxh3) in zip(places, chosen, strict=True)
        ]
        return target, parts, sources

    def _check(
        self,
        manifest: Sequence[ManifestTensor],
        length_bytes: int,
        base: Staged | None,
        expected: Mapping[str, TensorMeta] | None,
    ) -> None:
        if base is None:
            expected = self._expected if expected is None else expected
            check_full(manifest, expected, self._weight_dtype, length_bytes)
        else:
            check_delta(manifest, self._expected, self._weight_dtype, length_bytes, base.hashes)

    async def _begin(
        self,
        weight_version: int,
        manifest: Sequence[ManifestTensor],
        payload: Buffer,
        base: Staged | None,
        *,
        inline: bool,
    ) -> IncomingUpload:
        """`base` was retained for this upload."""
        if base is None:
            return IncomingUpload(weight_version, manifest, payload, payload, inline=inline)
        try:
            places, length = lay_out((t.name, t.shape, t.dtype, t.decoded_bytes) for t in manifest)
            target = await self._memory.allocate(length)
        except BaseException:
            release_all([payload, base.buffer])
            raise
        parts = _delta_parts(manifest, places, payload, base)
        sources = (payload, base.buffer)
        return IncomingUpload(
            weight_version, manifest, payload, target, parts, sources, inline=inline
        )


def _delta_parts(
    manifest: Sequence[ManifestTensor],
    places: Sequence[StagedTensor],
    payload: Buffer,
    base: Staged,
) -> list[Part]:
    there = {tensor.name: tensor.offset_bytes for tensor in base.weights.tensors}
    parts: list[Part] = []
    for tensor, place in zip(manifest, places, strict=True):
        if tensor.encoding is Encoding.RAW:
            parts.append(Part(place, payload, tensor.offset_bytes, tensor.xxh3))
            continue
        patch = None
        if tensor.coding is not None and tensor.encoding is Encoding.SPARSE:
            patch = Patch(payload, tensor.offset_bytes, tensor.length_bytes, tensor.coding)
        parts.append(Part(place, base.buffer, there[tensor.name], tensor.xxh3, patch))
    return parts


async def _assembled(target: Buffer, parts: Sequence[Part]) -> None:
    """Releases the buffer on failure."""
    try:
        await run_to_its_end(lambda: assemble(target, parts))
    except BaseException:
        target.release()
        raise
