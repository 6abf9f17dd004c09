"""NVIDIA's driver and its GPUs, and torch's build, as far as they can be asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from penstock.common.distribution import pip_install
from penstock.machine.findings import Finding, State

DRIVER = Path("/proc/driver/nvidia")
ASK_SECONDS = 120.0
QUERY = "name,memory.total,memory.free,driver_version"
TORCH = """
import json, torch
cuda = torch.cuda.is_available()
print(json.dumps({
    "version": torch.__version__,
    "cuda": torch.version.cuda,
    "devices": torch.cuda.device_count() if cuda else 0,
}))
"""


@dataclass(frozen=True)
class Gpu:
    name: str
    memory: str
    """Such as "81559 MiB"."""
    free: str
    driver: str


def gpu_count(driver: Path = DRIVER) -> int:
    """How many GPUs a process of this user sees."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    there = len(list((driver / "gpus").glob("*")))
    return (
        there if visible is None else min(there, len([v for v in visible.split(",") if v.strip()]))
    )


def ask_driver() -> tuple[list[Gpu], str]:
    """The GPUs, or why NVIDIA's tool does not list them."""
    command = ("nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader")
    try:
        answer = _run(command)
    except FileNotFoundError:
        return [], "nvidia-smi is not installed"
    except subprocess.TimeoutExpired:
        return [], f"nvidia-smi did not answer within {ASK_SECONDS:g} s"
    if answer.returncode:
        lines = (answer.stdout + answer.stderr).strip().splitlines()
        return [], lines[0] if lines else f"nvidia-smi ended with {answer.returncode}"
    rows = [line.split(", ") for line in answer.stdout.splitlines() if line.count(", ") == 3]
    return [Gpu(*row) for row in rows], ""


def check_gpus(count: int) -> Finding:
    if not count:
        return Finding("GPU", State.OK, "none: server and trainer use the processor")
    gpus, problem = ask_driver()
    if problem:
        hint = "install the driver's tools, or mend the driver"
        return Finding("GPU", State.WARNING, f"{count} found, and {problem}", hint)
    shown = "; ".join(f"{gpu.name}, {gpu.free} of {gpu.memory} free" for gpu in gpus)
    return Finding("GPU", State.OK, f"{shown}; driver {gpus[0].driver}" if gpus else "none visible")


def ask_torch() -> dict[str, Any]:
    """Its version, build and devices, or its `error`. In a process of its own, because it takes seconds and
    gigabytes, and a broken one may end it."""
    try:
        answer = _run((sys.executable, "-c", TORCH))
    except subprocess.TimeoutExpired:
        return {"error": f"the import did not end within {ASK_SECONDS:g} s"}
    if answer.returncode:
        lines = answer.stderr.strip().splitlines()
        return {"error": lines[-1] if lines else f"the import ended with {answer.returncode}"}
    return json.loads(answer.stdout.splitlines()[-1])


def check_torch(count: int) -> Finding:
    """`count` is the number of GPUs."""
    extras = f"server,trainer,{'cuda' if count else 'cpu'}"
    try:
        metadata.version("torch")
    except metadata.PackageNotFoundError:
        return Finding("torch", State.MISSING, "not installed", pip_install(extras))
    torch = ask_torch()
    if "error" in torch:
        hint = f"install it again: {pip_install(extras)}"
        return Finding("torch", State.MISSING, f"cannot be imported: {torch['error']}", hint)
    build = f"built for CUDA {torch['cuda']}" if torch["cuda"] else "built for a CPU"
    found = f"{torch['version']}, {build}"
    if count and not torch["cuda"]:
        hint = f"{pip_install(extras)}, or in a checkout: make setup ENGINE=cuda"
        return Finding("torch", State.WARNING, f"{found}: the GPUs are not used", hint)
    if count and not torch["devices"]:
        hint = (
            "install a driver for this CUDA; python -c 'import torch; torch.cuda.init()' says more"
        )
        return Finding("torch", State.MISSING, f"{found}: it cannot use the GPUs", hint)
    return Finding("torch", State.OK, found)


def _run(command: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=ASK_SECONDS, check=False)
