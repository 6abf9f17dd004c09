"""How trainer and servers agree on weights and tasks, at the start and after a lost stream.

A run that resumes after step K has its checkpoint. Its ledger may also list steps that the previous
trainer did beyond it. The cases:

    killed after the line of K+1,  the server samples at most K. K is published if the server lacks it,
      before its upload was whole    and K+1 is done again
    killed anywhere later          the server samples a version N > K that no checkpoint contains, and
                                     continues to sample it. The trainer catches up: it repeats steps
                                     K+1.. with the same groups, and publishes nothing, because the server
                                     is past them. Once it holds N, with identical weights, the run
                                     continues as usual
    a group is lost meanwhile,     the step comes out differently than the ledger records. Its weights are
      or the arithmetic differs      published at once as N+1; later steps get new lines
    late policy "wait", max_lag    the gate delivers one batch for each version, so K is published as
      above zero                     N+1 at once
    the server has lost all        K is published, and outstanding tasks are submitted again

A server that restarts during the run is given the version that the trainer holds. If the payload
already contains the next version, this is impossible. The server then keeps what it has until the
next switch, and pinned evaluations, for which the switch waits, are ended.

Several servers, killed and restarted at different times, may be in different states. Each is
handled separately. A server with an older version is given the trainer's; a server that has it is
skipped. They reach the same version when the trainer catches up, or earlier:

    some at N, others before it    the trainer catches up. Each version on the way goes only to the
      or empty                       servers that lack it
    one has a version that is      this run's weights get a greater number than any server has, and go to
      unknown here, or serves        all of them
      nothing
    the step comes out             its weights get a greater number than any server has, likewise
      differently
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from penstock.trainer.config.trainer import TrainerConfig
from penstock.trainer.core.errors import ConfigInvalid, SessionRefused
from penstock.trainer.data.feeder import TaskFeeder
from penstock.trainer.exchange.stream import SwitchReceipt
from penstock.trainer.exchange.streams import Exchanges
from penstock.trainer.gather.batch import Gatherer
from penstock.trainer.policy.adapter import check_taken
from penstock.trainer.policy.protocol import Policy
from penstock.trainer.state.ledger import Ledger, StepEntry
from penstock.trainer.weights.handover import Handover
from penstock.trainer.weights.publisher import Publisher
from penstock.trainer.weights.sender import Sent
from penstock.v1 import rollout_service_pb2, trainer_service_pb2

log = logging.getLogger(__name__)

UNAVAILABLE = rollout_service_pb2.REPLICA_STATE_UNAVAILABLE


class Agreement:
    """Tracks which weights have which version, on the trainer and on the servers."""

    def __init__(
        self,
        config: TrainerConfig,
        *,
        policy: Policy,
        exchanges: Exchanges,
        publisher: Publisher,
        tasks: TaskFeeder,
        handover: Handover,
        gatherer: Gatherer,
        ledger: Ledger,
        forgotten_step: int = 0,
    ) -> None:
        """`forgotten_step` is the step of a broken checkpoint. Up to it, the server may have
        forgotten groups that the ledger has ahead."""
        self._policy = policy
        self._exchanges = exchanges
        self._publisher = publisher
        self._tasks = tasks
        self._handover = handover
        self._gatherer = gatherer
        self._ledger = ledger
        self._forgotten_step = forgotten_step
        self._keeps_checkpoints = config.checkpoint.every_steps > 0
        # Late policies other than `wait` deliver everything buffered, whatever version the trainer
        # holds.
        self._one_batch_a_version = config.staleness.applied_policy == "wait"
        self._weight_dtype = ""
        self._ahead = [0] * len(exchanges.servers)
        """For each server the trainer is catching up with, the newest version of the previous
        trainer; otherwise zero."""
        self._sampled_ahead = False
        """Whether any of them samples that version already, rather than only having it staged."""
        self._restored = False
        """Whether a server came back since it was last asked for its info."""

    @property
    def catching_up(self) -> bool:
        """Whether a server samples a version that the trainer does not hold yet."""
        return self._sampled_ahead and self._newest_ahead > self._exchanges.held_version

    @property
    def _newest_ahead(self) -> int:
        return max(self._ahead)

    async def begin(self, saved_step: int) -> None:
        """Agrees with the servers on weights and tasks before the first step.

        A server starts with the base model, as version 0. If a server has seen versions that are
        unknown here, this run's weights get a greater number than all of them, because versions
        only grow. A server that serves nothing, because it could not load a version, is given one
        whatever its number. Raises ConfigInvalid if a server does not take this run's adapter, or
        takes another dtype than the others.
        """
        infos = await self._ask_all()
        if infos is None:
            return
        self._weight_dtype = _agreed_dtype(infos)
        if (adapter := self._policy.adapter()) is not None:
            for info in infos:
                check_taken(adapter, info.lora.max_rank if info.HasField("lora") else None)
        if saved_step and self._keeps_checkpoints:
            # The previous trainer may have died before reporting it.
            self._exchanges.checkpoint(saved_step)
        await self._agree_on_weights(infos)
        await self._handover.ask_all(self._submit)

    async def _ask_all(self) -> Sequence[rollout_service_pb2.GetServerInfoResponse] | None:
        """Asks every server for its info, such that all answers hold at the same time. If a server
        restarts while another is still awaited, all are asked again. Returns None if the run is
        asked to stop."""
        senders = self._publisher.senders
        while True:
            self._restored = False
            answers = await self._handover.ask_all(lambda server: senders[server].server_info())
            infos = [info for info in answers if info is not None]
            if len(infos) < len(answers):
                return None
            if not self._restored:
                return infos

    async def _agree_on_weights(
        self, infos: Sequence[rollout_service_pb2.GetServerInfoResponse]
    ) -> None:
        held, newest = self._exchanges.held_version, [_newest(info) for info in infos]
        foreign = any(self._is_foreign(info, held) for info in infos)
        if not self._one_batch_a_version and (max(newest) <= held or not foreign):
            self._gatherer.follow()
        if foreign:
            await self._publish(max(newest) + 1, range(len(infos)))
            return
        if max(newest) > held:
            log.warning(
                "the server samples version %d, made by steps that no checkpoint contains: "
                "repeating them before publishing anything",
                max(newest),
            )
            self._ahead = [version if version > held else 0 for version in newest]
            self._sampled_ahead = any(info.active_weight_version > held for info in infos)
        behind = [server for server, version in enumerate(newest) if version < held]
        await self._publish(held, behind)
        # Staged by the previous trainer, which died before the switch.
        staged = [
            server
            for server, info in enumerate(infos)
            if newest[server] == held and info.active_weight_version != held
        ]
        await self._handover.confirm(held, self._ask_to_switch(held, staged))

    async def _publish(self, version: int, servers: Sequence[int]) -> None:
        """Fills the payload with a version and makes these servers sample it. Fills it even if no
        server lacks the version, because a restarted server is given it again."""
        if servers:
            log.info("publishing version %d", version)
        await self.fill(version)
        if servers and await self._handover.stage(version, servers) is not None:
            await self._handover.confirm(version, self._ask_to_switch(version, servers))

    def _ask_to_switch(
        self, version: int, servers: Sequence[int]
    ) -> Mapping[int, asyncio.Future[SwitchReceipt]]:
        return {server: self._exchanges.servers[server].switch(version) for server in servers}

    def _is_foreign(self, info: rollout_service_pb2.GetServerInfoResponse, held: int) -> bool:
        """Whether a server's state rules out continuing from this run's weights, so that it needs a
        greater version."""
        newest = _newest(info)
        if newest < held:
            return False
        # One engine of a hub may be away at any time. The hub brings it up to date.
        away = [replica.state == UNAVAILABLE for replica in info.replicas]
        serves = not (away and all(away))
        return not serves or (newest > held and not self._has_ahead(newest))

    async def restore(self, server: int, welcome: trainer_service_pb2.Welcome) -> bool:
        """Brings a server up to date that came back with less state. Returns False if the payload
        is already newer than what the trainer holds; the next switch then does it. Raises
        ServerLost."""
        exchange, sender = self._exchanges.servers[server], self._publisher.senders[server]
        held, active = exchange.held_version, welcome.active_weight_version
        # With a transport that switches on upload, the server may sample a version whose answer was
        # lost.
        if active > max(held, self._ahead[server], self._publisher.filled_version):
            raise SessionRefused(
                f"the server samples version {active}, which this trainer never published"
            )
        self._restored = True
        await self._gatherer.came_back(server)
        if self._ahead[server]:
            # The server may have lost versions, which it can be given again.
            self._ahead[server] = _newest(await sender.server_info())
        if active < held:
            # The server has lost the base of delta uploads.
            sender.forget_base()
        lost = active < held
        if lost and self._publisher.filled_version == held:
            log.warning(
                "the server came back with version %d; publishing version %d again", active, held
            )
            exchange.restored.clear()
            if await self._handover.upload(server, held) is not None:
                exchange.repeat_switch()
                lost = False
            else:
                exchange.restored.set()
        await self._tasks.submit_again(server)
        return not lost

    async def fill(self, weight_version: int, *, uploads: bool = False) -> None:
        """Copies the policy's weights into the payload, as this version. With `uploads`, the upload
        begins at the same time, unless a server may already have these weights. Version 0, the base
        model, is never uploaded, because every server has it. The first version is compared with
        it.

        A server that is being restored reads the payload, so this waits until each such server
        samples its version. No other code waits for that answer.
        """
        await self._handover.all_restored()
        begins = uploads and weight_version > self._newest_ahead
        await self._publisher.fill(
            self._policy.weights,
            weight_version,
            self._weight_dtype,
            self._handover.announcements if begins else (),
        )

    def number(self, entry: StepEntry) -> int:
        """Returns the version number for a step's weights: the entry's own, unless a server has
        different weights under that number. A server that has the same entry got it from the
        previous trainer, with identical weights."""
        if entry.weight_version > self._newest_ahead or self._ledger.ahead.get(entry.step) == entry:
            return entry.weight_version
        version = self._newest_ahead + 1
        log.warning(
            "step %d came out differently than before: its weights become version %d",
            entry.step,
            version,
        )
        self._publisher.relabel(version)
        return version

    async def stage(self, weight_version: int) -> Sent | None:
        """Stages the payload's version on every server that lacks it. Returns None if no server
        lacked it."""
        lacking = [s for s in self._handover.servers if weight_version > self._ahead[s]]
        return await self._handover.stage(weight_version, lacking) if lacking else None

    def switch(self, weight_version: int) -> Mapping[int, asyncio.Future[SwitchReceipt]]:
        """Requests a version, which the trainer holds as of this call. Servers that are past it are
        skipped."""
        asked: list[int] = []
        for server, exchange in enumerate(self._exchanges.servers):
            if weight_version < self._ahead[server]:
                exchange.hold(weight_version)
            else:
                self._ahead[server] = 0
                asked.append(server)
        return self._ask_to_switch(weight_version, asked)

    def _has_ahead(self, newest: int) -> bool:
        """Returns whether the server's newest version belongs to a step that can be repeated."""
        ahead = self._ledger.ahead.values()
        return not self._one_batch_a_version and newest in {e.weight_version for e in ahead}

    async def _submit(self, server: int) -> None:
        """Submits tasks to a server that may have lost them, or forgotten groups that are needed
        again."""
        await self._tasks.submit_again(server)
        if self._forgotten_step:
            entries = [e for e in self._ledger.ahead.values() if e.step <= self._forgotten_step]
            lost = [group.task_id for entry in entries for group in entry.groups]
            await self._tasks.submit_anew(server, lost, self._forgotten_step)


def _newest(info: rollout_service_pb2.GetServerInfoResponse) -> int:
    """Returns the newest version that a server has, staged or active."""
    return max(info.active_weight_version, *info.staged_weight_versions, 0)


def _agreed_dtype(infos: Sequence[rollout_service_pb2.GetServerInfoResponse]) -> str:
    """Returns the dtype in which all servers take weights. Raises ConfigInvalid if they differ."""
    dtypes = dict.fromkeys(info.weight_dtype for info in infos)
    if len(dtypes) > 1:
        raise ConfigInvalid(
            "server.address: the servers of a run must take weights in one dtype, got "
            f"{', '.join(dtypes)}"
        )
    return next(iter(dtypes))
