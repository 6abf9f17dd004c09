"""Loads a model's weights from files to the ranks, and gathers them from the ranks to rank 0.

Both directions go tensor by tensor, so that no rank ever needs room for the whole model. Only the ranks of
the model's first copy take part in gathering, but every rank has to iterate to the end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, distributed, nn

from penstock.trainer.core.errors import ConfigInvalid
from penstock.trainer.policy.megatron.layout import Layout
from penstock.trainer.policy.megatron.names import (
    Cut,
    Entry,
    Shape,
    entries,
    held_entries,
    local_name,
    stage_of,
)

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MOST_DIMENSIONS = 2


class ModelFiles:
    """The tensors of a model folder, each read on demand."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigInvalid if the folder has no readable safetensors files."""
        self._folder = folder
        self._open: dict[str, Any] = {}
        try:
            if (folder / INDEX_FILE).exists():
                index = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))
                self._files = cast("dict[str, str]", index["weight_map"])
            else:
                self._files = dict.fromkeys(self._file(WEIGHTS_FILE).keys(), WEIGHTS_FILE)
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            raise ConfigInvalid(
                f"model.path: {folder} has no readable {WEIGHTS_FILE} or {INDEX_FILE}: {error}"
            ) from error

    def tensor(self, name: str) -> Tensor:
        """Read a tensor as float32. Raises ConfigInvalid."""
        try:
            return self._file(self._files[name]).get_tensor(name).float()
        except (KeyError, OSError, SafetensorError) as error:
            message = f"model.path: {self._folder} has no tensor {name}: {error}"
            raise ConfigInvalid(message) from error

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = safe_open(self._folder / name, framework="pt")
        return self._open[name]


def load_weights(module: nn.Module, shape: Shape, layout: Layout, folder: Path) -> None:
    """Fill this rank's parameters and the optimizer's copies of them. Raises ConfigInvalid."""
    files, parameters = ModelFiles(folder), dict(module.named_parameters())
    with torch.no_grad():
        for entry in held_entries(shape, layout.stage, layout.stages):
            whole = entry.join([files.tensor(name) for name in entry.hf], shape)
            own = entry.take(whole, layout.tensor, layout.tensor_ranks)
            parameter = parameters[local_name(entry, shape, layout.stages)]
            if parameter.shape != own.shape:
                raise ConfigInvalid(
                    f"model.path: {folder}: {entry.hf[0]} has shape {tuple(own.shape)} here, but "
                    f"the configuration requires {tuple(parameter.shape)}"
                )
            parameter.copy_(own)
            master(parameter).copy_(own)


def gather_weights(module: nn.Module, shape: Shape, layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor with its Hugging Face name on rank 0, and nothing on the others."""
    if layout.data != 0:
        return
    parameters = dict(module.named_parameters())
    for entry in entries(shape):
        whole = None
        if stage_of(entry, shape, layout.stages) == layout.stage:
            parameter = parameters[local_name(entry, shape, layout.stages)]
            whole = _gather_parts(entry, master(parameter).detach(), shape, layout)
        whole = _pass_to_first_stage(entry, whole, shape, layout)
        if whole is not None:
            yield from zip(entry.hf, entry.split(whole, shape), strict=True)


def master(parameter: nn.Parameter) -> Tensor:
    """Return what the optimizer updates: a parameter's float32 copy, or the parameter itself."""
    return cast("Tensor", getattr(parameter, "main_param", parameter))


def _gather_parts(entry: Entry, own: Tensor, shape: Shape, layout: Layout) -> Tensor | None:
    """Gather the whole parameter on the first rank of its stage; None on the others."""
    if layout.tensor_ranks == 1 or entry.cut is Cut.WHOLE:
        return entry.mend([own], shape) if layout.tensor == 0 else None
    parts = None
    if layout.tensor == 0:
        parts = [torch.empty_like(own) for _ in range(layout.tensor_ranks)]
    distributed.gather(own.contiguous(), parts, group=layout.tensor_group, group_dst=0)
    return None if parts is None else entry.mend(parts, shape)


def _pass_to_first_stage(
    entry: Entry, whole: Tensor | None, shape: Shape, layout: Layout
) -> Tensor | None:
    """Send the whole parameter to the first rank of the first stage; None on the others."""
    stage = stage_of(entry, shape, layout.stages)
    if stage == 0 or layout.tensor != 0:
        return whole
    group = layout.pipeline_group
    if whole is not None:
        sizes = torch.tensor([*whole.shape, 0][:MOST_DIMENSIONS], device=layout.device)
        distributed.send(sizes, group=group, group_dst=0)
        distributed.send(whole.contiguous(), group=group, group_dst=0)
        return None
    if layout.stage != 0:
        return None
    sizes = torch.empty(MOST_DIMENSIONS, dtype=torch.int64, device=layout.device)
    distributed.recv(sizes, group=group, group_src=stage)
    dimensions = [size for size in map(int, sizes) if size]
    received = torch.empty(dimensions, device=layout.device)
    distributed.recv(received, group=group, group_src=stage)
    return received
