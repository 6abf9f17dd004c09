"""One run's servers, with an `Exchange` for each.

Each server learns only its part of a step (`division`) and its own groups. Demand, greetings, losses and
waits are per server. All servers share the version that the trainer holds, so a switch is requested from
each.

If one is lost, the others deliver what was demanded and sample up to their gates. The loop waits only when
it needs the absent one: for its part of a batch, its upload or its switch. If one is given up (ServerGone)
or refuses this trainer (SessionRefused), the run ends. If one is left, because the run was asked to stop
while it was away, the trainer leaves all servers at once, so that a step is acknowledged to every server
or to none.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import TypeVar

import grpc

from penstock.trainer.core.aio import together
from penstock.trainer.data.shards import Division
from penstock.trainer.exchange.evaluation_stream import EvaluationStream
from penstock.trainer.exchange.stream import Exchange, Listeners, RunFacts
from penstock.trainer.exchange.waiting import saying
from penstock.v1 import trainer_service_pb2, trajectory_pb2
from penstock.wire.messages import StalenessContract

T = TypeVar("T")

Restore = Callable[[int, trainer_service_pb2.Welcome], Awaitable[None]]
"""Brings a server up to date that came back with less state than it had."""
Heed = Callable[[int, trainer_service_pb2.Notice], None]
"""Handles a notice from a server."""

MAX_NOTICES = 1_000
"""As many as a server keeps for an absent trainer."""


class Servers:
    """Every server of one run, identified by index, from zero."""

    def __init__(
        self,
        channels: Sequence[tuple[str, grpc.aio.Channel]],
        division: Division,
        run: RunFacts,
        *,
        give_up_after_seconds: float,
        stopping: asyncio.Event,
    ) -> None:
        """`channels` has each server's address and a channel to it."""
        self.division = division
        self._channels = channels
        self.left = asyncio.Event()
        """Set when the run stops without one of its servers, for good. Nothing more is sent to any of
        them."""
        self._heed: Heed | None = None
        self._unheeded: deque[tuple[int, trainer_service_pb2.Notice]] = deque(maxlen=MAX_NOTICES)
        """Notices that arrived outside of `notices_to`. A server sends each notice once."""
        self._news = asyncio.Event()
        self._changed = False
        """Whether `next_group` still has to report, by returning None, that `take_arrived` took
        groups or that all groups buffered at a server were seen."""
        self._from: dict[str, int] = {}
        """The server of each group in hand. It differs from the one its index suggests if the list
        of servers changed after its task was submitted."""
        self._exchanges = tuple(
            Exchange(
                channel,
                replace(run, contract=_with_part(run.contract, part)),
                give_up_after_seconds=give_up_after_seconds,
                stopping=stopping,
                where=address,
                listeners=Listeners(
                    arrived=self._news.set,
                    all_seen=self._change,
                    left=self._leave,
                    noticed=partial(self._notice, server),
                ),
            )
            for server, ((address, channel), part) in enumerate(
                zip(channels, division.parts, strict=True)
            )
        )

    def __len__(self) -> int:
        return len(self._exchanges)

    def __iter__(self) -> Iterator[Exchange]:
        return iter(self._exchanges)

    def __getitem__(self, server: int) -> Exchange:
        return self._exchanges[server]

    def saying(self, what: str) -> AbstractAsyncContextManager[None]:
        """If the body takes long, logs that it waits for `what`, and why."""
        return saying(what, self._channels)

    @property
    def held_version(self) -> int:
        return self[0].held_version

    @property
    def trainer_epoch(self) -> int:
        """Unique to this start of the trainer."""
        return self[0].trainer_epoch

    @property
    def evaluations(self) -> tuple[EvaluationStream, ...]:
        return tuple(exchange.evaluations for exchange in self)

    @contextmanager
    def notices_to(self, heed: Heed) -> Generator[None]:
        """Calls `heed` with each notice within the context, and at its begin with those that arrived
        before."""
        while self._unheeded:
            heed(*self._unheeded.popleft())
        self._heed = heed
        try:
            yield
        finally:
            self._heed = None

    async def open(self) -> bool:
        """Connects to all servers for the first time. Returns False if the run is asked to stop first.

        Raises ServerGone and SessionRefused.
        """
        welcomes = await together(exchange.open() for exchange in self)
        return all(welcome is not None for welcome in welcomes)

    async def run(self, restore: Restore) -> None:
        """Runs every `Exchange`; returns when all have ended. Raises ServerGone and SessionRefused."""
        await together(
            exchange.run(partial(restore, server)) for server, exchange in enumerate(self)
        )

    async def close(self) -> None:
        await together(exchange.close() for exchange in self)

    async def ask_all(self, attempt: Callable[[int], Awaitable[T]]) -> list[T | None]:
        return await together(
            exchange.ask(partial(attempt, server)) for server, exchange in enumerate(self)
        )

    async def next_group(self) -> trajectory_pb2.TrajectoryGroup | None:
        """Waits for the next group that any server delivers. Each group is returned once.

        Returns None, once, if `take_arrived` took groups since the last call. It also does so when
        all groups buffered at a server have been seen and the last one was already known.
        """
        while not self._changed:
            for server, exchange in enumerate(self):
                if exchange.arrived_count:
                    return self._hand_over(server, await exchange.next_group())
            self._news.clear()
            await self._news.wait()
        self._changed = False
        return None

    def take_arrived(self, server: int) -> list[trajectory_pb2.TrajectoryGroup]:
        """Takes all groups of a server that `next_group` has not returned. Wakes up a pending
        `next_group`."""
        taken = [self._hand_over(server, group) for group in self[server].take_arrived()]
        if taken:
            self._change()
        return taken

    def server_of(self, group: trajectory_pb2.TrajectoryGroup) -> int:
        return self._from[group.group_id]

    def receipt(self, groups: Sequence[trajectory_pb2.TrajectoryGroup], step: int) -> None:
        """Acknowledges a step: to each server the groups it delivered, to all of them that the step
        is done."""
        divided: defaultdict[int, list[trajectory_pb2.TrajectoryGroup]] = defaultdict(list)
        for group in groups:
            divided[self._from.pop(group.group_id)].append(group)
        for server, exchange in enumerate(self):
            exchange.receipt(divided[server], step)

    def refuse(self, group: trajectory_pb2.TrajectoryGroup, reason: str, message: str) -> None:
        self[self._from.pop(group.group_id)].refuse(group, reason, message)

    def checkpoint(self, step: int) -> None:
        for exchange in self:
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
        if self._heed is None:
            self._unheeded.append((server, notice))
        else:
            self._heed(server, notice)

    def _leave(self) -> None:
        if self.left.is_set():
            return
        self.left.set()
        for exchange in self:
            exchange.leave()


def _with_part(
    contract: trainer_service_pb2.StalenessContract, part: int
) -> trainer_service_pb2.StalenessContract:
    own = StalenessContract()
    own.CopyFrom(contract)
    own.groups_per_step = part
    return own
