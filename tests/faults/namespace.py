"""A network link that can go dark: a namespace behind a veth pair. Needs root and iproute2."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
from collections.abc import Generator
from dataclasses import dataclass

NUMBERS = itertools.count()


@dataclass(frozen=True)
class Namespace:
    """A namespace at one end of a link. This process is at the other end."""

    name: str
    address: str
    """The address of servers inside it."""
    link: str

    @property
    def prefix(self) -> tuple[str, ...]:
        """The prefix of a command that is to run inside."""
        return "ip", "netns", "exec", self.name

    def go_dark(self) -> None:
        """Drop the packets of both directions silently."""
        _ip("-n", self.name, "link", "set", self.link, "down")

    def go_on(self) -> None:
        """Let packets through again."""
        _ip("-n", self.name, "link", "set", self.link, "up")


def why_not() -> str:
    """Why no namespace can be made here; "" if one can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "there is no `ip` (iproute2)"
    try:
        with namespace():
            return ""
    except subprocess.CalledProcessError as error:
        return f"`{' '.join(error.cmd)}` failed: {error.stderr.decode().strip()}"


@contextlib.contextmanager
def namespace() -> Generator[Namespace]:
    """Make a namespace, and remove it with everything that is left in it. Raises CalledProcessError."""
    number = next(NUMBERS)
    name = f"penstock-{os.getpid()}-{number}"
    outside, inside = f"pk{os.getpid() % 100_000}o{number}", f"pk{os.getpid() % 100_000}i{number}"
    # From 198.18.0.0/15, which is reserved for network tests.
    base = (os.getpid() * 64 + number) % (1 << 15) * 4
    first, second = (
        f"198.{18 + (base >> 16)}.{base >> 8 & 255}.{(base & 255) + n}" for n in (1, 2)
    )
    _ip("netns", "add", name)
    try:
        _ip("link", "add", outside, "type", "veth", "peer", "name", inside, "netns", name)
        _ip("addr", "add", f"{first}/30", "dev", outside)
        _ip("link", "set", outside, "up")
        _ip("-n", name, "addr", "add", f"{second}/30", "dev", inside)
        _ip("-n", name, "link", "set", inside, "up")
        _ip("-n", name, "link", "set", "lo", "up")
        yield Namespace(name, second, inside)
    finally:
        # This removes its end of the pair, and with it the other end.
        _ip("netns", "del", name)


def _ip(*arguments: str) -> None:
    subprocess.run(("ip", *arguments), check=True, capture_output=True)
