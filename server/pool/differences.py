"""What changed from the version that a pool samples to the next one, for engine servers that hold the
former.

A hub has both whole: what its trainer sent last, and the version before, which it holds for who joins. So
it compares them itself, however the new one came, once for each version and only when the first engine
server could take it. A pool whose engines are all on the hub's own host never asks: they read the hub's
memory.

What a failure does. Where there is no difference (the base is not held, is an adapter's, or is of other
tensors), or so much changed that the tree carries fewer bytes out of the hub, the version travels whole. An
engine server that has not the base after all is sent the whole.
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
    """A version as its difference from another one."""

    base_version: int
    """The pool's number."""
    tensors: Sequence[weights_pb2.TensorSpec]
    payload: memoryview


class Differing:
    """The difference of one version from the one before, made when it is first asked for."""

    def __init__(
        self,
        base_version: int,
        open_base: Callable[[], AbstractAsyncContextManager[StagedWeights | None]],
        most_bytes: int,
    ) -> None:
        """`most_bytes` is how long it may be to be worth sending to every host."""
        self.base_version = base_version
        self._open_base = open_base
        self._most_bytes = most_bytes
        self._making: asyncio.Task[Sendable | None] | None = None

    async def get(
        self, specs: Sequence[weights_pb2.TensorSpec], version: memoryview
    ) -> Sendable | None:
        """Of the version whose full upload says `specs` of its bytes; None where it is sent whole."""
        if self._making is None:
            self._making = asyncio.create_task(
                self._make(specs, version), name=f"the difference from version {self.base_version}"
            )
        return await asyncio.shield(self._making)

    async def close(self) -> None:
        """Nobody asks any more. Returns once nothing of the version is read from here."""
        if self._making is not None:
            # What is under way in a thread goes on to its end, whoever waits for it.
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
                logger.error("version %d cannot be compared with: %s", self.base_version, error)
                return None
        length = found.length_bytes
        if length > self._most_bytes:
            logger.info("a difference of %d bytes is not worth sending", length)
            return None
        # One after the other, and not as views of the version, which may be gone before it has been sent.
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
            # Every view of the base has to be gone before it can be unmapped.
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
