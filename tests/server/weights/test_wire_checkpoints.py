"""A folder of safetensors as the source of a version: accepted whole,
or refused with the reason."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from penstock.v1 import weights_pb2
from tests.support.harness import (
    GetServerInfoRequest,
    Harness,
    delta,
    header,
    hello,
    messages,
    payload,
    send,
    weights_of,
)
from tests.support.weight_checks import MODEL_BYTES, held_bytes, refused

FEW, MANY = "model.layers.0.mlp.weight", "model.embed_tokens.weight"
INDEX = "model.safetensors.index.json"


def write(folder: Path, tensors: dict[str, Any], sharded: bool = False) -> Path:
    folder.mkdir(exist_ok=True)
    if not sharded:
        # Not in the order of the header.
        save_file(dict(reversed(tensors.items())), folder / "model.safetensors")
        return folder
    names = {name: f"part-{index}.safetensors" for index, name in enumerate(tensors)}
    for name, file in names.items():
        save_file({name: tensors[name]}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return folder


def upload_from(folder: Path | str, version: int = 1, **fields: Any) -> list[Any]:
    head, _ = header(version, **{"inline": None, "checkpoint": {"path": str(folder)}, **fields})
    for spec in head.tensors:
        spec.offset_bytes = spec.length_bytes = 0
    return messages(head, b"")


@pytest.mark.parametrize("sharded", [False, True])
async def test_a_folder_is_read_into_the_stage(
    harness: Harness, tmp_path: Path, sharded: bool
) -> None:
    info = await harness.wire.GetServerInfo(GetServerInfoRequest())
    assert weights_pb2.WEIGHT_SOURCE_KIND_CHECKPOINT in info.weight_sources
    more = weights_of(1) | {"some.buffer": np.zeros(3, np.int64)}
    folder = write(tmp_path / "checkpoint", more, sharded)
    responses = await send(harness, upload_from(folder))
    assert responses[-1].state == weights_pb2.WEIGHT_STATE_ACTIVE
    assert harness.engine.payloads == [payload(1)[0]]
    assert held_bytes(harness) == MODEL_BYTES
    # It is a valid base for deltas.
    await send(harness, messages(*delta(2, 1)))
    assert harness.engine.payloads[-1] == payload(2)[0]


def overwrite(path: Path, at: int, data: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[at : at + len(data)] = data
    path.write_bytes(content)


def rewrite(**tensors: Any) -> Callable[[Path], object]:
    """Replace tensors by the last component of their name but one; None leaves a tensor out."""
    by_name = {FEW: tensors.get("mlp", ...), MANY: tensors.get("embed", ...)}

    def act(folder: Path) -> None:
        new = {n: v if v is not ... else weights_of(1)[n] for n, v in by_name.items()}
        save_file({n: v for n, v in new.items() if v is not None}, folder / "model.safetensors")

    return act


def pipe(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")


def truncate(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", MODEL_BYTES)


INDEXED = {"weight_map": {MANY: "a.safetensors", FEW: "a.safetensors"}}
BROKEN: dict[str, tuple[Callable[[Path], object], str, str | None]] = {
    "no file": (lambda f: (f / "model.safetensors").unlink(), "SOURCE_UNAVAILABLE", None),
    "a pipe": (pipe, "SOURCE_UNAVAILABLE", None),
    "cut short": (truncate, "SOURCE_UNAVAILABLE", None),
    "empty": (lambda f: os.truncate(f / "model.safetensors", 0), "SOURCE_UNAVAILABLE", None),
    "a header of gigabytes": (
        lambda f: overwrite(f / "model.safetensors", 0, (1 << 40).to_bytes(8, "little")),
        "SOURCE_UNAVAILABLE",
        None,
    ),
    "a header that is no table": (
        lambda f: overwrite(f / "model.safetensors", 8, b"no table"),
        "SOURCE_UNAVAILABLE",
        None,
    ),
    "an index of a missing file": (
        lambda f: (f / INDEX).write_text(json.dumps(INDEXED)),
        "SOURCE_UNAVAILABLE",
        None,
    ),
    "an index of a file elsewhere": (
        lambda f: (f / INDEX).write_text('{"weight_map": {"x": "../other/model.safetensors"}}'),
        "SOURCE_UNAVAILABLE",
        None,
    ),
    "an index that is none": (
        lambda f: (f / INDEX).write_text("[]"),
        "SOURCE_UNAVAILABLE",
        None,
    ),
    "a missing tensor": (rewrite(mlp=None), "TENSOR_MISSING", FEW),
    "another shape": (rewrite(mlp=np.zeros((4, 8), np.float32)), "SHAPE_MISMATCH", FEW),
    "another dtype": (rewrite(mlp=np.zeros((8, 4), np.float16)), "DTYPE_MISMATCH", FEW),
    "other values": (rewrite(mlp=np.zeros((8, 4), np.float32)), "CHECKSUM_MISMATCH", FEW),
}


async def test_a_broken_folder_is_refused_and_changes_nothing(
    harness: Harness, tmp_path: Path
) -> None:
    for name, (act, reason, tensor) in BROKEN.items():
        folder = write(tmp_path / name, weights_of(1))
        act(folder)
        failure = await refused(harness, upload_from(folder))
        assert (failure.reason, failure.metadata.get("tensor")) == (reason, tensor), name
    failure = await refused(harness, upload_from(tmp_path / "absent"))
    assert failure.reason == "SOURCE_UNAVAILABLE"
    for path in ("", "relative/folder"):
        failure = await refused(harness, upload_from(path))
        assert failure.metadata["field"] == "header.checkpoint.path"
    folder = write(tmp_path / "whole", weights_of(1))
    failure = await refused(harness, upload_from(folder, base_weight_version=1))
    assert failure.metadata["field"] == "header.base_weight_version"
    requests = upload_from(folder)
    chunk = messages(*header(1))[1]
    assert (await refused(harness, [requests[0], chunk])).metadata["field"] == "chunk"
    head, _ = header(1, inline=None, checkpoint={"path": str(folder)})
    assert (await refused(harness, messages(head, b""))).reason == "FIELD_INVALID"
    new = weights_of(1)
    new[FEW][0, 0] = np.nan
    folder = write(tmp_path / "nan", new)
    head = delta(1, 0, new, raw=True)[0]
    failure = await refused(harness, upload_from(folder, tensors=head.tensors))
    assert (failure.reason, failure.metadata["tensor"]) == ("NOT_FINITE", FEW)
    assert held_bytes(harness) == 0
    assert (await send(harness, requests))[-1].state == weights_pb2.WEIGHT_STATE_ACTIVE


async def test_files_may_go_once_it_is_staged(harness: Harness, tmp_path: Path) -> None:
    folder = write(tmp_path / "checkpoint", weights_of(1))
    await send(harness, upload_from(folder, activation=weights_pb2.ACTIVATION_STAGED))
    (folder / "model.safetensors").unlink()
    exchange = await hello(harness.wire, 1 << 62)
    exchange.send(switch_weights={"weight_version": 1})
    assert (await exchange.receive("weight_receipt")).active_weight_version == 1
    assert harness.engine.payloads == [payload(1)[0]]
