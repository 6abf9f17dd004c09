"""A network of two ends that can go dark: a namespace behind a veth pair. Needs root, and iproute2."""

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
    """One of them; this process is at the other end."""

    name: str
    address: str
    """Of whatever listens inside."""
    link: str

    @property
    def prefix(self) -> tuple[str, ...]:
        """What goes before a command that is to run inside."""
        return "ip", "netns", "exec", self.name

    def go_dark(self) -> None:
        """Packets of either side are lost without a word."""
        _ip("-n", self.name, "link", "set", self.link, "down")

    def go_on(self) -> None:
        """They arrive again."""
        _ip("-n", self.name, "link", "set", self.link, "up")


def why_not() -> str:
    """Why there can be none here; empty where there can."""
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
    """Makes one, and removes it with whatever is left in it. Raises CalledProcessError."""
    number = next(NUMBERS)
    name = f"penstock-{os.getpid()}-{number}"
    outside, inside = f"pk{os.getpid() % 100_000}o{number}", f"pk{os.getpid() % 100_000}i{number}"
    # Of 198.18.0.0/15, which is set aside for tests of networks.
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
        # Its end of the pair goes with it, and with that the other.
        _ip("netns", "del", name)


def _ip(*arguments: str) -> None:
    subprocess.run(("ip", *arguments), check=True, capture_output=True)
