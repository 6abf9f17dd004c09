"""The `args` that functions written for slime receive: a plain namespace.

Its attributes come from the defaults below, the server's values and the `--args` file; later ones
win. As in slime, all attempts share one namespace, on which functions set attributes. It holds only
plain values, so that functions can copy it.
"""

from __future__ import annotations

import copy
import tomllib
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from penstock.client.scoring import BadFunction

# A name that never resolves, so that a request that bypasses `post` fails.
ROUTER_HOST: Final = "penstock.invalid"
ROUTER_PORT: Final = 80

_DEFAULTS: Final[Mapping[str, Any]] = {
    "sglang_router_ip": ROUTER_HOST,
    "sglang_router_port": ROUTER_PORT,
    "sglang_router_policy": None,
    "sglang_model_routers": None,
    "vllm_router_ip": ROUTER_HOST,
    "vllm_router_port": ROUTER_PORT,
    "sglang_server_concurrency": 512,
    "sglang_dp_size": 1,
    "sglang_speculative_algorithm": None,
    "sglang_enable_deterministic_inference": False,
    "router_policy": None,
    "rollout_num_gpus": 1,
    "rollout_num_gpus_per_engine": 1,
    "use_rollout_routing_replay": False,
    # The client resumes an aborted turn at the exact token, so no function ever sees one.
    "partial_rollout": False,
    "mask_offpolicy_in_partial_rollout": False,
    "ci_test": False,
    "group_rm": False,
    "rm_type": None,
    "rm_url": None,
    "reward_key": None,
    "eval_reward_key": None,
    "custom_rm_path": None,
    "custom_generate_function_path": None,
    "dynamic_sampling_filter_path": None,
    "rollout_sample_filter_path": None,
    "rollout_all_samples_process_path": None,
    "buffer_filter_path": None,
    "rollout_global_dataset": True,
    "rollout_batch_size": 1,
    "over_sampling_batch_size": 1,
    "n_samples_per_prompt": 1,
    "rollout_seed": 42,
    "rollout_temperature": 1.0,
    "rollout_top_p": 1.0,
    "rollout_top_k": -1,
    "rollout_max_response_len": None,
    "rollout_max_prompt_len": None,
    "rollout_stop": None,
    "rollout_stop_token_ids": None,
    "rollout_skip_special_tokens": False,
    "eval_max_response_len": None,
    "eval_datasets": [],
    "input_key": "prompt",
    "label_key": "label",
    "metadata_key": "metadata",
    "tool_key": None,
    "multimodal_keys": None,
    "apply_chat_template": False,
    "apply_chat_template_kwargs": {},
    "context_parallel_size": 1,
}


def read_arguments(path: Path | None) -> dict[str, Any]:
    """Reads the `--args` file, one TOML table. Raises BadFunction."""
    if path is None:
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadFunction(f"--args {path}: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadFunction(f"--args {path}: not valid TOML: {error}") from error


def make_arguments(
    given: Mapping[str, Any], *, model: str, max_context_length: int | None
) -> Namespace:
    """`max_context_length` is None if unknown."""
    served = {
        "hf_checkpoint": model,
        "rollout_max_context_len": max_context_length,
        "eval_max_context_len": max_context_length,
        "max_tokens_per_gpu": max_context_length,
    }
    return Namespace(**copy.deepcopy({**_DEFAULTS, **served, **given}))
