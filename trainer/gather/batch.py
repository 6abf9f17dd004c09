"""Batches: collects the groups of one step from what the servers deliver.

    delivery -> task taken -> read -> in the batch
                  |             +---> every trajectory failed: refused, another demanded
                  |             +---> dropped, see `group_policies`: refused, another demanded, and if
                  |                   so configured, the prompt asked again
                  +-> set aside, for a later batch
                  +-> the task was already trained with another group: refused, another demanded

Once a step has dropped too many groups, later ones are taken as they are, or the run stops. The reason of
a refusal decides what happens to the prompt. It is written to the ledger before it is sent to the server,
so that a resuming trainer asks again only the prompts that were to be asked again.

Within a batch, groups are sorted by the order of the data, so that sums come out the same regardless of
timing.

A batch contains a fixed part from each server (`division`), and each server's gate treats that part as a
step. A replacement for a group is therefore demanded from the server that delivered it.

A resuming run finds steps beyond its checkpoint in the ledger, made by the trainer that was killed. The
server redelivers their groups, mixed with others. While the gatherer follows the ledger, it rebuilds the
same batches. Groups of other steps are set aside. Groups of the current step were not dropped then, so
they are not dropped now. Following ends once all groups buffered at the servers have arrived and one is
missing, because the server lost it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass

from penstock.client.plugins.group_filter import Delivered
from penstock.trainer.batching.batching import TrainingGroup, read_group
from penstock.trainer.config.trainer import TrainerConfig
from penstock.trainer.core.aio import ComputeThread, together, unless
from penstock.trainer.core.errors import EverythingDropped, EverythingFailed
from penstock.trainer.data.feeder import ALL_FAILED, TaskFeeder
from penstock.trainer.data.tasks import times_asked_again
from penstock.trainer.exchange.servers import Servers
from penstock.trainer.gather.group_policies import (
    ASKED_AGAIN,
    FAILED_ASKED_AGAIN,
    SIBLING_FAILED,
    load_filter,
    mask_truncated,
    penalize_length,
    reason_to_drop,
)
from penstock.trainer.metrics.batch_figures import BatchFigures, describe_batch
from penstock.trainer.metrics.step_record import StepRecord
from penstock.trainer.state.ledger import Ledger, RefusedEntry
from penstock.v1 import trainer_service_pb2, trajectory_pb2

log = logging.getLogger(__name__)

TASK_SETTLED = "TASK_SETTLED"
# Notices of groups that will not be delivered: too old for the late policy "drop", or too large for
# a message.
TAKE_THEIR_TASK = ("GROUP_DROPPED", "GROUP_TOO_LARGE")


@dataclass(frozen=True, slots=True)
class Batch:
    """The groups of one step, as delivered and as read, in the order of the data."""

    deliveries: list[trajectory_pb2.TrajectoryGroup]
    groups: list[TrainingGroup]


@dataclass(eq=False, repr=False)
class Gatherer:
    """Gathers the batches of one run, one after another."""

    config: TrainerConfig
    exchanges: Servers
    tasks: TaskFeeder
    ledger: Ledger
    compute: ComputeThread
    stopping: asyncio.Event
    forgotten_step: int = 0
    """Step of a broken checkpoint: up to it, a server may have forgotten groups the ledger has ahead."""

    def __post_init__(self) -> None:
        self._parts = self.exchanges.division.parts
        self._aside: dict[str, trajectory_pb2.TrajectoryGroup] = {}
        """Groups in hand that no batch has taken yet, in order of arrival."""
        self._following = False
        self._wanted: frozenset[str] = frozenset()
        """Groups the ledger lists for the current step; empty if the gatherer takes any group."""
        self._failed_in_a_row = 0
        self._failure_reasons: Counter[str] = Counter()
        self._given_up: Counter[str] = Counter()
        self._filter = load_filter(self.config)

    def follow(self) -> None:
        """Rebuilds the batches that the ledger has ahead, from the groups buffered at the servers."""
        self._following = bool(self.ledger.ahead)

    async def came_back(self, server: int) -> None:
        """Sets aside the groups that a returned server delivered before, ahead of any other call: it may
        have lost them, and their tasks must not run again. Raises StorageFailed."""
        settled: list[trajectory_pb2.TrajectoryGroup] = []
        # No await until all groups are set aside and counted: a batch may be gathered concurrently.
        for delivery in self.exchanges.take_arrived(server):
            if self._take(delivery):
                self._put_aside(delivery)
            else:
                settled.append(delivery)
                self.exchanges[server].demand(1)
        for delivery in settled:
            await self._refuse_settled(delivery, instead=False)

    async def submit(self) -> None:
        """Submits tasks to every server, which may have lost them or forgotten groups needed again."""
        await self.exchanges.ask_all(self._submit)

    async def _submit(self, server: int) -> None:
        await self.tasks.submit_again(server)
        if self.forgotten_step:
            entries = [e for e in self.ledger.ahead.values() if e.step <= self.forgotten_step]
            lost = [group.task_id for entry in entries for group in entry.groups]
            await self.tasks.submit_anew(server, lost, self.forgotten_step)

    def demand(self, step: int) -> None:
        """Grants each server the credit that its part of this step's batch needs, unless the run is
        asked to stop."""
        if self.stopping.is_set():
            return
        wanted = self._wanted = self._of(step)
        aside = [group for name, group in self._aside.items() if not wanted or name in wanted]
        in_hand = Counter(map(self.exchanges.server_of, aside))
        for server, (exchange, part) in enumerate(zip(self.exchanges, self._parts, strict=True)):
            missing = part - in_hand[server] - exchange.on_their_way
            if missing > 0:
                exchange.demand(missing)

    def awaits(self, notice: trainer_service_pb2.Notice) -> bool:
        """Returns whether a notice of a dropped group may concern a task that awaits its group."""
        # Older servers send notices without an id: those may concern any task. Other unknown ids
        # are an agent's, a finished evaluation's, or repeat a notice from a stream that was lost.
        return not notice.task_id or self.tasks.awaits(notice.task_id)

    async def give_up(self, server: int, notice: trainer_service_pb2.Notice) -> None:
        """Settles a task that will get no group, as if refused; the server knows. The group is counted with
        the current step or the next."""
        self.tasks.settled(notice.task_id)
        self.tasks.arrived(server)
        self._given_up[notice.reason] += 1
        entry = RefusedEntry(notice.group_id, notice.task_id, notice.reason)
        await together(
            (
                # Without this entry, an older checkpoint would still list its index as outstanding.
                self.compute.run(self.ledger.refuse, entry),
                self.exchanges[server].ask(lambda: self.tasks.fill(server)),
            )
        )

    def _count_given_up(self, record: StepRecord) -> None:
        for reason, count in self._given_up.items():
            _count_dropped(record, reason, count)
        self._given_up.clear()

    async def gather(self, record: StepRecord) -> Batch | None:
        """Waits for as many groups as form a batch; returns None if the run is asked to stop.

        Raises EverythingFailed, EverythingDropped and StorageFailed.
        """
        held = self.exchanges.held_version
        self._wanted = self._of(record.step)
        missing = list(self._parts)
        if record.step not in self.ledger.ahead:
            for entry in self.ledger.take_unfinished():
                if entry.reason in (ALL_FAILED, FAILED_ASKED_AGAIN):
                    record.groups_failed += 1
                elif entry.reason != TASK_SETTLED:
                    _count_dropped(record, entry.reason)
        self._count_given_up(record)
        found: list[tuple[trajectory_pb2.TrajectoryGroup, TrainingGroup]] = []
        while len(found) < self.config.train.groups_per_step:
            if self.stopping.is_set():
                return None
            all_seen = all(exchange.all_seen for exchange in self.exchanges)
            if self._wanted and not self._wanted & self._aside.keys() and all_seen:
                log.warning("the server lost groups of step %d; taking others", record.step)
                self._wanted = frozenset()
                continue
            delivery = self._take_aside(missing) or await self._next(missing)
            if delivery is None:
                continue
            max_lag = self.config.staleness.max_lag
            group = read_group(delivery, trainer_version=held, max_lag=max_lag)
            record.failures += group.failures
            record.tokens_received += group.policy_tokens
            record.rewards += group.attempt_rewards
            if not group.samples:
                record.groups_failed += 1
                await self._refuse_failed(delivery)
                continue
            self._failed_in_a_row = 0
            # A group that this step trained before is trained again.
            if self._wanted or not await self._drop_useless(delivery, group, record):
                missing[self.exchanges.server_of(delivery)] -= 1
                found.append((delivery, self._weigh(delivery, group, record)))
        self._count_given_up(record)
        found.sort(key=lambda pair: (self.tasks.place(pair[0].task_id), pair[0].group_id))
        return Batch([delivery for delivery, _ in found], [group for _, group in found])

    def describe(self, batch: Batch) -> BatchFigures:
        sources = [self.tasks.data_source(delivery.task_id) for delivery in batch.deliveries]
        return describe_batch(batch.deliveries, batch.groups, sources)

    async def refill(self) -> bool:
        """Submits tasks in place of those in a batch. Returns False if the run has left its servers."""
        await self.exchanges.ask_all(self.tasks.fill)
        return not self.exchanges.left.is_set()

    def fillers(self) -> list[Coroutine[None, None, None]]:
        """Returns, for each server, what submits tasks again whenever it was full, until cancelled."""
        return [
            self.tasks.keep_filled(server, exchange.ask)
            for server, exchange in enumerate(self.exchanges)
        ]

    def settle(self, batch: Batch, step: int) -> None:
        """Sends the receipts of a batch that the step trained, and marks its tasks as done."""
        self.exchanges.receipt(batch.deliveries, step)
        for delivery in batch.deliveries:
            self.tasks.settled(delivery.task_id)

    def _of(self, step: int) -> frozenset[str]:
        """Returns the groups that the ledger lists for the step; empty when not following it."""
        entry = self.ledger.ahead.get(step) if self._following else None
        return entry.group_ids if entry is not None else frozenset[str]()

    def _take_aside(self, missing: Sequence[int]) -> trajectory_pb2.TrajectoryGroup | None:
        """Returns a group in hand for this batch, if any. `missing` counts each server's open part."""
        for name, group in self._aside.items():
            if self._is_for_batch(group, missing):
                return self._aside.pop(name)
        return None

    def _is_for_batch(self, group: trajectory_pb2.TrajectoryGroup, missing: Sequence[int]) -> bool:
        if self._wanted:
            return group.group_id in self._wanted
        return missing[self.exchanges.server_of(group)] > 0

    async def _next(self, missing: Sequence[int]) -> trajectory_pb2.TrajectoryGroup | None:
        """Waits for the next group. Returns None in four cases: the group is not for this batch, others
        were set aside meanwhile, all buffered groups were seen, or the run is asked to stop."""
        delivery = await unless(self.stopping, self.exchanges.next_group())
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
        """Keeps a group for a later batch. While looking for specific groups, demands another one from its
        server, or from any that may still have buffered groups."""
        self._aside[delivery.group_id] = delivery
        if self._wanted and delivery.group_id not in self._wanted:
            own = self.exchanges[self.exchanges.server_of(delivery)]
            for exchange in (own, *self.exchanges):
                if not exchange.all_seen:
                    exchange.demand(1)
                    break

    def _take(self, delivery: trajectory_pb2.TrajectoryGroup) -> bool:
        """Returns whether the task is still to be trained. The caller refuses the group if not."""
        self.tasks.arrived(self.exchanges.server_of(delivery))
        return self.tasks.take(delivery.task_id)

    async def _refuse_settled(
        self, delivery: trajectory_pb2.TrajectoryGroup, *, instead: bool = True
    ) -> None:
        message = f"another group of task {delivery.task_id} was trained, or refused"
        await self._refuse(delivery, TASK_SETTLED, message, instead=instead)

    async def _drop_useless(
        self, delivery: trajectory_pb2.TrajectoryGroup, group: TrainingGroup, record: StepRecord
    ) -> bool:
        """Returns whether the group was refused as unusable. Raises EverythingDropped."""
        config = self.config.groups
        reason = reason_to_drop(group, config)
        if reason is None and self._filter is not None:
            delivered = Delivered(delivery, self.tasks.task(delivery.task_id))
            # The filter may be slow, for example a judge over a network. Uploads and evaluations continue.
            reason = await self.compute.run(self._filter, group, delivered)
        if reason is None:
            return False
        own = (n for r, n in record.groups_dropped.items() if r not in TAKE_THEIR_TASK)
        if sum(own) >= config.max_dropped_per_step:
            counted = ", ".join(f"{r} {n}" for r, n in record.groups_dropped.items())
            said = f"step {record.step} has dropped the maximum number of groups: {counted}"
            if config.then == "stop":
                raise EverythingDropped(said)
            if not record.groups_kept_in_need:
                log.warning("%s; taking further groups as they are", said)
            record.groups_kept_in_need += 1
            return False
        message = f"dropped: {reason}"
        if self._ask_again(delivery.task_id, failed=reason == SIBLING_FAILED):
            reason = ASKED_AGAIN
        _count_dropped(record, reason)
        await self._refuse(delivery, reason, message)
        return True

    def _ask_again(self, task_id: str, *, failed: bool) -> bool:
        """Asks the prompt of a refused group again if trajectories failed and it may be replaced; otherwise
        gives it up. Returns whether it asks again."""
        config = self.config.groups
        again = failed and config.failed_siblings == "replace"
        again = again and times_asked_again(task_id) < config.max_replacements
        if again:
            self.tasks.ask_again(task_id)
        else:
            self.tasks.settled(task_id)
        return again

    def _weigh(
        self, delivery: trajectory_pb2.TrajectoryGroup, group: TrainingGroup, record: StepRecord
    ) -> TrainingGroup:
        """Returns the group with penalties for long answers and the mask of truncated turns applied."""
        config = self.config.groups
        if config.overlong is not None:
            group = penalize_length(group, delivery, config.overlong)
        if config.mask_truncated:
            group, masked = mask_truncated(group, delivery)
            record.tokens_truncated += masked
        return group

    async def _refuse_failed(self, delivery: trajectory_pb2.TrajectoryGroup) -> None:
        """Refuses a group in which every trajectory failed, and requests another one."""
        reasons = Counter(t.outcome.failure.reason for t in delivery.trajectories)
        self._failure_reasons.update(reasons)
        self._failed_in_a_row += 1
        named = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
        log.warning("every trajectory of group %s failed: %s", delivery.group_id, named)
        again = self._ask_again(delivery.task_id, failed=True)
        reason = FAILED_ASKED_AGAIN if again else ALL_FAILED
        too_many = self._failed_in_a_row >= self.config.failure.max_failed_groups
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
        # On disk first, because the server forgets the group once it is refused.
        entry = RefusedEntry(delivery.group_id, delivery.task_id, reason)
        await self.compute.run(self.ledger.refuse, entry)
        server = self.exchanges.server_of(delivery)
        self.exchanges.refuse(delivery, reason, message)
        if instead:
            self.exchanges[server].demand(1)
            await self.exchanges[server].ask(lambda: self.tasks.fill(server))


def _count_dropped(record: StepRecord, reason: str, count: int = 1) -> None:
    dropped = record.groups_dropped
    record.groups_dropped = {**dropped, reason: dropped.get(reason, 0) + count}


def settle_refused(tasks: TaskFeeder, refused: Iterable[RefusedEntry]) -> None:
    """Applies groups refused before this process started to their prompts."""
    for entry in refused:
        if entry.reason in (ASKED_AGAIN, FAILED_ASKED_AGAIN):
            tasks.ask_again(entry.task_id)
        elif entry.reason != TASK_SETTLED:
            tasks.settled(entry.task_id)
