"""Batches: the groups of one step, out of what the server delivers.

    delivery -> task taken -> read -> in the batch
                  |             +---> every trajectory failed: refused, another demanded
                  |             +---> of no use, see `group_policies`: refused, another demanded, and where
                  |                   that is the configuration, the prompt asked again
                  +-> aside, for a later batch
                  +-> the task was trained already, by another group: refused, another demanded

Where a step has dropped too many, those that follow are taken as they are, or the run stops. What a refusal
means for the prompt is in its reason, which is in the ledger before the server hears of it: a
trainer that resumes does not ask for a prompt that was given up, and asks again for one that was to be.

Groups arrive in the order in which they were finished. Within a batch they are put in the order of
the data, so that sums come out the same however long each of them took.

A batch has its part of each server's groups (`division`), for whose gate that part is a step: what is
demanded in the place of a group is demanded of the server that it came from.

A run that resumes finds in its ledger what the trainer that was killed did beyond the checkpoint.
The server delivers those groups again, among others that wait. While the gatherer follows the
ledger, it makes the same batches of them: what is not of the step at hand is put aside, and what is was
not dropped then, so it is not dropped now. It stops
where all that waited at the servers has come and a group is missing, because it was lost there.

What a server that was lost and is back had delivered before is put aside at once, before anything is asked
of it; what is refused of that, or is not of the step at hand, is made good by a demand like any other.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from penstock.client.plugins.group_filter import Delivered
from penstock.trainer.batching.batching import TrainingGroup, read_group
from penstock.trainer.config.trainer import TrainerConfig
from penstock.trainer.core.compute import ComputeThread
from penstock.trainer.core.errors import EverythingDropped, EverythingFailed
from penstock.trainer.core.stopping import unless
from penstock.trainer.data.feeder import ALL_FAILED, TaskFeeder, times_asked_again
from penstock.trainer.exchange.streams import Exchanges
from penstock.trainer.gather.group_policies import (
    ASKED_AGAIN,
    FAILED_ASKED_AGAIN,
    SIBLING_FAILED,
    load_filter,
    mask_truncated,
    penalize_length,
    reason_to_drop,
)
from penstock.trainer.metrics.step_record import StepRecord
from penstock.trainer.state.ledger import Ledger, RefusedEntry
from penstock.trainer.weights.handover import Handover
from penstock.v1 import trajectory_pb2

log = logging.getLogger(__name__)

TASK_SETTLED = "TASK_SETTLED"
# Notices of groups that will not come: too old for the late policy "drop", or for a message too large.
TAKE_THEIR_TASK = ("GROUP_DROPPED", "GROUP_TOO_LARGE")


@dataclass(slots=True)
class Batch:
    """The groups of one step, as delivered and as read, in the order of the data."""

    deliveries: list[trajectory_pb2.TrajectoryGroup] = field(
        default_factory=list[trajectory_pb2.TrajectoryGroup]
    )
    groups: list[TrainingGroup] = field(default_factory=list[TrainingGroup])


class Gatherer:
    """One run's batches, one after another."""

    def __init__(
        self,
        config: TrainerConfig,
        *,
        exchanges: Exchanges,
        tasks: TaskFeeder,
        handover: Handover,
        ledger: Ledger,
        compute: ComputeThread,
        stopping: asyncio.Event,
    ) -> None:
        self._config = config
        self._exchanges = exchanges
        self._parts = exchanges.division.parts
        self._tasks = tasks
        self._handover = handover
        self._ledger = ledger
        self._compute = compute
        self._stopping = stopping
        self._wanted_count = config.train.groups_per_step
        self._aside: dict[str, trajectory_pb2.TrajectoryGroup] = {}
        """Groups in hand that no batch has taken yet, in the order they came in."""
        self._following = False
        self._wanted: frozenset[str] = frozenset()
        """Groups that the step at hand was made of before; empty where that does not matter."""
        self._failed_in_a_row = 0
        self._failure_reasons: Counter[str] = Counter()
        self._given_up: Counter[str] = Counter()
        self._filter = load_filter(config)

    def follow(self) -> None:
        """Makes the batches that the ledger has ahead, out of what waits at the servers."""
        self._following = bool(self._ledger.ahead)

    async def came_back(self, server: int) -> None:
        """The server may have lost what it held: what it delivered before is in hand, and the tasks of
        it are not to be made again. Raises StorageFailed."""
        settled: list[trajectory_pb2.TrajectoryGroup] = []
        # Nothing is awaited before all are aside and counted: a batch may be gathered meanwhile.
        for delivery in self._exchanges.take_arrived(server):
            if self._take(delivery):
                self._put_aside(delivery)
            else:
                settled.append(delivery)
                self._exchanges.servers[server].demand(1)
        for delivery in settled:
            await self._refuse_settled(delivery, instead=False)

    def demand(self, step: int) -> None:
        """Grants each server the credit that its part of this step's batch needs."""
        wanted = self._wanted = self._of(step)
        aside = [group for name, group in self._aside.items() if not wanted or name in wanted]
        in_hand = Counter(map(self._exchanges.server_of, aside))
        for server, (exchange, part) in enumerate(
            zip(self._exchanges.servers, self._parts, strict=True)
        ):
            missing = part - in_hand[server] - exchange.on_their_way
            if missing > 0:
                exchange.demand(missing)

    def given_up(self, reason: str) -> None:
        """The server has dropped a group: counted with the step under way, or the next."""
        self._given_up[reason] += 1

    def _count_given_up(self, record: StepRecord) -> None:
        for reason, count in self._given_up.items():
            _count_dropped(record, reason, count)
        self._given_up.clear()

    async def gather(self, record: StepRecord) -> Batch | None:
        """Consumes deliveries; waits for as many groups as make a batch; produces it. None where the run
        is to stop.

        Raises EverythingFailed, StorageFailed.
        """
        held = self._exchanges.held_version
        self._wanted = self._of(record.step)
        missing = list(self._parts)
        if record.step not in self._ledger.ahead:
            for entry in self._ledger.take_unfinished():
                if entry.reason in (ALL_FAILED, FAILED_ASKED_AGAIN):
                    record.groups_failed += 1
                elif entry.reason != TASK_SETTLED:
                    _count_dropped(record, entry.reason)
        self._count_given_up(record)
        found: list[tuple[trajectory_pb2.TrajectoryGroup, TrainingGroup]] = []
        while len(found) < self._wanted_count:
            if self._stopping.is_set():
                return None
            if self._wanted and not self._wanted & self._aside.keys() and self._all_seen():
                log.warning("the server lost groups of step %d: taking others", record.step)
                self._wanted = frozenset()
                continue
            delivery = self._take_aside(missing) or await self._next(missing)
            if delivery is None:
                continue
            group = read_group(
                delivery,
                trainer_version=held,
                max_lag=self._config.staleness.max_lag,
            )
            record.failures += group.failures
            record.tokens_received += group.policy_tokens
            if not group.samples:
                record.groups_failed += 1
                await self._refuse_failed(delivery)
                continue
            self._failed_in_a_row = 0
            # What this step was made of before, it is made of again.
            if self._wanted or not await self._drop_useless(delivery, group, record):
                missing[self._exchanges.server_of(delivery)] -= 1
                found.append((delivery, self._weigh(delivery, group, record)))
        self._count_given_up(record)
        found.sort(key=lambda pair: (self._tasks.place(pair[0].task_id), pair[0].group_id))
        return Batch([delivery for delivery, _ in found], [group for _, group in found])

    def _of(self, step: int) -> frozenset[str]:
        """Groups that the step was made of before; empty where that does not matter."""
        entry = self._ledger.ahead.get(step) if self._following else None
        return entry.group_ids if entry is not None else frozenset[str]()

    def _all_seen(self) -> bool:
        """Whether everything has come that waited at the servers when they were greeted."""
        return all(exchange.all_seen for exchange in self._exchanges.servers)

    def _take_aside(self, missing: Sequence[int]) -> trajectory_pb2.TrajectoryGroup | None:
        """One in hand that is for this batch; `missing` of each server's part."""
        for name, group in self._aside.items():
            if self._is_for_batch(group, missing):
                return self._aside.pop(name)
        return None

    def _is_for_batch(self, group: trajectory_pb2.TrajectoryGroup, missing: Sequence[int]) -> bool:
        if self._wanted:
            return group.group_id in self._wanted
        return missing[self._exchanges.server_of(group)] > 0

    async def _next(self, missing: Sequence[int]) -> trajectory_pb2.TrajectoryGroup | None:
        """The next group that comes; None where it is not for this batch, others were put aside
        meanwhile, all that waited was seen, or the run is to stop."""
        if self._stopping.is_set():
            return None
        delivery = await unless(self._stopping, self._exchanges.next_group())
        if delivery is None:
            return None
        if not self._take(delivery):
            await self._refuse_settled(delivery)
            return None
        if self._is_for_batch(delivery, missing):
            return delivery
        self._put_aside(delivery)
        return None

    def _put_aside(self, delivery: trajectory_pb2.TrajectoryGroup) -> None:
        """In hand, for a later turn or batch; where others are looked for, one of them is asked for."""
        self._aside[delivery.group_id] = delivery
        if self._wanted and delivery.group_id not in self._wanted:
            self._look_on(self._exchanges.server_of(delivery))

    def _look_on(self, server: int) -> None:
        """What came from this server is not what is looked for: another from where some may wait still."""
        servers = self._exchanges.servers
        for exchange in (servers[server], *servers):
            if not exchange.all_seen:
                exchange.demand(1)
                return

    def _take(self, delivery: trajectory_pb2.TrajectoryGroup) -> bool:
        """Whether its task is still to be trained; a group of another one is to be refused."""
        self._tasks.arrived(self._exchanges.server_of(delivery))
        return self._tasks.take(delivery.task_id)

    async def _refuse_settled(
        self, delivery: trajectory_pb2.TrajectoryGroup, *, instead: bool = True
    ) -> None:
        message = f"another group of task {delivery.task_id} was trained, or refused"
        await self._refuse(delivery, TASK_SETTLED, message, instead=instead)

    async def _drop_useless(
        self,
        delivery: trajectory_pb2.TrajectoryGroup,
        group: TrainingGroup,
        record: StepRecord,
    ) -> bool:
        """Whether the group was refused because it is of no use. Raises EverythingDropped."""
        config = self._config.groups
        reason = reason_to_drop(group, config)
        if reason is None and self._filter is not None:
            delivered = Delivered(delivery, self._tasks.task(delivery.task_id))
            # It may take its time, a judge's over a network for one: uploads and evaluations go on.
            reason = await self._compute.run(self._filter, group, delivered)
        if reason is None:
            return False
        own = (n for r, n in record.groups_dropped.items() if r not in TAKE_THEIR_TASK)
        if sum(own) >= config.max_dropped_per_step:
            counted = ", ".join(f"{r} {n}" for r, n in record.groups_dropped.items())
            said = f"step {record.step} has dropped as many groups as it may: {counted}"
            if config.then == "stop":
                raise EverythingDropped(said)
            if not record.groups_kept_in_need:
                log.warning("%s; taking what comes, as it is", said)
            record.groups_kept_in_need += 1
            return False
        message = f"dropped: {reason}"
        if reason == SIBLING_FAILED and self._may_ask_again(delivery):
            self._tasks.ask_again(delivery.task_id)
            reason = ASKED_AGAIN
        else:
            self._tasks.settled(delivery.task_id)
        _count_dropped(record, reason)
        await self._refuse(delivery, reason, message)
        return True

    def _may_ask_again(self, delivery: trajectory_pb2.TrajectoryGroup) -> bool:
        """Whether the prompt of a group with failed trajectories is to be asked again."""
        config = self._config.groups
        again = config.failed_siblings == "replace"
        return again and times_asked_again(delivery.task_id) < config.max_replacements

    def _weigh(
        self,
        delivery: trajectory_pb2.TrajectoryGroup,
        group: TrainingGroup,
        record: StepRecord,
    ) -> TrainingGroup:
        """The group with what long answers lose."""
        config = self._config.groups
        if config.overlong is not None:
            group = penalize_length(group, delivery, config.overlong)
        if config.mask_truncated:
            group, masked = mask_truncated(group, delivery)
            record.tokens_truncated += masked
        return group

    async def _refuse_failed(self, delivery: trajectory_pb2.TrajectoryGroup) -> None:
        """A group in which everything failed: not to be sent again, and another one instead of it, of the
        same prompt where failed siblings are replaced."""
        reasons = Counter(t.outcome.failure.reason for t in delivery.trajectories)
        self._failure_reasons.update(reasons)
        self._failed_in_a_row += 1
        named = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
        log.warning("every trajectory of group %s failed: %s", delivery.group_id, named)
        reason = ALL_FAILED
        if self._may_ask_again(delivery):
            self._tasks.ask_again(delivery.task_id)
            reason = FAILED_ASKED_AGAIN
        else:
            self._tasks.settled(delivery.task_id)
        too_many = self._failed_in_a_row >= self._config.failure.max_failed_groups
        message = f"every trajectory failed: {named}"
        await self._refuse(delivery, reason, message, instead=not too_many)
        if too_many:
            counted = ", ".join(f"{r} {n}" for r, n in self._failure_reasons.most_common())
            last = delivery.trajectories[-1].outcome.failure if delivery.trajectories else None
            raise EverythingFailed(
                f"every trajectory failed in {self._failed_in_a_row} groups in a row: {counted}"
                + (f"; the last said: {last.message}" if last else "")
            )

    async def _refuse(
        self,
        delivery: trajectory_pb2.TrajectoryGroup,
        reason: str,
        message: str,
        *,
        instead: bool = True,
    ) -> None:
        # On disk first: what the server has been told it forgets.
        entry = RefusedEntry(delivery.group_id, delivery.task_id, reason)
        await self._compute.run(self._ledger.refuse, entry)
        server = self._exchanges.server_of(delivery)
        self._exchanges.refuse(delivery, reason, message)
        if instead:
            self._exchanges.servers[server].demand(1)
            await self._handover.ask(server, lambda: self._tasks.fill(server))


def _count_dropped(record: StepRecord, reason: str, count: int = 1) -> None:
    record.groups_dropped[reason] = record.groups_dropped.get(reason, 0) + count


def settle_refused(tasks: TaskFeeder, refused: Iterable[RefusedEntry]) -> None:
    """What groups that were refused before this process began mean for their prompts."""
    for entry in refused:
        if entry.reason in (ASKED_AGAIN, FAILED_ASKED_AGAIN):
            tasks.ask_again(entry.task_id)
        elif entry.reason != TASK_SETTLED:
            tasks.settled(entry.task_id)
