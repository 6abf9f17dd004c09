"""Which engine servers there are, where nobody lists them: names that are looked up, files that are read.

    HOST:PORT        that address
    dns:HOST:PORT    every address of the name, such as a headless service's of Kubernetes
    file:PATH        HOST:PORT a line; what follows a # is not read

What cannot be looked up keeps the addresses it had: a name server that is away takes no engine with it.
Nor does a file without any, which may be about to be written: who is listed anew is given all weights.
And an answer of a name server may lack some, for it was cut short, or an engine was not ready in that
moment: an address of a name goes once several looks in a row are without it.
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
"""In a row, after which an address of a name is there no more."""


class Discovery:
    """Looks for addresses again and again."""

    def __init__(self, entries: Sequence[str]) -> None:
        self._entries = entries
        self._found: dict[str, list[str]] = {}
        self._problems: dict[str, str] = {}
        self._without: dict[str, dict[str, int]] = {}
        """Of each name the addresses that its last answer lacked, and how many in a row did."""

    @property
    def is_fixed(self) -> bool:
        """Whether every entry is an address."""
        return not any(entry.startswith(("dns:", "file:")) for entry in self._entries)

    async def look(self) -> list[str]:
        """Every address there is now, each once."""
        for entry in self._entries:
            try:
                found = await _look(entry)
                self._found[entry] = self._with_those_just_gone(entry, found)
            except (OSError, ValueError) as error:
                if self._problems.get(entry) != str(error):
                    logger.warning("%s cannot be looked up: %s", entry, error)
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
        """Tells of the addresses every so many seconds, where they can change."""
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
            raise ValueError("it names no engine")
        return addresses
    if kind != "dns":
        return [entry]
    host, port = split_address(rest)
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    hosts = sorted({str(address[0]) for *_, address in found})
    return [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts]
