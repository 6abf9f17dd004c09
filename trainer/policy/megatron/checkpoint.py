"""Saves and loads megatron-core's state in its own distributed format, for any division of the ranks.

    folder/megatron/    torch_dist: every rank writes what no other rank has; a rank of another layout
                          reads what it needs

Writing uses torch's own writer in this process and thread. megatron-core's writer forks, which is unsafe
in a process with gRPC's threads, and it hangs if a child fails. An error on one rank is raised on all of
them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,  # pyright: ignore[reportPrivateUsage] - the version is pinned.
    mcore_to_pyt_state_dict,
)
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import (
    save,  # pyright: ignore[reportUnknownVariableType]
)

from penstock.trainer.core.errors import CheckpointUnusable

FOLDER = "megatron"
MODEL, OPTIMIZER = "model", "optimizer"
State = dict[str, object]


class _Writer(TorchDistSaveShardedStrategy):
    """A strategy that writes in the calling thread."""

    def save(  # pyright: ignore[reportIncompatibleMethodOverride] - a dictionary is all it is given.
        self, sharded_state_dict: State, checkpoint_dir: str | Path
    ) -> None:
        renamed, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        save(
            mcore_to_pyt_state_dict(renamed, False),
            storage_writer=FileSystemWriter(checkpoint_dir, thread_count=1),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


def save_state(folder: Path, model: nn.Module, optimizer: Any) -> None:
    """Write this rank's part. `optimizer` is None before its first step. Raises OSError."""
    (folder / FOLDER).mkdir(exist_ok=True)
    state = _sharded(model, optimizer, is_loading=False)
    write = cast("Any", dist_checkpointing).save
    try:
        write(state, str(folder / FOLDER), sharded_strategy=_Writer("torch_dist", 1))
    except (CheckpointException, RuntimeError) as error:
        # State common to all ranks goes through torch.save, which has no narrower type for a full disk.
        raise OSError(str(error)) from error


def load_state(folder: Path, model: nn.Module, optimizer: Any) -> None:
    """Read this rank's part. Raises CheckpointUnusable."""
    state = _sharded(model, optimizer, is_loading=True)
    try:
        found = cast("Any", dist_checkpointing).load(state, str(folder / FOLDER))
    except (CheckpointingException, CheckpointException, OSError, KeyError, ValueError) as error:
        raise CheckpointUnusable(f"{folder}: {error}") from error
    model.load_state_dict(found[MODEL])
    if optimizer is not None:
        optimizer.load_state_dict(found[OPTIMIZER])


def _sharded(model: nn.Module, optimizer: Any, *, is_loading: bool) -> State:
    """Build the state to write or read, in which each tensor has its place in the whole."""
    own = cast("Any", model).sharded_state_dict()
    state: State = {MODEL: own}
    if optimizer is not None:
        state[OPTIMIZER] = optimizer.sharded_state_dict(own, is_loading)
    return state
