"""What this machine has for a run: processor cores, memory, and NVIDIA GPUs.

torch is not imported, which takes seconds. The driver's `nvidia-smi` knows the GPUs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from penstock.common.host import memory_bytes
from penstock.up.placement import DEVICES

PATIENCE_SECONDS = 30.0
MIB = 1 << 20
BFLOAT16_FLAGS = frozenset(("avx512_bf16", "amx_bf16", "bf16"))
"""Of Linux, for the instructions of `common.arithmetic`."""
BFLOAT16_CAPABILITY = 8.0
"""The first compute capability of a GPU with bfloat16 instructions."""


@dataclass(frozen=True)
class Machine:
    cores: int
    memory_bytes: int
    """Of the machine, or of the container if that is less."""
    gpu_bytes: tuple[int, ...] = ()
    """Memory of each GPU that may be used."""
    bfloat16: bool = False
    """Whether what computes the model has instructions for it."""
    why_no_gpu: str = ""

    @property
    def room(self) -> int:
        """Bytes in which a process and the model that it computes have to fit: a GPU's, or all."""
        return min(self.gpu_bytes) if self.gpu_bytes else self.memory_bytes

    @property
    def described(self) -> str:
        if self.gpu_bytes:
            count, each = len(self.gpu_bytes), min(self.gpu_bytes) / 1e9
            return f"{count} GPU{'s' * (count > 1)} of {each:.0f} GB"
        memory = f"{self.memory_bytes / 1e9:.0f} GB"
        return f"{self.cores} processor cores and {memory}; {self.why_no_gpu}"


def look() -> Machine:
    """Reads what the machine has."""
    cores, memory = len(os.sched_getaffinity(0)), memory_bytes()
    gpus, why = _gpus()
    if gpus:
        modern = all(capability >= BFLOAT16_CAPABILITY for _, capability in gpus)
        return Machine(cores, memory, tuple(size for size, _ in gpus), modern)
    flags = set(Path("/proc/cpuinfo").read_text().split())
    return Machine(cores, memory, (), bool(flags & BFLOAT16_FLAGS), why)


def _gpus() -> tuple[list[tuple[int, float]], str]:
    """Bytes and compute capability of each GPU; if there is none, why."""
    if "+cpu" in metadata.version("torch"):
        return [], "the torch that is installed is the build for processors"
    program = shutil.which("nvidia-smi")
    if program is None:
        return [], "no NVIDIA driver"
    query = "--query-gpu=memory.total,compute_cap"
    command = (program, query, "--format=csv,noheader,nounits")
    try:
        said = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return [], f"nvidia-smi did not answer within {PATIENCE_SECONDS:g} s"
    if said.returncode:
        lines = (said.stdout + said.stderr).strip().splitlines()
        return [], f"nvidia-smi failed: {lines[0] if lines else said.returncode}"
    try:
        rows = [line.split(",") for line in said.stdout.splitlines() if line.strip()]
        found = [(int(size) * MIB, float(capability)) for size, capability in rows]
    except ValueError:
        return [], f"nvidia-smi reports {said.stdout.strip()!r}"
    visible = os.environ.get(DEVICES)
    if visible is None:
        return found, "no NVIDIA GPU"
    # Only their number counts: a machine's GPUs are alike.
    allowed = [name for name in visible.split(",") if name.strip() not in ("", "-1")]
    return found[: len(allowed)], f"{DEVICES} allows no GPU"
