"""How server and trainer share a machine: which GPUs each gets, and whether all weights are trained.

The sizes are those of docs/guides/several-gpus.md, with room for activations and the cache of the engine.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.launch.errors import LaunchInvalid
from penstock.machine.devices import Machine
from penstock.machine.models import FROZEN_BYTES, TRAINED_BYTES

USABLE = 0.85
"""Share of the memory that may be planned for."""
MOST_SHARED = 0.5
"""Largest share of one GPU's memory for the engine, if the trainer computes on it too."""


@dataclass(frozen=True)
class Layout:
    ranks: int
    """Processes of the trainer."""
    engines: int
    lora: bool
    engine_share: float = 0.0
    """Of the memory of a GPU that the trainer computes on too; zero if they share none."""

    @property
    def own_gpus(self) -> bool:
        """Whether no two processes share a GPU."""
        return not self.engine_share


def lay_out(machine: Machine, parameters: int, lora: bool, ranks: int | None) -> Layout:
    """Divides the machine. `lora` and `ranks` are what is asked for. Raises LaunchInvalid."""
    gpus = len(machine.gpus)
    alone = gpus > 1
    if ranks is not None and gpus and ranks > max(1, gpus - 1):
        raise LaunchInvalid(f"--ranks {ranks}: of {gpus} GPUs, one has to serve the model")
    ranks = ranks or max(1, gpus // 2)
    engine = parameters * (2 if machine.bfloat16 else 4)
    rest = 6e9 if gpus else 2e9
    needed = 0.0
    for adapter in (lora, True):
        # Ranks without GPUs share the machine's memory, and so does their engine.
        parts = ranks if alone else 1
        each = FROZEN_BYTES if adapter else TRAINED_BYTES
        trainer = parameters * each / parts + rest
        needed = max(trainer, engine + rest) if alone else trainer + engine
        if needed > USABLE * machine.room:
            continue
        share = 0.0 if alone or not gpus else min(MOST_SHARED, 0.95 - trainer / machine.room)
        return Layout(ranks, gpus - ranks if alone else 1, adapter, round(share, 2))
    raise LaunchInvalid(
        f"--model: {parameters / 1e9:.1f} billion parameters need about {needed / 1e9:.0f} GB "
        f"{'on each GPU' if gpus else 'of memory'} even with an adapter, and there are "
        f"{machine.room / 1e9:.0f} GB; take a smaller model, or a machine with more memory"
    )
