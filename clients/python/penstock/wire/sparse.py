"""Encodes one tensor as its difference from a base: lossless, and small if little changed.

A tensor is an array of unsigned integers of its dtype's width, so the result is bitwise equal whatever the
bits mean. `encode` compares it with the base and chooses the smallest encoding; `apply` turns a copy of the
base into the new tensor.

The form is that of `SparseCoding` in weights.proto; `benchmarks/codec/weight_deltas.py` has the
measurements behind the choices. Both directions work through a tensor in blocks, because memory fresh from
the kernel costs several times what is done with it here. Needs zstandard, which the client does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import zstandard

from penstock.v1 import weights_pb2

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Elements = NDArray[np.unsignedinteger]
    Octets = NDArray[np.uint8]
    Buffer = bytes | bytearray | memoryview

LEVEL = 1
"""Level of Zstandard. Positions and values hold entropy, with little repetition. Higher levels take
longer, and code dense gaps into more bytes."""

WIDTHS = (2, 4)
"""Supported sizes of an element, in bytes."""

ESCAPE = 255
"""Gap byte that is continued by the next one."""

BLOCK_ELEMENTS = 1 << 19
"""Elements compared at a time. A block's results fit into the cache, and two threads rarely contend for the
interpreter's lock. A multiple of eight, so that a block fills whole bytes of a bitmap."""

BLOCK_OCTETS = 1 << 16
"""Bytes of positions decoded at a time."""

GAPS_ONLY_BELOW = 0.1
BITMAP_ONLY_ABOVE = 0.3
"""Shares of changed elements; in between, both codings are made and the smaller one is used."""

_COMPRESSIONS = (weights_pb2.COMPRESSION_UNSPECIFIED, weights_pb2.COMPRESSION_ZSTD)


class SparseInvalid(ValueError):
    """A payload contradicts its SparseCoding, or cannot belong to a tensor of this size."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """One tensor as it is sent."""

    encoding: weights_pb2.TensorEncoding.ValueType
    """SAME, SPARSE or RAW."""
    coding: weights_pb2.SparseCoding | None
    """Set with SPARSE."""
    changed_element_count: int
    """Elements that differ from the base, whatever the encoding."""
    parts: tuple[bytes | memoryview, ...]
    """The payload, in order. With RAW it is a view of the tensor, valid until the tensor changes."""

    @property
    def length_bytes(self) -> int:
        return sum(len(part) for part in self.parts)


def encode_all(pairs: Sequence[tuple[Elements, Elements]], *, threads: int = 2) -> list[Encoded]:
    """Encodes many (base, new) pairs in parallel, largest first. Results are in the order of `pairs`."""
    order = sorted(range(len(pairs)), key=lambda index: -pairs[index][1].nbytes)
    with ThreadPoolExecutor(threads, "sparse") as pool:
        futures = {index: pool.submit(encode, *pairs[index]) for index in order}
        return [futures[index].result() for index in range(len(pairs))]


def encode(base: Elements, new: Elements) -> Encoded:
    """Chooses the smallest encoding of `new`, given that the receiver holds `base`.

    Both are one-dimensional and contiguous, with the same dtype (uint16 or uint32) and length. Takes up to
    a dozen bytes of memory for each changed element.
    """
    if base.dtype != new.dtype or base.shape != new.shape or new.dtype.itemsize not in WIDTHS:
        raise ValueError(f"cannot compare {new.dtype}{new.shape} with {base.dtype}{base.shape}")
    changes = list(_changes(base, new))
    count = sum(len(change.positions) for change in changes)
    if not count:
        return Encoded(weights_pb2.TENSOR_ENCODING_SAME, None, 0, ())
    coding, parts = _smallest(changes, count, len(new))
    if sum(map(len, parts)) < new.nbytes:
        return Encoded(weights_pb2.TENSOR_ENCODING_SPARSE, coding, count, parts)
    return Encoded(weights_pb2.TENSOR_ENCODING_RAW, None, count, (new.data.cast("B"),))


@dataclass(frozen=True, slots=True)
class _Change:
    """The changes in one block of a tensor; there is at least one."""

    start: int
    """First element of the block."""
    positions: NDArray[np.uint32]
    """Relative to the block's start, ascending."""
    values: Elements
    """New minus old, in zigzag coding."""


def _changes(base: Elements, new: Elements) -> Iterator[_Change]:
    per_word = 8 // new.dtype.itemsize
    # A multiple of eight elements: whole 64-bit words, and whole bytes of a bitmap.
    whole = len(new) - len(new) % 8
    for start in range(0, whole, BLOCK_ELEMENTS):
        stop = min(start + BLOCK_ELEMENTS, whole)
        positions, differences = _differences(base[start:stop], new[start:stop], per_word)
        if len(positions):
            yield _Change(start, positions.astype(np.uint32), _zigzag(differences))
    differences = new[whole:] - base[whole:]
    positions = np.flatnonzero(differences)
    if len(positions):
        yield _Change(whole, positions.astype(np.uint32), _zigzag(differences[positions]))


def _differences(
    base: Elements, new: Elements, per_word: int
) -> tuple[NDArray[np.int64], Elements]:
    """Positions of a block's changed elements, and new minus old. Compares 64-bit words first."""
    base_words, new_words = base.view(np.uint64), new.view(np.uint64)
    words = np.flatnonzero(base_words != new_words)
    if 2 * len(words) > len(base_words):
        differences = new - base
        positions = np.flatnonzero(differences != 0)
        return positions, differences[positions]
    differences = new_words[words].view(new.dtype) - base_words[words].view(new.dtype)
    changed = np.flatnonzero(differences != 0)
    positions = words[changed // per_word] * per_word + changed % per_word
    return positions, differences[changed]


def _zigzag(differences: Elements) -> Elements:
    # In place: the caller owns the array. Each operation keeps the dtype.
    signs = differences >> differences.dtype.type(differences.dtype.itemsize * 8 - 1)
    differences <<= 1
    differences ^= np.negative(signs)
    return differences


def _smallest(
    changes: Sequence[_Change], count: int, length: int
) -> tuple[weights_pb2.SparseCoding, tuple[bytes, ...]]:
    indexes: list[tuple[weights_pb2.IndexCoding.ValueType, bytes]] = []
    if count <= BITMAP_ONLY_ABOVE * length:
        indexes.append((weights_pb2.INDEX_CODING_GAPS, _gaps(changes)))
    if count >= GAPS_ONLY_BELOW * length:
        indexes.append((weights_pb2.INDEX_CODING_BITMAP, _bitmap(changes, length)))
    compressor = zstandard.ZstdCompressor(LEVEL)
    values = _planes(changes)
    packed_values = compressor.compress(values)
    candidates = [
        (
            weights_pb2.SparseCoding(
                changed_element_count=count,
                index_coding=coding,
                index_length_bytes=len(part),
                compression=compression,
            ),
            (part, values_part),
        )
        for coding, index in indexes
        for compression, part, values_part in (
            (weights_pb2.COMPRESSION_UNSPECIFIED, index, values),
            (weights_pb2.COMPRESSION_ZSTD, compressor.compress(index), packed_values),
        )
    ]
    return min(candidates, key=lambda candidate: sum(map(len, candidate[1])))


def _gaps(changes: Sequence[_Change]) -> bytes:
    parts: list[Octets] = []
    behind = 0  # The element after the last changed one.
    for change in changes:
        positions = change.positions.astype(np.int64)
        gaps = np.diff(positions, prepend=behind - change.start - 1) - 1
        behind = change.start + int(positions[-1]) + 1
        if gaps.max() < ESCAPE:
            parts.append(gaps.astype(np.uint8))
            continue
        escapes, rest = np.divmod(gaps, ESCAPE)
        ends = np.cumsum(escapes + 1)
        part = np.full(int(ends[-1]), ESCAPE, np.uint8)
        part[ends - 1] = rest
        parts.append(part)
    return np.concatenate(parts).tobytes()


def _bitmap(changes: Sequence[_Change], length: int) -> bytes:
    bitmap = np.zeros(-(-length // 8), np.uint8)
    block = np.zeros(BLOCK_ELEMENTS, np.bool_)
    for change in changes:
        block[change.positions] = True
        octets = np.packbits(block, bitorder="little")
        at = change.start // 8
        part = bitmap[at : at + len(octets)]
        part |= octets[: len(part)]
        block[change.positions] = False
    return bitmap.tobytes()


def _planes(changes: Sequence[_Change]) -> bytes:
    width = changes[0].values.dtype.itemsize
    return b"".join(
        (change.values >> (8 * plane)).astype(np.uint8).tobytes()
        for plane in range(width)
        for change in changes
    )


def apply(target: Elements, coding: weights_pb2.SparseCoding, payload: Buffer) -> None:
    """Turns `target`, a copy of the base, into the new tensor, in place.

    `target` is one-dimensional, contiguous, uint16 or uint32. `coding` may be a twin. Raises SparseInvalid
    if the payload is malformed; `target` is then unchanged. The decompressed payload
    takes additional memory. Its size is checked before it is allocated: at most one byte per element for
    positions, plus the element itself.
    """
    width, count = target.dtype.itemsize, coding.changed_element_count
    if width not in WIDTHS:
        raise ValueError(f"no elements of {target.dtype}")
    if not 0 < count <= len(target):
        raise SparseInvalid(f"{count} changed elements in a tensor of {len(target)}")
    data, split = memoryview(payload), coding.index_length_bytes
    if not 0 <= split <= len(data):
        raise SparseInvalid(f"positions of {split} bytes in a payload of {len(data)}")
    if coding.compression not in _COMPRESSIONS:
        raise SparseInvalid(f"unknown compression {coding.compression}")
    shortest, longest = _index_lengths(coding.index_coding, count, len(target))
    packed = coding.compression == weights_pb2.COMPRESSION_ZSTD
    index = _part("positions", data[:split], shortest, longest, packed=packed)
    values = _part("values", data[split:], count * width, count * width, packed=packed)
    if coding.index_coding == weights_pb2.INDEX_CODING_GAPS:
        _check_gaps(index, count, len(target))
        places = _gap_positions(index)
    else:
        _check_bitmap(index, count, len(target))
        places = _bitmap_positions(index)
    _add(target, places, values.reshape(width, count))


def _index_lengths(index_coding: int, count: int, length: int) -> tuple[int, int]:
    """The minimum and maximum number of bytes that positions can take."""
    if index_coding == weights_pb2.INDEX_CODING_GAPS:
        return count, count + (length - count) // ESCAPE
    if index_coding == weights_pb2.INDEX_CODING_BITMAP:
        return -(-length // 8), -(-length // 8)
    raise SparseInvalid(f"unknown index coding {index_coding}")


def _part(name: str, data: memoryview, shortest: int, longest: int, *, packed: bool) -> Octets:
    """One part of the payload, decompressed. Its length is checked before decompression."""
    length = _content_size(name, data) if packed else len(data)
    if not shortest <= length <= longest:
        span = str(longest) if shortest == longest else f"{shortest} to {longest}"
        raise SparseInvalid(f"{name} of {length} bytes where {span} are possible")
    if not packed:
        return np.frombuffer(data, np.uint8)
    try:
        content = zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise SparseInvalid(f"{name}: not one whole Zstandard frame: {error}") from error
    if len(content) != length:
        raise SparseInvalid(f"{name} of {len(content)} bytes in a frame that says {length}")
    return np.frombuffer(content, np.uint8)


def _content_size(name: str, data: memoryview) -> int:
    # Also rejects skippable frames, whose size counts no content.
    if bytes(data[: len(zstandard.FRAME_HEADER)]) != zstandard.FRAME_HEADER:
        raise SparseInvalid(f"{name}: no Zstandard frame")
    try:
        size = zstandard.frame_content_size(data)
    except zstandard.ZstdError as error:
        raise SparseInvalid(f"{name}: no Zstandard frame: {error}") from error
    if size < 0:
        raise SparseInvalid(f"{name}: the Zstandard frame does not name its content size")
    return size


def _check_gaps(index: Octets, count: int, length: int) -> None:
    ends, unchanged = 0, 0
    for start in range(0, len(index), BLOCK_OCTETS):
        block = index[start : start + BLOCK_OCTETS]
        ends += int(np.count_nonzero(block != ESCAPE))
        unchanged += int(block.sum(dtype=np.int64))
    if ends != count:
        raise SparseInvalid(f"gaps of {ends} changed elements where {count} changed")
    if index[-1] == ESCAPE:
        raise SparseInvalid("gaps that end in an escape")
    # The last position is this sum minus one, and every other position is smaller.
    if unchanged + count > length:
        raise SparseInvalid(f"a position of {unchanged + count - 1} in a tensor of {length}")


def _gap_positions(index: Octets) -> Iterator[NDArray[np.int64]]:
    passed = 0
    for start in range(0, len(index), BLOCK_OCTETS):
        block = index[start : start + BLOCK_OCTETS]
        unchanged = np.cumsum(block, dtype=np.int64)
        positions = unchanged[block != ESCAPE]
        positions += np.arange(passed, passed + len(positions))
        passed += int(unchanged[-1]) + len(positions)
        yield positions


def _check_bitmap(index: Octets, count: int, length: int) -> None:
    ones = 0
    for start in range(0, len(index), BLOCK_OCTETS):
        ones += int(np.count_nonzero(np.unpackbits(index[start : start + BLOCK_OCTETS])))
    if ones != count:
        raise SparseInvalid(f"a bitmap of {ones} changed elements where {count} changed")
    if length % 8 and index[-1] >> (length % 8):
        raise SparseInvalid(f"a bitmap with bits beyond the {length} elements")


def _bitmap_positions(index: Octets) -> Iterator[NDArray[np.int64]]:
    for start in range(0, len(index), BLOCK_OCTETS):
        bits = np.unpackbits(index[start : start + BLOCK_OCTETS], bitorder="little")
        yield np.flatnonzero(bits.view(np.bool_)) + start * 8


def _add(target: Elements, places: Iterator[NDArray[np.int64]], planes: Octets) -> None:
    """Adds the differences at their positions; they lie in byte planes of shape [width, changed]."""
    done = 0
    for positions in places:
        part = planes[:, done : done + len(positions)]
        done += len(positions)
        folded = part[0].astype(target.dtype)
        for plane in range(1, len(part)):
            folded |= part[plane].astype(target.dtype) << (8 * plane)
        target[positions] += (folded >> 1) ^ np.negative(folded & 1)
