"""Which server of a run makes which group: a step's groups, and the indices of the data, divided over them.

A task, its group, all its attempts and their turns belong to one server: they need one another, and no
server ever asks another. To each server the trainer is a run of its own, whose step is that server's part:

    parts   of a step, sum up to groups_per_step, and differ by one at most. A server is told its part as
              the groups of a step (Hello's contract), is asked for so many for each step, and its gate
              bounds the lag of what it admits by it
    indices of the data: an index modulo groups_per_step is a slot of a step, and each server has as many
              slots as groups. So of any groups_per_step indices in a row each server has exactly its
              part, which a hash of the task's id would come to on average only

Nothing is remembered: who resumes computes the same, and a prompt that is asked again stays with its
server.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Division:
    """A step of 8 over 3 servers has the parts 3, 3 and 2; index 12 is in slot 4, of server 1."""

    groups_per_step: int
    server_count: int = 1
    """At most `groups_per_step`: each has a part."""

    def __post_init__(self) -> None:
        if not 1 <= self.server_count <= self.groups_per_step:
            raise ValueError(
                f"{self.groups_per_step} groups cannot be divided over {self.server_count} servers"
            )

    @property
    def parts(self) -> tuple[int, ...]:
        """Groups of a step, of each server."""
        each, left = divmod(self.groups_per_step, self.server_count)
        return tuple(each + (server < left) for server in range(self.server_count))

    def server_of(self, index: int) -> int:
        """The server that a data index belongs to."""
        return index % self.groups_per_step % self.server_count
