"""Models with known differences, and their tensors as a trainer publishes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel


def load_model(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()


def tensors_of(model: PreTrainedModel) -> Callable[[], Iterator[tuple[str, torch.Tensor]]]:
    tied = model.config.tie_word_embeddings

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in model.state_dict().items():
            if not (tied and name == "lm_head.weight"):
                yield name, tensor

    return tensors


def moved(model: Path, folder: Path, seed: int) -> Path:
    """Writes a copy of the model with noise added to every weight; returns its folder."""
    generator = torch.Generator().manual_seed(seed)
    other = load_model(model)
    with torch.no_grad():
        for parameter in other.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.02
            parameter.mul_(1 + noise.to(parameter.dtype))
    other.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


def untied(model: Path, folder: Path) -> Path:
    """Writes a copy of the model with an untied output head; SmolLM2-135M then has 326 MB, not 269."""
    other = load_model(model)
    other.config.tie_word_embeddings = False
    other.lm_head.weight = torch.nn.Parameter(other.lm_head.weight.detach().clone())
    other.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder
