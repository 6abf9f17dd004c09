"""Finds the engine servers of a pool by looking up names and reading files.

    HOST:PORT        that address
    dns:HOST:PORT    every address of the name, such as a headless service in Kubernetes
    file:PATH        one HOST:PORT a line; text after a # is ignored

Removing an engine and adding it again is costly, because it then gets all weights. So an entry keeps its
addresses if its lookup fails or its file is empty (it may be about to be written). A DNS answer may be
incomplete, so an address of a name is only removed after several lookups in a row without it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.wire.channel import split_address

logger = logging.getLogger(__name__)

LOOKS_WITHOUT = 3
"""Consecutive lookups without an address after which it is removed from a name."""


class Discovery:
    def __init__(self, entries: Sequence[str]) -> None:
        self._entries = entries
        self._found: dict[str, list[str]] = {}
        self._problems: dict[str, str] = {}
        self._without: dict[str, dict[str, int]] = {}
        """For each name: addresses missing in its last answer, and for how many answers in a row."""

    @property
    def is_fixed(self) -> bool:
        """Whether every entry is an address."""
        return not any(entry.startswith(("dns:", "file:")) for entry in self._entries)

    async def look(self) -> list[str]:
        """All current addresses, without duplicates."""
        for entry in self._entries:
            try:
                found = await _look(entry)
                self._found[entry] = self._with_those_just_gone(entry, found)
            except (OSError, ValueError) as error:
                if self._problems.get(entry) != str(error):
                    logger.warning("cannot look up %s, keeping its addresses: %s", entry, error)
                self._problems[entry] = str(error)
                self._found.setdefault(entry, [])
            else:
                self._problems.pop(entry, None)
        every = (address for entry in self._entries for address in self._found[entry])
        return list(dict.fromkeys(every))

    def _with_those_just_gone(self, entry: str, found: list[str]) -> list[str]:
        if not entry.startswith("dns:"):
            return found
        before = self._without.get(entry, {})
        gone = (address for address in self._found.get(entry, []) if address not in found)
        counts = {address: before.get(address, 0) + 1 for address in gone}
        kept = {address: count for address, count in counts.items() if count < LOOKS_WITHOUT}
        self._without[entry] = kept
        return [*found, *kept]

    async def run(self, seconds: float, tell: Callable[[Sequence[str]], None]) -> None:
        """Calls `tell` every `seconds`. Returns at once if the addresses cannot change."""
        while not self.is_fixed:
            await asyncio.sleep(seconds)
            tell(await self.look())


async def _look(entry: str) -> list[str]:
    kind, _, rest = entry.partition(":")
    if kind == "file":
        text = await asyncio.to_thread(Path(rest).read_text)
        lines = [line.partition("#")[0].strip() for line in text.splitlines()]
        addresses = [line for line in lines if line]
        for address in addresses:
            split_address(address)
        if not addresses:
            raise ValueError("the file lists no engine")
        return addresses
    if kind != "dns":
        return [entry]
    host, port = split_address(rest)
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    hosts = sorted({str(address[0]) for *_, address in found})
    return [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts]
