"""The walk, seen from the trainer: batch -> gradient -> weights, again and again.

    gather   wait for the groups of one step, which the server delivers on demand
    train    advantages, packing, one optimizer step
    note     what the step was made of, in the ledger
    publish  upload the new weights while generation goes on
    switch   ask for them on the exchange, send receipts, demand the next batch
    conclude when the switch is answered: the step's record

A run may have several servers (`exchanges`). Each delivers its part of the batch, is sent the weights and
asked to switch, and gets the receipts of its own groups; the step goes on when all have. What follows says
"the server" of each.

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
                     server (`Handover`) stops waiting as `Exchanges.left` is set. A step that the ledger
                     has ahead is compared with its line all the same
    server lost      as with the server there until the loss, from then on as with the server away
      after that
    server full      as with the server lost, where it has no room for the weights or the tasks of the
                     step under way

In all of them the checkpoint holds the last step the policy contains, where checkpoints are kept
and it is not saved yet. It is written after the step's receipts and before its notice: what is
receipted and not in a checkpoint, the server delivers again to a trainer that resumes before it.
What is in a checkpoint and was not receipted it delivers again too; the ledger knows the group, and
it is refused then, not trained twice.

A run that resumes does what the trainer before did beyond the checkpoint again: see `agreement`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from opentelemetry.trace import Span

from penstock.common.failpoints import hit
from penstock.trainer.agreement import Agreement
from penstock.trainer.algorithms.objective import Objective
from penstock.trainer.batching.batching import TrainingGroup
from penstock.trainer.batching.planning import plan_step
from penstock.trainer.config.trainer import TrainerConfig
from penstock.trainer.core.compute import ComputeThread
from penstock.trainer.core.figures import as_json
from penstock.trainer.core.together import together
from penstock.trainer.data.feeder import TaskFeeder
from penstock.trainer.evaluation.evaluation import Evaluator
from penstock.trainer.exchange.stream import SwitchReceipt
from penstock.trainer.exchange.streams import Exchanges
from penstock.trainer.gather.batch import TAKE_THEIR_TASK, Batch, Gatherer
from penstock.trainer.metrics.batch_figures import describe_batch
from penstock.trainer.metrics.metrics import MetricsWriter
from penstock.trainer.metrics.step_record import StepRecord
from penstock.trainer.policy.protocol import Policy, StepResult
from penstock.trainer.state.ledger import Ledger, RefusedEntry, StepEntry, TrainedGroup
from penstock.trainer.weights.handover import Handover
from penstock.trainer.weights.probe import Probe
from penstock.trainer.weights.publisher import Publisher
from penstock.trainer.weights.sender import Sent
from penstock.v1 import trainer_service_pb2, weights_pb2

log = logging.getLogger(__name__)

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


class TrainingLoop:
    """One run, from the step its policy is at to its last."""

    def __init__(
        self,
        config: TrainerConfig,
        *,
        policy: Policy,
        compute: ComputeThread,
        exchanges: Exchanges,
        publisher: Publisher,
        tasks: TaskFeeder,
        metrics: MetricsWriter,
        probe: Probe,
        ledger: Ledger,
        checkpoint: Callable[[int, int, Mapping[str, object]], Callable[[], object]],
        stopping: asyncio.Event,
        step: int,
        share_prefixes: bool,
        forgotten_step: int = 0,
        evaluator: Evaluator | None = None,
        data_ranks: int = 1,
    ) -> None:
        """`checkpoint(step, weight_version, figures)` notes what there is to save, among it the step's
        figures where they are not written yet; what it returns saves it, and runs in the compute thread.
        `stopping`, which the exchanges have too, ends the run after the step under way. Up to
        `forgotten_step`, of a checkpoint that is broken, the server may have forgotten what the ledger
        has ahead. Without an `evaluator` nothing is measured. A plan is for `data_ranks` ranks."""
        self._data_ranks = data_ranks
        self._config = config
        self._evaluator = evaluator
        self._policy = policy
        self._compute = compute
        self._exchanges = exchanges
        self._publisher = publisher
        self._tasks = tasks
        self._metrics = metrics
        self._probe = probe
        self._ledger = ledger
        self._checkpoint = checkpoint
        self._stopping = stopping
        self._share_prefixes = share_prefixes
        self._objective = Objective(config.algorithm)
        self._handover = Handover(exchanges, publisher, IN_FLIGHT[config.weights.in_flight])
        self._gatherer = Gatherer(
            config,
            exchanges=exchanges,
            tasks=tasks,
            handover=self._handover,
            ledger=ledger,
            compute=compute,
            stopping=stopping,
        )
        self._agreement = Agreement(
            config,
            policy=policy,
            exchanges=exchanges,
            publisher=publisher,
            tasks=tasks,
            handover=self._handover,
            gatherer=self._gatherer,
            ledger=ledger,
            forgotten_step=forgotten_step,
        )
        self._saved_step = step
        self._unconcluded: StepRecord | None = None
        self.step = step
        """Last step the policy contains."""

    async def run(self) -> None:
        """Consumes delivered groups; waits for a batch of them; produces weight versions and
        receipts.

        Ends after the last step or, sooner, when it is asked to stop: the module says how.
        """
        async with asyncio.TaskGroup() as concluding:
            self._exchanges.on_notice = lambda server, notice: self._heed(
                server, notice, concluding
            )
            if self._evaluator is not None:
                self._evaluator.open(concluding)
            fillers = [
                concluding.create_task(
                    self._tasks.keep_filled(server, partial(self._handover.ask, server))
                )
                for server in self._handover.servers
            ]
            try:
                await self._steps(concluding)
            finally:
                self._exchanges.on_notice = None
                for filler in fillers:
                    filler.cancel()

    def _seconds_afterwards(self) -> float | None:
        """What the evaluation of the last weights takes, after the last step."""
        return self._evaluator.seconds_after(self._config.run.steps) if self._evaluator else 0.0

    async def _steps(self, concluding: asyncio.TaskGroup) -> None:
        conclusion = None
        self._measure(self._exchanges.held_version)
        if self.step < self._config.run.steps:
            self._gatherer.demand(self.step + 1)
        while self.step < self._config.run.steps:
            record = StepRecord(self.step + 1, time_gather_start=time.time())
            span = self._metrics.begin_step(record.step, self._seconds_afterwards())
            batch = await self._gather(record)
            if batch is None:
                await self._save_if_due()
                return
            hit("train.gathered")
            result = await self._train(batch, record)
            hit("train.computed")
            if conclusion is not None:
                # The payload is the server's until it has answered the switch before.
                await conclusion
            if self._config.weights.transport == "collective":
                # Its upload is the switch.
                await self._may_switch(record)
            await self._publish(batch, result, record)
            hit("train.published")
            await self._may_switch(record)
            switches = self._switch(batch, record)
            self._unconcluded = record
            record.finish(time.time() - record.time_gather_start)
            record.seconds_checkpoint = await self._save_if_due()
            record.finish(time.time() - record.time_gather_start)
            conclusion = concluding.create_task(self._conclude(switches, record, span))
        if conclusion is not None:
            await conclusion
        if self._evaluator is not None and not self._exchanges.left.is_set():
            self._metrics.doing("evaluating")
            await self._evaluator.finish(self.step, self._exchanges.held_version)

    async def begin(self) -> None:
        """Agrees with the servers on weights and tasks before the first step. Raises ConfigInvalid where
        one does not take this run's adapter."""
        await self._agreement.begin(self.step)

    async def restore(self, server: int, welcome: trainer_service_pb2.Welcome) -> None:
        """Brings a server up to date that came back with less than it had. Raises ServerLost."""
        samples_it = await self._agreement.restore(server, welcome)
        if self._evaluator is not None:
            if not samples_it:
                self._evaluator.version_gone()
            await self._evaluator.submit_again(server)

    def _measure(self, weight_version: int) -> None:
        """The server samples what the trainer holds: evaluations that are due begin."""
        behind = self._agreement.catching_up or self._exchanges.left.is_set()
        if self._evaluator is not None and not behind:
            self._evaluator.version_active(self.step, weight_version)

    async def _may_switch(self, record: StepRecord) -> None:
        if self._evaluator is not None:
            record.seconds_held += await self._evaluator.may_switch()

    async def _gather(self, record: StepRecord) -> Batch | None:
        """The next batch, without groups that failed altogether; None where the run is to stop."""
        batch = await self._gatherer.gather(record)
        if batch is None:
            return None
        record.time_gather_end = time.time()
        record.seconds_wait = record.time_gather_end - record.time_gather_start
        sources = [self._tasks.data_source(delivery.task_id) for delivery in batch.deliveries]
        record.batch = describe_batch(batch.deliveries, batch.groups, sources)
        record.traceparents = [
            trajectory.traceparent
            for delivery in batch.deliveries
            for trajectory in delivery.trajectories
            if trajectory.traceparent
        ]
        await self._handover.ask_all(self._tasks.fill)
        return None if self._exchanges.left.is_set() else batch

    def _heed(
        self, server: int, notice: trainer_service_pb2.Notice, group: asyncio.TaskGroup
    ) -> None:
        """A dropped group took its task with it; a requeued one did not."""
        if notice.reason not in TAKE_THEIR_TASK:
            return
        task_id = notice.task_id
        if self._evaluator is not None and self._evaluator.dropped(task_id, notice.reason):
            return
        # Without an id, as an older server sends it, it may be any; others are an agent's, of an evaluation
        # that is over, or were told before on a stream that was lost.
        if not task_id or self._tasks.awaits(task_id):
            group.create_task(self._give_up(server, notice))

    async def _give_up(self, server: int, notice: trainer_service_pb2.Notice) -> None:
        """No group of that task will come: as of one that was refused, which this server knows already."""
        self._tasks.settled(notice.task_id)
        self._tasks.arrived(server)
        self._gatherer.given_up(notice.reason)
        entry = RefusedEntry(notice.group_id, notice.task_id, notice.reason)
        await together(
            (
                # A checkpoint before this says that its index is outstanding.
                self._compute.run(self._ledger.refuse, entry),
                self._handover.ask(server, lambda: self._tasks.fill(server)),
            )
        )

    async def _train(self, batch: Batch, record: StepRecord) -> StepResult:
        record.time_train_start = time.time()
        self._probe.choose(batch.groups)
        record.result = await self._compute.run(self._compute_step, batch.groups)
        record.time_train_end = time.time()
        record.seconds_train = record.time_train_end - record.time_train_start
        return record.result

    def _compute_step(self, groups: list[TrainingGroup]) -> StepResult:
        plan = plan_step(
            groups,
            self._objective,
            token_budget=self._config.train.micro_batch_tokens,
            share_prefixes=self._share_prefixes,
            update_count=self._config.train.updates_per_step,
            ranks=self._data_ranks,
        )
        return self._policy.step(plan)

    async def _publish(self, batch: Batch, result: StepResult, record: StepRecord) -> None:
        """Notes the step and uploads its weights, staged: generation goes on meanwhile. An upload that
        begins with the copy is committed only after the note."""
        record.time_upload_start = record.time_upload_end = time.time()
        record.weight_version = self._exchanges.held_version + 1
        left = self._exchanges.left.is_set()
        # Nobody takes these weights, but where the step was done before, the ledger has their checksum:
        # without it this line would be another one, which cuts off those of the steps that follow.
        if left and record.step not in self._ledger.ahead:
            await self._note(_entry(batch, record, ""))
            return
        before = self._publisher.digest
        if result.applied or not self._publisher.filled_version:
            await self._agreement.fill(record.weight_version, uploads=not left)
        else:
            self._publisher.relabel(record.weight_version)
        entry = _entry(batch, record, self._publisher.digest)
        record.weight_version = self._agreement.number(entry)
        await self._note(replace(entry, weight_version=record.weight_version))
        sent = await self._agreement.stage(record.weight_version)
        record.time_upload_end = time.time()
        record.seconds_upload = record.time_upload_end - record.time_upload_start
        if sent is not None:
            _describe_upload(sent, record)
        # A server cannot say it of the first version that it gets, nor one whose answer was lost.
        same = before == self._publisher.digest or not result.applied
        if same or record.changed_tensors == 0:
            record.unchanged = True
            why = "" if result.applied else ", for the step had no gradient"
            log.warning("version %d changes no tensor%s", record.weight_version, why)

    async def _note(self, entry: StepEntry) -> None:
        if self._evaluator is not None and self._ledger.ahead.get(entry.step, entry) != entry:
            # Before the ledger loses what says so.
            self._metrics.forget(entry.step)
            self._evaluator.forget(entry.step)
        # Before the server hears of the version, so that the ledger knows of all it may sample.
        await self._compute.run(self._ledger.write, entry)
        hit("train.noted")

    def _switch(
        self, batch: Batch, record: StepRecord
    ) -> Mapping[int, asyncio.Future[SwitchReceipt]]:
        """Switch, receipts, and the demand of the next step, in this order on each stream; the answers to
        come, none of a server that is past this version."""
        record.time_switch_start = time.time()
        switches = self._agreement.switch(record.weight_version)
        self.step = record.step
        self._exchanges.receipt(batch.deliveries, self.step)
        for delivery in batch.deliveries:
            self._tasks.settled(delivery.task_id)
        if not self._config.checkpoint.every_steps:
            self._exchanges.checkpoint(self.step)
        if self.step < self._config.run.steps and not self._stopping.is_set():
            self._gatherer.demand(self.step + 1)
        return switches

    async def _save_if_due(self) -> float:
        """Saves what is not saved yet, each so many steps and at the end; returns its seconds."""
        every = self._config.checkpoint.every_steps
        last = self.step == self._config.run.steps or self._stopping.is_set()
        if not every or self.step == self._saved_step or (self.step % every and not last):
            return 0.0
        begun = time.time()
        # Noted here, while nothing moves; written there.
        figures: Mapping[str, object] = (
            {} if self._unconcluded is None else as_json(self._unconcluded.line())
        )
        save = self._checkpoint(self.step, self._exchanges.held_version, figures)
        await self._compute.run(save)
        self._saved_step = self.step
        hit("checkpoint.before_notice")
        # Only now: what the notice makes final, the server forgets.
        self._exchanges.checkpoint(self.step)
        return time.time() - begun

    async def _conclude(
        self,
        switches: Mapping[int, asyncio.Future[SwitchReceipt]],
        record: StepRecord,
        span: Span,
    ) -> None:
        switched = await self._handover.confirm(record.weight_version, switches)
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
            self._measure(record.weight_version)
        self._metrics.write(record, span)
        if self._unconcluded is record:
            self._unconcluded = None


def _entry(batch: Batch, record: StepRecord, weights: str) -> StepEntry:
    return StepEntry(
        record.step,
        record.weight_version,
        weights,
        tuple(
            TrainedGroup(
                delivery.group_id,
                delivery.task_id,
                tuple(trajectory.trajectory_id for trajectory in delivery.trajectories),
            )
            for delivery in batch.deliveries
        ),
    )


def _describe_upload(sent: Sent, record: StepRecord) -> None:
    record.upload_bytes, record.upload_dense_bytes = sent.bytes_sent, sent.dense_bytes
    record.delta, record.changed_elements_ratio = sent.delta, sent.changed_elements_ratio
    record.changed_tensors = sent.changed_tensors
    record.pause_seconds, record.probe_difference = sent.pause_seconds, sent.probe_difference
