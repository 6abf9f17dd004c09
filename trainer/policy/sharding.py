"""A model held by several ranks, a share each: FSDP2. On one process it is held whole.

Every parameter is cut along its first dimension. A block's parameters are gathered before the block
computes, forward and again backward, and given up after it; gradients are added up over the ranks and cut
likewise.
Between passes every rank holds its share and nothing else, of parameters, gradients and the optimizer's
moments alike. What `whole`, `sum` and `wait` do is a collective: all ranks call it, or none.

Gradients are summed, not averaged, because each micro-batch's loss is divided by the counts of the whole
step already. They are added up over the ranks once an update, after its last micro-batch, which keeps them
whole on each rank until then; or after each micro-batch, which keeps a share of them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from datetime import timedelta
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.distributed import (
    HashStore,  # pyright: ignore[reportPrivateImportUsage]
    ProcessGroup,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import (
    DTensor,
    distribute_tensor,  # pyright: ignore[reportUnknownVariableType]
)

from penstock.trainer.algorithms.objective import Figures

if TYPE_CHECKING:
    from numpy.typing import NDArray

LONGEST_WAIT = timedelta(days=1)
"""For all ranks to be at one place: what is written meanwhile may take longer than a collective may."""
WHOLE_NUMBERS = ("tokens", "below", "above", "masked", "clipped")


def _patient_group() -> ProcessGroup:
    """All ranks, who wait for each other for as long as it takes."""
    made = distributed.new_group(  # pyright: ignore[reportUnknownMemberType]
        backend="gloo", timeout=LONGEST_WAIT
    )
    return cast("ProcessGroup", made)


class Sharding:
    """How this process shares its models with the others."""

    def __init__(self, *, cpu_offload: bool = False, reduce_each_micro_batch: bool = False) -> None:
        """With `cpu_offload` shares lie in the host's memory between the passes of their block."""
        self._cpu_offload = cpu_offload
        # What is not reduced stays on the device, whole.
        self._reduces_each = reduce_each_micro_batch or cpu_offload
        joined = distributed.is_initialized()
        self.size = distributed.get_world_size() if joined else 1
        """Ranks."""
        self.rank = distributed.get_rank() if joined else 0
        self.device = torch.device("cpu")
        """What this rank computes on."""
        if torch.cuda.is_available():
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._shards = self.size > 1 or cpu_offload
        if self._shards and not joined:
            # One process that offloads: a group of itself alone.
            distributed.init_process_group(
                "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo",
                store=HashStore(),
                rank=0,
                world_size=1,
            )
        self._patient = _patient_group() if self.size > 1 else None

    @property
    def is_whole(self) -> bool:
        """Whether modules are left as they are."""
        return not self._shards

    def place(self, module: nn.Module, blocks: Collection[str]) -> None:
        """Puts a module where it computes, this rank's share of it where it is shared. `blocks` are names
        of classes whose instances are gathered one at a time."""
        if not self._shards:
            module.to(self.device)
            return
        mesh = init_device_mesh(self.device.type, (self.size,))
        offload = OffloadPolicy()
        if self._cpu_offload:
            offload = CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
        inner = [part for part in module.modules() if type(part).__name__ in blocks]
        for part in (*inner, module):
            # Also the outermost, so that between passes all there is are shares.
            fully_shard(part, mesh=mesh, reshard_after_forward=True, offload_policy=offload)
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.set_gradient_divide_factor(1.0)
                part.set_force_sum_reduction_for_comms(True)

    def accumulate(self, module: nn.Module, *, last: bool) -> None:
        """Says before a backward pass whether it is the update's last."""
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(last or self._reduces_each)

    def whole(self, tensor: Tensor) -> Tensor:
        """All of a tensor of which each rank has a share; another as it is."""
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def sum(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Over the ranks."""
        return self._reduce(values, distributed.ReduceOp.SUM)

    def sum_figures(self, figures: Figures) -> Figures:
        """Of the tokens of all ranks."""
        if self.size == 1:
            return figures
        names = [field.name for field in fields(Figures)]
        own = [cast("float | None", getattr(figures, name)) for name in names]
        values = np.array([value or 0.0 for value in own])
        # A rank whose micro-batches are all empty knows of nothing.
        known = np.array([float(value is not None) for value in own])
        sums = self.sum(values)
        maxima, known = np.split(
            self._reduce(np.concatenate([values, known]), distributed.ReduceOp.MAX), 2
        )
        found: dict[str, float | None] = {}
        for index, name in enumerate(names):
            # Which of two is the larger is not defined of what is no number, which a sum keeps.
            is_max = name.endswith("_max") and not np.isnan(sums[index])
            total = maxima[index] if is_max else sums[index]
            value = int(total) if name in WHOLE_NUMBERS else float(total)
            found[name] = value if known[index] else None
        return Figures(**cast("dict[str, int]", found))

    def wait(self) -> None:
        """Until every rank is here, also where one has something to write for a long time; that a rank is
        lost the others notice elsewhere."""
        if self._patient is not None:
            distributed.all_reduce(  # pyright: ignore[reportUnknownMemberType]
                torch.zeros(1), group=self._patient
            )

    def _reduce(
        self, values: NDArray[np.float64], operation: distributed.ReduceOp.RedOpType
    ) -> NDArray[np.float64]:
        if self.size == 1:
            return values
        # A copy on the CPU, over gloo: few numbers, of which all digits count.
        summed = torch.tensor(values, dtype=torch.float64)
        distributed.all_reduce(summed, operation)  # pyright: ignore[reportUnknownMemberType]
        return summed.numpy()


def share_of(parameter: Tensor, value: Tensor) -> Tensor:
    """The part of a whole value that belongs to this rank's share of a parameter."""
    if not isinstance(parameter, DTensor) or not value.ndim:
        return value.to(parameter.device)
    shared = distribute_tensor(
        value, parameter.device_mesh, parameter.placements, src_data_rank=None
    )
    return shared.to(parameter.device)


def overwrite(parameter: Tensor, value: Tensor) -> None:
    """Puts a whole value into a parameter, or its part into a share of it."""
    with torch.no_grad():
        parameter.copy_(share_of(parameter, value))
