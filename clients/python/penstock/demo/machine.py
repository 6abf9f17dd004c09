"""What the demo computes with: `python -m penstock.demo.machine` prints it as JSON.

A separate process, because only this part of the demo and the conversion of the model need torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib.util import find_spec

from penstock.up.processes import ProcessFailed, ending

CORES = len(os.sched_getaffinity(0))
FEATURES = ("amx_bf16", "avx512_bf16", "bf16", "avx512_f", "avx2")
"""torch's names for what decides how fast a processor trains, the fastest first."""


@dataclass(frozen=True)
class Machine:
    """The devices that torch found."""

    cpu: str
    """Name, cores and the best of FEATURES."""
    gpus: tuple[str, ...]
    """Names of the GPUs; empty if torch is the CPU build or sees none."""
    dtype: str
    """bfloat16 if the devices have instructions for it, else float32."""


def find_machine() -> Machine:
    """Asks torch, in another process. Raises ModuleNotFoundError, or ProcessFailed if torch fails."""
    if find_spec("torch") is None:
        raise ModuleNotFoundError("torch is not installed", name="torch")
    command = (sys.executable, "-W", "ignore", "-m", "penstock.demo.machine")
    result = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if result.returncode != 0:
        raise ProcessFailed(f"torch does not work here: {ending(result.returncode)}, see above")
    found = json.loads(result.stdout)
    return Machine(found["cpu"], tuple(found["gpus"]), found["dtype"])


def main() -> None:
    import torch

    from penstock.common.arithmetic import computes_bfloat16

    known = torch.cpu.get_capabilities()
    best = next((name for name in FEATURES if known.get(name)), known.get("architecture", ""))
    gpus = tuple(torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count()))
    dtype = "bfloat16" if computes_bfloat16("cuda" if gpus else "cpu") else "float32"
    cpu = f"{known.get('cpu_name', 'CPU')}, {CORES} cores, {best}"
    print(json.dumps(asdict(Machine(cpu, gpus, dtype))))  # noqa: T201


if __name__ == "__main__":
    main()
