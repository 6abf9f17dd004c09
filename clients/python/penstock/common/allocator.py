"""Tunes glibc's malloc for processes that receive many large messages."""

from __future__ import annotations

import ctypes

MIB = 1 << 20
# Parameters of mallopt(3).
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
# The maximum that malloc reaches on its own as larger and larger pieces, such as tensors, are freed.
TRAINER_TRIM_BYTES = 64 * MIB
TRAINER_MAP_BYTES = 32 * MIB


def keep_freed_memory(trim_bytes: int = 16 * MIB, map_bytes: int = 4 * MIB) -> None:
    """Lets messages of up to `map_bytes` reuse the memory of earlier ones; larger pieces go back.

    By default, malloc may return memory to the kernel after each message and ask for zeroed pages for the
    next. That costs an upload more than half of its speed, and a trainer a third of its time in the
    kernel. Only both settings together help. Does nothing if the C library is not glibc.
    """
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    for parameter, value in ((M_TRIM_THRESHOLD, trim_bytes), (M_MMAP_THRESHOLD, map_bytes)):
        mallopt(ctypes.c_int(parameter), ctypes.c_int(value))
