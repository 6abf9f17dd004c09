"""Divides a step's groups, and the indices of the data, over the servers of a run.

A task, its group, all its attempts and their turns belong to one server, because they depend on each other
and servers never talk to each other. To each server the trainer is a separate run, whose step is that
server's part. `Hello` names the part as the number of groups in a step, the trainer demands that many per
step, and the server's gate bounds lag by it.

An index modulo groups_per_step is a slot of a step, and each server has as many slots as groups. Any
groups_per_step consecutive indices therefore give each server exactly its part. Hashing the task id would
only balance on average. No state is kept: a resuming trainer computes the same division, and a prompt that
is asked again stays with its server.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Division:
    """For example, a step of 8 over 3 servers has parts 3, 3 and 2; index 12 is in slot 4, of server 1."""

    groups_per_step: int
    server_count: int = 1
    """At most `groups_per_step`, so that each server has a part."""

    @property
    def parts(self) -> tuple[int, ...]:
        """Number of groups in a step, for each server; they differ by at most one."""
        each, left = divmod(self.groups_per_step, self.server_count)
        return tuple(each + (server < left) for server in range(self.server_count))

    def server_of(self, index: int) -> int:
        """Returns the server that a data index belongs to."""
        return index % self.groups_per_step % self.server_count
