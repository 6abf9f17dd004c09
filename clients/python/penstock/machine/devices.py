"""What a run on this machine computes with: its GPUs, or else its processor. torch is not imported."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from importlib import metadata

from penstock.machine import gpus, processor
from penstock.machine.findings import gigabytes
from penstock.machine.gpus import Gpu
from penstock.machine.resources import memory_bytes

BFLOAT16_CAPABILITY = 8.0
"""The first compute capability of a GPU with bfloat16 instructions."""


@dataclass(frozen=True)
class Machine:
    processor: str
    """Its name, cores and instructions."""
    memory_bytes: int
    """Of the machine, or of the container if that is less."""
    gpus: tuple[Gpu, ...] = ()
    """Those that this process may use, if the torch that is installed can."""
    bfloat16: bool = False
    """Whether what computes the model has instructions for it."""
    why_no_gpu: str = ""

    @property
    def room(self) -> int:
        """Bytes in which a process and the model that it computes have to fit: a GPU's, or all."""
        return min((gpu.memory_bytes for gpu in self.gpus), default=self.memory_bytes)

    @property
    def whole(self) -> int:
        """Bytes of all GPUs, or of the machine if it has none."""
        return sum(gpu.memory_bytes for gpu in self.gpus) or self.memory_bytes

    @property
    def dtype(self) -> str:
        """What server and trainer compute in, unless a setting names it."""
        return "bfloat16" if self.bfloat16 else "float32"

    @property
    def described(self) -> str:
        if self.gpus:
            count = len(self.gpus)
            return f"{count} GPU{'s' * (count > 1)} of {gigabytes(self.room)}"
        return f"{self.processor}, {gigabytes(self.memory_bytes)}; {self.why_no_gpu}"


def look() -> Machine:
    found, why = _gpus()
    if found:
        fast = all(gpu.capability >= BFLOAT16_CAPABILITY for gpu in found)
    else:
        fast = processor.computes_bfloat16("cpu")
    return Machine(processor.described(), memory_bytes(), tuple(found), fast, why)


def _gpus() -> tuple[list[Gpu], str]:
    """The GPUs; if there is none, why."""
    try:
        build = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return [], "torch is not installed"
    if build.endswith("+cpu"):
        return [], "the torch that is installed is the build for processors"
    if shutil.which(gpus.TOOL) is None:
        return [], "no NVIDIA driver"
    return gpus.ask_driver()
