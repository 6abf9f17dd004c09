"""Prepares the next weights of a vLLM model next to those in use; runs inside vLLM's worker process.

Nearly all of a load on the CPU is packing: each linear weight is converted to the form that matrix products
read. The engine need not stand still for that. So it is done ahead of the pause, in *portions* between two
steps, and the pause only moves names.

    live model   ──── samples ──── samples ──── samples ────┐ pause ┌──── samples the new weights
    twin              portion      portion      last portion └ place ┘

The *twin* is the same tree of modules with its own tensors. It consists of copies of the module objects,
which are reset to the shapes that weights are loaded in. They are loaded one layer at a time with
vLLM's own support for weights that arrive while a model runs (`model_loader.reload`). The live
model is not touched before `place`, so a preparation that fails or is abandoned changes nothing.

Packing a twin must not touch the live model. By reading vLLM's code this was established for layers of
plain, unquantized weights in a model that is not compiled. `why_not` names anything else. Such a model, or
an upload that leaves a layer incomplete, is loaded whole during the pause, as in `reload`.
"""

# Twins are built from the internals of torch's modules and of vLLM's reload.
# pyright: reportPrivateUsage=false
from __future__ import annotations

import copy
from collections.abc import Generator, Iterable, Mapping
from pathlib import Path
from types import MethodType
from typing import cast

import psutil
import torch
from vllm.config import CompilationMode, VllmConfig
from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta, to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import layer_ref_sentinel
from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo

from penstock.common.failpoints import hit
from penstock.server.vllm.worker.reload import LoadsWeights, ProcessesWeights

PORTION_BYTES = 8 << 20
"""Bytes of the upload packed per portion: 10 ms on two cores. A larger tensor is one portion."""
ROOM = 1.25
"""Memory that must be free, in lengths of the upload: for the packed copy and a layer being packed."""

NamedTensors = Iterable[tuple[str, torch.Tensor]]


def why_not(model: torch.nn.Module, config: VllmConfig) -> str | None:
    """Why this model's weights cannot be prepared next to those in use; None if they can."""
    if config.device_config.device_type != "cpu":
        # Kernels hold the addresses of the weights, and there is hardly any packing.
        return "it is not on the CPU"
    if config.compilation_config.mode != CompilationMode.NONE:
        return "it is compiled"
    if config.lora_config is not None:
        return "it takes adapters"
    plain = UnquantizedLinearMethod | UnquantizedEmbeddingMethod
    modules = cast(Iterable[tuple[str, torch.nn.Module]], model.named_modules())
    for name, module in modules:
        method = getattr(module, "quant_method", None)
        if is_deferred_attention_layer(module):
            if type(module) is not Attention or method is not None:
                return f"{name} is {type(module).__name__}"
        elif method is not None and not isinstance(method, plain):
            return f"{name} is processed by {type(method).__name__}"
    return None


def has_room(length_bytes: int) -> bool:
    """Whether a second copy of this many bytes of weights fits into memory."""
    free = psutil.virtual_memory().available
    group = Path("/sys/fs/cgroup")
    if (group / "memory.max").exists() and (group / "memory.current").exists():
        limit = (group / "memory.max").read_text().strip()
        if limit.isdigit():
            # The kernel reclaims the container's inactive file cache on demand.
            statistics = dict(line.split() for line in (group / "memory.stat").open())
            used = int((group / "memory.current").read_text()) - int(statistics["inactive_file"])
            free = min(free, int(limit) - used)
    return free >= ROOM * length_bytes


class Preparation:
    """One complete version that is prepared, portion by portion, next to the live model."""

    def __init__(self, model: torch.nn.Module, tensors: NamedTensors) -> None:
        """The memory of `tensors` must not change until all portions are done."""
        self._model = model
        self._twins = {module: _Twin(module) for module in model.modules()}
        self._portions = self._prepare(tensors)
        self._made: list[_Twin] = []
        self.ready = False
        """Whether `place` may be called."""

    def go_on(self) -> bool:
        """Process one portion. Returns False once nothing is left. Raises what loading raises."""
        with torch.no_grad():
            return next(self._portions, False)

    def place(self) -> None:
        """Make these the weights of the live model, between two steps."""
        assert self.ready
        hit("weights.place")
        for twin in self._made:
            twin.place()
        self.end()

    def end(self) -> None:
        """Release everything that is not in use now."""
        self._portions.close()
        for twin in self._twins.values():
            twin.end()
        self._twins.clear()
        self._made.clear()
        self.ready = False

    def _prepare(self, tensors: NamedTensors) -> Generator[bool]:
        for twin in self._twins.values():
            twin.join(self._twins)
            twin.empty()
        yield True
        model = cast(LoadsWeights, self._twins[self._model].module)
        for portion in _portions(tensors):
            # A layer is packed as soon as all of its tensors are there.
            model.load_weights(portion)
            yield True
        self.ready = self._complete()

    def _complete(self) -> bool:
        """Finish layers that were not loaded on their own. Returns False if one should have been."""
        # Tensors shared between layers of the live model are shared in the twin too.
        renewed: dict[int, torch.nn.Parameter | None] = {}
        left: list[_Twin] = []
        for twin in self._twins.values():
            if twin.finish():
                self._made.append(twin)
                renewed.update(twin.renewed())
            else:
                left.append(twin)
        for twin in left:
            if twin.begun:
                return False
            if not twin.has_parameters:
                continue
            if not twin.share(renewed):
                return False
            self._made.append(twin)
        return True


class _Twin:
    """A copy of a module's object that gets its own tensors."""

    def __init__(self, live: torch.nn.Module) -> None:
        self._live = live
        self._was = dict(vars(live))
        self.module = module = copy.copy(live)
        module._parameters = dict(live._parameters)
        module._buffers = dict(live._buffers)
        module._non_persistent_buffers_set = set(live._non_persistent_buffers_set)

    def join(self, twins: Mapping[torch.nn.Module, _Twin]) -> None:
        children = self._live._modules.items()
        self.module._modules = {
            name: None if child is None else twins[child].module for name, child in children
        }

    def empty(self) -> None:
        """Reset it to the shapes that its layer is loaded in, without data."""
        recorded, info = layerwise.get_layerwise_info(self._live), self._info
        parameters, buffers = recorded.restore_metadata
        info.restore_metadata = (
            {name: self._own(to_meta_tensor(p)) for name, p in parameters.items()},
            {name: self._own(to_meta_tensor(b)) for name, b in buffers.items()},
        )
        info.restore_device = recorded.restore_device
        restore_layer_on_meta(self.module, info)
        for name, parameter in self.module._parameters.items():
            if parameter is not None and parameter is self._live._parameters.get(name):
                # vLLM does not reset a bias.
                fresh = torch.nn.Parameter(torch.empty_like(parameter), requires_grad=False)
                fresh.__class__ = parameter.__class__
                vars(fresh).update(vars(parameter))
                self._own(fresh)
                self.module._parameters[name] = fresh
        layerwise.initialize_online_processing(self.module)

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rebind a tensor's loaders, as vLLM recorded them or left them after a reload, to the twin."""
        for name, value in vars(tensor).items():
            while getattr(value, "__name__", "") == "online_process_loader":
                value = value.__wrapped__
            vars(tensor)[name] = value
        for owner in (self._live, layer_ref_sentinel):
            _hand_over(tensor, owner, self.module)
        return tensor

    @property
    def _info(self) -> LayerReloadingInfo:
        return layerwise.get_layerwise_info(self.module)

    @property
    def begun(self) -> bool:
        """Whether some of its tensors arrived, but not all."""
        return self._info.load_numel > 0

    @property
    def has_parameters(self) -> bool:
        return any(parameter is not None for parameter in self._live._parameters.values())

    def finish(self) -> bool:
        """Returns whether the layer is loaded."""
        came = {name for name, _ in self._info.loaded_weights}
        whole = {name for name, p in self.module._parameters.items() if p is not None}
        if isinstance(self.module, VocabParallelEmbedding) and came == whole:
            # Only the rows that pad the vocabulary are missing.
            layerwise._layerwise_process(self.module, self._info)
        return not self._info.can_load()

    def renewed(self) -> dict[int, torch.nn.Parameter | None]:
        """Its parameters, keyed by the id of the live module's."""
        mine = self.module._parameters
        return {id(p): mine[name] for name, p in self._live._parameters.items() if p is not None}

    def share(self, renewed: Mapping[int, torch.nn.Parameter | None]) -> bool:
        """Take the parameters that other layers were loaded with. Returns False if one is missing."""
        self.module._buffers = dict(self._live._buffers)
        for name, parameter in self._live._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in renewed:
                return False
            self.module._parameters[name] = renewed[id(parameter)]
        if method := getattr(self.module, "quant_method", None):
            # A tied head has its own packed copy.
            cast(ProcessesWeights, method).process_weights_after_loading(self.module)
        return True

    def place(self) -> None:
        """Move everything that was made for the twin to the live module."""
        mine = vars(self.module)
        for tensor in (*self.module._parameters.values(), *self.module._buffers.values()):
            if tensor is not None:
                _hand_over(tensor, self.module, self._live)
        changed = {name for name, value in mine.items() if value is not self._was.get(name)}
        for name in changed - {"_modules", "_non_persistent_buffers_set"}:
            vars(self._live)[name] = mine[name]

    def end(self) -> None:
        """Release its tensors at once; reference cycles with vLLM's records and loaders hold them."""
        layerwise.LAYERWISE_INFO.pop(self.module, None)
        vars(self.module).clear()
        self._was.clear()


def _hand_over(tensor: torch.Tensor, owner: object, other: object) -> None:
    """Rebind the methods among a tensor's attributes, such as its loader, from `owner` to `other`."""
    for name, value in vars(tensor).items():
        if isinstance(value, MethodType) and value.__self__ is owner:
            vars(tensor)[name] = MethodType(value.__func__, other)


def _portions(tensors: NamedTensors) -> Generator[list[tuple[str, torch.Tensor]]]:
    portion: list[tuple[str, torch.Tensor]] = []
    for name, tensor in tensors:
        portion.append((name, tensor))
        if sum(t.nbytes for _, t in portion) >= PORTION_BYTES:
            yield portion
            portion = []
    if portion:
        yield portion
