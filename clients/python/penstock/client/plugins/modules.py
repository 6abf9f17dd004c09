"""Replaces the engine-related modules that functions written for slime or vime import.

    from slime.utils.types import Sample
    from slime.utils.http_utils import post
    from slime.rollout.sglang_rollout import GenerateState

`install` puts a finder first on `sys.meta_path`. It serves the names in `_NAMES`, and their parent
packages if the real ones are not installed. So calls that such a function makes to the engine reach
Penstock.

Everything else comes from the installed package. Other modules, such as a grader, load unchanged. A
name that a replaced module lacks is loaded from the installed module on access, which then also
contains the replaced names. The finder stays for the life of the process, because many functions
import when they are called.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from penstock.client.plugins import samples as types
from penstock.client.plugins import slime_functions as own
from penstock.client.plugins.tokenizers import load_tokenizer
from penstock.client.plugins.vllm_route import build_inference_sampling_params

PACKAGES = ("slime", "vime")

_GENERATION = (
    *(own.GenerateState, own.get_model_url),
    *(own.generate, own.generate_and_rm, own.generate_and_rm_group),
)

_NAMES: Mapping[str, tuple[Any, ...]] = {
    "utils.types": (types.Sample,),
    "utils.http_utils": (own.post, own.get, own.get_rollout_num_engines),
    "utils.misc": (own.load_function, own.SingletonMeta),
    "utils.async_utils": (own.run, own.get_async_loop, own.AsyncLoopThread),
    "utils.processing_utils": (
        *(load_tokenizer, own.load_processor),
        *(own.build_processor_kwargs, own.encode_image_for_rollout_engine),
    ),
    "rollout.sglang_rollout": _GENERATION,
    "rollout.vllm_rollout": _GENERATION,
    "rollout.rm_hub": (own.async_rm, own.batched_async_rm),
    "rollout.base_types": (
        *(types.RolloutFnTrainOutput, types.RolloutFnEvalOutput, own.call_rollout_fn),
    ),
    "rollout.filter_hub.base_types": (
        *(types.DynamicFilterOutput, own.MetricGatherer),
        *(own.call_dynamic_filter, own.should_drop_dynamic_filter_output),
    ),
    "rollout.filter_hub.dynamic_sampling_filters": (own.check_reward_nonzero_std,),
}
# Entries whose name there differs from their name here.
_OTHER_NAMES: Mapping[str, Mapping[str, Any]] = {
    # Name of the batch type that their trainers receive.
    "utils.types": {"RolloutBatch": dict[str, Any]},
    "rollout.vllm_rollout": {"_build_inference_sampling_params": build_inference_sampling_params},
}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        top, _, name = fullname.partition(".")
        if top not in PACKAGES:
            return None
        ours = name in _NAMES
        above = not name or any(known.startswith(f"{name}.") for known in _NAMES)
        if not (ours or above):
            return None
        real = importlib.machinery.PathFinder.find_spec(fullname, path)
        if above and not ours and real is not None:
            return None
        spec = importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        # Submodules of a replaced module come from the installed package.
        spec.submodule_search_locations = list((real and real.submodule_search_locations) or ())
        return spec

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(_entries(module.__name__))
        module.__getattr__ = _Installed(module)


class _Installed:
    """Gives access to names of the installed module that the replacement lacks."""

    def __init__(self, ours: ModuleType) -> None:
        self._ours = ours
        self._module: ModuleType | None = None

    def __call__(self, name: str) -> Any:
        """Raises AttributeError, and errors of loading the module."""
        ours = self._ours
        # An import of a submodule must not load the installed package's own names.
        below = importlib.machinery.PathFinder.find_spec(f"{ours.__name__}.{name}", ours.__path__)
        if not name.startswith("__") and below is None:
            installed = self._module or self._load()
            if installed is not None and hasattr(installed, name):
                return getattr(installed, name)
        raise AttributeError(f"module {ours.__name__!r} has no attribute {name!r}")

    def _load(self) -> ModuleType | None:
        name = self._ours.__name__
        above = sys.modules[name.rpartition(".")[0]]
        spec = importlib.machinery.PathFinder.find_spec(name, above.__path__)
        if spec is None or spec.loader is None:
            return None
        # `sys.modules` keeps the replacement. Imports during loading may ask for more of this module.
        self._module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(self._module)
        except BaseException:
            self._module = None
            raise
        vars(self._module).update(_entries(name))
        return self._module


def _entries(module: str) -> dict[str, Any]:
    name = module.partition(".")[2]
    named = {entry.__name__: entry for entry in _NAMES.get(name, ())}
    return {**named, **_OTHER_NAMES.get(name, {})}


def install() -> None:
    """Further calls have no effect."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
