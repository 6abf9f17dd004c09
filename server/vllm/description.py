"""Description of the model that vLLM loaded, for the rest of the server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

from penstock.server.engine.protocol import AdapterLimits, EngineDescription
from penstock.server.weights.staging.checkpoint import upload_tensors

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.v1.engine.async_llm import AsyncLLM


def describe(llm: AsyncLLM) -> EngineDescription:
    model = llm.model_config
    config = cast(object, model.hf_text_config)
    tied = bool(getattr(config, "tie_word_embeddings", False))
    folder = _snapshot(model)
    return EngineDescription(
        model=model.model,
        vocab_size=model.get_vocab_size(),
        max_context_length=model.max_model_len,
        eos_token_ids=_eos_token_ids(llm),
        weight_dtype=str(model.dtype).removeprefix("torch."),
        tensors=upload_tensors(folder, config, tied=tied),
        checkpoint=folder,
        adapters=_adapter_limits(llm),
    )


def _adapter_limits(llm: AsyncLLM) -> AdapterLimits | None:
    lora = llm.vllm_config.lora_config
    return None if lora is None else AdapterLimits(lora.max_lora_rank, lora.max_loras)


def _eos_token_ids(llm: AsyncLLM) -> tuple[int, ...]:
    """The tokens at which vLLM ends a turn: the tokenizer's and the generation config's."""
    own = llm.renderer.get_eos_token_id()
    further = cast(
        "int | list[int] | None", llm.model_config.try_get_generation_config().get("eos_token_id")
    )
    tokens = [] if own is None else [own]
    tokens += [further] if isinstance(further, int) else further or []
    return tuple(dict.fromkeys(tokens))


def _snapshot(model: ModelConfig) -> Path | None:
    """The folder that vLLM loaded the model from, if it is in the local cache."""
    if (folder := Path(model.model)).is_dir():
        return folder
    from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model.model, revision=model.revision, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
