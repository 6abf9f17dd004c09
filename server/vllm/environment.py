"""Environment variables that vLLM reads, set only where they are unset; its engine process inherits them.

Importing this module sets those that must be there before vLLM is imported.
"""

from __future__ import annotations

import logging
import os


def set_defaults() -> None:
    """What every platform wants: a quiet engine in a spawned process, no usage statistics."""
    defaults = {
        # `fork` would copy the threads' locks of grpc and of the event loop in whatever state they are.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # At WARNING each start prints a dozen lines about what is normal on a CPU.
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # Of vLLM's own use of torch, in the engine process.
        "PYTHONWARNINGS": "ignore::FutureWarning",
        "TOKENIZERS_PARALLELISM": "false",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def set_cpu_defaults() -> None:
    """What the CPU backend wants on a machine that the engine shares with a trainer."""
    defaults = {
        # Keeps the worker inside the engine process: one process and one hop less.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # Huge pages for what malloc hands out: a weight update allocates the model anew, and a
        # quarter of its time went into page faults.
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
    }
    if "OMP_WAIT_POLICY" not in os.environ:
        # How long a thread spins at a barrier before it sleeps. libgomp's own default, 300 times this, is
        # hardly faster on idle cores (5 %) and half as fast where another process wants one; not to
        # spin at all costs a third on idle cores. Who shares them all the time says PASSIVE.
        defaults["GOMP_SPINCOUNT"] = "1000"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def quieten() -> None:
    """Silences what vLLM says before it configures its logging, in this process."""
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])


set_defaults()
quieten()
