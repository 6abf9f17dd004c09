"""One run's streams to its servers, one `Exchange` for each. With one server there is one.

Each server is told of its part of a step (`division`) and of its own groups, and is asked, greeted, lost
and awaited by itself. What all share is the version that the trainer holds: a switch is asked of each.

    one is lost        the others go on: they deliver what they were asked for and sample up to their gates.
                         The loop waits where it needs the one that is away: for its part of a batch, its
                         upload, its switch
    one is given up    the run ends (ServerGone), and so where one refuses this trainer (SessionRefused)
    one is left        the run was asked to stop, and a server was away: all are left at once, so that a
                         step is told to every server or to none. What had no receipt they deliver again
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from penstock.trainer.core.together import together
from penstock.trainer.data.shards import Division
from penstock.trainer.exchange.evaluation_stream import EvaluationStream
from penstock.trainer.exchange.stream import Exchange
from penstock.v1 import trainer_service_pb2, trajectory_pb2

Restore = Callable[[int, trainer_service_pb2.Welcome], Awaitable[None]]
"""Brings a server up to date that came back with less than it had."""
Heed = Callable[[int, trainer_service_pb2.Notice], None]
"""Takes what a server noticed."""

# As many as a server keeps for a trainer that is away.
MAX_NOTICES = 1_000


class Exchanges:
    """Every stream of one run; a server is called by its place among them, from zero."""

    def __init__(self, servers: Sequence[Exchange], division: Division) -> None:
        self.servers = tuple(servers)
        self.division = division
        self.left = asyncio.Event()
        """The run stops without one of its servers, for good: nothing is sent to any."""
        self._on_notice: Heed | None = None
        self._unheeded: deque[tuple[int, trainer_service_pb2.Notice]] = deque(maxlen=MAX_NOTICES)
        """Notices that came while nobody took them: a server says each once."""
        self._news = asyncio.Event()
        self._changed = False
        """Whether `take_arrived` took some, or all of a server's were seen, and `next_group` has not said
        so."""
        self._from: dict[str, int] = {}
        """The server of each group in hand, which is not that of its index where the servers were others
        when its task was submitted."""
        for server, exchange in enumerate(self.servers):
            exchange.on_arrival = self._news.set
            exchange.on_all_seen = self._change
            exchange.on_left = self._leave
            exchange.on_notice = partial(self._notice, server)

    @property
    def held_version(self) -> int:
        """Version the trainer holds."""
        return self.servers[0].held_version

    @property
    def trainer_epoch(self) -> int:
        """Of this start of the trainer, and of no other."""
        return self.servers[0].trainer_epoch

    @property
    def evaluations(self) -> tuple[EvaluationStream, ...]:
        """Of each server."""
        return tuple(exchange.evaluations for exchange in self.servers)

    @property
    def on_notice(self) -> Heed | None:
        """Called with each notice, and when it is set with the last 1,000 of those that came before."""
        return self._on_notice

    @on_notice.setter
    def on_notice(self, heed: Heed | None) -> None:
        self._on_notice = heed
        while heed is not None and self._unheeded:
            heed(*self._unheeded.popleft())

    async def open(self) -> bool:
        """Connects to all for the first time; False where the run is to stop before it has.

        Raises ServerGone and SessionRefused.
        """
        welcomes = await together(exchange.open() for exchange in self.servers)
        return all(welcome is not None for welcome in welcomes)

    async def run(self, restore: Restore) -> None:
        """Consumes what the servers send, each as `Exchange.run`; ends when all have ended. Raises
        ServerGone and SessionRefused."""
        await together(
            exchange.run(partial(restore, server)) for server, exchange in enumerate(self.servers)
        )

    async def close(self) -> None:
        """Half-closes all; returns when they have ended, or after the timeout."""
        await together(exchange.close() for exchange in self.servers)

    async def next_group(self) -> trajectory_pb2.TrajectoryGroup | None:
        """The next group that any of them delivered, each once; None, once, where `take_arrived` took
        some since, or where all that waited at a server was seen and the last of it was known already."""
        while not self._changed:
            for server, exchange in enumerate(self.servers):
                if exchange.arrived_count:
                    return self._hand_over(server, await exchange.next_group())
            self._news.clear()
            await self._news.wait()
        self._changed = False
        return None

    def take_arrived(self, server: int) -> list[trajectory_pb2.TrajectoryGroup]:
        """All that a server delivered and `next_group` has not brought; who waits there is told."""
        taken = [self._hand_over(server, group) for group in self.servers[server].take_arrived()]
        if taken:
            self._change()
        return taken

    def server_of(self, group: trajectory_pb2.TrajectoryGroup) -> int:
        """The server that delivered a group in hand."""
        return self._from[group.group_id]

    def receipt(self, groups: Sequence[trajectory_pb2.TrajectoryGroup], step: int) -> None:
        """Says that a step used these groups, to each server of its own; to all that the step is done."""
        divided: defaultdict[int, list[trajectory_pb2.TrajectoryGroup]] = defaultdict(list)
        for group in groups:
            divided[self._from.pop(group.group_id)].append(group)
        for server, exchange in enumerate(self.servers):
            exchange.receipt(divided[server], step)

    def refuse(self, group: trajectory_pb2.TrajectoryGroup, reason: str, message: str) -> None:
        """Says that a group is of no use and must not come again."""
        self.servers[self._from.pop(group.group_id)].refuse(group, reason, message)

    def checkpoint(self, step: int) -> None:
        """Says that receipts up to `step` are final."""
        for exchange in self.servers:
            exchange.checkpoint(step)

    def _change(self) -> None:
        self._changed = True
        self._news.set()

    def _hand_over(
        self, server: int, group: trajectory_pb2.TrajectoryGroup
    ) -> trajectory_pb2.TrajectoryGroup:
        self._from[group.group_id] = server
        return group

    def _notice(self, server: int, notice: trainer_service_pb2.Notice) -> None:
        if self._on_notice is None:
            self._unheeded.append((server, notice))
        else:
            self._on_notice(server, notice)

    def _leave(self) -> None:
        if self.left.is_set():
            return
        self.left.set()
        for exchange in self.servers:
            exchange.leave()
