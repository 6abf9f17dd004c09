"""Computes what changed from the active version to the next one, for engine servers that hold the former.

A hub has both whole: the trainer's last upload, and the previous version, which it holds for
joining engines. So it compares them itself, however the new one was uploaded. It does so once for
each version, and only when the first engine server could use the difference. If all engines are on
the hub's own host, it never does, because they read the hub's memory.

What a failure does. Without a difference, the version is sent whole. There is no difference if the
hub does not hold the base, or if the base is an adapter or has other tensors. The difference is
also not sent if the tree would carry fewer bytes out of the hub. An engine server that turns out
not to have the base is sent the whole version.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

import numpy as np

from penstock.server.engine.protocol import StagedWeights
from penstock.server.weights.staging.manifest import FLOATS
from penstock.v1 import weights_pb2
from penstock.wire import differences, sparse

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sendable:
    """A version, encoded as its difference from another one."""

    base_version: int
    """As the pool's number."""
    tensors: Sequence[weights_pb2.TensorSpec]
    payload: memoryview


class Differing:
    """The difference of one version from the previous one, computed on first use."""

    def __init__(
        self,
        base_version: int,
        open_base: Callable[[], AbstractAsyncContextManager[StagedWeights | None]],
        most_bytes: int,
    ) -> None:
        """`most_bytes` is the size up to which it is worth sending to every host."""
        self.base_version = base_version
        self._open_base = open_base
        self._most_bytes = most_bytes
        self._making: asyncio.Task[Sendable | None] | None = None

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
        async with self._open_base() as base:
            if base is None or not _comparable(specs, base):
                return None
            try:
                found = await asyncio.to_thread(_compare, specs, version, base)
            except OSError as error:
                logger.error(
                    "cannot read version %d to compare, sending whole weights: %s",
                    self.base_version,
                    error,
                )
                return None
        length = found.length_bytes
        if length > self._most_bytes:
            logger.info("sending whole weights, the difference would take %d bytes", length)
            return None
        # Copied, because the version's memory may be released before the difference has been sent.
        return Sendable(self.base_version, found.specs, memoryview(b"".join(found.pieces)))


def _comparable(specs: Sequence[weights_pb2.TensorSpec], base: StagedWeights) -> bool:
    """Whether both have the same tensors, in the same order, of dtypes that can be compared."""
    ours = [(spec.name, spec.dtype, spec.length_bytes) for spec in specs]
    theirs = [(tensor.name, tensor.dtype, tensor.length_bytes) for tensor in base.tensors]
    return ours == theirs and all(
        FLOATS[spec.dtype].bits.itemsize in sparse.WIDTHS for spec in specs
    )


def _compare(
    specs: Sequence[weights_pb2.TensorSpec], version: memoryview, base: StagedWeights
) -> differences.Difference:
    descriptor = os.open(base.path, os.O_RDONLY | os.O_CLOEXEC)
    with contextlib.closing(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)) as mapped:
        os.close(descriptor)
        view = memoryview(mapped)
        with view:
            # In a separate function: the base can be unmapped only after every view of it is gone.
            return _compared(specs, version, base, view)


def _compared(
    specs: Sequence[weights_pb2.TensorSpec],
    version: memoryview,
    base: StagedWeights,
    view: memoryview,
) -> differences.Difference:
    before = [
        np.frombuffer(view[t.offset_bytes : t.offset_bytes + t.length_bytes], FLOATS[t.dtype].bits)
        for t in base.tensors
    ]
    after = [
        np.frombuffer(
            version[s.offset_bytes : s.offset_bytes + s.length_bytes], FLOATS[s.dtype].bits
        )
        for s in specs
    ]
    return differences.difference(specs, before, after)
