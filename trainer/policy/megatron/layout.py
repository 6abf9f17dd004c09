"""Who has which part of a model: the ranks divided by tensor, pipeline and data parallelism.

    rank = (stage x data_ranks + data) x tensor_ranks + tensor

Import it only after `megatron_hook.install`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, cast

import torch
from megatron.core import parallel_state, tensor_parallel
from torch import distributed

from penstock.trainer.config.trainer import MegatronBackend
from penstock.trainer.core.errors import ConfigInvalid


@dataclass(frozen=True, slots=True)
class Layout:
    """Which part of the work is this rank's."""

    tensor: int
    """Its place among the ranks that share each tensor."""
    tensor_ranks: int
    stage: int
    """Its place in the pipeline."""
    stages: int
    data: int
    """Its place among those that have the same weights and other micro-batches."""
    data_ranks: int
    device: torch.device
    tensor_group: distributed.ProcessGroup
    """Those that share each tensor with this rank."""
    pipeline_group: distributed.ProcessGroup
    """Those that have the other layers of this rank's micro-batches."""

    @property
    def member(self) -> int:
        """Its place among the ranks that have the same micro-batches."""
        return self.stage * self.tensor_ranks + self.tensor

    @property
    def members(self) -> int:
        """How many these are."""
        return self.stages * self.tensor_ranks

    @property
    def is_last_stage(self) -> bool:
        """Whether it sees what the model predicts."""
        return self.stage == self.stages - 1

    @property
    def speaks(self) -> bool:
        """Whether it is the one of those with the same micro-batches that tells the others' results."""
        return self.is_last_stage and self.tensor == 0


def join_layout(backend: MegatronBackend, seed: int) -> Layout:
    """Takes this rank's place among all that are there; a process that is alone is its own group.

    A process does so once. Raises ConfigInvalid where the ranks cannot be divided so.
    """
    cuda = torch.cuda.is_available()
    if not distributed.is_initialized():
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=distributed.HashStore(),  # pyright: ignore[reportPrivateImportUsage]
            rank=0,
            world_size=1,
        )
    ranks, sizes = (
        distributed.get_world_size(),
        (backend.tensor_parallel, backend.pipeline_parallel),
    )
    if ranks % (sizes[0] * sizes[1]):
        raise ConfigInvalid(
            f"model.backend: tensor_parallel {sizes[0]} times pipeline_parallel {sizes[1]} must divide"
            f" the number of ranks, which is {ranks}"
        )
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(*sizes, create_gloo_process_groups=False)
    # Layers ask for its states, though none draws from them without dropout.
    cast("_Seed", tensor_parallel.model_parallel_cuda_manual_seed)(seed, force_reset_rng=True)
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
        device=torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu"),
    )


class _Seed(Protocol):
    def __call__(self, seed: int, *, force_reset_rng: bool) -> None: ...
