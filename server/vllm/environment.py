"""Defaults for environment variables that vLLM reads. The engine process inherits them.

A variable that is already set is left alone. Importing this module sets those of every platform, which must
be set before vLLM is imported.
"""

from __future__ import annotations

import logging
import os

from penstock.common.garbage import quicken

DEFAULTS = {
    # `fork` would copy the locks of grpc's threads and of the event loop in an arbitrary state.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # At WARNING each start prints a dozen lines that are normal on a CPU.
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # About vLLM's own use of torch, in the engine process.
    "PYTHONWARNINGS": "ignore::FutureWarning",
    "TOKENIZERS_PARALLELISM": "false",
}


def set_cpu_defaults() -> None:
    """Set the defaults of the CPU backend, for a machine that the engine shares with a trainer."""
    defaults = {
        # Keeps the worker inside the engine process: one process and one hop fewer.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # Huge pages for malloc: a weight update allocates the whole model, and page faults took a quarter
        # of its time.
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
    }
    if "OMP_WAIT_POLICY" not in os.environ:
        # How long a thread spins at a barrier before it sleeps. libgomp's default is 300 times this. It is
        # hardly faster on idle cores (5 %), and half as fast if another process wants one. Not spinning at
        # all costs a third on idle cores. If the cores are always shared, set OMP_WAIT_POLICY=PASSIVE.
        defaults["GOMP_SPINCOUNT"] = "1000"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def quieten() -> None:
    """Silence what vLLM logs in this process before it configures its logging."""
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])


def prepare_engine_process() -> None:
    """Called in the engine process before its first import of vLLM."""
    quieten()
    quicken()
    # Set there alone: what this process starts later must not export as the engine.
    os.environ.setdefault("OTEL_SERVICE_NAME", "penstock-engine")


for variable, default in DEFAULTS.items():
    os.environ.setdefault(variable, default)
quieten()
