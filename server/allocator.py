"""How glibc's malloc treats the memory of large messages in a server."""

from __future__ import annotations

import ctypes

MIB = 1 << 20
# Parameters of mallopt(3).
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
# Above these, memory that is freed goes back to the kernel.
TRIM_BYTES = 16 * MIB
MAP_BYTES = 4 * MIB


def keep_freed_memory() -> None:
    """Lets messages of a few MiB reuse memory of those before them.

    By its own rules malloc would give it back to the kernel after each and ask for zeroed pages with the
    next, which costs an upload more than half of its speed. Only both settings together help. Does
    nothing where the C library is not glibc.
    """
    try:
        libc = ctypes.CDLL("libc.so.6")
        mallopt = libc.mallopt
    except (OSError, AttributeError):
        return
    for parameter, value in ((M_TRIM_THRESHOLD, TRIM_BYTES), (M_MMAP_THRESHOLD, MAP_BYTES)):
        mallopt(ctypes.c_int(parameter), ctypes.c_int(value))
