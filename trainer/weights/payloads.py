"""The payloads of a publisher: one, or two where differences are sent and there is memory for it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from torch import Tensor

from penstock.trainer.weights.payload import Payload

log = logging.getLogger(__name__)

# Every tensor of a full upload with its name, in an order that does not change.
Weights = Callable[[], Iterator[tuple[str, Tensor]]]

# Memory beyond a second payload that has to be free before it is allocated.
SPARE_MEMORY_RATIO = 0.25
MEMORY_INFO = Path("/proc/meminfo")


class Payloads:
    """Gives out the payload to fill next; in the compute thread, since an allocation takes a while."""

    def __init__(self) -> None:
        self._all: list[Payload] = []

    def __len__(self) -> int:
        """How many there are."""
        return len(self._all)

    def free(self, weights: Weights, dtype: str, base: Payload | None) -> Payload | None:
        """One that is not `base`; None where there is no memory for it."""
        if (payload := self.reusable(base)) is not None:
            return payload
        if base is None:
            return self._allocate(weights, dtype)
        try:
            _check_memory(base.length_bytes)
            return self._allocate(weights, dtype)
        except OSError as error:
            log.warning(
                "no memory for a second copy of the weights (%s): every version is sent whole",
                error.strerror,
            )
            return None

    def reusable(self, base: Payload | None) -> Payload | None:
        """One that is there, and is not `base`; in any thread, at no cost."""
        # Until a switch makes a base of one, the first is enough.
        return next((payload for payload in self._all if payload is not base), None)

    def keep_one(self) -> None:
        """Gives back the memory of a second one."""
        while len(self._all) > 1:
            self._all.pop().close()

    def close(self) -> None:
        """Gives back the memory of all."""
        for payload in self._all:
            payload.close()
        self._all.clear()

    def _allocate(self, weights: Weights, dtype: str) -> Payload:
        payload = Payload(weights(), dtype)
        self._all.append(payload)
        return payload


def _check_memory(length_bytes: int) -> None:
    """Raises OSError where allocating so much would leave too little: the kernel would rather end a
    process than refuse."""
    for line in MEMORY_INFO.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            available = int(value.split()[0]) * 1024
            if available < length_bytes * (1 + SPARE_MEMORY_RATIO):
                raise OSError(0, f"{available >> 20} MiB are free, {length_bytes >> 20} needed")
