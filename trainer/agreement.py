"""How trainer and servers come to agree on weights and tasks: at the start, and after a stream was lost.

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
    late policy "wait", max_lag    the gate delivers one batch for each version: K is published as
      above zero                     N+1 at once
    the server has lost all        K is published, and what is outstanding submitted again

A server that is restarted while the run goes on is given the version that the trainer holds again. Where
the payload is of the next one already, it is not: it stays with less until that is switched to, and pinned
evaluations, for which the switch waits, are ended.

Of several servers, which were killed and restarted at moments of their own, each may be elsewhere. All
this is of each by itself: one is given a version where it has less, and is past it where it has it already.
They come to the same version when the trainer does, or before:

    some at N, others before it    the trainer catches up: each version on the way goes to those that do
      or empty                       not have it, and nothing to the others
    one has a version of which     this run's weights get a greater number than that of any server, and go
      nothing is known, or none      to all of them
      that can be trusted
    the step comes out otherwise   what it made gets a greater number than that of any server, likewise
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
    """Which weights have which number, here and at the servers."""

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
        """Up to `forgotten_step`, of a checkpoint that is broken, the server may have forgotten groups
        that the ledger has ahead."""
        self._policy = policy
        self._exchanges = exchanges
        self._publisher = publisher
        self._tasks = tasks
        self._handover = handover
        self._gatherer = gatherer
        self._ledger = ledger
        self._forgotten_step = forgotten_step
        self._keeps_checkpoints = config.checkpoint.every_steps > 0
        # Under the others all that waits is delivered, whatever version the trainer holds.
        self._one_batch_a_version = config.staleness.applied_policy == "wait"
        self._weight_dtype = ""
        self._ahead = [0] * len(exchanges.servers)
        """Newest version of the trainer before, of each server that this one is catching up with."""
        self._sampled_ahead = False
        """Whether any of them samples it already, or has it only staged."""
        self._restored = False
        """Whether a server came back since it was last asked what it has."""

    @property
    def catching_up(self) -> bool:
        """Whether a server samples a version that the trainer does not hold yet."""
        return self._sampled_ahead and self._newest_ahead > self._exchanges.held_version

    @property
    def _newest_ahead(self) -> int:
        return max(self._ahead)

    async def begin(self, saved_step: int) -> None:
        """Agrees with the servers on weights and tasks before the first step.

        A server starts with the base model, as version 0. Where one has seen versions of which nothing
        is known here, this run's weights get a greater number than all of them, for versions only grow. A
        server that serves nothing, because it could not load a version, needs one whatever its number.
        Raises ConfigInvalid where one does not take this run's adapter, or another dtype than the others.
        """
        infos = await self._ask_all()
        if infos is None:
            return
        self._weight_dtype = _agreed_dtype(infos)
        if (adapter := self._policy.adapter()) is not None:
            for info in infos:
                check_taken(adapter, info.lora.max_rank if info.HasField("lora") else None)
        if saved_step and self._keeps_checkpoints:
            # The trainer before may not have come to say so.
            self._exchanges.checkpoint(saved_step)
        await self._agree_on_weights(infos)
        await self._handover.ask_all(self._submit)

    async def _ask_all(self) -> Sequence[rollout_service_pb2.GetServerInfoResponse] | None:
        """What every server has, all of it true at the same time: what one said before it was restarted,
        while another was still awaited, is asked again. None where the run is to stop."""
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
                "the server samples version %d, of steps that no checkpoint contains: "
                "doing them again before anything is published",
                max(newest),
            )
            self._ahead = [version if version > held else 0 for version in newest]
            self._sampled_ahead = any(info.active_weight_version > held for info in infos)
        behind = [server for server, version in enumerate(newest) if version < held]
        await self._publish(held, behind)
        # Staged by the trainer before, which did not come to have it switched to.
        staged = [
            server
            for server, info in enumerate(infos)
            if newest[server] == held and info.active_weight_version != held
        ]
        await self._handover.confirm(held, self._ask_to_switch(held, staged))

    async def _publish(self, version: int, servers: Sequence[int]) -> None:
        """Fills the payload with a version, also where nobody lacks it: a server that restarts is given
        it again. Then has these servers sample it."""
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
        """Whether a server has what this run cannot go on from: it has to be given more."""
        newest = _newest(info)
        if newest < held:
            return False
        # Of a hub's engines one may be away at any time: it is given what the others sample by the hub.
        away = [replica.state == UNAVAILABLE for replica in info.replicas]
        serves = not (away and all(away))
        return not serves or (newest > held and not self._has_ahead(newest))

    async def restore(self, server: int, welcome: trainer_service_pb2.Welcome) -> bool:
        """Brings a server up to date that came back with less than it had; False where it cannot be given
        what the trainer holds, for the payload is newer: the next switch does it. Raises ServerLost."""
        exchange, sender = self._exchanges.servers[server], self._publisher.senders[server]
        held, active = exchange.held_version, welcome.active_weight_version
        # Where the upload is the switch, the server may have come to sample it, and its answer is lost.
        if active > max(held, self._ahead[server], self._publisher.filled_version):
            raise SessionRefused(
                f"the server samples version {active}, which this trainer never published"
            )
        self._restored = True
        await self._gatherer.came_back(server)
        if self._ahead[server]:
            # What it has no more it can be given again.
            self._ahead[server] = _newest(await sender.server_info())
        if active < held:
            # It has lost what differences are made from.
            sender.forget_base()
        lost = active < held
        if lost and self._publisher.filled_version == held:
            log.warning("the server came back with version %d; publishing %d again", active, held)
            exchange.restored.clear()
            if await self._handover.upload(server, held) is not None:
                exchange.repeat_switch()
                lost = False
            else:
                exchange.restored.set()
        await self._tasks.submit_again(server)
        return not lost

    async def fill(self, weight_version: int, *, uploads: bool = False) -> None:
        """Copies the policy's weights into the payload, as this version. With `uploads` the upload begins
        meanwhile, unless the server may turn out to have these weights. The base model, version 0, goes
        to nobody, for every server has it; but the first version is compared with it.

        The payload is a server's until it has said that it samples what is in it: it may hand over groups
        of that before. Of one that came back in between nobody else waits for the answer."""
        await self._handover.all_restored()
        begins = uploads and weight_version > self._newest_ahead
        await self._publisher.fill(
            self._policy.weights,
            weight_version,
            self._weight_dtype,
            self._handover.announcements if begins else (),
        )

    def number(self, entry: StepEntry) -> int:
        """The version that a step's weights get: the entry's, where no server has others by that number.
        Those that have it are from the trainer before, and the very same."""
        if entry.weight_version > self._newest_ahead or self._ledger.ahead.get(entry.step) == entry:
            return entry.weight_version
        version = self._newest_ahead + 1
        log.warning(
            "step %d came out otherwise than before: its weights are version %d",
            entry.step,
            version,
        )
        self._publisher.relabel(version)
        return version

    async def stage(self, weight_version: int) -> Sent | None:
        """Until every server has a version that the payload holds; None also where all had it before."""
        lacking = [s for s in self._handover.servers if weight_version > self._ahead[s]]
        return await self._handover.stage(weight_version, lacking) if lacking else None

    def switch(self, weight_version: int) -> Mapping[int, asyncio.Future[SwitchReceipt]]:
        """Asks for a version, which the trainer holds from now on; of none that is past it."""
        asked: list[int] = []
        for server, exchange in enumerate(self._exchanges.servers):
            if weight_version < self._ahead[server]:
                exchange.hold(weight_version)
            else:
                self._ahead[server] = 0
                asked.append(server)
        return self._ask_to_switch(weight_version, asked)

    def _has_ahead(self, newest: int) -> bool:
        """Whether the server's newest version is of a step that can be done again."""
        ahead = self._ledger.ahead.values()
        return not self._one_batch_a_version and newest in {e.weight_version for e in ahead}

    async def _submit(self, server: int) -> None:
        """Tasks to a server that may have lost them, or forgotten groups that are needed again."""
        await self._tasks.submit_again(server)
        if self._forgotten_step:
            entries = [e for e in self._ledger.ahead.values() if e.step <= self._forgotten_step]
            lost = [group.task_id for entry in entries for group in entry.groups]
            await self._tasks.submit_anew(server, lost, self._forgotten_step)


def _newest(info: rollout_service_pb2.GetServerInfoResponse) -> int:
    """The newest version that a server has, staged or active."""
    return max(info.active_weight_version, *info.staged_weight_versions, 0)


def _agreed_dtype(infos: Sequence[rollout_service_pb2.GetServerInfoResponse]) -> str:
    """What all of them take weights in. Raises ConfigInvalid."""
    dtypes = dict.fromkeys(info.weight_dtype for info in infos)
    if len(dtypes) > 1:
        raise ConfigInvalid(
            f"server.address: the servers of a run take weights in one dtype, got {', '.join(dtypes)}"
        )
    return next(iter(dtypes))
