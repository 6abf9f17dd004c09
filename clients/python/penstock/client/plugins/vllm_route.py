"""Translates vLLM's tokens-in, tokens-out endpoint, used by vime, to SGLang's, used by slime.

/inference/v1/generate {"token_ids", "sampling_params"} -> {"choices": [{"token_ids", "logprobs", ...}]}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}
# Options that have no effect: always on, or about text that this endpoint does not return.
_LEFT_OUT = {"logprobs", "include_stop_str_in_output", "detokenize", "output_kind"}
_TAKEN_OVER = ("temperature", "top_p", "top_k", "stop", "stop_token_ids", "skip_special_tokens")


def read_request(payload: Mapping[str, Any]) -> dict[str, Any]:
    given: Mapping[str, Any] = payload.get("sampling_params") or {}
    params = {_NAMES.get(k, k): v for k, v in given.items() if k not in _LEFT_OUT}
    # vLLM's default.
    params.setdefault("max_new_tokens", 16)
    rest = {k: v for k, v in payload.items() if k not in ("model", "token_ids", "sampling_params")}
    ids = payload.get("token_ids")
    return {**rest, "input_ids": ids, "sampling_params": params, "return_logprob": True}


def write_answer(answer: Mapping[str, Any]) -> dict[str, Any]:
    meta: Mapping[str, Any] = answer["meta_info"]
    pairs = meta["output_token_logprobs"]
    choice = {
        "index": 0,
        "token_ids": [token for _, token, _ in pairs],
        "logprobs": {"content": [{"token": f"token_id:{t}", "logprob": p} for p, t, _ in pairs]},
        "finish_reason": meta["finish_reason"]["type"],
    }
    counts = ("prompt_tokens", "completion_tokens")
    usage = {name: meta[name] for name in counts}
    return {"request_id": meta["id"], "choices": [choice], "usage": usage}


def build_inference_sampling_params(sampling_params: Mapping[str, Any]) -> dict[str, Any]:
    params = {name: sampling_params[name] for name in _TAKEN_OVER if sampling_params.get(name)}
    for name, other in _NAMES.items():
        if sampling_params.get(other) is not None:
            params[name] = sampling_params[other]
    # Zero is a valid temperature.
    params["temperature"] = sampling_params["temperature"]
    return {**params, "logprobs": 1}
