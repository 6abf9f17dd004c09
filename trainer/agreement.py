"""How trainer and server come to agree on weights and tasks: at the start, and after a stream was lost.

A run that resumes after step K finds, beside what the checkpoint holds, the ledger's lines of the
steps that the trainer before did beyond it. What becomes of them:

    killed after the line of K+1,  the server samples no more than K: K is published where it is not
      before its upload was whole    there, and K+1 done again
    killed anywhere later          the server samples a version N > K that no checkpoint contains. It
                                     goes on sampling it: the trainer catches up. It does steps K+1..
                                     again, of the same groups, and publishes nothing, for the server
                                     is past it. Once it holds N, with the very same weights, all is
                                     as if nothing had happened
    a group has gone meanwhile,    the step comes out otherwise than the ledger says. What it made is
      or the arithmetic differs      published at once as N+1; what follows gets lines of its own
    late policy "wait"             the gate delivers one batch for each version: K is published as
                                     N+1 at once
    the server has lost all        K is published, and what is outstanding submitted again
"""

from __future__ import annotations

import asyncio
import logging

from penstock.trainer.adapter import check_taken
from penstock.trainer.config import TrainerConfig
from penstock.trainer.errors import SessionRefused
from penstock.trainer.exchange import Exchange, SwitchReceipt
from penstock.trainer.gathering import Gatherer
from penstock.trainer.handover import Handover
from penstock.trainer.ledger import Ledger, StepEntry
from penstock.trainer.policy import Policy
from penstock.trainer.publisher import Publisher
from penstock.trainer.tasks import TaskFeeder
from penstock.v1 import rollout_service_pb2, trainer_service_pb2

log = logging.getLogger(__name__)

UNAVAILABLE = rollout_service_pb2.REPLICA_STATE_UNAVAILABLE


class Agreement:
    """Which weights have which number, here and at the server."""

    def __init__(
        self,
        config: TrainerConfig,
        *,
        policy: Policy,
        exchange: Exchange,
        publisher: Publisher,
        tasks: TaskFeeder,
        handover: Handover,
        gatherer: Gatherer,
        ledger: Ledger,
        forgotten_step: int = 0,
    ) -> None:
        """Up to `forgotten_step`, of a checkpoint that is broken, the server may have forgotten groups
        that the ledger has ahead."""
        self._policy = policy
        self._exchange = exchange
        self._publisher = publisher
        self._tasks = tasks
        self._handover = handover
        self._gatherer = gatherer
        self._ledger = ledger
        self._forgotten_step = forgotten_step
        self._keeps_checkpoints = config.checkpoint.every_steps > 0
        # Under the others all that waits is delivered, whatever version the trainer holds.
        self._one_batch_a_version = config.staleness.late_policy == "wait"
        self._weight_dtype = ""
        self._ahead_version = 0
        """Newest version of the trainer before, while this one is catching up with it."""
        self._sampled_ahead = False
        """Whether the server samples it already, or has it only staged."""

    @property
    def catching_up(self) -> bool:
        """Whether the server samples a version that the trainer does not hold yet."""
        return self._sampled_ahead and self._ahead_version > self._exchange.held_version

    async def begin(self, welcome: trainer_service_pb2.Welcome, saved_step: int) -> None:
        """Agrees with the server on weights and tasks before the first step.

        The server starts with the base model, as version 0. Where it has seen versions of which nothing
        is known here, this run's weights get a greater number than all of them, for versions only grow. A
        server that serves nothing, because it could not load a version, needs one whatever its number.
        Raises ConfigInvalid where it does not take this run's adapter.
        """
        info = await self._handover.retry(self._publisher.server_info)
        if info is None:
            return
        self._weight_dtype = info.weight_dtype
        if (adapter := self._policy.adapter()) is not None:
            check_taken(adapter, info.lora.max_rank if info.HasField("lora") else None)
        if saved_step and self._keeps_checkpoints:
            # The trainer before may not have come to say so.
            self._exchange.checkpoint(saved_step)
        await self._agree_on_weights(welcome, info)
        await self._handover.retry(self._submit)

    async def _agree_on_weights(
        self,
        welcome: trainer_service_pb2.Welcome,
        info: rollout_service_pb2.GetServerInfoResponse,
    ) -> None:
        held, active, newest = (
            self._exchange.held_version,
            info.active_weight_version,
            _newest(info),
        )
        serves = all(replica.state != UNAVAILABLE for replica in info.replicas)
        catching_up = serves and newest > held and self._has_ahead(newest)
        if (catching_up or newest <= held) and not self._one_batch_a_version:
            self._gatherer.follow(welcome)
        if catching_up:
            log.warning(
                "the server samples version %d, of steps that no checkpoint contains: "
                "doing them again before anything is published",
                newest,
            )
            self._ahead_version, self._sampled_ahead = newest, active > held
            await self.fill(held)
        elif serves and newest == held:
            # Also where it is there: a server that restarts is given it again.
            await self.fill(held)
            if active != held:
                # Staged by the trainer before, which did not come to have it switched to.
                await self._handover.confirm(held, self._exchange.switch(held))
        else:
            version = held if newest < held else newest + 1
            log.info("the server samples version %d; publishing %d", active, version)
            await self.fill(version)
            if await self._handover.stage(version) is not None:
                await self._handover.confirm(version, self._exchange.switch(version))

    async def restore(self, welcome: trainer_service_pb2.Welcome) -> None:
        """Brings a server up to date that came back with less than it had. Raises ServerLost."""
        held, active = self._exchange.held_version, welcome.active_weight_version
        if active > max(held, self._ahead_version):
            raise SessionRefused(
                f"the server samples version {active}, which this trainer never published"
            )
        await self._gatherer.came_back(welcome)
        if self._ahead_version:
            # What it has no more it can be given again.
            self._ahead_version = _newest(await self._publisher.server_info())
        if active < held:
            # It has lost what differences are made from.
            self._publisher.forget_base()
        # A payload that is newer is on its way already, and will be switched to.
        if active < held and self._publisher.filled_version == held:
            log.warning("the server came back with version %d; publishing %d again", active, held)
            if await self._handover.upload(held) is not None:
                self._exchange.repeat_switch()
        await self._tasks.submit_again()

    async def fill(self, weight_version: int, *, uploads: bool = False) -> None:
        """Copies the policy's weights into the payload, as this version. The base model is not copied:
        every server has it. With `uploads` the upload begins meanwhile, unless the server may turn out
        to have these weights."""
        if weight_version:
            begins = uploads and weight_version > self._ahead_version
            await self._publisher.fill(
                self._policy.weights,
                weight_version,
                self._weight_dtype,
                self._handover.announcement if begins else None,
            )

    def is_held(self, entry: StepEntry) -> bool:
        """Whether the server has these very weights already, from the trainer before, under this number."""
        behind = entry.weight_version <= self._ahead_version
        return behind and self._ledger.ahead.get(entry.step) == entry

    def number(self, entry: StepEntry) -> int:
        """The version that weights get which the server does not have."""
        if entry.weight_version > self._ahead_version:
            return entry.weight_version
        version = self._ahead_version + 1
        log.warning(
            "step %d came out otherwise than before: its weights are version %d",
            entry.step,
            version,
        )
        self._publisher.relabel(version)
        return version

    def switch(self, weight_version: int) -> asyncio.Future[SwitchReceipt] | None:
        """Asks for a version, which the trainer holds from now on. None where the server is past it."""
        if weight_version < self._ahead_version:
            self._exchange.hold(weight_version)
            return None
        self._ahead_version = 0
        return self._exchange.switch(weight_version)

    def _has_ahead(self, newest: int) -> bool:
        """Whether the server's newest version is of a step that can be done again."""
        ahead = self._ledger.ahead.values()
        return not self._one_batch_a_version and newest in {e.weight_version for e in ahead}

    async def _submit(self) -> None:
        """Tasks to a server that may have lost them, or forgotten groups that are needed again."""
        await self._tasks.submit_again()
        if self._forgotten_step:
            entries = [e for e in self._ledger.ahead.values() if e.step <= self._forgotten_step]
            lost = [group.task_id for entry in entries for group in entry.groups]
            await self._tasks.submit_anew(lost, self._forgotten_step)


def _newest(info: rollout_service_pb2.GetServerInfoResponse) -> int:
    """The newest version that a server has, staged or active."""
    return max(info.active_weight_version, *info.staged_weight_versions, 0)
