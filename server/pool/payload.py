"""The bytes of a version that a hub sends to its engine servers."""

from __future__ import annotations

import copy
import mmap
import os
from collections.abc import Sequence

import xxhash

from penstock.common.memory_file import host_namespace
from penstock.server.engine.protocol import StagedWeights
from penstock.server.weights.adapter_manifest import AdapterShape
from penstock.server.weights.staging.assembly import lay_out
from penstock.v1 import weights_pb2
from penstock.wire import codec

Tensors = Sequence[weights_pb2.TensorSpec]


class VersionPayload:
    """The mapped bytes of a staged version, and the fields of its upload header."""

    def __init__(self, weights: StagedWeights, adapter: AdapterShape | None = None) -> None:
        """None for full weights. Blocks while it reads every byte for the checksums. Raises OSError."""
        self.weight_version = weights.weight_version
        self.adapter = adapter and weights_pb2.LoraAdapter.FromString(codec.encode(adapter.lora))
        self._descriptor = os.open(weights.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.host_namespace = host_namespace(self._descriptor)
            ends = (tensor.offset_bytes + tensor.length_bytes for tensor in weights.tensors)
            self.length_bytes = length = max(ends, default=0)
            mapped = mmap.mmap(self._descriptor, length, prot=mmap.PROT_READ) if length else b""
        except BaseException:
            os.close(self._descriptor)
            raise
        self.view = memoryview(mapped)
        # A path of this process, so that it exists exactly as long as the process.
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        self.tensors = [
            weights_pb2.TensorSpec(
                name=tensor.name,
                shape=tensor.shape,
                dtype=tensor.dtype,
                offset_bytes=tensor.offset_bytes,
                length_bytes=tensor.length_bytes,
                xxh3=xxhash.xxh3_64_intdigest(
                    self.view[tensor.offset_bytes : tensor.offset_bytes + tensor.length_bytes]
                ),
            )
            for tensor in weights.tensors
        ]

    @property
    def dense(self) -> Tensors:
        """As laid out by an engine server that assembled the version from a difference."""
        dense = copy.deepcopy(self.tensors)
        places, _ = lay_out((t.name, tuple(t.shape), t.dtype, t.length_bytes) for t in dense)
        for tensor, place in zip(dense, places, strict=True):
            tensor.offset_bytes = place.offset_bytes
        return dense

    def close(self) -> None:
        """Processes that have the file open can still read it."""
        os.close(self._descriptor)
