"""Runs megatron-core on a machine without CUDA.

megatron-core names CUDA as the device in about forty of its modules. Without CUDA, `install` has `import`
rewrite these places to the CPU, in memory. Neither source nor bytecode is written, so a process without the
hook finds the library as it was installed. The rules were made for one version; the hook refuses any other.
A place that no rule covers raises torch's own error about CUDA when it is used.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType

import torch
from torch import Tensor

from penstock.common.distribution import pip_install
from penstock.trainer.core.errors import BackendUnusable

VERSION = "0.16.1"
PACKAGE = "megatron.core"
# Modules that are for other devices only, or not used here.
LEFT_ALONE = tuple(
    f"{PACKAGE}.{name}" for name in ("distributed.fsdp", "inference", "export", "extensions")
)
RANDOM = f"{PACKAGE}.tensor_parallel.random"
COMPILER = f"{PACKAGE}.jit"

# The order matters: after the second rule, the first would not match any more.
RULES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        # gloo's barrier does not accept a device.
        (r"device_ids=\[torch\.cuda\.current_device\(\)\],?", ""),
        (r"torch\.cuda\.current_device\(\)", 'torch.device("cpu")'),
        (r"""(\bdevice\s*(?::[^=()\n]*)?=\s*)(["'])cuda\2""", r"\1\2cpu\2"),
        (r"torch\.cuda\.(Float|Half|BFloat16)Tensor", r"torch.\1Tensor"),
        (r"\.cuda\(\)", ".cpu()"),
        (r"torch\.cuda\.(?:synchronize|empty_cache)\(\)", "None"),
        (r"torch\.cuda\.(get_rng_state|manual_seed)\b", r"torch.\1"),
    )
)


def install() -> None:
    """Make megatron-core run on this machine. With CUDA, or when called again, it rewrites nothing.

    Raises BackendUnusable, before it changes anything, if megatron-core is missing, has another version,
    or is already loaded.
    """
    _check_version()
    # Warnings about optional packages and deprecated torch calls, which users cannot act on.
    warnings.filterwarnings("ignore", module=r"megatron\.core")
    warnings.filterwarnings("ignore", message=".*deprecating ShardedTensor")
    if torch.cuda.is_available() or any(isinstance(f, _Finder) for f in sys.meta_path):
        return
    if loaded := [name for name in sys.modules if name.startswith(PACKAGE)]:
        raise BackendUnusable(f"{loaded[0]} was imported before it could be adapted to the CPU")
    sys.meta_path.insert(0, _Finder())


def rewrite(source: str) -> str:
    """Replace CUDA by the CPU in a module's source, keeping the number of lines."""
    for pattern, replacement in RULES:
        source = pattern.sub(replacement, source)
    return source


def _check_version() -> None:
    try:
        found = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError as error:
        raise BackendUnusable(
            f"model.backend megatron: megatron-core is not installed; {pip_install('megatron')}"
        ) from error
    if found != VERSION:
        raise BackendUnusable(
            f"model.backend megatron: megatron-core {found} is installed, but {VERSION} is required"
        )


class _Finder:
    """Finds the modules to rewrite, and nothing else."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not f"{name}.".startswith(f"{PACKAGE}.") or name.startswith(LEFT_ALONE):
            return None
        spec = PathFinder.find_spec(name, path, target)
        # Skip extension modules and modules without a match; these keep their compiled bytecode.
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            source = spec.loader.get_source(name)
            if source is not None and (name in (RANDOM, COMPILER) or rewrite(source) != source):
                spec.loader = _Loader(name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    """Compiles the rewritten source on every import; never reads or writes bytecode on disk."""

    def get_code(self, fullname: str) -> CodeType | None:
        source = self.get_source(fullname)
        if source is None:
            return None
        return compile(rewrite(source), self.path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        if module.__name__ == RANDOM:
            vars(module)["_get_cuda_rng_state"] = _get_random_state
            vars(module)["_set_cuda_rng_state"] = _set_random_state
        if module.__name__ == COMPILER:
            # The functions that its decorators compile are unused, and the compiler takes seconds to load.
            module.disable_jit_fuser()


def _get_random_state(
    device: object = None, clone: bool = False, graph_safe: bool = False
) -> Tensor:
    return torch.get_rng_state()


def _set_random_state(state: Tensor, device: object = None, graph_safe: bool = False) -> None:
    torch.set_rng_state(state)
