"""Divides the ranks by tensor, pipeline and data parallelism.

    rank = (stage x data_ranks + data) x tensor_ranks + tensor

Import it only after `hook.install`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from megatron.core import parallel_state, tensor_parallel
from torch import distributed

from penstock.trainer.config.trainer import MegatronBackend
from penstock.trainer.core.errors import ConfigInvalid
from penstock.trainer.policy.sharding import join_alone


@dataclass(frozen=True, slots=True)
class Layout:
    """This rank's part of the work."""

    tensor: int
    """Index among the ranks that share each tensor."""
    tensor_ranks: int
    stage: int
    """Index of the pipeline stage."""
    stages: int
    data: int
    """Index among the ranks with the same weights and different micro-batches."""
    data_ranks: int
    device: torch.device
    tensor_group: distributed.ProcessGroup
    """The ranks that share each tensor with this one."""
    pipeline_group: distributed.ProcessGroup
    """The ranks with the other layers for this rank's micro-batches."""

    @property
    def member(self) -> int:
        """Index among the ranks with the same micro-batches."""
        return self.stage * self.tensor_ranks + self.tensor

    @property
    def members(self) -> int:
        """Number of ranks with the same micro-batches."""
        return self.stages * self.tensor_ranks

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.stages - 1


def join_layout(backend: MegatronBackend, seed: int) -> Layout:
    """Join the layout of all ranks; a single process becomes its own group.

    Raises ConfigInvalid if the number of ranks cannot be divided this way.
    """
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    if not distributed.is_initialized():
        join_alone(device)
    ranks = distributed.get_world_size()
    sizes = backend.tensor_parallel, backend.pipeline_parallel
    if ranks % (sizes[0] * sizes[1]):
        raise ConfigInvalid(
            f"model.backend: tensor_parallel {sizes[0]} times pipeline_parallel {sizes[1]} must divide"
            f" the number of ranks, which is {ranks}"
        )
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(*sizes, create_gloo_process_groups=False)
    # Layers require the random states to exist, although none draws from them without dropout.
    cast("Any", tensor_parallel).model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    tensor_group, pipeline_group, data_group = (
        cast("distributed.ProcessGroup", group)
        for group in (
            parallel_state.get_tensor_model_parallel_group(),
            parallel_state.get_pipeline_model_parallel_group(),
            parallel_state.get_data_parallel_group(),
        )
    )
    return Layout(
        tensor=tensor_group.rank(),
        tensor_ranks=tensor_group.size(),
        stage=pipeline_group.rank(),
        stages=pipeline_group.size(),
        data=data_group.rank(),
        data_ranks=data_group.size(),
        tensor_group=tensor_group,
        pipeline_group=pipeline_group,
        device=device,
    )
