"""Sampling parameters under SGLang's names, which functions written for slime use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.client.sampling import SamplingOptions, SamplingParams

if TYPE_CHECKING:
    from argparse import Namespace

# Parameters that change the distribution but that the server lacks, with their neutral values.
_NEUTRAL: Mapping[str, object] = {
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "min_new_tokens": 0,
    "n": 1,
}
# Parameters that affect only the text of the answer. `no_stop_trim` keeps the stop in it.
_HARMLESS = {
    *("skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"),
    *("temperature", "top_p", "top_k", "max_new_tokens", "stop", "stop_token_ids"),
    *("sampling_seed", "ignore_eos"),
}


class SamplingUnsupported(Exception):
    """A parameter that a Penstock server lacks. Ignoring it would change the sampled tokens."""


def write_sampling_params(sampling: SamplingParams, args: Namespace) -> dict[str, Any]:
    """Returns the parameters for a function: the task's, with defaults from `args`."""
    stop = list(sampling.stop) or args.rollout_stop
    params: dict[str, Any] = {
        "temperature": args.rollout_temperature
        if sampling.temperature is None
        else sampling.temperature,
        "top_p": args.rollout_top_p if sampling.top_p is None else sampling.top_p,
        "top_k": sampling.top_k or args.rollout_top_k,
        "max_new_tokens": sampling.max_tokens
        or args.rollout_max_response_len
        or args.rollout_max_context_len,
        "stop": stop,
        "stop_token_ids": list(sampling.stop_token_ids) or args.rollout_stop_token_ids,
        "skip_special_tokens": args.rollout_skip_special_tokens,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    if sampling.ignore_eos:
        params["ignore_eos"] = True
    return params


def sampling_arguments(sampling: SamplingParams) -> dict[str, Any]:
    said = {
        "rollout_temperature": sampling.temperature,
        "rollout_top_p": sampling.top_p,
        "rollout_top_k": sampling.top_k or None,
        "rollout_max_response_len": sampling.max_tokens or None,
        "rollout_stop": list(sampling.stop) or None,
        "rollout_stop_token_ids": list(sampling.stop_token_ids) or None,
    }
    return {name: value for name, value in said.items() if value is not None}


def read_sampling_params(params: Mapping[str, Any]) -> SamplingOptions | None:
    """Returns None if no token is wanted. Raises SamplingUnsupported."""
    for name, value in params.items():
        if name not in _HARMLESS and value is not None and value != _NEUTRAL.get(name):
            raise SamplingUnsupported(f"sampling_params: {name} = {value!r} is not supported")
    # SGLang's default.
    max_tokens = 128 if params.get("max_new_tokens") is None else int(params["max_new_tokens"])
    if max_tokens <= 0:
        return None
    stop = params.get("stop") or ()
    options = SamplingOptions(
        temperature=float(_or(params.get("temperature"), 1.0)),
        top_p=float(_or(params.get("top_p"), 1.0)),
        top_k=max(0, int(_or(params.get("top_k"), 0))),
        max_tokens=max_tokens,
        stop_token_ids=tuple(params.get("stop_token_ids") or ()),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        ignore_eos=bool(params.get("ignore_eos", False)),
    )
    if params.get("sampling_seed") is not None:
        options["seed"] = int(params["sampling_seed"])
    return options


def _or(value: Any, default: float) -> Any:
    return default if value is None else value
