"""The walk, seen from the trainer: batch -> gradient -> weights, again and again.

    gather   wait for the groups of one step, which the server delivers on demand
    train    advantages, packing, one optimizer step
    publish  upload the new weights while generation goes on
    switch   ask for them on the exchange, send receipts, demand the next batch
    conclude when the switch is answered: the step's record

The server goes on sampling all the while; what it has finished meanwhile is waiting at the next
gather. A step's demand follows its switch, because from then on the trainer holds the new version,
from which lag is counted. Every step publishes a version of its own, also where nothing had a
gradient: the server counts batches by the versions between them.

A switch can be rejected: the engine could not load the version, or its probe was off. The server then
samples the version before. The order of events:

    1. SwitchWeights(v), the receipts of v's batch, the next demand; the next step gathers
    2. WeightReceipt(v) with a rejection. v's step is done all the same: the policy contains it, so its
       receipts stand and its groups are not trained again; only the engine lags behind
    3. v once more, whole, out of the payload, which the policy's next step does not touch. The groups
       that come meanwhile carry one version more of lag, and are masked or held back as any others
    4. SwitchWeights(v) again. Accepted: the step is concluded. Rejected: the run ends. What it has not
       saved the server delivers again to the trainer that resumes

The next version is not published before that is settled.

A run is asked to stop by `stopping`, and ends in one of these ways:

    server there     gathering ends at once; a step that computes is finished: publish, switch,
                     receipts, checkpoint, conclude
    server away      computing is finished, and so is its step, but only here: the server hears
                     nothing of it. Checkpoint; the record as far as known. Whoever waits for the
                     server (`Handover`) stops waiting as `Exchange.left` is set
    server lost      as with the server there until the loss, from then on as with the server away
      after that

In all of them the checkpoint holds the last step the policy contains, where checkpoints are kept
and it is not saved yet. It is written after the step's receipts and before its notice: what is
receipted and not in a checkpoint, the server delivers again to a trainer that resumes before it.
What is in a checkpoint and was not receipted it delivers again too; the feeder knows its task, and
it is receipted then, not trained twice.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from opentelemetry.trace import Span

from penstock.trainer.adapter import check_taken
from penstock.trainer.batching import TrainingGroup, build_micro_batches, read_group
from penstock.trainer.compute import ComputeThread
from penstock.trainer.config import TrainerConfig
from penstock.trainer.errors import EverythingFailed, SessionRefused
from penstock.trainer.exchange import Exchange, SwitchReceipt
from penstock.trainer.handover import Handover
from penstock.trainer.metrics import MetricsWriter, StepRecord
from penstock.trainer.policy import Policy, StepResult
from penstock.trainer.probe import Probe
from penstock.trainer.publisher import Publisher, Sent
from penstock.trainer.stopping import unless
from penstock.trainer.tasks import TaskFeeder
from penstock.v1 import rollout_service_pb2, trainer_service_pb2, trajectory_pb2, weights_pb2

log = logging.getLogger(__name__)

UNAVAILABLE = rollout_service_pb2.REPLICA_STATE_UNAVAILABLE
LATE_POLICIES = {
    "mask": trainer_service_pb2.LATE_POLICY_MASK,
    "wait": trainer_service_pb2.LATE_POLICY_WAIT,
    "requeue": trainer_service_pb2.LATE_POLICY_REQUEUE,
    "drop": trainer_service_pb2.LATE_POLICY_DROP,
}
IN_FLIGHT = {
    "keep": weights_pb2.IN_FLIGHT_POLICY_KEEP,
    "recompute": weights_pb2.IN_FLIGHT_POLICY_RECOMPUTE,
    "drain": weights_pb2.IN_FLIGHT_POLICY_DRAIN,
    "abort": weights_pb2.IN_FLIGHT_POLICY_ABORT,
}


@dataclass(slots=True)
class Batch:
    """The groups of one step, as delivered and as read."""

    deliveries: list[trajectory_pb2.TrajectoryGroup] = field(
        default_factory=list[trajectory_pb2.TrajectoryGroup]
    )
    groups: list[TrainingGroup] = field(default_factory=list[TrainingGroup])


class TrainingLoop:
    """One run, from the step its policy is at to its last."""

    def __init__(
        self,
        config: TrainerConfig,
        *,
        policy: Policy,
        compute: ComputeThread,
        exchange: Exchange,
        publisher: Publisher,
        tasks: TaskFeeder,
        metrics: MetricsWriter,
        probe: Probe,
        checkpoint: Callable[[int, int], None],
        stopping: asyncio.Event,
        step: int,
        share_prefixes: bool,
    ) -> None:
        """`checkpoint(step, weight_version)` runs in the compute thread. `stopping`, which the
        exchange has too, ends the run after the step under way."""
        self._config = config
        self._policy = policy
        self._compute = compute
        self._exchange = exchange
        self._publisher = publisher
        self._tasks = tasks
        self._metrics = metrics
        self._probe = probe
        self._checkpoint = checkpoint
        self._stopping = stopping
        self._share_prefixes = share_prefixes
        self._handover = Handover(exchange, publisher, IN_FLIGHT[config.weights.in_flight])
        self._failed_in_a_row = 0
        self._failure_reasons: Counter[str] = Counter()
        self._weight_dtype = ""
        self._saved_step = step
        self.step = step
        """Last step the policy contains."""

    async def run(self) -> None:
        """Consumes delivered groups; waits for a batch of them; produces weight versions and
        receipts.

        Ends after the last step or, sooner, when it is asked to stop: the module says how.
        """
        async with asyncio.TaskGroup() as concluding:
            self._exchange.on_notice = lambda notice: self._heed(notice, concluding)
            try:
                await self._steps(concluding)
            finally:
                self._exchange.on_notice = None

    async def _steps(self, concluding: asyncio.TaskGroup) -> None:
        conclusion = None
        if self.step < self._config.run.steps:
            self._exchange.demand(self._config.train.groups_per_step)
        while self.step < self._config.run.steps:
            record = StepRecord(self.step + 1, time_gather_start=time.time())
            span = self._metrics.begin_step(record.step)
            batch = await self._gather(record)
            if batch is None:
                await self._save_if_due()
                return
            result = await self._train(batch, record)
            if conclusion is not None:
                # The payload is the server's until it has answered the switch before.
                await conclusion
            await self._publish(result, record)
            switch = self._switch(batch, record)
            record.seconds_checkpoint = await self._save_if_due()
            record.seconds = time.time() - record.time_gather_start
            conclusion = concluding.create_task(self._conclude(switch, record, span))

    async def begin(self, welcome: trainer_service_pb2.Welcome) -> None:
        """Agrees with the server on weights and tasks before the first step.

        The server starts with the base model, as version 0. Where it has seen other versions, this
        run's weights get a greater number than all of them, for versions only grow. A server that serves
        nothing, because it could not load a version, needs one whatever its number. Raises ConfigInvalid
        where it does not take this run's adapter.
        """
        info = await self._handover.retry(self._publisher.server_info)
        if info is None:
            return
        self._weight_dtype = info.weight_dtype
        if (adapter := self._policy.adapter()) is not None:
            check_taken(adapter, info.lora.max_rank if info.HasField("lora") else None)
        held = self._exchange.held_version
        newest = max(info.active_weight_version, *info.staged_weight_versions, 0)
        serves = all(replica.state != UNAVAILABLE for replica in info.replicas)
        if newest > held or welcome.active_weight_version != held or not serves:
            version = held if newest < held else newest + 1
            log.info("the server samples version %d; publishing %d", newest, version)
            await self._publisher.fill(self._policy.weights, version, self._weight_dtype)
            if await self._handover.stage(version) is not None:
                await self._handover.confirm(version, self._exchange.switch(version))
        await self._handover.retry(self._tasks.submit_again)

    async def restore(self, welcome: trainer_service_pb2.Welcome) -> None:
        """Brings a server up to date that came back with less than it had. Raises ServerLost."""
        held, active = self._exchange.held_version, welcome.active_weight_version
        if active > held:
            raise SessionRefused(
                f"the server samples version {active}, which this trainer never published"
            )
        if active < held:
            # It has lost what differences are made from.
            self._publisher.forget_base()
        # A payload that is newer is on its way already, and will be switched to.
        if active < held and self._publisher.filled_version == held:
            log.warning("the server came back with version %d; publishing %d again", active, held)
            if await self._handover.upload(held) is not None:
                self._exchange.repeat_switch()
        await self._tasks.submit_again()

    async def _gather(self, record: StepRecord) -> Batch | None:
        """The next batch, without groups that failed altogether; None where the run is to stop."""
        batch = Batch()
        while len(batch.groups) < self._config.train.groups_per_step:
            delivery = await self._next_delivery()
            if delivery is None:
                return None
            self._tasks.arrived()
            if self._tasks.is_settled(delivery.task_id):
                # The checkpoint resumed from contains it, and its receipt was never heard.
                self._exchange.receipt([delivery], self.step)
                self._exchange.demand(1)
                await self._handover.retry(self._tasks.fill)
                continue
            group = read_group(
                delivery,
                trainer_version=self._exchange.held_version,
                max_lag=self._config.staleness.max_lag,
                normalize_std=self._config.train.normalize_std,
            )
            record.failures += group.failures
            if group.samples:
                self._failed_in_a_row = 0
                batch.deliveries.append(delivery)
                batch.groups.append(group)
            else:
                record.groups_failed += 1
                self._refuse(delivery)
                await self._handover.retry(self._tasks.fill)
        record.time_gather_end = time.time()
        record.seconds_wait = record.time_gather_end - record.time_gather_start
        _describe_batch(batch, record)
        await self._handover.retry(self._tasks.fill)
        return None if self._exchange.left.is_set() else batch

    def _heed(self, notice: trainer_service_pb2.Notice, group: asyncio.TaskGroup) -> None:
        """A dropped group took its task with it; a requeued one did not."""
        if notice.reason == "GROUP_DROPPED":
            self._tasks.arrived()
            group.create_task(self._handover.retry(self._tasks.fill))

    async def _next_delivery(self) -> trajectory_pb2.TrajectoryGroup | None:
        """The next group, or None as soon as the run is to stop."""
        if self._stopping.is_set():
            return None
        return await unless(self._stopping, self._exchange.next_group())

    def _refuse(self, delivery: trajectory_pb2.TrajectoryGroup) -> None:
        """A group in which everything failed: not to be sent again, and another one instead of
        it."""
        reasons = Counter(t.outcome.failure.reason for t in delivery.trajectories)
        self._failure_reasons.update(reasons)
        self._failed_in_a_row += 1
        named = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
        log.warning("every trajectory of group %s failed: %s", delivery.group_id, named)
        self._exchange.refuse(delivery, "ALL_FAILED", f"every trajectory failed: {named}")
        self._tasks.settled(delivery.task_id)
        if self._failed_in_a_row >= self._config.failure.max_failed_groups:
            counted = ", ".join(f"{r} {n}" for r, n in self._failure_reasons.most_common())
            last = delivery.trajectories[-1].outcome.failure if delivery.trajectories else None
            raise EverythingFailed(
                f"every trajectory failed in {self._failed_in_a_row} groups in a row: {counted}"
                + (f"; the last said: {last.message}" if last else "")
            )
        self._exchange.demand(1)

    async def _train(self, batch: Batch, record: StepRecord) -> StepResult:
        record.time_train_start = time.time()
        self._probe.choose(batch.groups)
        result = await self._compute.run(self._compute_step, batch.groups)
        record.time_train_end = time.time()
        record.seconds_train = record.time_train_end - record.time_train_start
        record.applied, record.loss, record.grad_norm = (
            result.applied,
            result.loss,
            result.grad_norm,
        )
        record.learning_rate, record.clip_fraction = result.learning_rate, result.clip_fraction
        record.logprob_diff_mean = result.logprob_diff_mean
        record.logprob_diff_max = result.logprob_diff_max
        return result

    def _compute_step(self, groups: list[TrainingGroup]) -> StepResult:
        batches = build_micro_batches(
            groups,
            token_budget=self._config.train.micro_batch_tokens,
            share_prefixes=self._share_prefixes,
        )
        return self._policy.step(batches, sum(group.trained_tokens for group in groups))

    async def _publish(self, result: StepResult, record: StepRecord) -> None:
        """Uploads the step's weights, staged: generation goes on meanwhile."""
        record.time_upload_start = record.time_upload_end = time.time()
        record.weight_version = self._exchange.held_version + 1
        if self._exchange.left.is_set():
            return
        if result.applied or not self._publisher.filled_version:
            await self._publisher.fill(
                self._policy.weights, record.weight_version, self._weight_dtype
            )
        else:
            self._publisher.relabel(record.weight_version)
        sent = await self._handover.stage(record.weight_version)
        record.time_upload_end = time.time()
        record.seconds_upload = record.time_upload_end - record.time_upload_start
        if sent is not None:
            _describe_upload(sent, record)

    def _switch(self, batch: Batch, record: StepRecord) -> asyncio.Future[SwitchReceipt]:
        """Switch, receipts, and the demand of the next step, in this order on the stream."""
        record.time_switch_start = time.time()
        switch = self._exchange.switch(record.weight_version)
        self.step = record.step
        self._exchange.receipt(batch.deliveries, self.step)
        for delivery in batch.deliveries:
            self._tasks.settled(delivery.task_id)
        if not self._config.checkpoint.every_steps:
            self._exchange.checkpoint(self.step)
        if self.step < self._config.run.steps and not self._stopping.is_set():
            self._exchange.demand(self._config.train.groups_per_step)
        return switch

    async def _save_if_due(self) -> float:
        """Saves what is not saved yet, each so many steps and at the end; returns its seconds."""
        every = self._config.checkpoint.every_steps
        last = self.step == self._config.run.steps or self._stopping.is_set()
        if not every or self.step == self._saved_step or (self.step % every and not last):
            return 0.0
        begun = time.time()
        await self._compute.run(self._checkpoint, self.step, self._exchange.held_version)
        self._saved_step = self.step
        # Only now: what the notice makes final, the server forgets.
        self._exchange.checkpoint(self.step)
        return time.time() - begun

    async def _conclude(
        self, switch: asyncio.Future[SwitchReceipt], record: StepRecord, span: Span
    ) -> None:
        switched = await self._handover.confirm(record.weight_version, switch)
        if switched is None:
            record.time = time.time()
        else:
            receipt = switched.receipt
            record.time_switch_end = record.time = receipt.received_at
            record.seconds_switch = record.time_switch_end - record.time_switch_start
            record.pause_seconds += receipt.pause_seconds
            if receipt.probe_difference is not None:
                record.probe_difference = receipt.probe_difference
            if switched.sent_again is not None:
                record.upload_bytes += switched.sent_again.bytes_sent
                record.delta = False
        record.idle_ratio = record.seconds_wait / record.seconds if record.seconds else 0.0
        self._metrics.write(record, span)


def _describe_batch(batch: Batch, record: StepRecord) -> None:
    groups = batch.groups
    rewards = np.array([reward for group in groups for reward in group.rewards])
    lags = np.concatenate([group.lags for group in groups])
    record.reward_mean, record.reward_std = float(rewards.mean()), float(rewards.std())
    if len(lags):
        record.lag_mean, record.lag_max = float(lags.mean()), int(lags.max())
    record.tokens = sum(group.policy_tokens for group in groups)
    record.tokens_trained = sum(group.trained_tokens for group in groups)
    record.tokens_masked = sum(group.masked_tokens for group in groups)
    record.groups = len(groups)
    record.groups_without_gradient = sum(not group.has_gradient for group in groups)
    record.traceparents = [
        trajectory.traceparent
        for delivery in batch.deliveries
        for trajectory in delivery.trajectories
        if trajectory.traceparent
    ]


def _describe_upload(sent: Sent, record: StepRecord) -> None:
    record.upload_bytes, record.upload_dense_bytes = sent.bytes_sent, sent.dense_bytes
    record.delta, record.changed_elements_ratio = sent.delta, sent.changed_elements_ratio
    record.changed_tensors = sent.changed_tensors
    record.unchanged = sent.changed_tensors == 0
    record.pause_seconds, record.probe_difference = sent.pause_seconds, sent.probe_difference
    if record.unchanged:
        why = "" if record.applied else ", for the step had no gradient"
        log.warning("version %d changes no tensor%s", record.weight_version, why)
