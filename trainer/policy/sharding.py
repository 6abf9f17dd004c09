"""Shards a model over several ranks with FSDP2. A single process holds the whole model.

Every parameter is cut along its first dimension. A block's parameters are gathered before the block
computes, once in the forward and once in the backward pass, and freed after it. `whole`, `gather`, `sum`
and `wait` are collectives: either all ranks call them, or none.

Gradients are summed, not averaged, because each micro-batch's loss is already divided by the counts of the
whole step. By default they are summed over the ranks once per update, and each rank keeps whole gradients
until then. Summed after each micro-batch, each rank keeps only a shard of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
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
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import (
    DTensor,
    distribute_tensor,  # pyright: ignore[reportUnknownVariableType]
)

from penstock.trainer.algorithms.objective import Figures

if TYPE_CHECKING:
    from numpy.typing import NDArray

LONGEST_WAIT = timedelta(days=1)
"""Time limit of `wait`. One rank's writes may take longer than a collective is allowed to."""
WHOLE_NUMBERS = ("tokens", "below", "above", "masked", "clipped")


def join_alone(device: torch.device) -> None:
    """Create a process group with this process as the only member."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    distributed.init_process_group(backend, store=HashStore(), rank=0, world_size=1)


class Sharding:
    """How this process shards its models over all ranks."""

    def __init__(self, *, cpu_offload: bool = False, reduce_each_micro_batch: bool = False) -> None:
        """With `cpu_offload`, shards are kept in the host's memory outside their block's passes."""
        self._cpu_offload = cpu_offload
        # Unreduced gradients are whole and stay on the device, so offloading requires the reduction.
        self._reduces_each = reduce_each_micro_batch or cpu_offload
        joined = distributed.is_initialized()
        self.size = distributed.get_world_size() if joined else 1
        """Number of ranks."""
        self.rank = distributed.get_rank() if joined else 0
        self.device = torch.device("cpu")
        """The device that this rank computes on."""
        if torch.cuda.is_available():
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.is_whole = self.size == 1 and not cpu_offload
        """Whether modules stay whole."""
        if not self.is_whole and not joined:
            join_alone(self.device)
        self._patient: ProcessGroup | None = None
        if self.size > 1:
            made = distributed.new_group(backend="gloo", timeout=LONGEST_WAIT)  # pyright: ignore[reportUnknownMemberType]
            self._patient = cast("ProcessGroup", made)

    def place(self, module: nn.Module, blocks: Collection[str]) -> None:
        """Move a module to the device, or shard it. `blocks` names the classes whose instances are
        gathered one at a time."""
        if self.is_whole:
            module.to(self.device)
            return
        mesh = init_device_mesh(self.device.type, (self.size,))
        offload = OffloadPolicy()
        if self._cpu_offload:
            offload = CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
        inner = [part for part in module.modules() if type(part).__name__ in blocks]
        for part in (*inner, module):
            # Including the outermost module, so that only shards remain between passes.
            fully_shard(part, mesh=mesh, reshard_after_forward=True, offload_policy=offload)
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.set_gradient_divide_factor(1.0)
                part.set_force_sum_reduction_for_comms(True)

    def accumulate(self, module: nn.Module, *, last: bool) -> None:
        """Announce, before a backward pass, whether it is the update's last."""
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(last or self._reduces_each)

    def whole(self, tensor: Tensor) -> Tensor:
        """Gather a sharded tensor; return any other tensor as it is."""
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def gather(self, named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Make tensors whole, one at a time, on the CPU; empty on all ranks but rank 0."""
        gathered: dict[str, Tensor] = {}
        for name, tensor in named:
            whole = self.whole(tensor.detach())
            if self.rank == 0:
                gathered[name] = whole.cpu().contiguous()
        return gathered

    def sum(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        return self._reduce(values, distributed.ReduceOp.SUM)

    def sum_figures(self, figures: Figures) -> Figures:
        if self.size == 1:
            return figures
        names = [field.name for field in fields(Figures)]
        own = [cast("float | None", getattr(figures, name)) for name in names]
        values = np.array([value or 0.0 for value in own])
        # A rank whose micro-batches are all empty has no figures.
        known = np.array([float(value is not None) for value in own])
        sums = self.sum(values)
        maxima, known = np.split(
            self._reduce(np.concatenate([values, known]), distributed.ReduceOp.MAX), 2
        )
        found: dict[str, float | None] = {}
        for index, name in enumerate(names):
            # A maximum with NaN is undefined, but a sum keeps the NaN.
            is_max = name.endswith("_max") and not np.isnan(sums[index])
            total = maxima[index] if is_max else sums[index]
            value = int(total) if name in WHOLE_NUMBERS else float(total)
            found[name] = value if known[index] else None
        return Figures(**cast("dict[str, int]", found))

    def wait(self) -> None:
        """Wait for every rank, even if one writes for a long time. A rank's loss is detected elsewhere."""
        if self._patient is not None:
            distributed.all_reduce(torch.zeros(1), group=self._patient)  # pyright: ignore[reportUnknownMemberType]

    def _reduce(
        self, values: NDArray[np.float64], operation: distributed.ReduceOp.RedOpType
    ) -> NDArray[np.float64]:
        if self.size == 1:
            return values
        # On the CPU, over gloo: there are few numbers, and all digits count.
        summed = torch.tensor(values, dtype=torch.float64)
        distributed.all_reduce(summed, operation)  # pyright: ignore[reportUnknownMemberType]
        return summed.numpy()


def share_of(parameter: Tensor, value: Tensor) -> Tensor:
    """Cut the part of a whole value that belongs to this rank's shard of a parameter."""
    if not isinstance(parameter, DTensor) or not value.ndim:
        return value.to(parameter.device)
    shared = distribute_tensor(
        value, parameter.device_mesh, parameter.placements, src_data_rank=None
    )
    return shared.to(parameter.device)


def overwrite(parameter: Tensor, value: Tensor) -> None:
    """Copy a whole value into a parameter, or this rank's part of it into its shard."""
    with torch.no_grad():
        parameter.copy_(share_of(parameter, value))
