"""How glibc's malloc treats the memory of large messages, in whoever receives many of them."""

from __future__ import annotations

import ctypes

MIB = 1 << 20
# Parameters of mallopt(3).
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
# Above these, memory that is freed goes back to the kernel.
SERVER_TRIM_BYTES = 16 * MIB
SERVER_MAP_BYTES = 4 * MIB
# What malloc itself comes to at most as larger and larger pieces are freed, such as tensors.
TRAINER_TRIM_BYTES = 64 * MIB
TRAINER_MAP_BYTES = 32 * MIB


def keep_freed_memory(
    trim_bytes: int = SERVER_TRIM_BYTES, map_bytes: int = SERVER_MAP_BYTES
) -> None:
    """Lets messages of up to `map_bytes` reuse memory of those before them.

    By its own rules malloc may give it back to the kernel after each and ask for zeroed pages with the
    next, which costs an upload more than half of its speed, and a trainer a third of its time in the
    kernel. Only both settings together help. Does nothing where the C library is not glibc.
    """
    try:
        libc = ctypes.CDLL("libc.so.6")
        mallopt = libc.mallopt
    except (OSError, AttributeError):
        return
    for parameter, value in ((M_TRIM_THRESHOLD, trim_bytes), (M_MMAP_THRESHOLD, map_bytes)):
        mallopt(ctypes.c_int(parameter), ctypes.c_int(value))
