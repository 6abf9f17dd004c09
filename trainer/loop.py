"""The training loop: gathers a batch, computes a step, publishes the weights, and repeats.

    gather   wait for the groups of one step, which the server delivers on demand
    train    compute advantages, pack, take one optimizer step
    note     record the groups of the step in the ledger
    publish  upload the new weights while the server keeps generating
    switch   request the switch on the exchange, send receipts, demand the next batch
    conclude write the step's record once the server has answered the switch

A run may have several servers (`exchanges`). Each server delivers its part of the batch. Each is
sent the weights, is asked to switch, and gets the receipts of its own groups. The step continues
once all servers are done. Below, "the server" means each of them.

The server samples throughout. Groups that it finishes during a step wait for the next gather. A
step's demand follows its switch, because that is when the trainer's version changes, and lag is
counted from the trainer's version. Every step publishes a separate version, even if nothing had a
gradient, because the server counts batches by the versions between them.

A switch can be rejected: the engine could not load the version, or its probe failed. The server
then keeps sampling the previous version. The order of events is:

    1. SwitchWeights(v), the receipts of v's batch, the next demand; the next step gathers
    2. WeightReceipt(v) with a rejection. v's step still counts. The policy contains it, so its
       receipts stand and its groups are not trained again. Only the engine lags behind
    3. v is sent again, whole, from the payload; the policy's next step does not touch the payload.
       Groups that arrive meanwhile have one more version of lag, and the late policy treats them
       like any others
    4. SwitchWeights(v) again. If accepted, the step is concluded. If rejected, the run ends. The
       server delivers everything unsaved again to the trainer that resumes

The next version is not published until this is settled.

`stopping` asks a run to stop. It then ends in one of these ways:

    server reachable    gathering ends at once. A step that is computing is finished: publish,
                        switch, receipts, checkpoint, conclude
    server unreachable  a step that is computing is finished, but only locally: the server hears
                        nothing about it. The checkpoint is written, and the record as far as it
                        is known. `Servers.left` is set, which ends every wait for the server
                        (`Exchange.ask`). A step that the ledger already contains is still compared
                        with its line
    server lost later   as for a reachable server until the loss, then as for an unreachable one
    server full         as for a lost server, if it has no room for the weights or the tasks of
                        the current step

In all cases the checkpoint holds the last step that the policy contains, if checkpoints are kept
and that step is not saved yet. The checkpoint is written after the step's receipts and before the
notice of it. If a group was receipted but is in no checkpoint, the server delivers it again to a
trainer that resumes before that step. If a group is in a checkpoint but was not receipted, the
server delivers it again as well. The ledger knows that group, so it is refused rather than trained
twice.

A resumed run repeats the steps that the previous trainer did beyond the checkpoint: see
`weights.catching_up`.
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
from penstock.trainer.algorithms.objective import Objective
from penstock.trainer.batching.batching import TrainingGroup
from penstock.trainer.batching.planning import plan_step
from penstock.trainer.config.trainer import TrainerConfig
from penstock.trainer.core.compute import ComputeThread
from penstock.trainer.core.figures import as_json
from penstock.trainer.core.together import together
from penstock.trainer.data.feeder import TaskFeeder
from penstock.trainer.evaluation.evaluation import Evaluator
from penstock.trainer.exchange.servers import Servers
from penstock.trainer.gather.batch import TAKE_THEIR_TASK, Batch, Gatherer
from penstock.trainer.metrics.batch_figures import describe_batch
from penstock.trainer.metrics.metrics import MetricsWriter
from penstock.trainer.metrics.step_record import StepRecord
from penstock.trainer.policy.protocol import Policy, StepResult
from penstock.trainer.state.ledger import Ledger, RefusedEntry, StepEntry, TrainedGroup
from penstock.trainer.weights.probe import Probe
from penstock.trainer.weights.publisher import Publisher, Switches
from penstock.trainer.weights.sent import Sent
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
    """One run, from the policy's current step to the last."""

    def __init__(
        self,
        config: TrainerConfig,
        *,
        policy: Policy,
        compute: ComputeThread,
        exchanges: Servers,
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
        """`checkpoint(step, weight_version, figures)` collects what to save, and returns a function
        that saves it in the compute thread. `figures` are those of the step, if not written yet.

        `stopping` is shared with the exchanges and ends the run after the current step. If a
        checkpoint is broken, `forgotten_step` is its step. Up to that step the server may have
        forgotten groups that the ledger still has ahead. Without an `evaluator` there are no
        evaluations. Plans are made for `data_ranks` ranks.
        """
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
        self._forgotten_step = forgotten_step
        self._gatherer = Gatherer(
            config,
            exchanges=exchanges,
            tasks=tasks,
            ledger=ledger,
            compute=compute,
            stopping=stopping,
        )
        self._saved_step = step
        self._unconcluded: StepRecord | None = None
        self.step = step
        """The last step that the policy contains."""

    async def run(self) -> None:
        """Gather batches, train on them, and produce weight versions and receipts.

        Ends after the last step, or earlier if asked to stop. The module docstring describes how.
        """
        async with asyncio.TaskGroup() as concluding:
            if self._evaluator is not None:
                self._evaluator.open(concluding)
            fillers = [
                concluding.create_task(self._tasks.keep_filled(server, exchange.ask))
                for server, exchange in enumerate(self._exchanges)
            ]
            try:
                with self._exchanges.notices_to(partial(self._heed, concluding)):
                    await self._steps(concluding)
            finally:
                for filler in fillers:
                    filler.cancel()

    def _seconds_afterwards(self) -> float | None:
        """Estimate the seconds that the evaluation of the final weights takes after the last step."""
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
                # The server reads the payload until it has answered the previous switch.
                await conclusion
            if self._config.weights.transport == "collective":
                # For a collective, the upload is the switch.
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
        """Agree with the servers on weights and tasks before the first step.

        Raises ConfigInvalid if a server does not accept this run's adapter.
        """
        infos = await self._publisher.ask_servers()
        if infos is None:
            return
        if self.step and self._config.checkpoint.every_steps:
            # The previous trainer may have died before reporting it.
            self._exchanges.checkpoint(self.step)
        # Other late policies than `wait` deliver everything buffered, whatever version the trainer
        # holds.
        may_repeat = self._config.staleness.applied_policy != "wait"
        ahead = self._ledger.ahead.values() if may_repeat else ()
        repeatable = {entry.weight_version for entry in ahead}
        repeats = await self._publisher.begin(infos, self._policy.weights, repeatable)
        if repeats and may_repeat:
            self._gatherer.follow()
        await self._exchanges.ask_all(self._submit)

    async def _submit(self, server: int) -> None:
        """Submit tasks to a server that may have lost them, or forgotten groups that are needed
        again."""
        await self._tasks.submit_again(server)
        if self._forgotten_step:
            entries = [e for e in self._ledger.ahead.values() if e.step <= self._forgotten_step]
            lost = [group.task_id for entry in entries for group in entry.groups]
            await self._tasks.submit_anew(server, lost, self._forgotten_step)

    async def restore(self, server: int, welcome: trainer_service_pb2.Welcome) -> None:
        """Bring a server up to date that came back without some of its state. Raises ServerLost."""
        await self._gatherer.came_back(server)
        samples_it = await self._publisher.senders[server].restore(welcome)
        await self._tasks.submit_again(server)
        if self._evaluator is not None:
            if not samples_it:
                self._evaluator.version_gone()
            await self._evaluator.submit_again(server)

    def _measure(self, weight_version: int) -> None:
        """Start the evaluations that are due, now that the server samples the trainer's version."""
        behind = self._publisher.catching_up or self._exchanges.left.is_set()
        if self._evaluator is not None and not behind:
            self._evaluator.version_active(self.step, weight_version)

    async def _may_switch(self, record: StepRecord) -> None:
        if self._evaluator is not None:
            record.seconds_held += await self._evaluator.may_switch()

    async def _gather(self, record: StepRecord) -> Batch | None:
        """Return the next batch, without groups whose attempts all failed; None to stop the run."""
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
        await self._exchanges.ask_all(self._tasks.fill)
        return None if self._exchanges.left.is_set() else batch

    def _heed(
        self, group: asyncio.TaskGroup, server: int, notice: trainer_service_pb2.Notice
    ) -> None:
        """Give up the task of a dropped group. The task of a requeued group stays."""
        if notice.reason not in TAKE_THEIR_TASK:
            return
        task_id = notice.task_id
        if self._evaluator is not None and self._evaluator.dropped(task_id, notice.reason):
            return
        # Older servers send notices without an id: those may concern any task. Other unknown ids
        # are an agent's, a finished evaluation's, or repeat a notice from a stream that was lost.
        if not task_id or self._tasks.awaits(task_id):
            group.create_task(self._give_up(server, notice))

    async def _give_up(self, server: int, notice: trainer_service_pb2.Notice) -> None:
        """Settle a task that will get no group, as if refused. The server knows about this already."""
        self._tasks.settled(notice.task_id)
        self._tasks.arrived(server)
        self._gatherer.given_up(notice.reason)
        entry = RefusedEntry(notice.group_id, notice.task_id, notice.reason)
        await together(
            (
                # Without this entry, an older checkpoint would still list its index as outstanding.
                self._compute.run(self._ledger.refuse, entry),
                self._exchanges[server].ask(lambda: self._tasks.fill(server)),
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
        """Note the step in the ledger and stage its weights while the server keeps generating.

        An upload that starts while the payload is filled is committed only after the note.
        """
        record.time_upload_start = record.time_upload_end = time.time()
        record.weight_version = self._exchanges.held_version + 1
        left = self._exchanges.left.is_set()
        # No server takes these weights. But if the step was done before, its ledger line has their
        # checksum. A line without it would differ and cut off the lines of the steps that follow.
        if left and record.step not in self._ledger.ahead:
            await self._note(_entry(batch, record, ""))
            return
        before = self._publisher.digest
        if result.applied or not self._publisher.filled_version:
            weights = self._policy.weights
            await self._publisher.fill(weights, record.weight_version, uploads=not left)
        else:
            self._publisher.relabel(record.weight_version)
        entry = _entry(batch, record, self._publisher.digest)
        repeated = self._ledger.ahead.get(entry.step) == entry
        record.weight_version = self._publisher.number(entry, repeated=repeated)
        await self._note(replace(entry, weight_version=record.weight_version))
        sent = await self._publisher.stage(record.weight_version)
        record.time_upload_end = time.time()
        record.seconds_upload = record.time_upload_end - record.time_upload_start
        if sent is not None:
            _describe_upload(sent, record)
        # A server cannot report this for its first version, or if its answer was lost.
        same = before == self._publisher.digest or not result.applied
        if same or record.changed_tensors == 0:
            record.unchanged = True
            why = "" if result.applied else ", because the step had no gradient"
            log.warning("version %d changes no tensor%s", record.weight_version, why)

    async def _note(self, entry: StepEntry) -> None:
        if self._evaluator is not None and self._ledger.ahead.get(entry.step, entry) != entry:
            # Must precede the ledger write, which removes the evidence of the mismatch.
            self._metrics.forget(entry.step)
            self._evaluator.forget(entry.step)
        # The ledger must contain every version that the server may sample, so it is written first.
        await self._compute.run(self._ledger.write, entry)
        hit("train.noted")

    def _switch(self, batch: Batch, record: StepRecord) -> Switches:
        """Send the switch, the receipts and the next step's demand, in this order on each stream.

        Returns the pending answers. Servers already past this version have none.
        """
        record.time_switch_start = time.time()
        switches = self._publisher.switch(record.weight_version)
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
        """Save a checkpoint every `every_steps` steps and at the end; return the seconds it took."""
        every = self._config.checkpoint.every_steps
        last = self.step == self._config.run.steps or self._stopping.is_set()
        if not every or self.step == self._saved_step or (self.step % every and not last):
            return 0.0
        begun = time.time()
        # Collected here, while nothing changes; the compute thread writes it.
        figures: Mapping[str, object] = (
            {} if self._unconcluded is None else as_json(self._unconcluded.line())
        )
        save = self._checkpoint(self.step, self._exchanges.held_version, figures)
        await self._compute.run(save)
        self._saved_step = self.step
        hit("checkpoint.before_notice")
        # Not before the save: the notice is final, and the server forgets these groups.
        self._exchanges.checkpoint(self.step)
        return time.time() - begun

    async def _conclude(self, switches: Switches, record: StepRecord, span: Span) -> None:
        switched = await self._publisher.confirm(record.weight_version, switches)
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
