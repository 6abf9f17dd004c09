"""Batches from several servers: each contributes its part, whatever is put aside, refused or lost."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.trainer.batching.batching import TrainingGroup
from penstock.trainer.config.trainer import TrainerConfig
from penstock.trainer.core.aio import ComputeThread
from penstock.trainer.data.shards import Division
from penstock.trainer.gather.batch import Batch, Gatherer
from penstock.trainer.gather.group_policies import NO_SPREAD
from penstock.trainer.metrics.step_record import StepRecord
from penstock.trainer.state.ledger import Ledger, RefusedEntry, StepEntry, TrainedGroup
from tests.trainer.gather.test_group_policies import Reachable, Settling, outcomes


class Server(Reachable):
    """Delivers its groups, as far as they were demanded."""

    def __init__(self, *groups: Any) -> None:
        self.waiting = deque(groups)
        self.credit = 0
        self.arrived: deque[Any] = deque()
        self.news = asyncio.Event()

    def demand(self, count: int) -> None:
        self.credit += count
        self.deliver()

    def deliver(self) -> None:
        while self.credit and self.waiting:
            self.credit -= 1
            self.arrived.append(self.waiting.popleft())
        self.news.set()

    @property
    def on_their_way(self) -> int:
        return self.credit + len(self.arrived)

    @property
    def all_seen(self) -> bool:
        return not self.waiting and not self.arrived


class Servers:
    """Stands in for `exchange.servers.Servers`, with the part that batches use."""

    held_version = 0

    def __init__(self, division: Division, *servers: Server) -> None:
        self.division, self._servers = division, servers
        self.refused: list[str] = []
        self._from: dict[str, int] = {}

    def __iter__(self) -> Iterator[Server]:
        return iter(self._servers)

    def __getitem__(self, server: int) -> Server:
        return self._servers[server]

    async def next_group(self) -> Any:
        for place, server in enumerate(self._servers):
            if server.arrived:
                group = server.arrived.popleft()
                self._from[group.group_id] = place
                return group
        raise AssertionError("nothing is on its way: this would wait for ever")

    def take_arrived(self, place: int) -> list[Any]:
        taken = list(self._servers[place].arrived)
        self._servers[place].arrived.clear()
        self._from |= dict.fromkeys((group.group_id for group in taken), place)
        return taken

    def server_of(self, group: Any) -> int:
        return self._from[group.group_id]

    def refuse(self, group: Any, reason: str, message: str) -> None:
        self.refused.append(group.group_id)


class Trained(Settling):
    """A feeder of tasks some of which were already trained, with other groups."""

    def __init__(self, *task_ids: str) -> None:
        super().__init__()
        self._trained = task_ids

    def take(self, task_id: str) -> bool:
        return task_id not in self._trained


def groups(*numbers: int) -> list[Any]:
    return [outcomes(number, 0, 1).group for number in numbers]


@contextlib.contextmanager
def gathering(
    folder: Path,
    servers: Servers,
    *ahead: tuple[int, ...],
    trained: tuple[str, ...] = (),
    **group_config: object,
) -> Iterator[Gatherer]:
    """`ahead`: the groups of each step that the previous trainer did. `trained`: tasks that are
    settled.
    """
    config = TrainerConfig.model_validate(
        {
            "model": {"path": "none"},
            "data": {"reasoning_gym": {"name": "chain_sum"}},
            "groups": group_config,
            "train": {"groups_per_step": servers.division.groups_per_step},
        }
    )
    with contextlib.closing(Ledger(folder)) as ledger:
        ledger.begin()
        for step, numbers in enumerate(ahead, 1):
            made = tuple(TrainedGroup(f"g{n}", f"r/{n}", ()) for n in numbers)
            ledger.write(StepEntry(step, step, "w", made))
    compute = ComputeThread(1)
    with contextlib.closing(Ledger(folder)) as ledger, contextlib.closing(compute):
        ledger.resume(0)
        yield Gatherer(
            config,
            exchanges=servers,  # type: ignore[arg-type]
            tasks=Trained(*trained),  # type: ignore[arg-type]
            ledger=ledger,
            compute=compute,
            stopping=asyncio.Event(),
        )


async def take(gatherer: Gatherer, step: int) -> list[str]:
    gatherer.demand(step)
    return await gather(gatherer, step)


async def gather(gatherer: Gatherer, step: int) -> list[str]:
    """The groups of a step that was already demanded."""
    async with asyncio.timeout(20):
        batch: Batch | None = await gatherer.gather(StepRecord(step))
    assert batch is not None
    return [delivery.group_id for delivery in batch.deliveries]


async def test_a_run_that_is_to_stop_begins_no_step_of_what_is_in_hand(tmp_path: Path) -> None:
    first = Server(*groups(0, 1, 2, 3))
    servers = Servers(Division(2), first)
    with gathering(tmp_path, servers) as gatherer:
        gatherer.follow()
        assert sorted(await take(gatherer, 1)) == ["g0", "g1"]
        gatherer.demand(2)
        await gatherer.came_back(0)
        gatherer.stopping.set()
        assert await gatherer.gather(StepRecord(2)) is None


async def test_a_batch_has_each_servers_part_however_much_another_has(tmp_path: Path) -> None:
    first, second = Server(*groups(0, 2, 4, 6, 8)), Server(*groups(1, 3, 5, 7))
    servers = Servers(Division(3, 2), first, second)
    with gathering(tmp_path, servers) as gatherer:
        assert sorted(await take(gatherer, 1)) == ["g0", "g1", "g2"]
        assert (first.credit, second.credit) == (0, 0)
        # The first server came back. The groups it had delivered are in hand, and join the next batch.
        gatherer.demand(2)
        await gatherer.came_back(0)
        assert sorted(await take(gatherer, 2)) == ["g3", "g4", "g6"]
        assert (first.waiting[0].group_id, second.waiting[0].group_id) == ("g8", "g5")


async def test_a_group_in_the_place_of_one_that_is_refused_is_the_same_servers(
    tmp_path: Path,
) -> None:
    flat = outcomes(1, 1, 1).group
    first, second = Server(*groups(0, 2)), Server(flat, *groups(3, 5))
    servers = Servers(Division(2, 2), first, second)
    with gathering(tmp_path, servers, drop_without_spread=True) as gatherer:
        assert sorted(await take(gatherer, 1)) == ["g0", "g3"]
        assert servers.refused == ["g1"]
    with contextlib.closing(Ledger(tmp_path)) as ledger:
        ledger.resume(0)
        assert ledger.refused == [RefusedEntry("g1", "r/1", NO_SPREAD)]


async def test_steps_that_are_done_again_are_made_of_the_same_groups(tmp_path: Path) -> None:
    # Redelivered in the order of completion: the second step's groups come before the first's.
    first, second = Server(*groups(6, 4, 2, 0)), Server(*groups(3, 1, 5))
    servers = Servers(Division(3, 2), first, second)
    with gathering(tmp_path, servers, (0, 1, 2), (3, 4, 6)) as gatherer:
        gatherer.follow()
        assert sorted(await take(gatherer, 1)) == ["g0", "g1", "g2"]
        assert sorted(await take(gatherer, 2)) == ["g3", "g4", "g6"]


async def test_groups_that_a_server_lost_are_replaced_by_its_own(tmp_path: Path) -> None:
    # g1 and g3 are gone. The second server made other groups, and the first still has all its groups.
    first, second = Server(*groups(0, 2, 4, 6)), Server(*groups(5, 7))
    servers = Servers(Division(3, 2), first, second)
    with gathering(tmp_path, servers, (0, 1, 2), (3, 4, 6)) as gatherer:
        gatherer.follow()
        made = await take(gatherer, 1)
        assert Counter(int(name[1:]) % 2 for name in made) == {0: 2, 1: 1}
        assert {"g0", "g2"} < set(made)


async def test_steps_of_a_run_that_was_divided_otherwise_can_be_done_again(tmp_path: Path) -> None:
    # The list of servers was reversed: the ledger's step has two groups of the second server.
    first, second = Server(*groups(1, 3, 9)), Server(*groups(0, 2, 4))
    servers = Servers(Division(3, 2), first, second)
    with gathering(tmp_path, servers, (0, 1, 2)) as gatherer:
        gatherer.follow()
        assert sorted(await take(gatherer, 1)) == ["g0", "g1", "g2"]
        # After that, each server contributes its own part again.
        assert sorted(await take(gatherer, 2)) == ["g3", "g4", "g9"]


async def test_a_group_that_is_refused_when_its_server_is_back_is_replaced(tmp_path: Path) -> None:
    server = Server(*groups(0, 1, 2))
    servers = Servers(Division(2, 1), server)
    with gathering(tmp_path, servers, trained=("r/0",)) as gatherer:
        gatherer.demand(1)
        await gatherer.came_back(0)
        assert servers.refused == ["g0"]
        assert await gather(gatherer, 1) == ["g1", "g2"]
        assert server.credit == 0


async def test_what_is_looked_for_is_asked_for_when_its_server_is_back(tmp_path: Path) -> None:
    server = Server(*groups(0, 1))
    with gathering(tmp_path, Servers(Division(1, 1), server), (1,)) as gatherer:
        gatherer.follow()
        gatherer.demand(1)
        await gatherer.came_back(0)
        assert server.on_their_way == 1
        assert await gather(gatherer, 1) == ["g1"]


ASKED, ANSWERED = threading.Event(), threading.Event()


def judged(group: TrainingGroup) -> str | None:
    """A filter that takes time to answer, and drops the first group."""
    ASKED.set()
    if not ANSWERED.wait(10):
        return "NOBODY_ANSWERED"
    return "DISLIKED" if group.samples[0].trajectory_id.startswith("0-") else None


async def test_others_work_while_a_filter_of_ones_own_waits(tmp_path: Path) -> None:
    servers = Servers(Division(1, 1), Server(*groups(0, 1)))
    own = {"function": f"{__name__}:judged"}
    with gathering(tmp_path, servers, filter=own) as gatherer:
        taking = asyncio.create_task(take(gatherer, 1))
        assert await asyncio.to_thread(ASKED.wait, 10)
        # The event loop runs while the filter still waits for its answer.
        assert not taking.done()
        ANSWERED.set()
        assert await taking == ["g1"]
    with contextlib.closing(Ledger(tmp_path)) as ledger:
        ledger.resume(0)
        assert ledger.refused == [RefusedEntry("g0", "r/0", "FILTER:DISLIKED")]


async def test_a_batch_is_gathered_while_others_are_refused(tmp_path: Path) -> None:
    server, busy = Server(*groups(0, 1, 2)), threading.Event()
    servers = Servers(Division(2, 1), server)
    with gathering(tmp_path, servers, trained=("r/0",)) as gatherer:
        gatherer.demand(1)
        computing = asyncio.create_task(gatherer.compute.run(busy.wait, 20))
        coming_back = asyncio.create_task(gatherer.came_back(0))
        await asyncio.sleep(0)
        assert await gather(gatherer, 1) == ["g1", "g2"]
        assert not coming_back.done() and not servers.refused
        busy.set()
        await asyncio.gather(computing, coming_back)
        assert servers.refused == ["g0"]
