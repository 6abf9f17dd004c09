"""Replaces every weight of a live vLLM model; runs inside vLLM's worker process.

On the CPU vLLM packs every linear weight and deletes the original, so tensors cannot simply be copied into
place. The layerwise reload of vLLM restores the model's original shapes, one layer at a time, and packs
again. After a failed reload, layers would count the tensors they had received as part of the next one.
This module corrects that.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Protocol, cast

import torch
from vllm.config import ModelConfig
from vllm.model_executor.model_loader.reload import layerwise

# It warns about every layer that has nothing to load, such as a rotary embedding, on every update.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)


class LoadsWeights(Protocol):
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> object: ...


class ProcessesWeights(Protocol):
    """The interface of vLLM's quantization methods, including that of plain weights."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None: ...


def reload_model(
    model: torch.nn.Module, config: ModelConfig, tensors: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """If this fails, the model is a mixture that a complete reload heals."""
    layerwise.initialize_layerwise_reload(model)
    try:
        cast(LoadsWeights, model).load_weights(tensors)
        layerwise.finalize_layerwise_processing(model, config)
    except BaseException:
        forget_reload(model)
        raise


def forget_reload(model: torch.nn.Module) -> None:
    """End a failed reload: layers not yet replaced get their old tensors back."""
    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.kernel_tensors is not None:
            layerwise._place_kernel_tensors(layer, info)  # pyright: ignore[reportPrivateUsage]
        info.reset()
