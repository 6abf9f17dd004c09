"""A gloo group of a trainer and the workers of an engine, and how weights lie in what it broadcasts.

    trainer   Meeting (listens) -> asks the server to join -> meeting.lead() -> broadcast, broadcast, ...
    worker    join_group() -> broadcast, broadcast, ...

The trainer is rank 0. It listens before it asks anybody to join, so that a worker that finds nobody there
need not wait. Each wait ends with GroupBroken at the group's deadline, and at once where gloo notices that
the other side is gone; a group that broke is of no further use.

A version travels as one run of bytes: its tensors in order, each at a multiple of ALIGNMENT. The run is
cut into buckets, each of which is one broadcast; a tensor may span several, and a bucket hold many.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Protocol, cast

import torch
from torch.distributed import (
    BroadcastOptions,
    ProcessGroupGloo,
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
    Work,
)

_PLACE = re.compile(r"^\[[^]]*\.cc:\d+\] ")

ALIGNMENT = 64
LEADER = 0


class GroupBroken(Exception):
    """The other side is gone, or did not come in time."""


class Meeting:
    """Where a group meets; made by its leader."""

    def __init__(self, address: str, port: int, world_size: int, timeout_seconds: float) -> None:
        """Listens from here on; port 0 takes a free one. Raises GroupBroken where it cannot."""
        self._address = address
        self._world_size = world_size
        self._timeout_seconds = timeout_seconds
        self._store = _open_store(address, port, world_size, timeout_seconds, listen=True)
        self.port = self._store.port

    def lead(self) -> GlooGroup:
        """Waits for every worker. Raises GroupBroken."""
        return GlooGroup(
            self._store, LEADER, self._world_size, self._address, self._timeout_seconds
        )


def join_group(
    address: str, port: int, rank: int, world_size: int, timeout_seconds: float
) -> GlooGroup:
    """Joins a meeting that is being held, as a worker. Raises GroupBroken."""
    try:
        # The store would try again and again.
        with socket.create_connection((address, port), timeout_seconds) as found:
            own_address = cast("tuple[str, int]", found.getsockname())[0]
    except OSError as error:
        raise GroupBroken(f"nobody listens at {address}:{port}: {error}") from error
    store = _open_store(address, port, world_size, timeout_seconds, listen=False)
    return GlooGroup(store, rank, world_size, own_address, timeout_seconds)


class GlooGroup:
    """A group that has met."""

    def __init__(
        self,
        store: TCPStore,
        rank: int,
        world_size: int,
        own_address: str,
        timeout_seconds: float,
    ) -> None:
        gloo = cast("_Gloo", ProcessGroupGloo)
        options = gloo._Options()  # pyright: ignore[reportPrivateUsage]
        # By itself gloo resolves the host's name, which need not lead back to this host.
        options._devices = [gloo.create_device(hostname=own_address)]  # pyright: ignore[reportPrivateUsage]
        options._timeout = timedelta(seconds=timeout_seconds)  # pyright: ignore[reportPrivateUsage]
        self._timeout_seconds = timeout_seconds
        try:
            self._group = gloo(store, rank, world_size, options)
        except RuntimeError as error:
            raise GroupBroken(f"the group did not meet: {_said(error)}") from error
        # The leader's is what the others met through.
        self._store = store

    @property
    def timeout_seconds(self) -> float:
        """Longest time a single wait takes."""
        return self._timeout_seconds

    def broadcast(self, buffer: torch.Tensor, seconds: float | None = None) -> None:
        """Sends the leader's buffer into that of everybody else; returns when this side is done.

        Raises GroupBroken, after `seconds` at the latest.
        """
        limit = self._timeout_seconds if seconds is None else min(seconds, self._timeout_seconds)
        options = BroadcastOptions()
        options.rootRank = LEADER
        options.rootTensor = 0
        options.timeout = timedelta(seconds=max(limit, 0.001))
        try:
            # Not its future: a callback of gloo's that fails ends the process.
            self._group.broadcast([buffer], options).wait()
        except RuntimeError as error:
            raise GroupBroken(f"the group broke: {_said(error)}") from error


class _Broadcasts(Protocol):
    def broadcast(self, tensors: list[torch.Tensor], options: BroadcastOptions, /) -> Work: ...


class _Options(Protocol):
    _devices: list[object]
    _timeout: timedelta


class _Gloo(Protocol):
    """ProcessGroupGloo, with what torch's own stubs leave out."""

    def _Options(self) -> _Options: ...  # noqa: N802

    def create_device(self, *, hostname: str) -> object: ...

    def __call__(
        self, store: TCPStore, rank: int, size: int, options: _Options, /
    ) -> _Broadcasts: ...


def lay_out(lengths: Iterable[int]) -> tuple[list[int], int]:
    """Where each tensor of these lengths, in bytes, begins; and the length of all."""
    offsets: list[int] = []
    end = 0
    for length in lengths:
        offsets.append(end)
        end += -(-length // ALIGNMENT) * ALIGNMENT
    return offsets, end


def buckets(length_bytes: int, bucket_bytes: int) -> Iterator[tuple[int, int]]:
    """Begin and end of each bucket."""
    for begin in range(0, length_bytes, bucket_bytes):
        yield begin, min(begin + bucket_bytes, length_bytes)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's own bytes, flat; a copy only where it is not contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _open_store(
    address: str, port: int, world_size: int, timeout_seconds: float, *, listen: bool
) -> TCPStore:
    try:
        return TCPStore(
            address,
            port,
            world_size,
            listen,
            timedelta(seconds=timeout_seconds),
            wait_for_workers=False,
        )
    except (RuntimeError, ValueError) as error:
        doing = "listen" if listen else "meet"
        raise GroupBroken(f"cannot {doing} at {address}:{port}: {_said(error)}") from error


def _said(error: Exception) -> str:
    """The first line of what torch says, without where in its sources it says so."""
    return _PLACE.sub("", str(error).partition("\n")[0])
