"""A server keeps the memory of a large message for the next one."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
from penstock.server import allocator

if sys.argv[1] == "kept":
    allocator.keep_freed_memory()

def messages(count):
    for _ in range(count):
        # As gRPC does: pieces, and the whole.
        whole = b"".join([bytes(64 << 10) for _ in range(32)])
        whole[0]

messages(20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
messages(20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has mallopt")
def test_large_messages_use_memory_again() -> None:
    faults = {
        how: int(subprocess.check_output([sys.executable, "-c", PROGRAM, how]))
        for how in ("kept", "given back")
    }
    # 512 pages of 2 MiB, twenty times.
    assert faults["kept"] < 512 < faults["given back"], faults
