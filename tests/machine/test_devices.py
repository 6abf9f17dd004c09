"""What a run computes with: NVIDIA's GPUs if torch can use them, or the processor."""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path

import pytest
import torch

from penstock.machine import gpus, processor
from penstock.machine.devices import look
from penstock.machine.gpus import DEVICES
from penstock.machine.processor import BFLOAT16, computes_bfloat16

H200 = "NVIDIA H200, 143771, 143000, 9.0, 580.95.05"


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The driver's program, of two GPUs, beside a torch that could use them."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho '{H200}'\necho '{H200}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv(DEVICES, raising=False)
    monkeypatch.setattr(metadata, "version", lambda name: "2.13.0+cu130")
    return program


def test_gpus_are_those_of_the_driver(smi: Path) -> None:
    found = look()
    assert [(gpu.name, gpu.memory_bytes) for gpu in found.gpus] == [
        ("NVIDIA H200", 143771 << 20)
    ] * 2
    assert (found.bfloat16, found.dtype) == (True, "bfloat16")
    assert (found.room, found.whole) == (143771 << 20, 2 * 143771 << 20)
    assert found.described == "2 GPUs of 150.8 GB"
    smi.write_text("#!/bin/sh\necho 'Tesla T4, with commas, 16384, 16000, 7.5, 580'\n")
    assert (look().dtype, look().gpus[0].name) == ("float32", "Tesla T4, with commas")


@pytest.mark.parametrize(("visible", "count"), [("", 0), ("-1", 0), ("1", 1), ("0,1,2", 2)])
def test_only_gpus_that_are_allowed_count(
    smi: Path, monkeypatch: pytest.MonkeyPatch, visible: str, count: int
) -> None:
    monkeypatch.setenv(DEVICES, visible)
    found = look()
    assert len(found.gpus) == count
    assert bool(count) or found.why_no_gpu == "CUDA_VISIBLE_DEVICES allows no GPU"


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo 'Driver mismatch'; exit 18", "nvidia-smi failed: Driver mismatch"),
        ("exit 9", "nvidia-smi failed: 9"),
        ("echo 'GB10, [N/A], [N/A], 12.1, 580'", "nvidia-smi reports 'GB10, [N/A], [N/A], 12.1, 580'"),
        ("echo 'two, words'", "nvidia-smi reports 'two, words'"),
        ("true", "no NVIDIA GPU"),
        ("exec sleep 60", "nvidia-smi did not answer within 0.2 s"),
    ],
)  # fmt: skip
def test_a_driver_that_fails_is_explained(
    smi: Path, monkeypatch: pytest.MonkeyPatch, script: str, why: str
) -> None:
    if "sleep" in script:
        monkeypatch.setattr(gpus, "ASK_SECONDS", 0.2)
    smi.write_text(f"#!/bin/sh\n{script}\n")
    assert (look().gpus, look().why_no_gpu) == ((), why)


def test_a_torch_for_processors_uses_no_gpu(smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "2.13.0+cpu")
    found = look()
    assert found.gpus == ()
    assert 10**8 < found.memory_bytes == found.room == found.whole
    assert found.described.startswith(processor.described())
    assert found.described.endswith("; the torch that is installed is the build for processors")


def test_no_driver_and_no_torch_are_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "2.13.0")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert look().why_no_gpu == "no NVIDIA driver"

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert look().why_no_gpu == "torch is not installed"


def test_torch_finds_the_instructions_that_linux_names() -> None:
    capabilities = torch.cpu.get_capabilities()
    assert computes_bfloat16("cpu") == any(capabilities.get(name) for name in BFLOAT16)


@pytest.mark.parametrize("name", [*BFLOAT16, "avx2"])
def test_one_instruction_set_is_enough(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "features", lambda: frozenset((name, "sse2")))
    assert computes_bfloat16("cpu") == (name != "avx2")


def test_a_processor_is_described_by_its_name(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("model name\t: Any CPU @ 2 GHz\nflags\t\t: fpu avx2 amx_bf16\n" * 2)
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert processor.described(file, tmp_path) == "Any CPU @ 2 GHz, 1.5 cores with avx2, amx_bf16"
    file.write_text("Features\t: asimd\n")
    assert processor.described(file, tmp_path) == "1.5 cores with asimd"
