"""Publishes the trainer's weights to every server of a run.

    begin   agree with the servers on weights before the first step (`catching_up`)
    fill    pack a version once (compute thread); uploads may begin meanwhile
    number  settle which version the step's weights are
    stage   upload to each server: whole, or as a difference -> every one has it STAGED
    switch  request it from each server, on the exchange
    confirm wait until every server samples it, with one more upload after a rejection

Uploads to several servers run concurrently, and a change of the copy waits for all of them. A switch is
requested only once every server has the version staged. A server that has restarted since then has lost the
staged version, and rejects the switch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Collection, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from penstock.trainer.core.aio import together
from penstock.trainer.exchange.stream import SwitchReceipt
from penstock.trainer.state.ledger import StepEntry
from penstock.trainer.weights.catching_up import Infos, agreed_dtype, make_plan
from penstock.trainer.weights.copy import WeightCopy, Weights
from penstock.trainer.weights.sender import Sender
from penstock.trainer.weights.sent import Sent, Switched

log = logging.getLogger(__name__)

Switches = Mapping[Sender, asyncio.Future[SwitchReceipt]]
"""Pending answers to a switch."""


class Publisher:
    def __init__(self, copy: WeightCopy, senders: Sequence[Sender]) -> None:
        """Each of `senders` uploads `copy` to one server."""
        self._copy = copy
        self.senders = tuple(senders)
        self._samples_inherited = False
        """Whether any server samples a version of the previous trainer."""

    @property
    def filled_version(self) -> int:
        """The version whose bytes the payload holds; zero before the first."""
        return self._copy.version

    @property
    def digest(self) -> str:
        """Checksum of the payload, equal for equal weights; empty before the first version."""
        return self._copy.filled.digest if self._copy.filled else ""

    @property
    def length_bytes(self) -> int:
        """Of a whole version."""
        return self._copy.filled.length_bytes if self._copy.filled else 0

    @property
    def catching_up(self) -> bool:
        """Whether a server samples a version that the trainer does not hold yet."""
        return self._samples_inherited and self._inherited > self._held

    @property
    def _inherited(self) -> int:
        return max(sender.inherited for sender in self.senders)

    @property
    def _held(self) -> int:
        return self.senders[0].exchange.held_version

    async def ask_servers(self) -> Infos | None:
        """The description of every server, such that all answers hold at the same time. If a server is lost
        while another is still awaited, all are asked again.

        Returns None if the run is asked to stop. Raises ConfigInvalid if a server does not take this run's
        adapter, or takes another dtype than the others."""
        while True:
            epochs = [sender.exchange.trainer_epoch for sender in self.senders]
            answers = await together(
                sender.exchange.ask(sender.server_info) for sender in self.senders
            )
            infos = [info for info in answers if info is not None]
            if len(infos) < len(answers):
                return None
            if epochs == [sender.exchange.trainer_epoch for sender in self.senders]:
                break
        self._copy.dtype = agreed_dtype(infos)
        for sender, info in zip(self.senders, infos, strict=True):
            sender.check_adapter(info)
        return infos

    async def begin(self, infos: Infos, weights: Weights, repeatable: Collection[int]) -> bool:
        """Make the servers sample the trainer's weights, as far as they lack them; see `make_plan`.

        Fills the payload even if no server lacks the version, because a restarted server is given it again.
        Returns whether the steps that the ledger has ahead are repeated."""
        plan = make_plan(infos, self._held, repeatable)
        for sender, version in zip(self.senders, plan.inherited, strict=True):
            sender.inherited = version
        self._samples_inherited = plan.is_sampled
        version = plan.weight_version
        lacking = [self.senders[server] for server in plan.lacking]
        staged = [self.senders[server] for server in plan.staged]
        if lacking:
            log.info("publishing version %d", version)
        await self.fill(weights, version)
        if await _stage(version, lacking) is not None:
            await self.confirm(version, _switch(version, lacking))
        await self.confirm(version, _switch(version, staged))
        return plan.repeats

    async def fill(self, weights: Weights, weight_version: int, *, uploads: bool = False) -> None:
        """Copy weights into the payload as this version, and score the probe with them.

        With `uploads`, uploads begin during the copy if they can, unless a server may already have these
        weights. Version 0, the base model, is never uploaded, because every server has it. The first
        version is compared with it.

        Waits for uploads in progress. A server that is being restored reads the payload, so this waits
        until each such server samples its version. No other code waits for that answer."""
        begins = uploads and weight_version > self._inherited
        async with self._alone():
            # Before the copy begins, so that a partly overwritten payload never counts as a version.
            self._relabel(weight_version)
            if not any(sender.has_base for sender in self.senders):
                self._copy.base = None
            keeps_base = self._copy.base is not None or any(s.sends_deltas for s in self.senders)
            payload = self._copy.reusable(keeps_base=keeps_base)
            if payload is None:
                payload = await self._copy.allocate(weights, keeps_base=keeps_base)
            self._copy.filled = payload
            if begins:
                for sender in self.senders:
                    sender.begin_ahead(payload)
            try:
                in_chunks = any(sender.next_in_chunks for sender in self.senders)
                await self._copy.fill(payload, weights, in_chunks=in_chunks)
            except BaseException:
                self._leave_ahead()
                raise

    @asynccontextmanager
    async def _alone(self) -> AsyncGenerator[None]:
        """While no server reads the payload: no upload is in progress, and none is being restored."""
        while True:
            await together(sender.restored() for sender in self.senders)
            async with AsyncExitStack() as stack:
                for sender in self.senders:
                    await stack.enter_async_context(sender.lock)
                # A server may have come back while this waited for another one.
                if all(sender.is_restored for sender in self.senders):
                    yield
                    return

    async def relabel(self, weight_version: int) -> None:
        """Give the payload another number, for a step that changed no weights."""
        async with self._alone():
            self._relabel(weight_version)

    def _relabel(self, weight_version: int) -> None:
        self._copy.relabel(weight_version)
        self._leave_ahead()

    def number(self, entry: StepEntry, *, repeated: bool) -> int:
        """The version number for a step's weights: the entry's own, unless a server has different weights
        under that number.

        If the step was `repeated` with the same entry, a server got that version from the previous trainer,
        with identical weights."""
        if repeated or entry.weight_version > self._inherited:
            return entry.weight_version
        version = self._inherited + 1
        log.warning(
            "step %d came out differently than before: its weights become version %d",
            entry.step,
            version,
        )
        self._relabel(version)
        return version

    async def stage(self, weight_version: int) -> Sent | None:
        """Returns None if no server lacked the version, or the run stops without one."""
        lacking = [sender for sender in self.senders if weight_version > sender.inherited]
        return await _stage(weight_version, lacking)

    def switch(self, weight_version: int) -> Switches:
        """Request a version, which the trainer holds as of this call. Servers past it have no answer."""
        return _switch(weight_version, self.senders)

    async def confirm(self, weight_version: int, switches: Switches) -> Switched | None:
        """See `Sender.confirm`. Returns None if the run stops without one of the servers."""
        answers = await together(
            sender.confirm(weight_version, switch) for sender, switch in switches.items()
        )
        switched = [one for one in answers if one is not None]
        return Switched.merged(switched) if switched and len(switched) == len(answers) else None

    def close(self) -> None:
        for sender in self.senders:
            sender.close()
        self._copy.close()

    def _leave_ahead(self) -> None:
        for sender in self.senders:
            sender.leave_ahead()


async def _stage(weight_version: int, senders: Iterable[Sender]) -> Sent | None:
    """Return None if there is none to stage on, or the run stops without one."""
    sent = await together(sender.stage(weight_version) for sender in senders)
    took = [one for one in sent if one is not None]
    return Sent.merged(took) if took and len(took) == len(sent) else None


def _switch(weight_version: int, senders: Iterable[Sender]) -> Switches:
    asked = ((sender, sender.switch(weight_version)) for sender in senders)
    return {sender: switch for sender, switch in asked if switch is not None}
