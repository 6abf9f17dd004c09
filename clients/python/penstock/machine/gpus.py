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
from penstock.machine.findings import Finding, State, gib

DRIVER = Path("/proc/driver/nvidia")
TOOL = "nvidia-smi"
ASK_SECONDS = 30.0
IMPORT_SECONDS = 120.0
QUERY = "name,memory.total,memory.free,compute_cap,driver_version"
MIB = 1 << 20
DEVICES = "CUDA_VISIBLE_DEVICES"
TORCH = """
import json, torch
def vision():
    try:
        import torchvision
    except ModuleNotFoundError as error:
        return None if error.name == "torchvision" else str(error)
    except Exception as error:
        return str(error)
cuda = torch.cuda.is_available()
print(json.dumps({
    "version": torch.__version__,
    "cuda": torch.version.cuda,
    "devices": torch.cuda.device_count() if cuda else 0,
    "vision": vision(),
}))
"""


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_bytes: int
    free_bytes: int
    capability: float
    driver: str


def gpu_count(driver: Path = DRIVER) -> int:
    """How many GPUs a process of this user sees, without asking the driver's tool, which takes seconds."""
    return _allowed(len(list((driver / "gpus").glob("*"))))


def _allowed(there: int) -> int:
    visible = os.environ.get(DEVICES)
    if visible is None:
        return there
    # Only their number counts: a machine's GPUs are alike.
    return min(there, sum(name.strip() not in ("", "-1") for name in visible.split(",")))


def ask_driver() -> tuple[list[Gpu], str]:
    """The GPUs that this process may use, or why there is none."""
    command = (TOOL, f"--query-gpu={QUERY}", "--format=csv,noheader,nounits")
    try:
        answer = _run(command, ASK_SECONDS)
    except FileNotFoundError:
        return [], f"{TOOL} is not installed"
    except subprocess.TimeoutExpired:
        return [], f"{TOOL} did not answer within {ASK_SECONDS:g} s"
    if answer.returncode:
        lines = (answer.stdout + answer.stderr).strip().splitlines()
        return [], f"{TOOL} failed: {lines[0] if lines else answer.returncode}"
    try:
        found = [_read(line) for line in answer.stdout.splitlines() if line.strip()]
    except ValueError:
        return [], f"{TOOL} reports {answer.stdout.strip()!r}"
    if not found:
        return [], "no NVIDIA GPU"
    count = _allowed(len(found))
    return found[:count], "" if count else f"{DEVICES} allows no GPU"


def _read(line: str) -> Gpu:
    """Raises ValueError."""
    name, size, free, capability, version = line.rsplit(", ", 4)
    return Gpu(name, int(size) * MIB, int(free) * MIB, float(capability), version)


def check_gpus(count: int) -> Finding:
    if not count:
        return Finding("GPU", State.OK, "none: server and trainer use the processor")
    gpus, problem = ask_driver()
    if problem:
        hint = "install the driver's tools, or mend the driver"
        return Finding("GPU", State.WARNING, f"{count} found, and {problem}", hint)
    shown = "; ".join(f"{g.name}, {gib(g.free_bytes)} of {gib(g.memory_bytes)} free" for g in gpus)
    return Finding("GPU", State.OK, f"{shown}; driver {gpus[0].driver}")


def ask_torch() -> dict[str, Any]:
    """Its version, build and devices, or its `error`. In a separate process, because it takes seconds and
    gigabytes, and a broken one may end it."""
    try:
        answer = _run((sys.executable, "-c", TORCH), IMPORT_SECONDS)
    except subprocess.TimeoutExpired:
        return {"error": f"the import did not end within {IMPORT_SECONDS:g} s"}
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
    if torch.get("vision"):
        # `pip install 'penstock-rl[cpu]'` brings it for CUDA, and transformers then fails.
        hint = "pip uninstall -y torchvision torchaudio torchcodec"
        complaint = f"{found}: torchvision does not fit it: {torch['vision']}"
        return Finding("torch", State.MISSING, complaint, hint)
    if count and not torch["cuda"]:
        hint = f"{pip_install(extras)}, or in a checkout: make setup ENGINE=cuda"
        return Finding("torch", State.WARNING, f"{found}: the GPUs are not used", hint)
    if count and not torch["devices"]:
        hint = (
            "install a driver for this CUDA; python -c 'import torch; torch.cuda.init()' says more"
        )
        return Finding("torch", State.MISSING, f"{found}: it cannot use the GPUs", hint)
    return Finding("torch", State.OK, found)


def _run(command: tuple[str, ...], seconds: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
