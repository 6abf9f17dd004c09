"""The trainer's copy of the policy's weights for upload, packed once for all servers.

The copy keeps the bytes of the newest version until the next `fill`. A server that comes back empty can
then be sent them again without the model. If differences are sent, there are two payloads. One holds what
the servers sample (`base`). The other one is filled and compared with it, and becomes the base once a
server has switched. Without memory for a second payload, every version is sent whole.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from penstock.trainer.core.aio import ComputeThread
from penstock.trainer.weights.payload import Payload
from penstock.trainer.weights.probe import Probe
from penstock.v1 import weights_pb2
from penstock.wire import differences
from penstock.wire.upload import Piece

log = logging.getLogger(__name__)

# Yields every tensor of a full upload with its name, always in the same order.
Weights = Callable[[], Iterator[tuple[str, Tensor]]]

# Memory that must stay free beyond a second payload, as a share of its size.
SPARE_MEMORY_RATIO = 0.25
MEMORY_INFO = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class Held:
    """The version that a server samples, with the trainer's copy of its bytes."""

    payload: Payload
    weight_version: int


@dataclass(frozen=True, slots=True)
class Parcel:
    """What is sent for one version: all of it, or its difference from a base."""

    weight_version: int
    payload: Payload
    """The whole version, even if only a difference is sent."""
    specs: tuple[weights_pb2.TensorSpec, ...]
    """Every tensor, in the order of `pieces`."""
    pieces: tuple[Piece, ...]
    """The bytes to send, in order."""
    changed_elements_ratio: float | None = None
    """Share of elements that differ from the base; None if the parcel is whole."""
    base: Held | None = None
    """None if the parcel is whole."""

    @property
    def is_delta(self) -> bool:
        return self.base is not None

    @property
    def base_weight_version(self) -> int:
        """Zero if the parcel is whole."""
        return self.base.weight_version if self.base else 0

    @property
    def length_bytes(self) -> int:
        """Number of bytes to send."""
        return sum(map(len, self.pieces))


def whole(payload: Payload, weight_version: int) -> Parcel:
    return Parcel(weight_version, payload, payload.specs, (payload.file.view,))


def difference(payload: Payload, weight_version: int, base: Held) -> Parcel:
    """Make the bitwise difference that turns `base` into `payload`; equal tensors take no bytes."""
    if payload is base.payload:
        same = tuple(differences.same(spec) for spec in payload.specs)
        return Parcel(weight_version, payload, same, (), 0.0, base)
    found = differences.difference(payload.specs, base.payload.elements(), payload.elements())
    return Parcel(weight_version, payload, found.specs, found.pieces, found.changed_part, base)


class WeightCopy:
    """One version as bytes, and the previous one if differences are computed from it."""

    def __init__(self, compute: ComputeThread, probe: Probe | None = None) -> None:
        self._compute = compute
        self._probe = probe
        self.dtype = ""
        """The dtype in which the servers take weights; known before the first `fill`."""
        self.payloads: list[Payload] = []
        self.filled: Payload | None = None
        """The payload that the next upload sends; None before the first `fill`."""
        self.version = 0
        """Of `filled`; zero before the first."""
        self.base: Held | None = None
        """The version that differences are computed from."""
        self.measured: weights_pb2.WeightProbe | None = None
        """The probe, scored with these weights."""
        self.has_room_for_two = True
        """Whether there was memory for a second payload when it was needed."""
        self._difference: Parcel | None = None

    @property
    def probe_is_chosen(self) -> bool:
        """Whether a header needs the probe's score, known only once the payload is filled."""
        return self._probe is not None and bool(self._probe.token_ids)

    def reusable(self, *, keeps_base: bool) -> Payload | None:
        """What `allocate` would return, if it need not allocate. An upload can then begin earlier."""
        if not keeps_base and len(self.payloads) > 1:
            return None
        return self._free_payload()

    async def allocate(self, weights: Weights, *, keeps_base: bool) -> Payload:
        """The payload to fill next. Without `keeps_base`, no difference will be made from it."""
        return await self._compute.run(self._allocate, weights, keeps_base)

    async def fill(self, payload: Payload, weights: Weights, *, in_chunks: bool = False) -> None:
        """Copy the weights and score the probe with them. `in_chunks` also computes chunk checksums."""
        self._difference = None
        await self._compute.run(self._fill, payload, weights, in_chunks)

    async def pack(self, *, as_difference: bool) -> Parcel:
        """The filled version as it is sent. A difference is computed once for all senders."""
        return await self._compute.run(self._pack, as_difference)

    def relabel(self, weight_version: int) -> None:
        """Give the bytes a new version number."""
        self.version = weight_version
        self._difference = None

    def become_base(self) -> None:
        """Make the filled version the base, because a server samples it now."""
        assert self.filled is not None
        self.base = Held(self.filled, self.version)
        self._difference = None

    def close(self) -> None:
        for payload in self.payloads:
            payload.close()
        self.payloads.clear()
        self.filled = self.base = self._difference = None

    def _free_payload(self) -> Payload | None:
        """A payload other than the base. One is enough until a switch makes it the base."""
        base = self.base.payload if self.base else None
        return next((payload for payload in self.payloads if payload is not base), None)

    # The following run in the compute thread.

    def _allocate(self, weights: Weights, keeps_base: bool) -> Payload:
        while not keeps_base and len(self.payloads) > 1:
            self.payloads.pop().close()
        if (payload := self._free_payload()) is not None:
            return payload
        try:
            if self.base is not None:
                _check_memory(self.base.payload.length_bytes)
            payload = Payload(weights(), self.dtype)
        except OSError as error:
            if self.base is None:
                raise
            log.warning(
                "no memory for a second copy of the weights (%s); sending every version whole",
                error.strerror,
            )
            payload = self.base.payload
            self.has_room_for_two, self.base = False, None
            return payload
        self.payloads.append(payload)
        return payload

    def _fill(self, payload: Payload, weights: Weights, in_chunks: bool) -> None:
        payload.fill(weights(), in_chunks=in_chunks)
        if self._probe is not None:
            self.measured = self._probe.measure(payload.tensors())

    def _pack(self, as_difference: bool) -> Parcel:
        if self.filled is None:
            raise RuntimeError("pack was called before fill")
        if not as_difference or self.base is None:
            return whole(self.filled, self.version)
        if self._difference is None:
            self._difference = difference(self.filled, self.version, self.base)
        return self._difference


def _check_memory(length_bytes: int) -> None:
    """Raise OSError if too little would be left: the kernel would sooner kill a process than refuse."""
    for line in MEMORY_INFO.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            available = int(value.split()[0]) * 1024
            if available < length_bytes * (1 + SPARE_MEMORY_RATIO):
                raise OSError(0, f"{available >> 20} MiB are free, {length_bytes >> 20} needed")
