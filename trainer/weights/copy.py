"""The trainer's copy of the policy's weights for upload, packed once for all servers.

The copy keeps the bytes of the newest version until the next `fill`. A server that comes back empty
can then be sent them again without the model.

If differences are sent, there are two payloads. One holds what the servers sample (`base`). The
other one is filled and compared with it, and becomes the base once a server has switched. Without
memory for a second payload, every version is sent whole.
"""

from __future__ import annotations

from penstock.trainer.core.aio import ComputeThread
from penstock.trainer.weights.parcel import Held, Parcel, difference, whole
from penstock.trainer.weights.payload import Payload
from penstock.trainer.weights.payloads import Payloads, Weights
from penstock.trainer.weights.probe import Probe
from penstock.v1 import weights_pb2


class WeightCopy:
    """One version as bytes, and the previous one if differences are computed from it."""

    def __init__(self, compute: ComputeThread, probe: Probe | None = None) -> None:
        self._compute = compute
        self._probe = probe
        self.payloads = Payloads()
        self.filled: Payload | None = None
        """The payload that the next upload sends; None before the first `fill`."""
        self.version = 0
        """The version whose bytes it holds; zero before the first."""
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
        """Return what `allocate` would, if it need not allocate. An upload can then begin earlier."""
        if not keeps_base and len(self.payloads) > 1:
            return None
        return self.payloads.reusable(self.base.payload if self.base else None)

    async def allocate(self, weights: Weights, dtype: str, *, keeps_base: bool) -> Payload:
        """Return the payload to fill next. Without `keeps_base`, no difference will be made from it."""
        return await self._compute.run(self._allocate, weights, dtype, keeps_base)

    async def fill(self, payload: Payload, weights: Weights, *, in_chunks: bool = False) -> None:
        """Copy the weights and score the probe with them. `in_chunks` also computes chunk checksums."""
        self._difference = None
        await self._compute.run(self._fill, payload, weights, in_chunks)

    async def pack(self, *, as_difference: bool) -> Parcel:
        """Return the filled version as it is sent. A difference is computed once for all senders."""
        return await self._compute.run(self._pack, as_difference)

    def relabel(self, weight_version: int) -> None:
        """Give the current bytes a new version number."""
        self.version = weight_version
        self._difference = None

    def become_base(self) -> None:
        """Make the filled version the base, because a server samples it now."""
        assert self.filled is not None
        self.base = Held(self.filled, self.version)
        self._difference = None

    def close(self) -> None:
        """Free the payloads' memory."""
        self.payloads.close()
        self.filled = self.base = self._difference = None

    # The following run in the compute thread.

    def _allocate(self, weights: Weights, dtype: str, keeps_base: bool) -> Payload:
        if not keeps_base:
            self.payloads.keep_one()
        payload = self.payloads.free(weights, dtype, self.base.payload if self.base else None)
        if payload is not None:
            return payload
        assert self.base is not None
        payload = self.base.payload
        self.has_room_for_two, self.base = False, None
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
