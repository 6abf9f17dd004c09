"""Loads new weights into the live model; runs inside vLLM's worker process.

A complete version comes as a file in memory. One call does the whole update, so that a failure always ends
vLLM's update session and the next upload can begin another. If the version was prepared ahead, while
generation continued, that call only puts it in place: see `preparation`.

Versions that a collective brings come through any other backend of vLLM's registry. vLLM has one backend
for an engine's whole life, so this one stands in front of the other, which it creates when a trainer asks
to join.

vLLM finds this module through `worker_extension_cls`, and importing it registers the backend "penstock". It
also corrects what `reload` leaves wrong: on the CPU a tied `lm_head` keeps its own packed copy, which
no reload renews.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import mmap
import os
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import torch
from tqdm import tqdm
from vllm.config import VllmConfig, WeightTransferConfig, set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from penstock.common.failpoints import hit

# Imported for their effects: the backend "gloo", a fix of vLLM's LoRA, faster drawing of tokens, and AMX.
from penstock.server.vllm.worker import (
    gloo,  # noqa: F401  # pyright: ignore[reportUnusedImport]
    lora,  # noqa: F401  # pyright: ignore[reportUnusedImport]
    sampling,  # noqa: F401  # pyright: ignore[reportUnusedImport]
    tiles,  # noqa: F401  # pyright: ignore[reportUnusedImport]
)
from penstock.server.vllm.worker.preparation import Preparation, has_room, why_not
from penstock.server.vllm.worker.reload import ProcessesWeights, forget_reload, reload_model
from penstock.server.weights.staging.manifest import WeightRefused

logger = logging.getLogger(__name__)

BACKEND = "penstock"
# A server stages next to what it holds, or the trainer shares one file and the server holds another.
FILES_KEPT = 2
ROUND = "collective_round"
"""Key under which an update of a collective carries the other backend's own description of it."""

PORTION_SECONDS = 0.01
"""Minimum time between two steps spent on preparing a version, while there is more to do."""

# tqdm's default is a lock between processes. The engine process does not live to release it, so Python
# would warn of a leak each time a server stops.
tqdm.set_lock(threading.RLock())  # pyright: ignore[reportUnknownMemberType]

# The mapping of a staged file is read-only on purpose.
warnings.filterwarnings("ignore", message="The given buffer is not writable")


@dataclass
class StagedFile(WeightTransferUpdateInfo):
    path: str
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    offsets_bytes: list[int]
    prepared: bool = False
    """Whether this is the version last prepared, if any was."""


class Mappings:
    """Files mapped for reading. The same few files carry versions again and again, and a fresh
    mapping costs a tenth of a load, during which generation stands still."""

    def __init__(self) -> None:
        # By device, inode and length; a mapped file keeps its inode.
        self._kept: OrderedDict[tuple[int, int, int], mmap.mmap] = OrderedDict()

    def open(self, path: Path) -> mmap.mmap:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            key = (status.st_dev, status.st_ino, status.st_size)
            mapped = self._kept.pop(key, None)
            if mapped is None:
                # Populating every page at once costs a fraction of faulting them in.
                flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
                mapped = mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ)
        self._kept[key] = mapped
        while len(self._kept) > FILES_KEPT:
            self._kept.popitem(last=False)
        return mapped


def tensors_of(staged: StagedFile, mapped: mmap.mmap) -> Iterator[tuple[str, torch.Tensor]]:
    """Without a copy: they share the memory of the file."""
    for name, dtype_name, shape, offset in zip(
        staged.names, staged.dtypes, staged.shapes, staged.offsets_bytes, strict=True
    ):
        hit("weights.tensor")
        dtype = cast(torch.dtype, getattr(torch, dtype_name))
        count = math.prod(shape)
        yield name, torch.frombuffer(mapped, dtype=dtype, count=count, offset=offset).view(shape)


OtherEngine = WeightTransferEngine[WeightTransferInitInfo, WeightTransferUpdateInfo]


@dataclass(kw_only=True)
class JoinInfo(WeightTransferInitInfo):
    backend: str
    rendezvous: dict[str, object]
    """Fields that the backend defines."""
    seconds: float
    """Maximum duration of each operation."""


class WeightEngine(WeightTransferEngine[JoinInfo, StagedFile]):
    init_info_cls = JoinInfo
    update_info_cls = StagedFile
    supports_draft_weight_update = False

    _mappings = Mappings()
    _preparation: Preparation | None = None
    _portion_ended = 0.0
    _other: OtherEngine | None = None
    _begun = False
    """Whether the other backend is in the middle of an update."""
    _changed = False
    """Whether that update has changed the model."""
    _problem: BaseException | None = None

    # A version in a file

    def prepare(self, staged: StagedFile) -> bool:
        """Begin to prepare a version, in place of any other. Returns whether `go_on` has work to do. If
        not, or after `go_on` raised, `receive_weights` does everything."""
        self.leave_preparation()
        mapped = self._mappings.open(Path(staged.path))
        reason = why_not(self.model, self.vllm_config)
        if reason is None and not has_room(len(mapped)):
            reason = "there is no room for a second copy"
        if reason is not None:
            logger.info("not preparing weights ahead of the switch: %s", reason)
            return False
        self._preparation = Preparation(self.model, tensors_of(staged, mapped))
        self._portion_ended = time.monotonic()
        return True

    def go_on(self) -> bool:
        """Continue for as long as the previous step took, but at least `PORTION_SECONDS`. Returns whether
        there is more to do. Raises what loading raises, and then gives the preparation up."""
        if self._preparation is None:
            return False
        began = time.monotonic()
        # Otherwise a model with long steps would get its weights hundreds of steps late.
        limit = began + max(PORTION_SECONDS, began - self._portion_ended)
        try:
            while more := self._preparation.go_on():
                if time.monotonic() >= limit:
                    break
        except BaseException:
            self.leave_preparation()
            raise
        self._portion_ended = time.monotonic()
        return more

    def leave_preparation(self) -> None:
        if self._preparation is not None:
            self._preparation.end()
            self._preparation = None

    def receive_weights(self, update_info: StagedFile) -> None:
        preparation = self._preparation
        if update_info.prepared and preparation is not None and preparation.ready:
            preparation.place()
            self._preparation = None
            return
        self.leave_preparation()
        mapped = self._mappings.open(Path(update_info.path))
        reload_model(self.model, self.model_config, tensors_of(update_info, mapped))
        self._renew_tied_head()

    def _renew_tied_head(self) -> None:
        config = cast(object, self.model_config.hf_text_config)
        if self.device.type != "cpu" or not getattr(config, "tie_word_embeddings", False):
            return
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead):
                method = cast(ProcessesWeights, module.quant_method)
                method.process_weights_after_loading(module)

    # A version through another backend, and what vLLM calls for either

    def init_transfer_engine(self, init_info: JoinInfo) -> None:
        """Leaves the previous collective."""
        self.shutdown()
        if init_info.backend == BACKEND:
            raise ValueError(f"{BACKEND!r} takes no collective")
        config = WeightTransferConfig(backend=init_info.backend)
        other = cast(
            OtherEngine,
            WeightTransferEngineFactory.create_engine(  # pyright: ignore[reportUnknownMemberType]
                config, self.vllm_config, self.device, self.model
            ),
        )
        try:
            other.init_transfer_engine(other.parse_init_info(_within_seconds(other, init_info)))
        except BaseException:
            other.shutdown()
            raise
        self._other = other

    def start_weight_update(self) -> None:
        """Reset the state only: the first update shows which backend it is for."""
        self._begun = self._changed = False
        self._problem = None

    def update_weights(self, update_info: dict[str, object]) -> None:
        """Load one staged file, or one round of a collective."""
        if ROUND not in update_info:
            super().update_weights(update_info)
            return
        with self._noting_problems() as other:
            if not self._begun:
                self._begun = True
                self.leave_preparation()
                self._changed = not getattr(other, "stages_first", False)
                other.start_weight_update()
            other.update_weights(cast("dict[str, object]", update_info[ROUND]))

    def finish_weight_update(self) -> None:
        if self._begun:
            with self._noting_problems() as other:
                self._changed = True
                other.finish_weight_update()
                self._renew_tied_head()
            self._begun = False

    def abandon(self) -> dict[str, object]:
        """End an unfinished update and leave the collective."""
        if self._begun and self._changed:
            forget_reload(self.model)
        outcome: dict[str, object] = {"changed": self._begun and self._changed}
        if self._problem is not None:
            outcome["problem"] = str(self._problem)
        if isinstance(self._problem, WeightRefused):
            outcome["reason"] = self._problem.reason.value
            outcome["metadata"] = self._problem.metadata
        self._begun = self._changed = False
        self._problem = None
        self.shutdown()
        return outcome

    def shutdown(self) -> None:
        other, self._other = self._other, None
        if other is not None:
            other.shutdown()

    @contextlib.contextmanager
    def _noting_problems(self) -> Generator[OtherEngine]:
        if self._other is None:
            raise RuntimeError("no collective was joined")
        try:
            yield self._other
        except BaseException as error:
            # vLLM passes on the text only.
            self._problem = error
            raise


def _within_seconds(engine: OtherEngine, join: JoinInfo) -> dict[str, object]:
    """The rendezvous, with the backend's own deadline, if it has one, capped at this server's."""
    fields = {field.name: field.default for field in dataclasses.fields(engine.init_info_cls)}
    if "timeout_seconds" not in fields:
        return join.rendezvous
    asked = join.rendezvous.get("timeout_seconds", fields["timeout_seconds"])
    limit = min(float(cast(float, asked)), join.seconds)
    return {**join.rendezvous, "timeout_seconds": limit}


class _Worker(Protocol):
    weight_transfer_engine: WeightEngine
    vllm_config: VllmConfig
    _weight_update_active: bool


class WorkerExtension:
    def prepare_weights(self, update: dict[str, object] | None) -> bool:
        """Prepare one portion: the first one of the given file, or the next one for None. Returns whether
        there is more to do. Raises what `WeightEngine.go_on` raises."""
        worker = cast(_Worker, self)
        engine = worker.weight_transfer_engine
        with set_current_vllm_config(worker.vllm_config):
            if update is not None and not engine.prepare(engine.parse_update_info(update)):
                return False
            return engine.go_on()

    def abandon_collective(self) -> Mapping[str, object]:
        """vLLM itself has no way to end a session without finishing it."""
        worker = cast(_Worker, self)
        worker._weight_update_active = False  # pyright: ignore[reportPrivateUsage]
        return worker.weight_transfer_engine.abandon()


WeightTransferEngineFactory.register_engine(  # pyright: ignore[reportUnknownMemberType]
    BACKEND, WeightEngine
)
