"""A gloo group of a trainer and an engine's workers, and the layout of the weights that it broadcasts.

    trainer   Meeting (listens) -> asks the server to join -> meeting.lead() -> broadcast, broadcast, ...
    worker    join_group() -> broadcast, broadcast, ...

The trainer is rank 0. It listens before it asks workers to join, so a worker that cannot connect fails at
once. Each wait ends with GroupBroken at the group's deadline, or immediately if gloo notices that the peer
is gone. A broken group cannot be used again.

A version is sent as one sequence of bytes: its tensors in order, each at a multiple of ALIGNMENT. The
sequence is cut into buckets, and each bucket is one broadcast. A tensor may span several buckets, and a
bucket may hold many tensors.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any, cast

import torch
from torch.distributed import (
    BroadcastOptions,
    ProcessGroupGloo,
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)

_PLACE = re.compile(r"^\[[^]]*\.cc:\d+\] ")

ALIGNMENT = 64
LEADER = 0


class GroupBroken(Exception):
    """A peer is gone, or did not arrive in time."""


class Meeting:
    """The rendezvous of a group, created by its leader."""

    def __init__(self, address: str, port: int, world_size: int, timeout_seconds: float) -> None:
        """Starts to listen; port 0 picks a free port. Raises GroupBroken if it cannot listen."""
        self._address = address
        self._world_size = world_size
        self._timeout_seconds = timeout_seconds
        self._store = _open_store(address, port, world_size, timeout_seconds, listen=True)
        self.port = self._store.port

    def lead(self) -> GlooGroup:
        """Waits for all workers to join. Raises GroupBroken."""
        return GlooGroup(
            self._store, LEADER, self._world_size, self._address, self._timeout_seconds
        )


def join_group(
    address: str, port: int, rank: int, world_size: int, timeout_seconds: float
) -> GlooGroup:
    """Joins an open meeting as a worker. Raises GroupBroken."""
    try:
        # Checked first, because the store would keep retrying.
        with socket.create_connection((address, port), timeout_seconds) as found:
            own_address = cast("tuple[str, int]", found.getsockname())[0]
    except OSError as error:
        raise GroupBroken(f"no trainer listens at {address}:{port}: {error}") from error
    store = _open_store(address, port, world_size, timeout_seconds, listen=False)
    return GlooGroup(store, rank, world_size, own_address, timeout_seconds)


class GlooGroup:
    """A group whose members have all joined."""

    def __init__(
        self,
        store: TCPStore,
        rank: int,
        world_size: int,
        own_address: str,
        timeout_seconds: float,
    ) -> None:
        # torch's stubs lack most of this class.
        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        # By default gloo resolves the host's name, which need not lead back to this host.
        options._devices = [gloo.create_device(hostname=own_address)]
        options._timeout = timedelta(seconds=timeout_seconds)
        self.timeout_seconds = timeout_seconds
        """Maximum duration of a single wait."""
        try:
            self._group = gloo(store, rank, world_size, options)
        except RuntimeError as error:
            raise GroupBroken(f"the group did not meet: {_said(error)}") from error
        # Keeps the store alive: the leader's serves the whole group.
        self._store = store

    def broadcast(self, buffer: torch.Tensor, seconds: float | None = None) -> None:
        """Sends the leader's buffer into every other member's; returns when this member is done.

        Raises GroupBroken, after `seconds` at the latest.
        """
        limit = self.timeout_seconds if seconds is None else min(seconds, self.timeout_seconds)
        options = BroadcastOptions()
        options.rootRank = LEADER
        options.rootTensor = 0
        options.timeout = timedelta(seconds=max(limit, 0.001))
        try:
            # Does not use its future: a failing callback in gloo ends the process.
            self._group.broadcast([buffer], options).wait()
        except RuntimeError as error:
            raise GroupBroken(f"the group broke: {_said(error)}") from error


def lay_out(lengths: Iterable[int]) -> tuple[list[int], int]:
    """The offsets of tensors with these lengths, and the total length; all in bytes."""
    offsets: list[int] = []
    end = 0
    for length in lengths:
        offsets.append(end)
        end += -(-length // ALIGNMENT) * ALIGNMENT
    return offsets, end


def buckets(length_bytes: int, bucket_bytes: int) -> Iterator[tuple[int, int]]:
    """Yields the begin and end of each bucket, in bytes."""
    for begin in range(0, length_bytes, bucket_bytes):
        yield begin, min(begin + bucket_bytes, length_bytes)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes as a flat tensor; a copy only if it is not contiguous."""
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
    """The first line of torch's message, without the position in torch's sources."""
    return _PLACE.sub("", str(error).partition("\n")[0])
