"""FetchWeights: hands a version that this server has, or is receiving, on to another server.

The requested tensors are compared with the present ones by name, length and checksum, then sent in the
caller's layout, in order. If the version is still being received, a slice is sent as soon as its bytes have
arrived, so that along a chain of servers the last one has a version hardly later than the first. Nothing is
verified on the way: the receiver has the checksums from the header that referred it to this server.

Failures: a version that is not here, or has other weights, is refused before a byte is sent. If the upload
of a version ends without being verified, the calls that follow it end too. Memory that a call reads is kept
until the call is over.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass

from penstock.server.core.errors import DomainError, FieldInvalid
from penstock.server.weights.staging.incoming import IncomingUpload, Staged
from penstock.v1 import weights_pb2
from penstock.wire.reasons import Reason
from penstock.wire.upload import CHUNK_BYTES, Piece, chunk_message

EMPTY_BYTES = 16 << 20
"""How many bytes a payload may leave empty between its tensors, beyond the length of the version."""


@dataclass(frozen=True, slots=True)
class Readable:
    """A version that is here or being received."""

    view: memoryview
    places: Mapping[str, tuple[int, int, int]]
    """For each tensor: its offset in `view`, its length, its XXH3-64."""
    wait_for: Callable[[int], Awaitable[bool]]
    """Returns once that many bytes from the beginning of `view` are there; False if they never will be."""


Slice = tuple[int | None, int]
"""A tensor or a gap between two: where it begins in the version, or None for zeros, and its length."""


@dataclass(frozen=True, slots=True)
class WeightHandout:
    find: Callable[[int], Staged | None]
    """Returns a verified version."""
    arriving: Callable[[], IncomingUpload | None]
    """Returns the upload under way."""

    async def fetch_weights(
        self, request: weights_pb2.FetchWeightsRequest
    ) -> AsyncGenerator[bytes]:
        """Yields serialized FetchWeightsResponse messages. Raises WEIGHT_VERSION_NOT_STAGED,
        TENSOR_UNKNOWN, CHECKSUM_MISMATCH or FIELD_INVALID."""
        if request.weight_version < 1:
            problem = "must be a version that was uploaded"
            raise FieldInvalid("weight_version", problem, request.weight_version)
        with self._opened(request.weight_version) as readable:
            place = 0
            for begin, length in _cut(_slices(request, readable)):
                if begin is not None and not await readable.wait_for(begin + length):
                    raise _missing(request.weight_version, "its upload ended without it")
                piece: Piece = bytes(length)
                if begin is not None:
                    piece = readable.view[begin : begin + length]
                yield chunk_message(place, length, (piece,))
                place += length

    @contextlib.contextmanager
    def _opened(self, weight_version: int) -> Generator[Readable]:
        staged, upload = self.find(weight_version), self.arriving()
        if staged is not None and staged.buffer.view is not None:
            buffer, tensors, hashes = staged.buffer, staged.weights.tensors, staged.hashes
            places = {t.name: (t.offset_bytes, t.length_bytes, hashes[t.name]) for t in tensors}
            readable = Readable(staged.buffer.view, places, _at_once)
        elif (
            upload is not None
            and upload.weight_version == weight_version
            and (arriving := upload.arriving()) is not None
        ):
            buffer, view = arriving
            places = {t.name: (t.offset_bytes, t.length_bytes, t.xxh3) for t in upload.manifest}
            readable = Readable(view, places, upload.wait_for)
        else:
            raise _missing(weight_version, "it is not here")
        buffer.retain()
        try:
            yield readable
        finally:
            buffer.release()


async def _at_once(_: int) -> bool:
    return True


def _slices(request: weights_pb2.FetchWeightsRequest, readable: Readable) -> list[Slice]:
    """Slices of the requested payload, from its beginning to the end of its last tensor."""
    slices: list[Slice] = []
    end = empty = 0
    for spec in sorted(request.tensors, key=lambda spec: spec.offset_bytes):
        found = readable.places.get(spec.name)
        if found is None:
            raise DomainError(
                Reason.TENSOR_UNKNOWN,
                f"version {request.weight_version} has no tensor {spec.name!r}",
                {"tensor": spec.name},
            )
        begin, length, xxh3 = found
        if (spec.length_bytes, spec.xxh3) != (length, xxh3):
            raise DomainError(
                Reason.CHECKSUM_MISMATCH,
                f"{spec.name}: version {request.weight_version} here has {length} bytes with XXH3 "
                f"{xxh3:016x}, requested were {spec.length_bytes} with {spec.xxh3:016x}",
                {"tensor": spec.name},
            )
        if spec.offset_bytes < end:
            problem = f"of {spec.name} is inside another tensor, which ends at {end}"
            raise FieldInvalid("tensors.offset_bytes", problem, spec.offset_bytes)
        slices += [(None, spec.offset_bytes - end), (begin, length)]
        empty += spec.offset_bytes - end
        end = spec.offset_bytes + length
    most = readable.view.nbytes + EMPTY_BYTES
    if empty > most:
        # Gaps are sent as zeros, so without a bound a caller could request them without limit.
        problem = f"leaves more than {most} bytes empty between tensors"
        raise FieldInvalid("tensors.offset_bytes", problem, empty)
    return slices


def _cut(slices: Sequence[Slice]) -> Generator[Slice]:
    for begin, length in slices:
        for done in range(0, length, CHUNK_BYTES):
            yield None if begin is None else begin + done, min(CHUNK_BYTES, length - done)


def _missing(weight_version: int, problem: str) -> DomainError:
    return DomainError(
        Reason.WEIGHT_VERSION_NOT_STAGED,
        f"version {weight_version} cannot be handed out: {problem}",
        {"weight_version": weight_version},
    )
