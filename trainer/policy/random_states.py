"""Saves and restores every random state that training draws from, as files of a checkpoint.

Dropout draws from torch's states, on the CPU and on the compute device. Libraries may draw from Python's
and numpy's. The order of the data draws from none: it is a function of the run's seed and the index (see
`tasks`).

Each rank has separate states, so that ranks drop out different values of different sequences.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import cast

import numpy as np
import torch
from safetensors.torch import (
    load_file,  # pyright: ignore[reportUnknownVariableType]
    save_file,  # pyright: ignore[reportUnknownVariableType]
)

CPU, CUDA = "cpu", "cuda"


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
    random.seed(seed)
    np.random.seed(seed % 2**32)


def compute_reproducibly() -> None:
    """Have torch add in the same order every time, and warn of operations that cannot.

    By default, several threads add gradients of gathered values in the order in which they finish.
    """
    # Like use_deterministic_algorithms(True, warn_only=True), which loads a compiler for seconds.
    torch.set_deterministic_debug_mode("warn")
    # Filling uninitialized memory only helps debugging.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore


def save_random_states(folder: Path, rank: int = 0) -> None:
    """Write the current states. Raises OSError and SafetensorError."""
    tensor_file, file = _files(folder, rank)
    states = {CPU: torch.get_rng_state()}
    if torch.cuda.is_available():
        states[CUDA] = torch.cuda.get_rng_state()
    save_file(states, tensor_file)
    kind, keys, position, has_gauss, cached = cast(
        "tuple[str, np.ndarray[tuple[int], np.dtype[np.uint32]], int, int, float]",
        np.random.get_state(legacy=True),
    )
    numpy_state = [kind, keys.tolist(), position, has_gauss, cached]
    document = {"python": random.getstate(), "numpy": numpy_state}
    file.write_text(json.dumps(document), encoding="utf-8")


def load_random_states(folder: Path, rank: int = 0) -> None:
    """Restore the states that `save_random_states` wrote.

    A rank without saved states is seeded from rank 0's. Raises OSError, SafetensorError, ValueError and
    KeyError.
    """
    tensor_file, file = _files(folder, rank)
    if rank and not tensor_file.exists():
        load_random_states(folder)
        seed_all(int(torch.randint(2**31, ())) + rank)
        return
    states = load_file(tensor_file)
    torch.set_rng_state(states.pop(CPU))
    if torch.cuda.is_available() and CUDA in states:
        torch.cuda.set_rng_state(states[CUDA])
    document = json.loads(file.read_text(encoding="utf-8"))
    version, keys, gauss = document["python"]
    random.setstate((version, tuple(keys), gauss))
    kind, keys, position, has_gauss, cached = document["numpy"]
    np.random.set_state((kind, np.asarray(keys, np.uint32), position, has_gauss, cached))


def _files(folder: Path, rank: int) -> tuple[Path, Path]:
    stem = f"random-{rank}" if rank else "random"
    return folder / f"{stem}.safetensors", folder / f"{stem}.json"
