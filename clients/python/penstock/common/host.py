"""What a process may use of its machine."""

from __future__ import annotations

import os
from pathlib import Path


def memory_bytes() -> int:
    """Memory of the machine, or of the container if that is less."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()).isdigit():
        return min(total, int(text))
    return total
