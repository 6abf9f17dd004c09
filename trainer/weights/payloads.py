"""A publisher's payloads: one, or two if differences are sent and there is enough memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from torch import Tensor

from penstock.trainer.weights.payload import Payload

log = logging.getLogger(__name__)

# Yields every tensor of a full upload with its name, always in the same order.
Weights = Callable[[], Iterator[tuple[str, Tensor]]]

# Memory that must stay free beyond a second payload, as a share of its size.
SPARE_MEMORY_RATIO = 0.25
MEMORY_INFO = Path("/proc/meminfo")


class Payloads:
    """Provides the payload to fill next. Allocation is slow, so use this in the compute thread."""

    def __init__(self) -> None:
        self._all: list[Payload] = []

    def __len__(self) -> int:
        """Number of allocated payloads."""
        return len(self._all)

    def free(self, weights: Weights, dtype: str, base: Payload | None) -> Payload | None:
        """Return a payload other than `base`; None if there is no memory for one."""
        if (payload := self.reusable(base)) is not None:
            return payload
        if base is None:
            return self._allocate(weights, dtype)
        try:
            _check_memory(base.length_bytes)
            return self._allocate(weights, dtype)
        except OSError as error:
            log.warning(
                "no memory for a second copy of the weights (%s); sending every version whole",
                error.strerror,
            )
            return None

    def reusable(self, base: Payload | None) -> Payload | None:
        """Return an allocated payload other than `base`, or None. Cheap, and safe in any thread."""
        # One payload is enough until a switch makes it the base.
        return next((payload for payload in self._all if payload is not base), None)

    def keep_one(self) -> None:
        """Free a second payload."""
        while len(self._all) > 1:
            self._all.pop().close()

    def close(self) -> None:
        """Free the memory of all payloads."""
        for payload in self._all:
            payload.close()
        self._all.clear()

    def _allocate(self, weights: Weights, dtype: str) -> Payload:
        payload = Payload(weights(), dtype)
        self._all.append(payload)
        return payload


def _check_memory(length_bytes: int) -> None:
    """Raise OSError if this allocation would leave too little memory.

    The kernel would sooner kill a process than refuse the allocation.
    """
    for line in MEMORY_INFO.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            available = int(value.split()[0]) * 1024
            if available < length_bytes * (1 + SPARE_MEMORY_RATIO):
                raise OSError(0, f"{available >> 20} MiB are free, {length_bytes >> 20} needed")
