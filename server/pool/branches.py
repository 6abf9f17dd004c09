"""From whom the hosts of a pool take a version: the hub, or a host that has it or is being given it.

A tree: the hub hands the version on to so many hosts, each of those to as many more, and so on; with one
each it is a chain. A host hands on what it has while it still receives, so the last host has all of it
about as soon as the first, and no connection carries it more often than there are branches.

What a failure does. A host that fails is not in the tree any more. Those that took it from there take it
from another one, from the beginning, and after the second from the hub.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from penstock.server.pool.member import Member

PEERS_TRIED = 2
"""Hosts that are asked before the hub sends by itself."""


@dataclass(slots=True, eq=False)
class _Host:
    member: Member
    given: int = 0
    """How many take it from there."""


@dataclass(slots=True)
class Branches:
    """Who can hand one version on, in the order in which they came to it."""

    most: int
    """Hosts that each host, and the hub, hands it on to; with none the hub sends it to each."""
    spare_hub: bool = False
    """Whether the hub sends only where nobody else can."""
    _hub_given: int = 0
    _hosts: list[_Host] = field(default_factory=list[_Host])

    def add(self, members: Iterable[Member]) -> None:
        """These have it, or are being given it."""
        self._hosts += [_Host(member) for member in members if member.hands_on]

    def drop(self, member: Member) -> None:
        """It will not have it."""
        self._hosts = [host for host in self._hosts if host.member is not member]

    def take(self, tried: Collection[Member]) -> Member | None:
        """From whom the next host takes it, None for the hub; `tried` gave it nothing."""
        if self._hub_given < self.most and not self.spare_hub:
            self._hub_given += 1
            return None
        for host in self._hosts:
            untried = host.member not in tried and len(tried) < PEERS_TRIED
            if untried and host.given < self.most:
                host.given += 1
                return host.member
        self._hub_given += 1
        return None
