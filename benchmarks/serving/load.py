"""What all systems of `serving.throughput` have in common: engine options, prompts, sampling."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable

import torch

from penstock.machine.processor import computes_bfloat16

PROMPT_TOKENS = 32
# The faster type on this machine: without instructions for it, bfloat16 takes five times as long.
DTYPE = (
    "bfloat16" if computes_bfloat16("cuda" if torch.cuda.is_available() else "cpu") else "float32"
)
ENGINE = ["--dtype", DTYPE, "--max-model-len", "1024", "--max-num-seqs", "64"]
ENGINE += ["--kv-cache-memory-bytes", str(2 << 30)]
SAMPLING = {"temperature": 1.0, "ignore_eos": True}
Run = Callable[[int, int], Awaitable[float]]


def prompt() -> list[int]:
    """Returns a random prompt, which no cache has seen."""
    return [random.randrange(100, 40_000) for _ in range(PROMPT_TOKENS)]
