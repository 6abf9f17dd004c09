"""vLLM's engine options under vLLM's own names, read by vLLM's own parser, over Penstock's defaults."""

from __future__ import annotations

# First, because vLLM reads the environment when it is imported.
import penstock.server.vllm.environment  # noqa: F401  # pyright: ignore[reportUnusedImport]

# isort: split
import argparse
import dataclasses
import json
import os
from collections.abc import Sequence
from typing import NoReturn, cast

from vllm.config import WeightTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser

from penstock.machine.processor import computes_bfloat16
from penstock.machine.resources import memory_bytes

WORKER_EXTENSION = "penstock.server.vllm.worker.weight_engine.WorkerExtension"
KV_CACHE_SPACE = "VLLM_CPU_KVCACHE_SPACE"
GIB = 1 << 30

DEFAULTS = (
    # Log-probabilities of the distribution that was sampled from, including temperature and truncation.
    *("--logprobs-mode", "processed_logprobs"),
    # Only the request determines the sampling, never generation_config.json.
    *("--generation-config", "vllm"),
    *("--scheduling-policy", "priority"),
    "--enable-prefix-caching",
    "--no-use-tqdm-on-load",
)
CPU_DEFAULTS = (
    # A compiler pass at each start costs more than it gains here.
    "--enforce-eager",
    # vLLM's default on the CPU, 128, shares almost nothing between short prompts.
    *("--block-size", "32"),
)


class _Parser(FlexibleArgumentParser):
    """Raises ValueError where argparse would print and exit."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def engine_arguments(options: Sequence[str]) -> AsyncEngineArgs:
    """A later option wins. Raises ValueError with the parser's message."""
    on_cpu = bool(current_platform.is_cpu())
    parser = AsyncEngineArgs.add_cli_args(_Parser(prog="penstock serve", add_help=False))
    defaults = [*DEFAULTS, *(CPU_DEFAULTS if on_cpu else ())]
    if on_cpu and not computes_bfloat16("cpu"):
        # vLLM defaults to the checkpoint's dtype, which this CPU would compute by conversions.
        defaults += ("--dtype", "float32")
    namespace = cast(argparse.Namespace, parser.parse_args([*defaults, *options]))
    arguments = AsyncEngineArgs.from_cli_args(namespace)
    if arguments.worker_extension_cls not in ("", WORKER_EXTENSION):
        raise ValueError(
            "--worker-extension-cls is reserved: Penstock uses it to load the weights, "
            f"got {arguments.worker_extension_cls!r}"
        )
    arguments.worker_extension_cls = WORKER_EXTENSION
    if on_cpu and arguments.kv_cache_memory_bytes is None and not os.environ.get(KV_CACHE_SPACE):
        # vLLM would reserve nearly all of the machine's memory.
        arguments.kv_cache_memory_bytes = max(1, min(4, memory_bytes() // (8 * GIB))) * GIB
    if arguments.enable_lora:
        # A new version is loaded before the oldest is freed.
        arguments.max_cpu_loras = max(arguments.max_cpu_loras or 0, arguments.max_loras + 1)
    arguments.weight_transfer_config = WeightTransferConfig(backend="penstock")
    return arguments


def describe_options(arguments: AsyncEngineArgs) -> dict[str, object]:
    """The options that differ from vLLM's defaults, by field name, as values that JSON can hold."""
    described: dict[str, object] = {}
    for option in dataclasses.fields(arguments):
        value: object = getattr(arguments, option.name)
        default: object = option.default
        if option.default_factory is not dataclasses.MISSING:
            default = option.default_factory()
        if value != default:
            described[option.name] = _plain(value)
    return described


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    return json.loads(json.dumps(value, default=str))
