"""Processes that compute together, each placed by itself: the trainer's ranks, as torchrun starts them.

They meet at rank 0's address. Where one ends the others end by themselves (`trainer.ranks`), or are killed
after a while; then all of it has ended.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.up.processes import THIS_HOST, Command, Running

PARTING_SECONDS = 40.0
"""How long ranks have to end by themselves after the first of them did."""


def rank_name(name: str, rank: int) -> str:
    """What a rank is called; rank 0 has the name of the whole."""
    return name if rank == 0 else f"{name}-rank-{rank}"


def rank_environments(hosts: Sequence[str], port: int, *, own_device: bool) -> list[dict[str, str]]:
    """What tells each rank its place, as torchrun does. `hosts` are theirs, and rank 0 has the port.

    With `own_device` each sees but the device that is its own, which has the number zero then.
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
            # By itself gloo resolves the host's name, which need not lead back to this host.
            place["GLOO_SOCKET_IFNAME"] = "lo"
        said.append(place)
    return said


class RankedProcess:
    """Processes that compute together: rank 0 speaks for all."""

    def __init__(self, command: Command, ranks: Sequence[Running]) -> None:
        self.command = command
        self._ranks = ranks
        self._ending = asyncio.create_task(self._end())

    @property
    def pid(self) -> int:
        """Rank 0's."""
        return self._ranks[0].pid

    @property
    def host(self) -> str:
        """Rank 0's."""
        return self._ranks[0].host

    async def wait(self) -> int:
        """Rank 0's exit status, or where that is zero the first that is not, once all have ended."""
        return await asyncio.shield(self._ending)

    def signal(self, number: signal.Signals) -> None:
        """Sends it to rank 0, with which the others end."""
        self._ranks[0].signal(number)

    async def write(self, files: Mapping[Path, str]) -> None:
        """Writes files on the node of each."""
        await asyncio.gather(*(rank.write(files) for rank in self._ranks))

    async def stop(self, patience: float) -> None:
        """Asks rank 0 to end, and makes all after `patience` seconds."""
        self.signal(signal.SIGTERM)
        try:
            await asyncio.wait((self._ending,), timeout=patience)
        finally:
            self.kill()
        await self.wait()

    def kill(self) -> None:
        """Kills all."""
        for rank in self._ranks:
            rank.kill()

    def ending(self, status: int) -> str:
        """What became of rank 0, which says so where it ended for another."""
        return self._ranks[0].ending(status)

    async def _end(self) -> int:
        ends = [asyncio.create_task(rank.wait()) for rank in self._ranks]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait(ends, timeout=PARTING_SECONDS)
        self.kill()
        statuses = await asyncio.gather(*ends)
        return next((status for status in statuses if status), 0)
