"""The policy's weights as the trainer uploads them: packed once, however many servers they go to.

The copy keeps the bytes of the newest version until the next `fill`, so that a server that comes back empty
can be given them again without the model.

Where differences are sent there are two payloads: one has what the servers sample (`base`), and the other
is filled, compared with it, and takes its place once a server has switched. Without memory for the second
one every version goes whole.
"""

from __future__ import annotations

from penstock.trainer.core.compute import ComputeThread
from penstock.trainer.weights.parcel import Held, Parcel, difference, whole
from penstock.trainer.weights.payload import Payload
from penstock.trainer.weights.payloads import Payloads, Weights
from penstock.trainer.weights.probe import Probe
from penstock.v1 import weights_pb2


class WeightCopy:
    """One version as bytes, and the one before where differences are made from it."""

    def __init__(self, compute: ComputeThread, probe: Probe | None = None) -> None:
        self._compute = compute
        self._probe = probe
        self.payloads = Payloads()
        self.filled: Payload | None = None
        """What the next upload is of; None before the first `fill`."""
        self.version = 0
        """Version whose bytes it holds; zero before the first."""
        self.base: Held | None = None
        """What differences are made from."""
        self.measured: weights_pb2.WeightProbe | None = None
        """The probe, scored with these weights."""
        self.has_room_for_two = True
        """Whether there was memory for a second payload when it was asked for."""
        self._difference: Parcel | None = None

    @property
    def probe_is_chosen(self) -> bool:
        """Whether a header has a score, which is known only once the payload is filled."""
        return self._probe is not None and bool(self._probe.token_ids)

    def reusable(self, *, keeps_base: bool) -> Payload | None:
        """What `allocate` returns where it has nothing to do: an upload begins the sooner."""
        if not keeps_base and len(self.payloads) > 1:
            return None
        return self.payloads.reusable(self.base.payload if self.base else None)

    async def allocate(self, weights: Weights, dtype: str, *, keeps_base: bool) -> Payload:
        """The payload to fill next; without `keeps_base` no difference will be made of it."""
        return await self._compute.run(self._allocate, weights, dtype, keeps_base)

    async def fill(self, payload: Payload, weights: Weights, *, in_chunks: bool = False) -> None:
        """Copies the weights, to travel `in_chunks` or not, and scores the probe with them."""
        self._difference = None
        await self._compute.run(self._fill, payload, weights, in_chunks)

    async def pack(self, *, as_difference: bool) -> Parcel:
        """The filled version as it travels; a difference is made once for all who ask for it."""
        return await self._compute.run(self._pack, as_difference)

    def relabel(self, weight_version: int) -> None:
        """These bytes are another version's too."""
        self.version = weight_version
        self._difference = None

    def become_base(self) -> None:
        """A server samples the filled version: what comes next can be a difference from it."""
        assert self.filled is not None
        self.base = Held(self.filled, self.version)
        self._difference = None

    def close(self) -> None:
        """Gives the memory back."""
        self.payloads.close()
        self.filled = self.base = self._difference = None

    # In the compute thread.

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
            raise RuntimeError("fill comes before upload")
        if not as_difference or self.base is None:
            return whole(self.filled, self.version)
        if self._difference is None:
            self._difference = difference(self.filled, self.version, self.base)
        return self._difference
