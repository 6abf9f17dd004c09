"""Computes what changed from the active version to the next one, for engine servers that hold the former.

A hub has both whole: the trainer's last upload, and the previous version, which it holds for joining
engines. So it compares them itself, however the new one was uploaded: once for each version, when the
first engine server could use the difference. It never does if all engines are on its own host, because
they read its memory.

What a failure does. The version is sent whole if the hub does not hold the base, if the base is an adapter
or has other tensors, if the tree would carry fewer bytes out of the hub, and to an engine server that
turns out not to have the base.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.server.engine.protocol import StagedTensor, StagedWeights
from penstock.server.weights.staging.manifest import FLOATS
from penstock.v1 import weights_pb2
from penstock.wire import differences, sparse

if TYPE_CHECKING:
    from numpy.typing import NDArray

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sendable:
    """A version, encoded as its difference from another one."""

    base_version: int
    """As the pool's number."""
    tensors: Sequence[weights_pb2.TensorSpec]
    payload: memoryview


@dataclass(eq=False)
class Differing:
    """The difference of one version from the previous one, computed on first use."""

    base_version: int
    open_base: Callable[[], AbstractAsyncContextManager[StagedWeights | None]]
    most_bytes: int
    """Size up to which it is worth sending to every host."""
    _making: asyncio.Task[Sendable | None] | None = None

    async def get(
        self, specs: Sequence[weights_pb2.TensorSpec], version: memoryview
    ) -> Sendable | None:
        """None if the version is to be sent whole. `specs` and `version` are those of its full upload."""
        if self._making is None:
            self._making = asyncio.create_task(
                self._make(specs, version), name=f"the difference from version {self.base_version}"
            )
        return await asyncio.shield(self._making)

    async def close(self) -> None:
        """Return once the comparison no longer reads the version. Not to be used afterwards."""
        if self._making is not None:
            # Work in a thread cannot be cancelled, so it runs to its end.
            await asyncio.wait([self._making])

    async def _make(
        self, specs: Sequence[weights_pb2.TensorSpec], version: memoryview
    ) -> Sendable | None:
        async with self.open_base() as base:
            if base is None or not _comparable(specs, base):
                return None
            try:
                found = await asyncio.to_thread(_compare, specs, version, base)
            except OSError as error:
                problem = "cannot read version %d to compare, sending whole weights: %s"
                logger.error(problem, self.base_version, error)
                return None
        length = found.length_bytes
        if length > self.most_bytes:
            logger.info("sending whole weights, the difference would take %d bytes", length)
            return None
        # Copied, because the version's memory may be released before the difference has been sent.
        return Sendable(self.base_version, found.specs, memoryview(b"".join(found.pieces)))


def _comparable(specs: Sequence[weights_pb2.TensorSpec], base: StagedWeights) -> bool:
    """Whether both have the same tensors, in the same order, of dtypes that can be compared."""
    ours = [(spec.name, spec.dtype, spec.length_bytes) for spec in specs]
    theirs = [(tensor.name, tensor.dtype, tensor.length_bytes) for tensor in base.tensors]
    return ours == theirs and all(FLOATS[s.dtype].bits.itemsize in sparse.WIDTHS for s in specs)


def _compare(
    specs: Sequence[weights_pb2.TensorSpec], version: memoryview, base: StagedWeights
) -> differences.Difference:
    with (
        base.path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped,
        memoryview(mapped) as view,
    ):
        # The base can be unmapped only after every view of it is gone, so no variable holds its arrays.
        return differences.difference(specs, _arrays(base.tensors, view), _arrays(specs, version))


def _arrays(
    tensors: Sequence[StagedTensor] | Sequence[weights_pb2.TensorSpec], memory: memoryview
) -> list[NDArray[Any]]:
    return [
        np.frombuffer(
            memory[t.offset_bytes : t.offset_bytes + t.length_bytes], FLOATS[t.dtype].bits
        )
        for t in tensors
    ]
