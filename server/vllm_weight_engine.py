"""Copies a staged version into the live model; runs inside vLLM's worker process.

vLLM finds it through `worker_extension_cls`, whose import registers the backend "penstock". One call,
`receive_weights`, does the whole update, so that a failure always ends vLLM's update session
and the next upload can begin another.

On the CPU vLLM packs every linear weight and deletes the original, so tensors cannot simply be copied
into place: its layerwise reload gives the model its original shape back, one layer at a time, and packs
again. Two things are put right here that it leaves wrong: a tied `lm_head` keeps a packed copy of
its own, which the reload does not renew; and after a reload that failed half-way, layers would count
what they had received as if it were part of the next one.
"""

from __future__ import annotations

import logging
import math
import mmap
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import layerwise

BACKEND = "penstock"

# It warns of every layer that has nothing to load, such as a rotary embedding, on every update.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
# The mapping of a staged file is read-only on purpose.
warnings.filterwarnings("ignore", message="The given buffer is not writable")


@dataclass
class StagedFile(WeightTransferUpdateInfo):
    """Where one complete version lies."""

    path: str
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    offsets_bytes: list[int]


class _LoadsWeights(Protocol):
    """What every vLLM model offers."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> object: ...


class StagedFileEngine(WeightTransferEngine[WeightTransferInitInfo, StagedFile]):
    """Loads complete versions from a file in memory."""

    init_info_cls = WeightTransferInitInfo
    update_info_cls = StagedFile
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
        """Nothing to join: the file is the transport."""

    def start_weight_update(self) -> None:
        """Nothing: see `receive_weights`."""

    def receive_weights(self, update_info: StagedFile) -> None:
        layerwise.initialize_layerwise_reload(self.model)
        try:
            cast(_LoadsWeights, self.model).load_weights(tensors_of(update_info))
            layerwise.finalize_layerwise_processing(self.model, self.model_config)
        except BaseException:
            _forget_reload(self.model)
            raise
        self._renew_tied_head()

    def finish_weight_update(self) -> None:
        """Nothing: see `receive_weights`."""

    def shutdown(self) -> None:
        """Nothing is held between updates."""

    def _renew_tied_head(self) -> None:
        config = cast(object, self.model_config.hf_text_config)
        if self.device.type != "cpu" or not getattr(config, "tie_word_embeddings", False):
            return
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead):
                method = cast(_ProcessesWeights, module.quant_method)
                method.process_weights_after_loading(module)


class _ProcessesWeights(Protocol):
    """What vLLM's quantization methods offer, that of plain weights among them."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None: ...


def tensors_of(staged: StagedFile) -> Iterator[tuple[str, torch.Tensor]]:
    """The staged tensors, without a copy: their memory is the file's."""
    with Path(staged.path).open("rb") as file:
        # Every page at once, which costs a fraction of as many faults.
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        mapped = mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ)
    for name, dtype_name, shape, offset in zip(
        staged.names, staged.dtypes, staged.shapes, staged.offsets_bytes, strict=True
    ):
        dtype = cast(torch.dtype, getattr(torch, dtype_name))
        count = math.prod(shape)
        yield name, torch.frombuffer(mapped, dtype=dtype, count=count, offset=offset).view(shape)


def _forget_reload(model: torch.nn.Module) -> None:
    """Ends a reload that failed: layers not yet replaced get their old tensors back.

    The model is then a mixture, but one that a complete reload makes whole.
    """
    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.kernel_tensors is not None:
            layerwise._place_kernel_tensors(layer, info)  # pyright: ignore[reportPrivateUsage]
        info.reset()


class WorkerExtension:
    """Mixed into vLLM's worker; its import is what matters."""


WeightTransferEngineFactory.register_engine(  # pyright: ignore[reportUnknownMemberType]
    BACKEND, StagedFileEngine
)
