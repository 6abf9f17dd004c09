"""Uploads are accepted whole and verified, or refused with the precise reason and nothing kept."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.common.memory_file import MemoryFile, host_id
from penstock.server.engine.protocol import TensorMeta
from penstock.server.weights.staging import incoming as weight_upload
from penstock.server.weights.staging import shared_memory, stage_memory
from penstock.server.weights.staging.incoming import IncomingUpload, Staged
from penstock.server.weights.staging.manifest import Encoding, ManifestTensor, WeightRefused
from penstock.server.weights.staging.stage import WeightStage
from penstock.wire.reasons import Reason

BITS = {"float32": np.uint32, "bfloat16": np.uint16, "float16": np.uint16}
NAN = {"float32": 0x7FC0_0000, "bfloat16": 0x7FC0, "float16": 0x7E00}
MINUS_INFINITY = {"float32": 0xFF80_0000, "bfloat16": 0xFF80, "float16": 0xFC00}
SHAPES = {"embed.weight": (7, 4), "norm.weight": (4,), "scale": (), "lm_head.weight": (7, 4)}
EXPECTED = {n: TensorMeta(s, optional=n == "lm_head.weight") for n, s in SHAPES.items()}


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in memory that must be empty at the end."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)
        assert not any(Path(name).iterdir())


def describe(payload: bytes, dtype: str = "float32", names: tuple[str, ...] = tuple(SHAPES)):
    """A manifest of tensors that are contiguous in the payload."""
    manifest: list[ManifestTensor] = []
    offset = 0
    for name in names:
        length = int(np.prod(SHAPES[name])) * np.dtype(BITS[dtype]).itemsize
        digest = xxhash.xxh3_64_intdigest(payload[offset : offset + length])
        manifest.append(ManifestTensor(name, SHAPES[name], dtype, offset, length, digest))
        offset += length
    return manifest


def random_payload(dtype: str = "float32", seed: int = 0) -> bytes:
    count = sum(int(np.prod(shape)) for shape in SHAPES.values())
    values = np.random.default_rng(seed).standard_normal(count).astype(np.float32)
    if dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return values.astype(dtype).tobytes()


def send(upload: IncomingUpload, payload: bytes, size: int = 50) -> None:
    for offset in range(0, len(payload), size):
        data = payload[offset : offset + size]
        upload.write_chunk(offset, data, xxhash.xxh3_64_intdigest(data))


def read(staged: Staged) -> bytes:
    """The staged bytes, read as the engine's process reads them."""
    return staged.weights.path.read_bytes()


async def refusal(stage: WeightStage, act: Callable[[], object]) -> WeightRefused:
    before = open_descriptors()
    with pytest.raises(WeightRefused) as caught:
        result = act()
        if hasattr(result, "__await__"):
            await result
    assert stage.held_bytes == 0
    stage.close()
    assert open_descriptors() <= before
    return caught.value


def descriptors_of(folder: Path) -> int:
    """The number of files in this folder that this process has open."""
    count = 0
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            count += str(path.readlink()).startswith(str(folder))
    return count


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.mark.parametrize("dtype", list(BITS))
async def test_an_inline_payload_comes_out_as_it_went_in(folder: Path, dtype: str):
    stage = WeightStage(folder, EXPECTED, dtype)
    payload = random_payload(dtype)
    upload = await stage.begin_inline(3, describe(payload, dtype), len(payload))
    send(upload, payload)
    staged = await upload.verify()
    assert staged.weight_version == 3
    assert read(staged) == payload
    assert [(t.name, t.shape, t.dtype) for t in staged.weights.tensors] == [
        (name, shape, dtype) for name, shape in SHAPES.items()
    ]
    upload.release()
    assert stage.held_bytes == len(payload)
    staged.release()
    assert stage.held_bytes == 0
    stage.close()
    assert not staged.weights.path.exists()


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.sets(st.integers(1, 255)), order=st.randoms(use_true_random=False))
async def test_chunks_may_come_in_any_order_and_size(folder: Path, cuts: set[int], order):
    stage = WeightStage(folder, EXPECTED, "float32")
    payload = random_payload()
    edges = [0, *sorted(cut for cut in cuts if cut < len(payload)), len(payload)]
    chunks = list(pairwise(edges))
    order.shuffle(chunks)
    upload = await stage.begin_inline(1, describe(payload), len(payload))
    for begin, end in chunks:
        upload.write_chunk(begin, payload[begin:end], xxhash.xxh3_64_intdigest(payload[begin:end]))
    assert read(await upload.verify()) == payload
    stage.close()


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(chunks=st.lists(st.tuples(st.integers(0, 259), st.integers(1, 90)), min_size=1, max_size=12))
async def test_a_byte_is_taken_once_and_a_missing_one_is_noticed(
    folder: Path, chunks: list[tuple[int, int]]
):
    stage = WeightStage(folder, EXPECTED, "float32")
    payload = random_payload()
    upload = await stage.begin_inline(1, describe(payload), len(payload))
    seen: set[int] = set()
    for begin, length in chunks:
        data = payload[begin : begin + length]
        wanted = set(range(begin, begin + length))
        if wanted & seen or begin + length > len(payload):
            data = data.ljust(length, b"\0")
            with pytest.raises(WeightRefused) as caught:
                upload.write_chunk(begin, data, xxhash.xxh3_64_intdigest(data))
            assert caught.value.reason is Reason.FIELD_INVALID
            break
        upload.write_chunk(begin, data, xxhash.xxh3_64_intdigest(data))
        seen |= wanted
    else:
        missing = set(range(len(payload))) - seen
        if missing:
            with pytest.raises(WeightRefused) as caught:
                await upload.verify()
            assert caught.value.metadata["begin"] == str(min(missing))
    stage.close()
    assert stage.held_bytes == 0


async def test_a_tied_head_may_be_left_out(folder: Path):
    stage = WeightStage(folder, EXPECTED, "float32")
    manifest = describe(random_payload(), names=("embed.weight", "norm.weight", "scale"))
    payload = random_payload()[: manifest[-1].offset_bytes + 4]
    upload = await stage.begin_inline(1, manifest, len(payload))
    send(upload, payload)
    assert len((await upload.verify()).weights.tensors) == 3
    stage.close()


CHANGES: dict[str, tuple[Callable[[list[ManifestTensor]], object], Reason, str]] = {
    "unknown": (lambda m: m.append(replace(m[0], name="x")), Reason.TENSOR_UNKNOWN, "x"),
    "missing": (lambda m: m.pop(0), Reason.TENSOR_MISSING, "embed.weight"),
    "twice": (lambda m: m.append(m[0]), Reason.FIELD_INVALID, "embed.weight"),
    "transposed": (
        lambda m: m.__setitem__(0, replace(m[0], shape=(4, 7))),
        Reason.SHAPE_MISMATCH,
        "embed.weight",
    ),
    "dtype": (
        lambda m: m.__setitem__(1, replace(m[1], dtype="bfloat16")),
        Reason.DTYPE_MISMATCH,
        "norm.weight",
    ),
    "encoded": (
        lambda m: m.__setitem__(1, replace(m[1], encoding=Encoding.SAME)),
        Reason.FIELD_INVALID,
        "norm.weight",
    ),
    "length": (
        lambda m: m.__setitem__(1, replace(m[1], length_bytes=12)),
        Reason.FIELD_INVALID,
        "norm.weight",
    ),
    "negative": (
        lambda m: m.__setitem__(1, replace(m[1], offset_bytes=-4)),
        Reason.FIELD_INVALID,
        "norm.weight",
    ),
    "outside": (
        lambda m: m.__setitem__(3, replace(m[3], offset_bytes=m[3].offset_bytes + 4)),
        Reason.FIELD_INVALID,
        "lm_head.weight",
    ),
    "overlap": (
        lambda m: m.__setitem__(3, replace(m[3], offset_bytes=m[3].offset_bytes - 4)),
        Reason.FIELD_INVALID,
        "lm_head.weight",
    ),
    "crooked": (
        lambda m: m.__setitem__(3, replace(m[3], offset_bytes=m[3].offset_bytes - 3)),
        Reason.FIELD_INVALID,
        "lm_head.weight",
    ),
}


@pytest.mark.parametrize("change", list(CHANGES))
async def test_a_wrong_manifest_is_refused_before_any_byte(folder: Path, change: str):
    apply, reason, tensor = CHANGES[change]
    payload = random_payload()
    manifest = describe(payload)
    apply(manifest)
    stage = WeightStage(folder, EXPECTED, "float32")
    refused = await refusal(stage, lambda: stage.begin_inline(1, manifest, len(payload)))
    assert (refused.reason, refused.metadata["tensor"]) == (reason, tensor)


async def test_a_flipped_bit_is_refused_with_its_chunk(folder: Path):
    stage = WeightStage(folder, EXPECTED, "float32")
    payload = random_payload()
    upload = await stage.begin_inline(1, describe(payload), len(payload))
    digest = xxhash.xxh3_64_intdigest(payload[:8])
    refused = await refusal(stage, lambda: upload.write_chunk(0, b"\1" + payload[1:8], digest))
    assert refused.reason is Reason.CHECKSUM_MISMATCH


async def test_a_refused_upload_takes_no_more(folder: Path):
    stage = WeightStage(folder, EXPECTED, "float32")
    payload = random_payload()
    upload = await stage.begin_inline(1, describe(payload), len(payload))
    with pytest.raises(WeightRefused):
        upload.write_chunk(0, payload[:8], 0)
    refused = await refusal(stage, lambda: send(upload, payload))
    assert refused.reason is Reason.FIELD_INVALID


async def test_a_tensor_that_differs_from_its_checksum_is_refused_by_name(folder: Path):
    stage = WeightStage(folder, EXPECTED, "float32")
    payload = random_payload()
    manifest = describe(payload)
    manifest[1] = replace(manifest[1], xxh3=manifest[1].xxh3 ^ 1)
    upload = await stage.begin_inline(1, manifest, len(payload))
    send(upload, payload)
    refused = await refusal(stage, upload.verify)
    assert (refused.reason, refused.metadata["tensor"]) == (
        Reason.CHECKSUM_MISMATCH,
        "norm.weight",
    )


@pytest.mark.parametrize("dtype", list(BITS))
@pytest.mark.parametrize("poison", [NAN, MINUS_INFINITY])
async def test_what_is_not_finite_is_refused_by_name(
    folder: Path, dtype: str, poison: dict[str, int]
):
    values = np.frombuffer(random_payload(dtype), BITS[dtype]).copy()
    values[SHAPES["embed.weight"][0] * 4 + 2] = poison[dtype]
    stage = WeightStage(folder, EXPECTED, dtype)
    upload = await stage.begin_inline(1, describe(values.tobytes(), dtype), values.nbytes)
    send(upload, values.tobytes())
    refused = await refusal(stage, upload.verify)
    assert (refused.reason, refused.metadata["tensor"]) == (Reason.NOT_FINITE, "norm.weight")


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    dtype=st.sampled_from(list(BITS)),
    poison=st.sampled_from([NAN, MINUS_INFINITY]),
    where=st.integers(0, 60),
    cuts=st.sets(st.integers(1, 243)),
    order=st.randoms(use_true_random=False),
    in_order=st.booleans(),
)
async def test_what_is_not_finite_is_found_wherever_chunks_are_cut(
    folder: Path, dtype: str, poison: dict[str, int], where: int, cuts: set[int], order, in_order
):
    values = np.frombuffer(random_payload(dtype), BITS[dtype]).copy()
    values[where] = poison[dtype]
    payload = values.tobytes()
    edges = [0, *sorted(cut for cut in cuts if cut < len(payload)), len(payload)]
    chunks = list(pairwise(edges))
    if not in_order:
        order.shuffle(chunks)
    stage = WeightStage(folder, EXPECTED, dtype)
    upload = await stage.begin_inline(1, describe(payload, dtype), len(payload))
    for begin, end in chunks:
        upload.write_chunk(begin, payload[begin:end], xxhash.xxh3_64_intdigest(payload[begin:end]))
    with pytest.raises(WeightRefused) as caught:
        await upload.verify()
    width = BITS[dtype]().itemsize
    tensor = next(
        t
        for t in describe(payload, dtype)
        if t.offset_bytes <= where * width < t.offset_bytes + t.length_bytes
    )
    assert (caught.value.reason, caught.value.metadata["tensor"]) == (
        Reason.NOT_FINITE,
        tensor.name,
    )
    stage.close()


async def test_the_largest_finite_numbers_pass(folder: Path):
    for dtype, infinity in MINUS_INFINITY.items():
        values = np.full(len(random_payload(dtype)) // BITS[dtype]().itemsize, infinity - 1)
        payload = values.astype(BITS[dtype]).tobytes()
        stage = WeightStage(folder, EXPECTED, dtype)
        upload = await stage.begin_inline(1, describe(payload, dtype), len(payload))
        send(upload, payload)
        await upload.verify()
        stage.close()


async def test_a_full_disk_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stage_memory, "SHARED_MEMORY", folder)
    monkeypatch.setattr(stage_memory.tempfile, "gettempdir", lambda: str(folder))
    shape = (1 << 48,)
    stage = WeightStage(None, {"w": TensorMeta(shape)}, "float32")
    manifest = [ManifestTensor("w", shape, "float32", 0, 1 << 50, 0)]
    refused = await refusal(stage, lambda: stage.begin_inline(1, manifest, 1 << 50))
    assert refused.reason is Reason.DISK_FULL


async def test_a_payload_goes_where_there_is_room(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stage_memory, "SHARED_MEMORY", Path("/nonexistent"))
    payload = random_payload()
    stage = WeightStage(None, EXPECTED, "float32")
    upload = await stage.begin_inline(1, describe(payload), len(payload))
    send(upload, payload)
    assert read(await upload.verify()) == payload
    stage.close()


def share(folder: Path, payload: bytes) -> tuple[Path, str]:
    path = folder / "payload"
    path.write_bytes(payload)
    return path, f"{host_id()}:{path.stat().st_dev}"


async def test_a_shared_file_is_staged_and_may_lose_its_name(folder: Path):
    payload = random_payload()
    path, namespace = share(folder, payload)
    stage = WeightStage(folder, EXPECTED, "float32")
    upload = await stage.begin_shared(4, describe(payload), str(path), namespace)
    staged = await upload.verify()
    path.unlink()
    assert read(staged) == payload
    assert stage.held_bytes == 0
    stage.close()


async def test_a_shared_file_may_have_no_name():
    payload = random_payload()
    descriptor = os.memfd_create("payload")
    os.write(descriptor, payload)
    name = f"/proc/{os.getpid()}/fd/{descriptor}"
    namespace = f"{host_id()}:{Path(name).stat().st_dev}"
    stage = WeightStage(None, EXPECTED, "float32")
    upload = await stage.begin_shared(4, describe(payload), name, namespace)
    os.close(descriptor)
    assert read(await upload.verify()) == payload
    stage.close()


def seal(payload: bytes) -> tuple[MemoryFile, str]:
    """A sealed file, whose length can never change, and its name."""
    file = MemoryFile(len(payload))
    file.view[:] = payload
    return file, str(file.path)


async def test_a_sealed_file_stays_mapped_for_the_versions_that_follow_in_it():
    stage = WeightStage(None, EXPECTED, "float32")
    file, name = seal(random_payload())
    mapped = mappings()
    for version in range(1, 4):
        payload = random_payload(seed=version)
        file.view[:] = payload
        namespace = file.host_namespace
        upload = await stage.begin_shared(version, describe(payload), name, namespace)
        staged = await upload.verify()
        assert read(staged) == payload
        assert mappings() == mapped + 1
        staged.release()
    # An error in a later version in the same file is still detected.
    file.view[:4] = b"\xff" * 4
    upload = await stage.begin_shared(4, describe(payload), name, namespace)
    with pytest.raises(WeightRefused) as caught:
        await upload.verify()
    assert caught.value.metadata["tensor"] == "embed.weight"
    file.close()
    stage.close()


def mappings() -> int:
    """The number of weight files that this process has mapped."""
    gc.collect()  # Another test may have left some in a reference cycle.
    return Path("/proc/self/maps").read_text().count("penstock-weights")


async def test_a_shared_version_outlives_what_is_kept_of_its_uploader():
    stage = WeightStage(None, EXPECTED, "float32")
    mapped = mappings()
    payload = random_payload()
    file, name = seal(payload)
    upload = await stage.begin_shared(1, describe(payload), name, file.host_namespace)
    stage.forget_shared()
    staged = await upload.verify()
    file.close()
    held = await stage.hold(staged)
    assert {t.name: t.xxh3 for t in describe(payload)} == {
        t.name: xxhash.xxh3_64_intdigest(
            read(held)[t.offset_bytes : t.offset_bytes + t.length_bytes]
        )
        for t in held.weights.tensors
    }
    del file, staged, upload
    stage.forget_shared()
    assert mappings() == mapped
    held.release()
    stage.close()


async def test_at_most_two_files_of_uploaders_stay_mapped():
    stage = WeightStage(None, EXPECTED, "float32")
    files = [seal(random_payload(seed=seed))[0] for seed in range(4)]
    mapped = mappings()  # Mapped by the uploader itself.
    for version, file in enumerate(files, 1):
        manifest = describe(bytes(file.view))
        upload = await stage.begin_shared(version, manifest, str(file.path), file.host_namespace)
        (await upload.verify()).release()
    assert mappings() == mapped + shared_memory.KEPT_MAPPINGS
    stage.close()
    assert mappings() == mapped
    for file in files:
        file.close()


async def test_a_shared_file_that_shrinks_is_refused(folder: Path):
    payload = random_payload()
    path, namespace = share(folder, payload)
    stage = WeightStage(folder, EXPECTED, "float32")
    upload = await stage.begin_shared(4, describe(payload), str(path), namespace)
    os.truncate(path, 10)
    refused = await refusal(stage, upload.verify)
    path.unlink()
    assert refused.reason is Reason.SOURCE_UNAVAILABLE


async def test_a_shared_file_that_is_too_short_is_refused(folder: Path):
    payload = random_payload()
    path, namespace = share(folder, payload[:-1])
    stage = WeightStage(folder, EXPECTED, "float32")
    manifest = describe(payload)
    refused = await refusal(stage, lambda: stage.begin_shared(4, manifest, str(path), namespace))
    path.unlink()
    assert refused.reason is Reason.FIELD_INVALID


async def test_a_file_of_another_host_is_refused(folder: Path):
    payload = random_payload()
    path, namespace = share(folder, payload)
    stage = WeightStage(folder, EXPECTED, "float32")
    refused = await refusal(
        stage, lambda: stage.begin_shared(4, describe(payload), str(path), "x" + namespace)
    )
    path.unlink()
    assert refused.reason is Reason.SOURCE_UNAVAILABLE


@pytest.mark.parametrize("kind", ["absent", "folder", "link", "pipe", "socket", "device", "disk"])
async def test_only_a_file_in_memory_can_be_shared(folder: Path, tmp_path: Path, kind: str):
    payload = random_payload()
    target, namespace = share(folder, payload)
    path = folder / "other"
    if kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(target)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
    elif kind == "device":
        path = Path("/dev/zero")
    elif kind == "disk":
        # Executables are always on a disk, while a temporary folder may be in memory.
        path = Path(os.path.realpath("/proc/self/exe"))
    stage = WeightStage(folder, EXPECTED, "float32")
    refused = await refusal(
        stage, lambda: stage.begin_shared(4, describe(payload), str(path), namespace)
    )
    assert refused.reason is Reason.SOURCE_UNAVAILABLE
    target.unlink()
    if kind == "folder":
        path.rmdir()
    elif path.parent == folder:
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("name", ["", "payload", "../payload", "/dev/shm/\0"])
async def test_a_shared_name_is_an_absolute_path(folder: Path, name: str):
    stage = WeightStage(folder, EXPECTED, "float32")
    manifest = describe(random_payload())
    refused = await refusal(stage, lambda: stage.begin_shared(4, manifest, name, "h"))
    assert refused.reason in (Reason.FIELD_INVALID, Reason.SOURCE_UNAVAILABLE)


async def test_released_memory_is_used_again(folder: Path):
    stage = WeightStage(folder, EXPECTED, "float32")
    inodes: set[int] = set()
    views: set[int] = set()
    for seed in range(3):
        payload = random_payload(seed=seed)
        upload = await stage.begin_inline(seed, describe(payload), len(payload))
        send(upload, payload)
        staged = await upload.verify()
        assert read(staged) == payload
        inodes.add(staged.weights.path.stat().st_ino)
        views.add(id(staged.buffer.view))
        staged.release()
    stage.close()
    assert len(inodes) == len(views) == 1


async def test_a_cancelled_check_gives_its_memory_back_only_when_it_has_ended(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    stage = WeightStage(folder, EXPECTED, "float32")
    payload = random_payload()
    upload = await stage.begin_inline(1, describe(payload), len(payload))
    send(upload, payload)
    begun, go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def slowly(*arguments: object) -> None:
        loop.call_soon_threadsafe(begun.set)
        go_on.wait()

    monkeypatch.setattr(weight_upload, "verify_tensors", slowly)
    verifying = asyncio.ensure_future(upload.verify())
    await begun.wait()
    for _ in range(3):
        verifying.cancel()
        await asyncio.sleep(0.01)
        assert stage.held_bytes == len(payload)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await verifying
    assert stage.held_bytes == 0
    stage.close()


async def test_what_is_held_of_a_shared_version_is_a_checked_copy(folder: Path):
    payload = random_payload()
    for overwritten in (False, True):
        path, namespace = share(folder, payload)
        stage = WeightStage(folder, EXPECTED, "float32")
        upload = await stage.begin_shared(4, describe(payload), str(path), namespace)
        staged = await upload.verify()
        if overwritten:
            # Too early: the uploader must wait until the version is active.
            path.write_bytes(payload[:-4] + bytes(4))
            with pytest.raises(WeightRefused) as caught:
                await stage.hold(staged)
            assert caught.value.reason is Reason.CHECKSUM_MISMATCH
            assert stage.held_bytes == 0
        else:
            held = await stage.hold(staged)
            path.write_bytes(bytes(len(payload)))
            data = read(held)
            assert stage.held_bytes == len(data)
            for tensor, told in zip(held.weights.tensors, describe(payload), strict=True):
                begin, length = tensor.offset_bytes, tensor.length_bytes
                assert xxhash.xxh3_64_intdigest(data[begin : begin + length]) == told.xxh3
            held.release()
        path.unlink()
        stage.close()


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 40), min_size=1, max_size=30), st.randoms(use_true_random=False))
async def test_memory_is_given_out_in_full_and_taken_back(folder: Path, lengths: list[int], order):
    memory = stage_memory.StageMemory(folder)
    live: list[stage_memory.Buffer] = []
    # Close even if an example is aborted midway.
    with contextlib.closing(memory):
        for length in lengths:
            buffer = await memory.allocate(length)
            assert os.fstat(buffer.descriptor).st_size == length
            buffer.retain()
            live.append(buffer)
            buffer.release()
            if order.random() < 0.5:
                live.pop(order.randrange(len(live))).release()
            assert memory.held_bytes == sum(b.length_bytes for b in live)
            # Buffers in use, and at most one kept for the next upload; each
            # mapping has its own descriptor.
            assert descriptors_of(folder) <= 2 * (len(live) + 1)
    assert descriptors_of(folder) == 0
    # A late release is harmless.
    for buffer in live:
        buffer.release()
