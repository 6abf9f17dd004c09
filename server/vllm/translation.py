"""Between the server's types and vLLM's: the model, requests and their output, and staged weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from penstock.server.engine.protocol import (
    AdapterLimits,
    Delta,
    EngineDescription,
    EngineRequest,
    Finish,
    StagedWeights,
)
from penstock.server.weights.staging.checkpoint import upload_tensors

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.v1.engine.async_llm import AsyncLLM

# vLLM silently raises temperatures between zero and this value to it.
LOWEST_TEMPERATURE = 0.01

FINISHES = {
    "stop": Finish.STOP,
    "repetition": Finish.STOP,
    "length": Finish.LENGTH,
    "abort": Finish.ABORTED,
}


def describe(llm: AsyncLLM) -> EngineDescription:
    model, lora = llm.model_config, llm.vllm_config.lora_config
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
        adapters=None if lora is None else AdapterLimits(lora.max_lora_rank, lora.max_loras),
    )


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


def sampling_params(request: EngineRequest) -> SamplingParams:
    """Raises ValueError for a temperature that vLLM would change."""
    sampling = request.sampling
    if 0.0 < sampling.temperature < LOWEST_TEMPERATURE:
        raise ValueError(
            f"vLLM samples at temperature 0 or from {LOWEST_TEMPERATURE} on, "
            f"got {sampling.temperature}"
        )
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        stop=list(sampling.stop) or None,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        max_tokens=sampling.max_tokens,
        logprobs=0,  # Only that of the sampled token.
        flat_logprobs=True,
        # Only stop strings need text; they may be special tokens.
        detokenize=bool(sampling.stop),
        skip_special_tokens=False,
        output_kind=RequestOutputKind.DELTA,
        stream_interval=request.stream_interval,
        skip_clone=True,
    )


def cut(
    output: RequestOutput,
    completion: CompletionOutput,
    position: int,
    starts: Sequence[tuple[str, int]],
    weight_version: int,
) -> Iterator[Delta]:
    """Cut where the weight version changes. The output begins with token `position` of the request. An end
    without tokens has `weight_version` if no token came before it."""
    token_ids = np.asarray(completion.token_ids, np.int32)
    flat = cast(FlatLogprobs, completion.logprobs)
    logprobs = np.asarray(flat.logprobs, np.float32)
    if len(logprobs) != len(token_ids):
        raise RuntimeError(f"{len(token_ids)} tokens came with {len(logprobs)} log-probabilities")
    finish = _finish(completion.finish_reason) if output.finished else None
    cached = output.num_cached_tokens or 0
    pieces = list(version_pieces(starts, position, position + len(token_ids)))
    if not pieces and finish:
        version = int(starts[-1][0]) if starts else weight_version
        pieces = [(position, position, version)]
    for index, (begin, end, version) in enumerate(pieces):
        part = slice(begin - position, end - position)
        last = index == len(pieces) - 1
        yield Delta(token_ids[part], logprobs[part], version, finish if last else None, cached)


def version_pieces(
    starts: Sequence[tuple[str, int]], begin: int, end: int
) -> Iterator[tuple[int, int, int]]:
    """Yields (begin, end, version). `starts` has, in order, the label and first token of each version."""
    for index, (label, start) in enumerate(starts):
        stop = starts[index + 1][1] if index + 1 < len(starts) else end
        first, last = max(start, begin), min(stop, end)
        if first < last:
            yield first, last, int(label)


def update_info(weights: StagedWeights) -> dict[str, object]:
    """Fields of `worker.weight_engine.StagedFile` for the worker."""
    return {
        "path": str(weights.path),
        "names": [tensor.name for tensor in weights.tensors],
        "dtypes": [tensor.dtype for tensor in weights.tensors],
        "shapes": [list(tensor.shape) for tensor in weights.tensors],
        "offsets_bytes": [tensor.offset_bytes for tensor in weights.tensors],
    }


def _finish(reason: str | None) -> Finish:
    if reason not in FINISHES:
        raise RuntimeError(f"vLLM ended a request with {reason!r}")
    return FINISHES[reason]
