"""The codec of one tensor against a base: exact, never larger than raw, and strict about its input."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from penstock.v1 import weights_pb2
from penstock.wire import codec, sparse
from penstock.wire.sparse import SparseInvalid, apply, encode, encode_all

SAME = weights_pb2.TENSOR_ENCODING_SAME
SPARSE = weights_pb2.TENSOR_ENCODING_SPARSE
RAW = weights_pb2.TENSOR_ENCODING_RAW
GAPS = weights_pb2.INDEX_CODING_GAPS
BITMAP = weights_pb2.INDEX_CODING_BITMAP
PLAIN = weights_pb2.COMPRESSION_UNSPECIFIED
ZSTD = weights_pb2.COMPRESSION_ZSTD

FIELDS = ("changed_element_count", "index_coding", "index_length_bytes", "compression")

DTYPES = st.sampled_from([np.dtype(np.uint16), np.dtype(np.uint32)])
BLOCK_OCTETS = 128 << 10


def decode(base, encoded):
    """The tensor that the receiving side reconstructs."""
    payload = b"".join(encoded.parts)
    assert len(payload) == encoded.length_bytes
    match encoded.encoding:
        case weights_pb2.TENSOR_ENCODING_SAME:
            return base.copy()
        case weights_pb2.TENSOR_ENCODING_RAW:
            return np.frombuffer(payload, base.dtype)
        case _:
            target = base.copy()
            apply(target, encoded.coding, payload)
            return target


def check_round_trip(base, new):
    encoded = encode(base, new)
    np.testing.assert_array_equal(decode(base, encoded), new)
    assert encoded.changed_element_count == np.count_nonzero(base != new)
    assert encoded.length_bytes <= new.nbytes
    assert (encoded.encoding == SAME) == (encoded.changed_element_count == 0)
    assert (encoded.coding is not None) == (encoded.encoding == SPARSE)
    return encoded


@st.composite
def pairs(draw):
    """A base and a new tensor that differ in some elements."""
    dtype = draw(DTYPES)
    length = draw(st.integers(0, 600))
    elements = st_numpy.from_dtype(dtype)
    base = draw(st_numpy.arrays(dtype, length, elements=elements, fill=elements))
    new = base.copy()
    if length:
        for position in draw(st.lists(st.integers(0, length - 1), max_size=length)):
            new[position] = draw(elements)
    return base, new


@given(pairs())
def test_a_tensor_comes_back_bit_for_bit(pair):
    check_round_trip(*pair)


@given(DTYPES, st.integers(0, 40_000), st.floats(0, 1), st.booleans(), st.integers(0, 2**32 - 1))
def test_it_does_at_every_share_of_changed_elements(dtype, length, share, by_one, seed):
    generator = np.random.default_rng(seed)
    base = generator.integers(0, 256, length * dtype.itemsize, np.uint8).view(dtype)
    new = base.copy()
    changed = np.flatnonzero(generator.random(length) < share)
    most = 2 if by_one else np.iinfo(dtype).max
    new[changed] += generator.integers(1, most, len(changed), dtype, endpoint=False)
    encoded = check_round_trip(base, new)
    if by_one and len(changed) > 1000:
        assert encoded.encoding == SPARSE


@given(pairs(), st.sampled_from([GAPS, BITMAP]), st.sampled_from([PLAIN, ZSTD]))
def test_every_coding_decodes_whichever_the_encoder_would_choose(pair, index_coding, compression):
    base, new = pair
    assume((base != new).any())
    target = base.copy()
    apply(target, *payload_of(base, new, index_coding, compression))
    np.testing.assert_array_equal(target, new)


def coding_of(*values):
    return weights_pb2.SparseCoding(**dict(zip(FIELDS, values, strict=True)))


def replace(coding, **fields):
    return coding_of(*(fields.get(name, getattr(coding, name)) for name in FIELDS))


def payload_of(base, new, index_coding=GAPS, compression=PLAIN):
    """A coding and its payload, written element by element from the text of weights.proto."""
    bits = base.dtype.itemsize * 8
    positions = [i for i in range(len(base)) if base[i] != new[i]]
    if index_coding == GAPS:
        index, behind = bytearray(), 0
        for position in positions:
            escapes, rest = divmod(position - behind, 255)
            index += bytes([255] * escapes + [rest])
            behind = position + 1
    else:
        index = bytearray(-(-len(base) // 8))
        for position in positions:
            index[position // 8] |= 1 << position % 8
    folded = []
    for position in positions:
        difference = (int(new[position]) - int(base[position])) % 2**bits
        signed = difference - 2**bits if difference >= 2 ** (bits - 1) else difference
        folded.append(2 * signed if signed >= 0 else -2 * signed - 1)
    values = b"".join(
        bytes(value >> 8 * plane & 255 for value in folded) for plane in range(bits // 8)
    )
    index = bytes(index)
    if compression == ZSTD:
        index, values = zstandard.compress(index), zstandard.compress(values)
    return coding_of(len(positions), index_coding, len(index), compression), index + values


@given(pairs())
def test_the_encoder_writes_what_the_proto_says(pair):
    base, new = pair
    encoded = encode(base, new)
    if encoded.coding is not None and encoded.coding.compression == PLAIN:
        expected = payload_of(base, new, encoded.coding.index_coding)
        assert (encoded.coding, b"".join(encoded.parts)) == expected


def test_an_empty_tensor_and_one_without_changes_are_same():
    for length in (0, 1, 7, 4096):
        base = np.arange(length, dtype=np.uint16)
        assert check_round_trip(base, base.copy()).encoding == SAME


def test_one_element_changes_by_any_amount():
    for value in (0, 1, 0x7FFF, 0x8000, 0xFFFF):
        for other in (0, 1, 0x7FFF, 0x8000, 0xFFFF):
            check_round_trip(np.array([value], np.uint16), np.array([other], np.uint16))


def test_payload_bits_of_nan_and_the_sign_of_zero_survive():
    base = np.array([0.0, -0.0, np.nan, np.inf] * 64, np.float32).view(np.uint32)
    new = base[::-1].copy()
    new[2] = 0x7FC0BEEF
    new[3] = 0xFF800001
    check_round_trip(base, new)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_a_handful_of_changes_in_a_large_tensor_takes_a_handful_of_bytes(dtype):
    length = 5 * sparse.BLOCK_ELEMENTS + 3
    base = np.zeros(length, dtype)
    new = base.copy()
    for position in (0, 254, 510, 2 * sparse.BLOCK_ELEMENTS - 1, length - 4, length - 1):
        new[position] = 7
    encoded = check_round_trip(base, new)
    assert encoded.changed_element_count == 6
    assert encoded.length_bytes < 200


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_dense_changes_that_straddle_blocks_come_back(dtype):
    length = 2 * sparse.BLOCK_ELEMENTS + 5
    base = np.arange(length, dtype=np.uint32).astype(dtype)
    new = base.copy()
    new[sparse.BLOCK_ELEMENTS - 100_000 :: 2] ^= 0x55
    assert check_round_trip(base, new).encoding == SPARSE
    assert check_round_trip(base, base + dtype(1)).length_bytes < base.nbytes // 100


def test_what_does_not_get_smaller_is_sent_raw():
    generator = np.random.default_rng(0)
    base = np.zeros(10_001, np.uint16)
    new = generator.integers(1, 2**16, len(base)).astype(np.uint16)
    encoded = check_round_trip(base, new)
    assert encoded.encoding == RAW
    # Not a copy: the payload is the tensor itself.
    assert np.shares_memory(np.frombuffer(encoded.parts[0], np.uint16), new)


def test_arrays_of_a_mapping_at_any_offset_are_compared_too():
    memory = bytearray(np.arange(4003, dtype=np.uint16).tobytes())
    base = np.frombuffer(memory, np.uint16, 4000, offset=2)
    new = base.copy()
    new[::17] += 3
    check_round_trip(base, new)


def test_many_tensors_keep_their_order():
    generator = np.random.default_rng(1)
    tensors = []
    for length in (3, 40_000, 0, 512, 100_000):
        base = generator.integers(0, 2**16, length).astype(np.uint16)
        new = base.copy()
        new[::50] += 1
        tensors.append((base, new))
    for (base, new), encoded in zip(tensors, encode_all(tensors), strict=True):
        np.testing.assert_array_equal(decode(base, encoded), new)


def test_tensors_that_cannot_be_compared_are_the_callers_mistake():
    base = np.zeros(4, np.uint16)
    for new in (np.zeros(5, np.uint16), np.zeros(4, np.uint32)):
        with pytest.raises(ValueError, match="cannot compare"):
            encode(base, new)
    with pytest.raises(ValueError, match="cannot compare"):
        encode(np.zeros(4, np.uint8), np.zeros(4, np.uint8))


def test_a_coding_is_read_from_either_class_of_message():
    base = np.zeros(100, np.uint16)
    new = base.copy()
    new[7] = 9
    encoded = encode(base, new)
    fields = {name: getattr(encoded.coding, name) for name in FIELDS}
    for message_class in (weights_pb2.SparseCoding, codec.twin(weights_pb2.SparseCoding)):
        message = message_class.FromString(message_class(**fields).SerializeToString())
        target = base.copy()
        apply(target, message, memoryview(b"".join(encoded.parts)))
        np.testing.assert_array_equal(target, new)


# Refused input. The tensor has 1001 elements, of which 0, 300 and 1000 changed by 1 each.


def sample(index_coding=GAPS, compression=PLAIN):
    base = np.zeros(1001, np.uint16)
    new = base.copy()
    new[[0, 300, 1000]] += 1
    return payload_of(base, new, index_coding, compression)


def refuses(coding, payload, match, length=1001):
    target = np.arange(length, dtype=np.uint16)
    with pytest.raises(SparseInvalid, match=match):
        apply(target, coding, payload)
    np.testing.assert_array_equal(target, np.arange(length))


def with_index(index, values=b"\2\2\2\0\0\0", count=3, index_coding=GAPS):
    return coding_of(count, index_coding, len(index), PLAIN), index + values


def zstd_frame(claimed_size, *blocks):
    """A frame that claims one content size and holds runs of zeros of other sizes."""
    body = b""
    for number, size in enumerate(blocks, 1):
        header = (number == len(blocks)) | 1 << 1 | size << 3
        body += header.to_bytes(3, "little") + b"\0"
    return zstandard.FRAME_HEADER + b"\xe0" + struct.pack("<Q", claimed_size) + body


@pytest.mark.parametrize("compression", [PLAIN, ZSTD])
@pytest.mark.parametrize("index_coding", [GAPS, BITMAP])
def test_a_payload_of_any_other_length_is_refused(index_coding, compression):
    coding, payload = sample(index_coding, compression)
    for cut in range(len(payload)):
        refuses(coding, payload[:cut], "positions|values")
    for more in (b"\0", b"\2\0", zstandard.compress(b"")):
        refuses(coding, payload + more, "values")
    for length in {0, coding.index_length_bytes - 1, coding.index_length_bytes + 1}:
        refuses(replace(coding, index_length_bytes=length), payload, "positions|values|gaps")
    refuses(replace(coding, index_length_bytes=-1), payload, "positions of -1 bytes")
    refuses(replace(coding, index_length_bytes=len(payload) + 1), payload, "in a payload of")


@pytest.mark.parametrize("compression", [PLAIN, ZSTD])
@pytest.mark.parametrize("index_coding", [GAPS, BITMAP])
def test_a_count_that_disagrees_is_refused(index_coding, compression):
    coding, payload = sample(index_coding, compression)
    for count in (-(2**63), -1, 0, 1002, 2**63 - 1):
        refuses(replace(coding, changed_element_count=count), payload, f"^{count} changed elements")
    for count in (1, 2, 4, 1001):
        refuses(replace(coding, changed_element_count=count), payload, "positions|values")


def test_codings_this_version_does_not_know_are_refused():
    coding, payload = sample()
    for number in (0, 3, -1):
        refuses(replace(coding, index_coding=number), payload, f"unknown index coding {number}")
    for number in (2, -1):
        refuses(replace(coding, compression=number), payload, f"unknown compression {number}")


def test_nothing_has_changed_in_a_tensor_without_elements():
    refuses(*sample(), "3 changed elements in a tensor of 0", length=0)


def test_gaps_that_end_outside_or_in_the_middle_are_refused():
    assert sample() == with_index(b"\0\xff\x2c\xff\xff\xbd")
    refuses(*with_index(b"\0\xff\x2c\xff\xff\xbe"), "position of 1001 in a tensor of 1001")
    refuses(*with_index(b"\xfe\xfe\xff\xff\xfe"), "position of 1274 in a tensor of 1001")
    refuses(*with_index(b"\0\0\0\xff"), "end in an escape")
    refuses(*with_index(b"\0\0\xff\xff"), "gaps of 2 changed elements where 3 changed")
    refuses(*with_index(b"\0\0\0\0"), "gaps of 4 changed elements where 3 changed")
    refuses(*with_index(b"\0\0"), "positions of 2 bytes where 3 to 6 are possible")
    refuses(*with_index(b"\0\xff\xff\xff\xff\0\0"), "positions of 7 bytes where 3 to 6")


def test_a_bitmap_with_other_bits_is_refused():
    bitmap = bytearray(126)
    bitmap[0], bitmap[125] = 0b11, 0b10
    refuses(*with_index(bytes(bitmap), index_coding=BITMAP), "beyond the 1001 elements")
    bitmap[125] = 0
    refuses(*with_index(bytes(bitmap), index_coding=BITMAP), "of 2 changed elements where 3")
    refuses(*with_index(bytes(bitmap[:125]), index_coding=BITMAP), "125 bytes where 126 are")


def test_frames_that_are_not_one_whole_frame_of_the_right_size_are_refused():
    (coding, payload), values = sample(GAPS, ZSTD), b"\2\2\2\0\0\0"
    index = payload[: coding.index_length_bytes]
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(values)
    skippable = b"\x50\x2a\x4d\x18" + struct.pack("<I", 6) + values
    flipped = bytearray(zstandard.ZstdCompressor(write_checksum=True).compress(values))
    flipped[-1] ^= 1
    for part, match in (
        (b"", "values: no Zstandard frame"),
        (values, "values: no Zstandard frame"),
        (zstandard.FRAME_HEADER, "values: no Zstandard frame"),
        (skippable, "values: no Zstandard frame"),
        (unsized, "values: the Zstandard frame does not name its content size"),
        (zstandard.compress(values + b"\0"), "values of 7 bytes where 6 are possible"),
        (zstandard.compress(values[:5]), "values of 5 bytes where 6 are possible"),
        (zstandard.compress(values) + b"\0", "values: not one whole Zstandard frame"),
        (zstandard.compress(values) + skippable, "values: not one whole Zstandard frame"),
        (zstandard.compress(values)[:-1], "values: not one whole Zstandard frame"),
        (bytes(flipped), "values: not one whole Zstandard frame"),
        (zstd_frame(6, 5), "values"),
        (zstd_frame(6, 7), "values: not one whole Zstandard frame"),
    ):
        refuses(coding, index + part, match)


@pytest.mark.parametrize(
    "frame",
    [
        zstd_frame(1 << 40, BLOCK_OCTETS),
        zstd_frame(1 << 63, BLOCK_OCTETS),
        zstd_frame(2**64 - 3, BLOCK_OCTETS),
        zstd_frame(64 << 20, *[BLOCK_OCTETS] * 512),
        zstd_frame(6, *[BLOCK_OCTETS] * 512),
    ],
)
def test_a_frame_never_costs_more_memory_than_the_tensor_allows(frame):
    coding, payload = sample(GAPS, ZSTD)
    index = payload[: coding.index_length_bytes]
    # The first call in a process imports modules, whose memory is not the frame's.
    refuses(coding, index + frame, "values")
    tracemalloc.start()
    try:
        refuses(coding, index + frame, "values")
        refuses(replace(coding, index_length_bytes=len(frame)), frame + payload, "positions|gaps")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_a_whole_tensor_is_applied_within_the_memory_the_documentation_names():
    length = 1 << 22
    target = np.zeros(length, np.uint16)
    index, values = zstandard.compress(bytes(length)), zstandard.compress(bytes(2 * length))
    tracemalloc.start()
    try:
        apply(target, coding_of(length, GAPS, len(index), ZSTD), index + values)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert not target.any()
    # One byte for each position, the elements themselves, and the memory of a block.
    assert peak < 3 * length + (8 << 20)


CODINGS = st.builds(
    coding_of,
    st.integers(-1, 70),
    st.integers(-1, 3),
    st.integers(-1, 70),
    st.integers(-1, 2),
)


@settings(max_examples=300)
@given(DTYPES, st.integers(0, 64), CODINGS, st.binary(max_size=200))
def test_random_bytes_are_refused_or_decoded_and_nothing_else(dtype, length, coding, payload):
    base = np.arange(length, dtype=dtype)
    target = base.copy()
    try:
        apply(target, coding, payload)
    except SparseInvalid:
        np.testing.assert_array_equal(target, base)
    else:
        assert np.count_nonzero(target != base) <= coding.changed_element_count


@settings(max_examples=300)
@given(st.data())
def test_a_damaged_payload_is_refused_or_decoded_and_nothing_else(data):
    index_coding = data.draw(st.sampled_from([GAPS, BITMAP]))
    compression = data.draw(st.sampled_from([PLAIN, ZSTD]))
    coding, payload = sample(index_coding, compression)
    damaged = bytearray(payload)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    target = np.zeros(1001, np.uint16)
    try:
        apply(target, coding, bytes(damaged))
    except SparseInvalid:
        assert not target.any()
    else:
        assert np.count_nonzero(target) <= 3
