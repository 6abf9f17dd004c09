"""Keeps adapters off the embeddings; imported in vLLM's worker process, before it loads the model.

With adapters enabled, vLLM also prepares the output layer for them. It then computes that layer for at most
as many rows as the step has requests. The first prompt scored among other requests, which is a probe, would
therefore crash the engine process. Every step would also pay for a product over the whole vocabulary. No
adapter here has such a part: see `adapter_manifest`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from torch import nn
from vllm.lora import model_manager

_supported = model_manager.get_supported_lora_modules  # pyright: ignore[reportPrivateImportUsage]


def linear_modules(model: nn.Module) -> list[str]:
    """The modules that vLLM would prepare for adapters, without the embeddings."""
    embeddings: set[str] = set()
    for module in model.modules():
        named = cast("Iterable[str] | None", getattr(module, "embedding_modules", None))
        embeddings.update(named or ())
    return [name for name in _supported(model) if name not in embeddings]


model_manager.get_supported_lora_modules = linear_modules  # pyright: ignore[reportPrivateImportUsage]
