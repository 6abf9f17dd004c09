"""`penstock weights` against the real server with the fake engine."""

from __future__ import annotations

import asyncio
import builtins
import json
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import save_file

from penstock.cli.__main__ import main
from penstock.cli.checkpoint import read_checkpoint
from penstock.client import connect
from penstock.common.checkpoint import CheckpointUnreadable
from penstock.v1 import rollout_service_pb2, weights_pb2
from tests.support.fakes import TENSORS
from tests.support.harness import Harness, sampling, serve
from tests.support.scripted_trainer_server import Received, ScriptedServer, refuse

EMBEDDING, MLP, HEAD = TENSORS


async def command(*arguments: str) -> Result:
    """Run the command in a thread, while the server keeps running on this event loop."""
    return await asyncio.to_thread(CliRunner().invoke, main, ("weights", *arguments))


def model(seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """The fake engine's model. Its tied head is left out."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(meta.shape, generator=generator).to(dtype)
        for name, meta in TENSORS.items()
        if not meta.optional
    }


def save(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    return folder


def loaded(harness: Harness) -> dict[str, bytes]:
    data = harness.engine.payloads[-1]
    return {
        tensor.name: data[tensor.offset_bytes : tensor.offset_bytes + tensor.length_bytes]
        for tensor in harness.engine.loaded[-1].tensors
    }


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: tensor.float().numpy().tobytes() for name, tensor in tensors.items()}


@pytest.mark.parametrize("source", ["auto", "checkpoint", "stream", "shared-memory"])
async def test_a_checkpoint_is_pushed_and_sampled(tmp_path: Path, source: str) -> None:
    folder = save(tmp_path / "model", model())
    async with serve(tmp_path) as harness:
        shown = await command("push", harness.address, str(folder), "--source", source)
        assert shown.exit_code == 0, shown.output
        assert "version 1 is active; pause 0.0" in shown.output
        assert "2 tensors, with no previous version to compare to" in shown.output
        assert loaded(harness) == bits(model())
        assert harness.engine.version == 1
        turn = await harness.generate("t", sampling_params=sampling(3))
        assert set(turn.versions) == {1}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
async def test_another_dtype_is_converted(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = save(tmp_path / "model", model(dtype=dtype))
    async with serve(tmp_path) as harness:
        # The source `checkpoint` cannot convert, so the default source does not try it.
        shown = await command("push", harness.address, str(folder))
        assert shown.exit_code == 0, shown.output
        assert loaded(harness) == bits(model(dtype=dtype))
        refused = await command("push", harness.address, str(folder), "--source", "checkpoint")
        assert refused.exit_code == 1
        name = str(dtype).removeprefix("torch.")
        assert f"{EMBEDDING} has dtype {name}, but the server needs float32" in refused.output
        assert harness.engine.version == 1


async def test_staged_is_not_switched_to_and_a_version_can_be_named(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", model())
    async with serve(tmp_path) as harness:
        shown = await command(
            "push", harness.address, str(folder), "--version", "7", "--stage-only"
        )
        assert shown.exit_code == 0, shown.output
        assert "version 7 is staged, version 0 is active" in shown.output
        assert harness.engine.version == 0
        shown = await command("push", harness.address, str(folder), "--in-flight", "drain")
        # The comparison is with the newest staged version, and nothing differs.
        assert "version 8 is active" in shown.output and "unchanged!" in shown.output
        other = model()
        other[MLP] = other[MLP] + 1
        shown = await command("push", harness.address, str(save(folder, other)))
        assert "version 9 is active" in shown.output and "1 of 2 tensors changed" in shown.output


async def test_a_sharded_checkpoint_is_read_by_its_index(tmp_path: Path) -> None:
    tensors, folder = model(), tmp_path / "model"
    folder.mkdir()
    for number, (name, tensor) in enumerate(tensors.items()):
        save_file({name: tensor}, folder / f"part-{number}.safetensors")
    save_file({"stray": torch.zeros(1)}, folder / "other.safetensors")
    names = {name: f"part-{number}.safetensors" for number, name in enumerate(tensors)}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    async with serve(tmp_path) as harness:
        shown = await command("push", harness.address, str(folder))
        assert shown.exit_code == 0, shown.output
        assert loaded(harness) == bits(tensors)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"extra": torch.zeros(2)}, "TENSOR_UNKNOWN: the model has no tensor 'extra'"),
        ({MLP: torch.zeros(8, 5)}, f"SHAPE_MISMATCH: {MLP}"),
        ({MLP: None}, f"TENSOR_MISSING: 1 tensors of the model are missing, first {MLP}"),
        ({MLP: torch.full((8, 4), torch.nan)}, f"NOT_FINITE: {MLP}"),
        ({MLP: torch.zeros(8, 4, dtype=torch.int8)}, f"{MLP} has dtype I8"),
    ],
)
async def test_what_is_refused_is_named_and_changes_nothing(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    tensors = {n: t for n, t in {**model(), **change}.items() if t is not None}
    folder = save(tmp_path / "model", tensors)
    async with serve(tmp_path) as harness:
        for source in ("auto", "stream"):
            shown = await command("push", harness.address, str(folder), "--source", source)
            assert shown.exit_code == 1
            assert "penstock weights: " in shown.output and words in shown.output
        assert harness.engine.loaded == []


async def test_an_old_version_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", model())
    async with serve(tmp_path) as harness:
        assert (await command("push", harness.address, str(folder))).exit_code == 0
        shown = await command("push", harness.address, str(folder), "--version", "1")
        assert shown.exit_code == 1
        assert "WEIGHT_VERSION_STALE" in shown.output


async def test_without_a_server_it_says_so(tmp_path: Path) -> None:
    async with ScriptedServer() as server:
        address = server.address
    for arguments in (("show", address), ("push", address, str(save(tmp_path, model())))):
        shown = await command(*arguments)
        assert shown.exit_code == 1
        assert shown.output.startswith("penstock weights: ")


async def test_auto_goes_from_one_source_to_the_next(tmp_path: Path) -> None:
    async def elsewhere(requests: Any, context: Any) -> None:
        await anext(requests)
        await refuse(
            context, grpc.StatusCode.FAILED_PRECONDITION, "SOURCE_UNAVAILABLE", "another host"
        )

    tensors, received = model(), Received()
    folder = save(tmp_path / "model", tensors)
    async with ScriptedServer() as server:
        server.info.weight_sources.extend(
            [
                weights_pb2.WEIGHT_SOURCE_KIND_INLINE,
                weights_pb2.WEIGHT_SOURCE_KIND_SHARED_MEMORY,
                weights_pb2.WEIGHT_SOURCE_KIND_CHECKPOINT,
            ]
        )
        server.uploads = [elsewhere, elsewhere, received.take]
        shown = await command("push", server.address, str(folder))
        assert shown.exit_code == 0, shown.output
        assert "another host; trying shared-memory" in shown.output
        assert "another host; trying stream" in shown.output
        assert received.header.WhichOneof("source") == "inline"
        assert received.tensors() == bits(tensors)
        # Later than the epoch of any trainer that has started.
        assert received.header.trainer_epoch > 1_700_000_000 * 10**9


async def test_show_prints_what_the_server_is_and_holds(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", model())
    async with serve(tmp_path) as harness:
        await command("push", harness.address, str(folder), "--version", "3")
        await command("push", harness.address, str(folder), "--stage-only")
        shown = await command("show", harness.address)
        assert shown.exit_code == 0, shown.output
        found = json.loads((await command("show", harness.address, "--json")).output)
    lines = {line.split()[0]: line.split(maxsplit=1)[1] for line in shown.output.splitlines()[:8]}
    assert lines["model"] == "fake" and lines["dtype"] == "float32"
    assert lines["active"] == "version 3" and lines["staged"] == "version 4"
    assert lines["delta"] == "base  version 3"
    assert lines["adapters"] == "not enabled"
    assert "inline" in lines["sources"] and "shared memory" in lines["sources"]
    assert "(the server itself)" in shown.output and "serving" in shown.output
    assert found["active_weight_version"] == found["delta_base_weight_version"] == 3
    assert found["staged_weight_versions"] == [4]
    assert found["replicas"][0]["state"] == "serving"
    assert found["lora"] is None


async def test_adapters_and_replicas_are_listed() -> None:
    async with ScriptedServer() as server:
        server.info.adapter_weight_versions.extend([5, 6])
        server.info.active_weight_version, server.info.full_weight_version = 6, 2
        server.info.lora.max_rank, server.info.lora.max_adapters = 16, 4
        replica = server.info.replicas.add()
        replica.address, replica.active_weight_version = "10.0.0.1:7", 5
        replica.state = rollout_service_pb2.REPLICA_STATE_PAUSED
        shown = (await command("show", server.address)).output
        found = json.loads((await command("show", server.address, "--json")).output)
    assert "version 5, version 6 (rank up to 16, 4 at a time)" in shown
    assert "version 6, an adapter on version 2\n" in shown
    assert found["full_weight_version"] == 2
    assert shown.splitlines()[-1].split() == ["10.0.0.1:7", "paused", "5", "0", "0"]
    assert found["lora"] == {"max_rank": 16, "max_adapters": 4}


@pytest.mark.parametrize(
    ("address", "state", "shown"),
    [
        ("10.0.0.1:7", "SERVING", 0),
        ("10.0.0.1:7", "PAUSED", 0),
        ("10.0.0.1:7", "JOINING", None),
        ("10.0.0.1:7", "DRAINING", None),
        ("10.0.0.1:7", "UNAVAILABLE", None),
        ("", "UNAVAILABLE", 0),
    ],
)
async def test_a_version_that_is_not_known_is_not_shown_as_0(
    address: str, state: str, shown: int | None
) -> None:
    async with ScriptedServer() as server:
        replica = server.info.replicas.add()
        replica.address = address
        replica.state = rollout_service_pb2.ReplicaState.Value(f"REPLICA_STATE_{state}")
        table = (await command("show", server.address)).output
        found = json.loads((await command("show", server.address, "--json")).output)
        async with connect(server.address) as client:
            (told,) = (await client.server_info()).replicas
    assert found["replicas"][0]["active_weight_version"] == shown
    assert told.active_weight_version == shown
    assert table.splitlines()[-1].split()[-3] == ("-" if shown is None else "0")


def test_without_xxhash_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = builtins.__import__

    def absent(name: str, *rest: Any, **more: Any) -> Any:
        if name == "penstock.wire.upload":
            raise ModuleNotFoundError("No module named 'xxhash'", name="xxhash")
        return original(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", absent)
    shown = CliRunner().invoke(main, ("weights", "push", "127.0.0.1:1", str(tmp_path)))
    assert shown.exit_code == 2
    assert "xxhash is not installed; install the extra server (or trainer)" in shown.output
    assert "penstock-rl[server]" in shown.output


@pytest.mark.parametrize("to", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_conversion_rounds_as_torch_does(tmp_path: Path, stored: torch.dtype, to: str) -> None:
    generator = torch.Generator().manual_seed(1)
    scale = torch.tensor(10.0) ** torch.randint(-12, 5, (4096,), generator=generator)
    values = torch.randn(4096, generator=generator) * scale
    # Ties, subnormals, signed zeros.
    values[:6] = torch.tensor([1.00390625, 1.01171875, 1e-41, -1e-41, 0.0, -0.0])
    tensor = values.to(stored)
    (read,) = read_checkpoint(save(tmp_path, {"a": tensor}))
    expected = tensor.float().to(getattr(torch, to)).view(torch.uint8)
    assert read.bytes_as(to).tobytes() == expected.numpy().tobytes()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "model.safetensors: cannot mmap an empty file"),
        (b"\xff" * 20, "a header of"),
        (b"\x04\0\0\0\0\0\0\0nono", "model.safetensors: "),
        (b"\x02\0\0\0\0\0\0\0[]", "model.safetensors: "),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointUnreadable, match=words):
        read_checkpoint(tmp_path)


def test_a_file_cut_short_is_named(tmp_path: Path) -> None:
    path = save(tmp_path, {"a": torch.zeros(100)}) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointUnreadable, match=r"a: bytes 0 to 400 of 399"):
        read_checkpoint(tmp_path)


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointUnreadable, match="holds no safetensors file"):
        read_checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointUnreadable, match=r"index\.json: KeyError"):
        read_checkpoint(tmp_path)


def test_reading_maps_and_does_not_copy(tmp_path: Path) -> None:
    (read,) = read_checkpoint(save(tmp_path, {"a": torch.arange(4.0)}))
    assert np.frombuffer(read.data, "<f4").tolist() == [0, 1, 2, 3]
    assert read.bytes_as("float32") is read.data
