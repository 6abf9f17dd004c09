"""What a machine has, and how a run shares it."""

from __future__ import annotations

import os
import re
from importlib import metadata
from pathlib import Path

import pytest

from penstock.launch import machine
from penstock.launch.errors import LaunchInvalid
from penstock.launch.layout import lay_out
from penstock.launch.machine import Machine, look

GB = 10**9


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The driver's program, of two GPUs, beside a torch that could use them."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '81559, 9.0'\necho '81559, 9.0'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(metadata, "version", lambda name: "2.13.0+cu130")
    return program


def test_gpus_are_those_of_the_driver(smi: Path) -> None:
    found = look()
    assert found.gpu_bytes == (81559 << 20, 81559 << 20)
    assert found.bfloat16
    assert found.room == 81559 << 20
    assert found.described == "2 GPUs of 86 GB"
    smi.write_text("#!/bin/sh\necho '16384, 7.5'\n")
    assert not look().bfloat16


@pytest.mark.parametrize(("visible", "count"), [("", 0), ("-1", 0), ("1", 1), ("0,1", 2)])
def test_only_gpus_that_are_allowed_count(
    smi: Path, monkeypatch: pytest.MonkeyPatch, visible: str, count: int
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = look()
    assert len(found.gpu_bytes) == count
    assert bool(count) or found.why_no_gpu == "CUDA_VISIBLE_DEVICES allows no GPU"


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo 'Driver/library version mismatch'; exit 18", "nvidia-smi failed: Driver/library"),
        ("exit 9", "nvidia-smi failed: 9"),
        ("echo '[N/A], [N/A]'", r"nvidia-smi reports '\[N/A\], \[N/A\]'"),
        ("true", "no NVIDIA GPU"),
        ("exec sleep 60", "nvidia-smi did not answer within 0.2 s"),
    ],
)
def test_a_driver_that_fails_is_explained(
    smi: Path, monkeypatch: pytest.MonkeyPatch, script: str, why: str
) -> None:
    monkeypatch.setattr(machine, "PATIENCE_SECONDS", 0.2)
    smi.write_text(f"#!/bin/sh\n{script}\n")
    found = look()
    assert found.gpu_bytes == ()
    assert re.match(why, found.why_no_gpu)


def test_a_torch_for_processors_uses_no_gpu(smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "2.13.0+cpu")
    found = look()
    assert found.gpu_bytes == ()
    assert found.cores == len(os.sched_getaffinity(0))
    assert 10**8 < found.memory_bytes == found.room
    assert found.described.endswith("the torch that is installed is the build for processors")


def test_no_driver_is_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "2.13.0")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert look().why_no_gpu == "no NVIDIA driver"


def gpus(count: int, size: int = 80) -> Machine:
    return Machine(16, 200 * GB, (size * GB,) * count, bfloat16=True)


def test_one_gpu_is_shared() -> None:
    layout = lay_out(gpus(1), 600_000_000, lora=False, ranks=None)
    assert (layout.ranks, layout.engines, layout.lora) == (1, 1, False)
    assert layout.engine_share == 0.5
    tight = lay_out(gpus(1), 3_000_000_000, lora=False, ranks=None)
    assert 0.1 < tight.engine_share < 0.35
    assert not tight.lora


def test_what_does_not_fit_is_trained_as_an_adapter_or_refused() -> None:
    large = lay_out(gpus(1), 7_000_000_000, lora=False, ranks=None)
    assert large.lora
    # The machine has no more than what both take together.
    assert 7e9 * 4 + 6e9 + large.engine_share * 80e9 <= 80e9
    with pytest.raises(LaunchInvalid, match=r"70\.0 billion parameters need about 426 GB on each"):
        lay_out(gpus(1), 70_000_000_000, lora=False, ranks=None)
    laptop = Machine(8, 16 * GB)
    assert not lay_out(laptop, 500_000_000, lora=False, ranks=None).lora
    assert lay_out(laptop, 1_000_000_000, lora=False, ranks=None).lora
    with pytest.raises(LaunchInvalid, match="GB of memory even with an adapter"):
        lay_out(laptop, 7_000_000_000, lora=False, ranks=None)


@pytest.mark.parametrize(
    ("count", "ranks", "wanted"), [(2, None, (1, 1)), (8, None, (4, 4)), (8, 2, (2, 6)), (3, None, (1, 2))]
)  # fmt: skip
def test_several_gpus_are_divided(count: int, ranks: int | None, wanted: tuple[int, int]) -> None:
    layout = lay_out(gpus(count), 1_000_000_000, lora=False, ranks=ranks)
    assert (layout.ranks, layout.engines) == wanted
    assert layout.engine_share == 0
    assert lay_out(gpus(count), 1_000_000_000, lora=True, ranks=ranks).lora


def test_more_ranks_than_gpus_are_refused() -> None:
    with pytest.raises(LaunchInvalid, match=r"--ranks 2: of 2 GPUs, one has to serve the model"):
        lay_out(gpus(2), 10**9, lora=False, ranks=2)
    with pytest.raises(LaunchInvalid, match=r"--ranks 2"):
        lay_out(gpus(1), 10**9, lora=False, ranks=2)
    assert lay_out(Machine(8, 64 * GB), 10**9, lora=False, ranks=2).ranks == 2
