"""Every random state that training draws from, as files of a checkpoint, and back.

Torch's is what dropout draws from, on the CPU and on the device it computes on; Python's and numpy's are
what libraries underneath may draw from. The order of the data is not among them: it is a function of the
run's seed and the index (see `tasks`), so its position is all there is to keep.

Each rank of a run has its own: they drop out different things of different sequences.
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

TENSOR_FILE = "random{suffix}.safetensors"
FILE = "random{suffix}.json"
CPU, CUDA = "cpu", "cuda"


def seed_all(seed: int) -> None:
    """Begins every one of them anew."""
    torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
    random.seed(seed)
    np.random.seed(seed % 2**32)


def compute_reproducibly() -> None:
    """Has torch add up in the same order each time; what cannot be done so warns.

    With several threads it otherwise adds gradients of what was gathered in the order of the threads.
    """
    # As use_deterministic_algorithms(True, warn_only=True), which loads a compiler for seconds.
    torch.set_deterministic_debug_mode("warn")
    # Only debugging needs memory that nobody reads to be filled.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore


def save_random_states(folder: Path, rank: int = 0) -> None:
    """Writes them as they are now. Raises OSError and SafetensorError."""
    suffix = _suffix(rank)
    states = {CPU: torch.get_rng_state()}
    if torch.cuda.is_available():
        states[CUDA] = torch.cuda.get_rng_state()
    save_file(states, folder / TENSOR_FILE.format(suffix=suffix))
    kind, keys, position, has_gauss, cached = cast(
        "tuple[str, np.ndarray[tuple[int], np.dtype[np.uint32]], int, int, float]",
        np.random.get_state(legacy=True),
    )
    numpy_state = [kind, keys.tolist(), position, has_gauss, cached]
    document = {"python": random.getstate(), "numpy": numpy_state}
    (folder / FILE.format(suffix=suffix)).write_text(json.dumps(document), encoding="utf-8")


def load_random_states(folder: Path, rank: int = 0) -> None:
    """Goes on from where `save_random_states` was. A rank that was not there then begins anew, with a seed
    that follows from where rank 0 was.

    Raises OSError, SafetensorError, ValueError and KeyError.
    """
    if rank and not (folder / TENSOR_FILE.format(suffix=_suffix(rank))).exists():
        load_random_states(folder)
        seed_all(int(torch.randint(2**31, ())) + rank)
        return
    suffix = _suffix(rank)
    states = load_file(folder / TENSOR_FILE.format(suffix=suffix))
    torch.set_rng_state(states.pop(CPU))
    if torch.cuda.is_available() and CUDA in states:
        torch.cuda.set_rng_state(states[CUDA])
    document = json.loads((folder / FILE.format(suffix=suffix)).read_text(encoding="utf-8"))
    version, keys, gauss = document["python"]
    random.setstate((version, tuple(keys), gauss))
    kind, keys, position, has_gauss, cached = document["numpy"]
    np.random.set_state((kind, np.asarray(keys, np.uint32), position, has_gauss, cached))


def _suffix(rank: int) -> str:
    return f"-{rank}" if rank else ""
