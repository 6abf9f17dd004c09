"""Whether this machine has the GPUs and the memory that a configuration asks for, roughly."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

QUERY = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
QUERY_SECONDS = 5.0
DRIVER = Path("/proc/driver/nvidia/gpus")
TRAINED_BYTES = 16
"""Bytes of each trained parameter: weights, gradients and two moments in float32."""
FROZEN_BYTES = 4


def gpu_count() -> int:
    """The GPUs that processes started here would see."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = sum(1 for _ in DRIVER.iterdir()) if DRIVER.is_dir() else 0
    if visible is None:
        return present
    named = [name for name in visible.split(",") if name.strip() not in ("", "-1")]
    return min(present, len(named))


def memory() -> tuple[int | None, str]:
    """The memory for weights, at most, and whose it is: of all GPUs, or of a machine without any. None if
    the driver does not say."""
    if count := gpu_count():
        try:
            told = subprocess.run(
                QUERY, capture_output=True, text=True, timeout=QUERY_SECONDS, check=True
            )
            largest = max(int(line) for line in told.stdout.split())
        except (OSError, ValueError, subprocess.SubprocessError):
            return None, ""
        return count * largest << 20, f"{count} GPUs have"
    return host_bytes(), "this machine has"


def host_bytes() -> int:
    """The memory of this machine, or of the container if it has less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return min(total, int(text)) if text.isdecimal() else total


def trainer_bytes(elements: int, *, adapter: bool) -> int:
    """What a trainer keeps for a model with this many parameters, on all its ranks together."""
    return elements * (FROZEN_BYTES if adapter else TRAINED_BYTES)


def in_gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
