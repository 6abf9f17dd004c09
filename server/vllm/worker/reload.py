"""Replaces every weight of a live vLLM model; runs inside vLLM's worker process.

On the CPU vLLM packs every linear weight and deletes the original, so tensors cannot simply be copied
into place: its layerwise reload gives the model its original shape back, one layer at a time, and packs
again. After a reload that failed half-way, layers would count what they had received as if it were part
of the next one; that is put right here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Protocol, cast

import torch
from vllm.config import ModelConfig
from vllm.model_executor.model_loader.reload import layerwise

# It warns of every layer that has nothing to load, such as a rotary embedding, on every update.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)


class LoadsWeights(Protocol):
    """What every vLLM model offers."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> object: ...


class ProcessesWeights(Protocol):
    """What vLLM's quantization methods offer, that of plain weights among them."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None: ...


def reload_model(
    model: torch.nn.Module, config: ModelConfig, tensors: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Loads one complete version. Where it fails, the model is a mixture that a complete reload heals."""
    layerwise.initialize_layerwise_reload(model)
    try:
        cast(LoadsWeights, model).load_weights(tensors)
        layerwise.finalize_layerwise_processing(model, config)
    except BaseException:
        forget_reload(model)
        raise


def forget_reload(model: torch.nn.Module) -> None:
    """Ends a reload that failed: layers not yet replaced get their old tensors back."""
    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.kernel_tensors is not None:
            layerwise._place_kernel_tensors(layer, info)  # pyright: ignore[reportPrivateUsage]
        info.reset()
