"""Servers and trainers keep the memory of a large message for the next one."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource
from penstock.common import allocator

allocator.keep_freed_memory({arguments})

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
@pytest.mark.parametrize(
    "arguments", ["", "allocator.TRAINER_TRIM_BYTES, allocator.TRAINER_MAP_BYTES"]
)
def test_large_messages_use_memory_again(arguments: str) -> None:
    program = PROGRAM.format(arguments=arguments)
    faults = int(subprocess.check_output([sys.executable, "-c", program]))
    # If each message of 2 MiB returned its memory, there would be 20 x 512 page faults. Untuned
    # malloc may do either.
    assert faults < 512
