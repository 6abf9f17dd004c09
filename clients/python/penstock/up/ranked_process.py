"""Processes that compute together, each placed separately: the trainer's ranks, as torchrun starts them.

They meet at rank 0's address. When one ends, the others end on their own (`trainer.ranks`), or are killed
after a while. The whole has ended when all ranks have.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.up.processes import THIS_HOST, Command, Running, halt

PARTING_SECONDS = 40.0
"""How long the other ranks have to end on their own after the first one ended."""


def rank_name(name: str, rank: int) -> str:
    return name if rank == 0 else f"{name}-rank-{rank}"


def rank_environments(hosts: Sequence[str], port: int, *, own_device: bool) -> list[dict[str, str]]:
    """The environment variables that give each rank its place, as torchrun sets them.

    `hosts` are the ranks' hosts; `port` is on rank 0's. With `own_device`, each rank sees only its own
    device, which then has the number zero.
    """
    one_host = len(set(hosts)) == 1
    said: list[dict[str, str]] = []
    for rank, host in enumerate(hosts):
        local_rank = 0 if own_device else hosts[:rank].count(host)
        place = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(hosts)),
            "LOCAL_RANK": str(local_rank),
            "MASTER_ADDR": THIS_HOST if one_host else hosts[0],
            "MASTER_PORT": str(port),
        }
        if one_host:
            # By default gloo resolves the host's name, which need not lead back to this host.
            place["GLOO_SOCKET_IFNAME"] = "lo"
        said.append(place)
    return said


class RankedProcess:
    """Processes that compute together, represented by rank 0."""

    def __init__(self, command: Command, ranks: Sequence[Running]) -> None:
        self.command = command
        self._ranks = ranks
        self._ending = asyncio.create_task(self._end())

    @property
    def pid(self) -> int:
        return self._ranks[0].pid

    @property
    def host(self) -> str:
        return self._ranks[0].host

    async def wait(self) -> int:
        """Returns the first non-zero exit status in rank order, once all ranks have ended; else zero."""
        return await asyncio.shield(self._ending)

    def signal(self, number: signal.Signals) -> None:
        """Rank 0 gets it; the other ranks end when it does."""
        self._ranks[0].signal(number)

    async def write(self, files: Mapping[Path, str]) -> None:
        await asyncio.gather(*(rank.write(files) for rank in self._ranks))

    async def stop(self, patience: float) -> None:
        """Sends SIGTERM to rank 0, and kills all ranks after `patience` seconds."""
        await halt(self, self._ending, patience)

    def kill(self) -> None:
        for rank in self._ranks:
            rank.kill()

    def ending(self, status: int) -> str:
        """How rank 0 ended. If another rank made it end, its log names that rank."""
        return self._ranks[0].ending(status)

    async def _end(self) -> int:
        ends = [asyncio.create_task(rank.wait()) for rank in self._ranks]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait(ends, timeout=PARTING_SECONDS)
        self.kill()
        statuses = await asyncio.gather(*ends)
        return next((status for status in statuses if status), 0)
