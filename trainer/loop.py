"""The training loop: gathers a batch, computes a step, publishes the weights, and repeats.

    gather   wait for the groups of one step, which the server delivers on demand
    train    compute advantages, pack, take one optimizer step
    note     record the groups of the step in the ledger
    publish  upload the new weights while the server keeps generating
    switch   request the switch on the exchange, send receipts, demand the next batch
    conclude write the step's record once the server has answered the switch

With several servers, each delivers its part of the batch, is sent the weights and the switch, and gets the
receipts of its own groups. The step continues once all are done. Below, "the server" means each.

A step's demand follows its switch, because the trainer's version changes then, and lag is counted from
that version. Every step publishes a separate version, even if nothing had a gradient, because the server
counts batches by the versions between them.

A switch can be rejected: the engine could not load the version, or its probe failed. The server then keeps
sampling the previous version. The step still counts: the policy contains it, so its receipts stand. The
version is sent again, whole, from the payload, which the next step does not touch. Groups that arrive
meanwhile have one more version of lag. A second rejection ends the run, and the server delivers everything
unsaved again to the trainer that resumes. The next version is not published until this is settled.

`stopping` asks a run to stop. It then ends in one of these ways:

    server reachable    gathering ends at once. A step that is computing is finished: publish, switch,
                        receipts, checkpoint, conclude
    server unreachable  a step that is computing is finished, but only locally: with its checkpoint, and its
                        record as far as it is known. `Servers.left` is set, which ends every wait for
                        the server. A step that the ledger already contains is still compared with its line
    server lost later,  as for a reachable server until then, and after that as for an unreachable one. Full
      or full           means without room for the weights or the tasks of the current step

The checkpoint, if any are kept, holds the last step that the policy contains. It is written after the
step's receipts and before the notice of it. The server delivers again, to a trainer that resumes, what was
receipted but is in no checkpoint, and also what is in one but was not receipted. The ledger knows the
latter groups, so they are refused rather than trained twice. Repeated steps: see `weights.catching_up`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

from opentelemetry.trace import Span

from penstock.common.failpoints import hit
from penstock.common.loop_watch import LoopWatch
from penstock.trainer.config.trainer import TrainerConfig
from penstock.trainer.evaluation.evaluation import Evaluator
from penstock.trainer.exchange.servers import Servers
from penstock.trainer.gather.batch import TAKE_THEIR_TASK, Batch, Gatherer
from penstock.trainer.gather.sample import Samples
from penstock.trainer.learner import Learner
from penstock.trainer.metrics.metrics import MetricsWriter
from penstock.trainer.metrics.step_record import StepRecord
from penstock.trainer.state.ledger import StepEntry, TrainedGroup
from penstock.trainer.weights.publisher import Publisher, Switches
from penstock.v1 import trainer_service_pb2

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Step:
    """A step between its batch and its training."""

    batch: Batch
    record: StepRecord
    span: Span


@dataclass(eq=False, repr=False)
class TrainingLoop:
    """One run, from the policy's current step to the last."""

    config: TrainerConfig
    learner: Learner
    gatherer: Gatherer
    exchanges: Servers
    publisher: Publisher
    metrics: MetricsWriter
    evaluator: Evaluator

    def __post_init__(self) -> None:
        self._unconcluded: StepRecord | None = None
        self._conclusion: asyncio.Task[None] | None = None
        self._group: asyncio.TaskGroup
        self._ended = False
        self._in_step = False
        """Whether `train` has begun a step and not published it."""
        every = self.config.metrics.sample_every_steps
        self._samples = Samples(self.config.model.path, every, self.learner.compute)
        self.step = self.learner.saved_step
        """The last step that the policy contains."""

    async def begin(self) -> None:
        """Agree with the servers on weights and tasks before the first step.

        Raises ConfigInvalid if a server does not accept this run's adapter.
        """
        infos = await self.publisher.ask_servers()
        if infos is None:
            return
        if self.step and self.config.checkpoint.every_steps:
            # The previous trainer may have died before reporting it.
            self.exchanges.checkpoint(self.step)
        # Other late policies than `wait` deliver everything buffered, whatever version the trainer holds.
        may_repeat = self.config.staleness.applied_policy != "wait"
        ahead = self.learner.ledger.ahead.values() if may_repeat else ()
        repeatable = {entry.weight_version for entry in ahead}
        repeats = await self.publisher.begin(infos, self.learner.policy.weights, repeatable)
        if repeats and may_repeat:
            self.gatherer.follow()
        await self.gatherer.submit()

    async def restore(self, server: int, welcome: trainer_service_pb2.Welcome) -> None:
        """Bring a server up to date that came back without some of its state. Raises ServerLost."""
        await self.gatherer.came_back(server)
        samples_it = await self.publisher.senders[server].restore(welcome)
        await self.gatherer.tasks.submit_again(server)
        if not samples_it:
            self.evaluator.version_gone()
        await self.evaluator.submit_again(server)

    async def run(self) -> None:
        """Gather batches, train on them, and produce weight versions and receipts.

        Ends after the last step, or earlier if asked to stop. The module docstring describes how.
        """
        async with self.running():
            while (step := await self.next_step()) is not None:
                await self.train(step)

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """What happens beside the steps. A caller that makes steps itself may leave before the last: the
        run then ends as on a request to stop."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            watch = LoopWatch("trainer", self.metrics.stalled)
            watch.start()
            self.evaluator.open(group)
            fillers = [group.create_task(filler) for filler in self.gatherer.fillers()]
            try:
                with self.exchanges.notices_to(partial(self._heed, group)):
                    self._measure(self.exchanges.held_version)
                    if not self.learner.is_last(self.step):
                        self.gatherer.demand(self.step + 1)
                    yield
                    # A step that was cancelled in the middle is in the policy and in no checkpoint: the
                    # run resumes before it.
                    if not self._ended and not self._in_step:
                        self.learner.stopping.set()
                        await self.next_step()
            finally:
                watch.stop()
                for filler in fillers:
                    filler.cancel()

    def _heed(
        self, group: asyncio.TaskGroup, server: int, notice: trainer_service_pb2.Notice
    ) -> None:
        """Give up the task of a dropped group. The task of a requeued group stays."""
        if notice.reason not in TAKE_THEIR_TASK:
            return
        if self.evaluator.dropped(notice.task_id, notice.reason):
            return
        if self.gatherer.awaits(notice):
            group.create_task(self.gatherer.give_up(server, notice))

    async def next_step(self) -> Step | None:
        """Gather a batch, which `train` takes; None once the run has ended."""
        if self.learner.is_last(self.step):
            await self._finish()
            return None
        record = StepRecord(self.step + 1, time_gather_start=time.time())
        span = self.metrics.begin_step(
            record.step,
            self.evaluator.seconds_after(self.config.run.steps),
            may_end_early=self.config.run.target is not None,
        )
        batch = await self._gather(record)
        if batch is None:
            # The run ends here. Stop requests and lost servers later in a step let it finish.
            self._ended = True
            await self._save_if_due()
            return None
        hit("train.gathered")
        return Step(batch, record, span)

    async def train(self, step: Step, batch: Batch | None = None) -> None:
        """Make an optimizer step, and publish its weights.

        `batch` is what to train instead, made from the step's own: all groups of that count as trained.
        """
        record = step.record
        self._in_step = True
        await self._train(batch or step.batch, record)
        hit("train.computed")
        if self._conclusion is not None:
            # The server reads the payload until it has answered the previous switch.
            await asyncio.shield(self._conclusion)
        entry = await self._note(step.batch, record)
        await self._publish(entry, record)
        hit("train.published")
        switches = await self._switch(step.batch, record)
        record.finish(time.time() - record.time_gather_start)
        record.seconds_checkpoint = await self._save_if_due()
        record.finish(time.time() - record.time_gather_start)
        self._conclusion = self._group.create_task(self._conclude(switches, record, step.span))
        self._in_step = False

    async def _finish(self) -> None:
        self._ended = True
        if self._conclusion is not None:
            await asyncio.shield(self._conclusion)
        if self.step < self.config.run.steps:
            self._report_target()
        self.metrics.display.doing("evaluating")
        await self.evaluator.finish(self.step, self.exchanges.held_version)

    def _report_target(self) -> None:
        target, mean = self.config.run.target, self.learner.ending.mean
        assert target is not None
        assert mean is not None
        log.info(
            "reward %.3f reached run.target.reward = %g; ending after step %d of at most %d",
            *(mean, target.reward, self.step, self.config.run.steps),
        )

    async def _gather(self, record: StepRecord) -> Batch | None:
        """Return the next batch, without groups whose attempts all failed; None to stop the run."""
        async with self.exchanges.saying(f"the groups of step {record.step}"):
            batch = await self.gatherer.gather(record)
        if batch is None:
            return None
        record.time_gather_end = time.time()
        record.seconds_wait = record.time_gather_end - record.time_gather_start
        record.sample = await self._samples.of(record.step, batch.deliveries)
        record.traceparents = [
            trajectory.traceparent
            for delivery in batch.deliveries
            for trajectory in delivery.trajectories
            if trajectory.traceparent
        ]
        return batch if await self.gatherer.refill() else None

    async def _train(self, batch: Batch, record: StepRecord) -> None:
        record.batch = self.gatherer.describe(batch)
        record.time_train_start = time.time()
        record.result = await self.learner.train(batch.groups)
        record.time_train_end = time.time()
        record.seconds_train = record.time_train_end - record.time_train_start
        record.reward_target_mean = self.learner.score(record.rewards)

    async def _note(self, batch: Batch, record: StepRecord) -> StepEntry:
        """Fill the payload, and record the step in the ledger with the payload's checksum.

        An upload that starts while the payload is filled is committed only after the note.
        """
        if self.config.weights.transport == "collective":
            # For a collective, the upload is the switch.
            record.seconds_held += await self._may_switch()
        record.time_upload_start = record.time_upload_end = time.time()
        record.weight_version = self.exchanges.held_version + 1
        left = self.exchanges.left.is_set()
        entry = _entry(batch, record, "")
        # No server takes these weights. But if the step was done before, its ledger line has their
        # checksum. A line without it would differ and cut off the lines of the steps that follow.
        if not left or self.learner.is_repeated(record.step):
            before, applied = self.publisher.digest, record.result.applied
            if applied or not self.publisher.filled_version:
                weights = self.learner.policy.weights
                await self.publisher.fill(weights, record.weight_version, uploads=not left)
            else:
                await self.publisher.relabel(record.weight_version)
            record.unchanged = before == self.publisher.digest or not applied
            entry = _entry(batch, record, self.publisher.digest)
            repeated = self.learner.is_repeated(entry.step) and not self.learner.differs(entry)
            record.weight_version = self.publisher.number(entry, repeated=repeated)
            entry = replace(entry, weight_version=record.weight_version)
        if self.learner.differs(entry):
            # Must precede the ledger write, which removes the evidence of the mismatch.
            self.metrics.forget(entry.step)
            self.evaluator.forget(entry.step)
        # The ledger must contain every version that the server may sample, so it is written first.
        await self.learner.note(entry)
        return entry

    async def _publish(self, entry: StepEntry, record: StepRecord) -> None:
        """Stage the noted weights while the server keeps generating, unless no server takes them."""
        if not entry.weights:
            return
        async with self.exchanges.saying(f"the upload of version {record.weight_version}"):
            sent = await self.publisher.stage(record.weight_version)
        record.time_upload_end = time.time()
        record.seconds_upload = record.time_upload_end - record.time_upload_start
        if sent is not None:
            record.upload_bytes, record.upload_dense_bytes = sent.bytes_sent, sent.dense_bytes
            record.delta, record.changed_elements_ratio = sent.delta, sent.changed_elements_ratio
            record.changed_tensors, record.pause_seconds = sent.changed_tensors, sent.pause_seconds
            record.probe_difference = sent.probe_difference
        # A server cannot report this for its first version, or if its answer was lost.
        record.unchanged |= record.changed_tensors == 0
        if record.unchanged:
            why = "" if record.result.applied else ", because the step had no gradient"
            log.warning("version %d changes no tensor%s", record.weight_version, why)

    async def _switch(self, batch: Batch, record: StepRecord) -> Switches:
        """Send the switch, the receipts and the next step's demand, in this order on each stream.

        Returns the pending answers. Servers already past this version have none.
        """
        record.seconds_held += await self._may_switch()
        record.time_switch_start = time.time()
        switches = self.publisher.switch(record.weight_version)
        self.step = record.step
        self.gatherer.settle(batch, self.step)
        if not self.config.checkpoint.every_steps:
            self.exchanges.checkpoint(self.step)
        if self.learner.is_last(self.step):
            self.metrics.end_with(self.step)
        else:
            self.gatherer.demand(self.step + 1)
        self._unconcluded = record
        return switches

    async def _may_switch(self) -> float:
        async with self.exchanges.saying("pinned evaluations, before the switch"):
            return await self.evaluator.may_switch()

    async def _save_if_due(self) -> float:
        """Save a checkpoint if one is due; return the seconds it took."""
        begun = time.time()
        version = self.exchanges.held_version
        if not await self.learner.save_if_due(self.step, version, self._unconcluded):
            return 0.0
        hit("checkpoint.before_notice")
        # Not before the save: the notice is final, and the server forgets these groups.
        self.exchanges.checkpoint(self.step)
        return time.time() - begun

    async def _conclude(self, switches: Switches, record: StepRecord, span: Span) -> None:
        async with self.exchanges.saying(f"the switch to version {record.weight_version}"):
            switched = await self.publisher.confirm(record.weight_version, switches)
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
        self.metrics.write(record, span)
        if self._unconcluded is record:
            self._unconcluded = None

    def _measure(self, weight_version: int) -> None:
        """Start the evaluations that are due, now that the server samples the trainer's version."""
        if not self.publisher.catching_up:
            self.evaluator.version_active(self.step, weight_version)


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
