"""Decides where each host of a pool gets a version: the hub, or a host that has or receives it.

The hosts form a tree. The hub hands the version to `most` hosts, each of those to as many more, and
so on; with one each, it is a chain. A host passes on what it has while it still receives. So the
last host has all of it about as soon as the first, and no connection carries it more often than
there are branches.

What a failure does. A failed host leaves the tree. The hosts that took the version from it start
over with another one, and after a second failure with the hub.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from penstock.server.pool.member import Member

PEERS_TRIED = 2
"""Number of hosts that are asked before the hub sends the version itself."""


@dataclass(slots=True, eq=False)
class _Host:
    member: Member
    given: int = 0
    """Number of hosts that take the version from this one."""


@dataclass(slots=True)
class Branches:
    """The hosts that can hand one version on, in the order in which they got it."""

    most: int
    """Number of hosts that each host, and the hub, hands it on to; with 0, the hub sends it to
    each."""
    spare_hub: bool = False
    """Whether the hub sends only if no other host can."""
    _hub_given: int = 0
    _hosts: list[_Host] = field(default_factory=list[_Host])

    def add(self, members: Iterable[Member]) -> None:
        """Add hosts that have the version or are receiving it."""
        self._hosts += [_Host(member) for member in members if member.hands_on]

    def drop(self, member: Member) -> None:
        """Remove a host that will not have the version."""
        self._hosts = [host for host in self._hosts if host.member is not member]

    def take(self, tried: Collection[Member]) -> Member | None:
        """Choose the source for the next host: a member, or None for the hub.

        `tried` holds members that already failed to give it the version.
        """
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
