"""The processor: its cores, as far as this process may use them, and its instructions."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from penstock.machine.findings import Finding, State

CPUINFO = Path("/proc/cpuinfo")
CGROUP = Path("/sys/fs/cgroup")
BFLOAT16 = ("amx_bf16", "avx512_bf16", "bf16", "svebf16")
"""Linux's names for instructions that multiply bfloat16: two of x86, two of Arm."""
SHOWN = ("avx2", "avx512f", "asimd", *BFLOAT16)


def features(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """The names of the instruction sets that all cores have."""
    lines = re.findall(r"^(?:flags|Features)\s*:(.*)$", cpuinfo.read_text(), re.MULTILINE)
    return frozenset(set[str].intersection(*(set(line.split()) for line in lines)) if lines else ())


def cores(cgroup: Path = CGROUP) -> float:
    """How many cores this process may use: a container's quota may be a fraction."""
    found = float(len(os.sched_getaffinity(0)))
    with contextlib.suppress(OSError, ValueError):
        # "max 100000", or microseconds of each period.
        quota, period = (cgroup / "cpu.max").read_text().split()
        found = min(found, int(quota) / int(period))
    return found


def computes_bfloat16(device_type: str) -> bool:
    """Whether this machine's devices of a type, "cpu" or "cuda", have instructions for bfloat16.

    A processor without them computes in bfloat16 through conversions. With AVX2 alone, a training step of
    135 million parameters takes twelve times as long as in float32, and vLLM's sampling five times. With
    such instructions, bfloat16 is faster and takes half the memory.
    """
    if device_type == "cpu":
        return not features().isdisjoint(BFLOAT16)
    import torch

    return torch.cuda.is_bf16_supported(including_emulation=False)


def described(cpuinfo: Path = CPUINFO, cgroup: Path = CGROUP) -> str:
    """Its name, if Linux knows it, the cores, and those of the instructions that matter."""
    name = re.search(r"^model name\s*: (.*)$", cpuinfo.read_text(), re.MULTILINE)
    known = features(cpuinfo)
    named = ", ".join(each for each in SHOWN if each in known) or "no vector instructions"
    own = f"{name[1].strip()}, " if name else ""
    return f"{own}{cores(cgroup):g} cores with {named}"


def check_processor(has_gpu: bool, cpuinfo: Path = CPUINFO, cgroup: Path = CGROUP) -> Finding:
    known, found = features(cpuinfo), described(cpuinfo, cgroup)
    if has_gpu:
        return Finding("processor", State.OK, found)
    if not known & {"avx2", "asimd"}:
        return Finding(
            *("processor", State.MISSING, f"{found}: the engine for a CPU needs AVX2"),
            "use another machine, or one with a GPU",
        )
    if known.isdisjoint(BFLOAT16):
        said = "no bfloat16 instructions: the trainer, and a server without --dtype, use float32"
        hint = "leave dtype out; bfloat16 would take five to twelve times as long"
        return Finding("processor", State.WARNING, f"{found}; {said}", hint)
    return Finding("processor", State.OK, f"{found}; bfloat16 is fast")
