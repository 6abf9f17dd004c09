"""The weights of a pool: staged everywhere, switched to in parts, given to who comes late.

    stage     a version goes to every engine as soon as the hub has it (`pool_uploads`), while all sample
    switch    in parts, or all at once (`pool_switch`); it ends when none in rotation has an older one
    bring_up  one that joins is given the active version before it takes turns

Every engine in rotation samples the active version or a newer one. `switch` and `bring_up` both decide that
without an `await` between the look and the act.

An adapter is a version as any other. Who joins is given it second: first the full weights that it is added
to, unless it is known to have them, as one that was never given any has those of version 0. An engine that
has somebody else's adapter on the right full weights needs the pool's adapter alone. On others, it can be
given neither (ADAPTER_ACTIVE), and stays out until its process is another one.

Who joins is given a version within the limits of a switch, `stage_seconds` and `switch_seconds`, else is
tried again later, and says meanwhile what it waits for. Those of one host that join at the same time are
sent it once, as in a switch (`pool_sharing`). `bring_ups` are given one at the same time; those that took
too long before have places of their own, in which they are in nobody's way.

What a failure does. An engine that refuses a version, or takes too long over it, leaves the rotation and is
brought up to date, with the probe that the version came with. What none takes is refused as a whole. Who is
lost meanwhile is not waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import NoReturn

from penstock.common.memory_file import host_id
from penstock.server.core.errors import DomainError
from penstock.server.core.own_tasks import OwnTasks
from penstock.server.engine.protocol import StagedWeights
from penstock.server.pool.differences import Differing
from penstock.server.pool.member import Member, State
from penstock.server.pool.remote import Refused, StagedThere, Unanswered
from penstock.server.pool.roster import Roster
from penstock.server.pool.rules import PoolRules
from penstock.server.pool.sharing import Sharing
from penstock.server.pool.switch import PoolSwitch
from penstock.server.pool.uploads import Fanout, Payload, not_taken
from penstock.server.weights.adapter_manifest import AdapterShape
from penstock.server.weights.probe import Probe, ProbeResult
from penstock.server.weights.staging.incoming import Staged
from penstock.server.weights.switch import InFlight, PoolUpdate, Switched
from penstock.v1 import weights_pb2
from penstock.wire.reasons import Reason

logger = logging.getLogger(__name__)

OpenVersion = Callable[[int], AbstractAsyncContextManager[StagedWeights | None]]


class PoolWeights:
    """Which version the pool samples, and how every engine comes to it."""

    def __init__(
        self, roster: Roster, rules: PoolRules, expect_aborts: Callable[[Member], None]
    ) -> None:
        """`expect_aborts` is told of an engine that is about to abort its turns."""
        self._roster = roster
        self._rules = rules
        self._expect_aborts = expect_aborts
        # Newer than that of any hub before, which engine servers then no longer listen to.
        self._epoch = time.time_ns()
        self._fanout: Fanout | None = None
        self._staging: asyncio.Task[None] | None = None
        self._switch: PoolSwitch | None = None
        self._tasks = OwnTasks()
        self._sharing = Sharing()
        self._places = asyncio.Semaphore(rules.bring_ups)
        self._places_of_hung = asyncio.Semaphore(max(1, rules.bring_ups // 4))
        self.active = 0
        """The pool's version."""
        self._full = 0
        """That of its full weights: the same, unless the active version is an adapter."""
        self._adapter: AdapterShape | None = None
        """What the active version is, where it is an adapter."""
        self._probe: Probe | None = None
        """What the active version came with."""
        self.open_version: OpenVersion | None = None
        """Opens the bytes of a version for who comes late."""
        self.may_bring_up: Callable[[], bool] = lambda: True
        """Whether the active version is what should be sampled."""

    @property
    def adapter_versions(self) -> list[int]:
        """Adapters that sample somewhere, oldest first; of the engines as each was looked at last."""
        found = {v for member in self._roster.members for v in member.adapter_versions}
        return sorted(found | ({self.active} if self._adapter is not None else set()))

    def is_current(self, member: Member) -> bool:
        """Whether it samples the active version or a newer one."""
        return member.version is not None and member.version >= self.active

    async def bring_up(self, member: Member, trusted: bool) -> None:
        """Gives it the active version, where it has another one, and then turns."""
        active = self.active
        if self._is_kept_out(member):
            return
        if not (trusted and self.is_current(member)):
            if not self.may_bring_up():
                member.problem = "waits for the trainer's version"
                return
            if not trusted:
                # They failed to load, whatever it calls them.
                member.version = member.full_version = None
            # Any number of those that hang leave room for the others.
            places = self._places_of_hung if member.hung else self._places
            if places.locked():
                self._tell(member, f"waits to be given version {active}, as others are")
            async with places:
                await self._give(member)
                member.hung = member.hung and not self.is_current(member)
        # Another version may have become active meanwhile: then it is looked at again at once.
        if self.is_current(member):
            member.serve()
        elif self.active != active:
            self._roster.poke(member)

    def _is_kept_out(self, member: Member) -> bool:
        """Whether it did not take what the others switch to: it is brought up to date afterwards. Not where
        no other takes turns: until then what it samples is the pool's."""
        switch = self._switch
        if switch is None or member not in switch.given_up or member.version == switch.version:
            return False
        return any(m.stays for m in self._roster.members if m is not member)

    async def _give(self, member: Member) -> None:
        """The active version, and before it the full weights below, where it has others."""
        if self._adapter is not None and member.full_version != self._full:
            await self._give_version(member, self._full)
            if member.full_version != self._full:
                return
        # Scored again: one whose probe was off is here, too.
        await self._give_version(member, self.active, self._probe, self._adapter)

    async def _give_version(
        self,
        member: Member,
        version: int,
        probe: Probe | None = None,
        adapter: AdapterShape | None = None,
    ) -> None:
        if not member.may_be_offered(version):
            return
        # Nobody waits for the bytes of one that hung before.
        key = member.host_id, version, adapter is None, member.hung

        def opening() -> AbstractAsyncContextManager[Fanout | None]:
            return self._open_fanout(member.host_id, version, probe, adapter)

        async with self._sharing.use(key, opening) as fanout:
            if fanout is None:
                waits = f"version {version} is not held: it waits for the next one"
                lacks = f"its full weights are not version {version}, which is not held"
                member.problem = waits if version == self.active else lacks
                return
            self._tell(member, f"is being given version {version}")
            limit, doing = self._rules.stage_seconds, "had not all of"
            try:
                async with asyncio.timeout(limit):
                    there = await fanout.begin(member)
                limit, doing = self._rules.switch_seconds, "did not switch to"
                async with asyncio.timeout(limit):
                    await there.activate(weights_pb2.IN_FLIGHT_POLICY_ABORT)
                member.has(version, adapter=adapter is not None)
            except Refused as error:
                fanout.settle(member, accepted=False)
                member.decline(version)
                member.leave_rotation(not_taken(version, error))
            except Unanswered:
                # It may be gone, or serve nothing any more.
                member.decline(version)
                raise
            except TimeoutError:
                member.hung = True
                member.leave_rotation(f"{doing} version {version} after {limit:g} s")
            finally:
                fanout.end(member)

    @contextlib.asynccontextmanager
    async def _open_fanout(
        self, host: str, version: int, probe: Probe | None, adapter: AdapterShape | None
    ) -> AsyncGenerator[Fanout | None]:
        """A version for who joins on this host; None where it is not held."""
        opened = self.open_version(version) if self.open_version is not None else _nothing()
        async with opened as weights:
            if weights is None:
                yield None
                return
            payload = await asyncio.to_thread(Payload, weights, adapter)
            holders = [other for other in self._roster.rotation if other.version == version]
            random.shuffle(holders)
            # One of the same host is nearest.
            holders.sort(key=lambda other: other.host_id != host)
            fanout = Fanout(payload, self._epoch, self._rules, probe, holders=holders)
            try:
                yield fanout
            finally:
                await fanout.close()

    def _tell(self, member: Member, doing: str) -> None:
        """Why it takes no turns just now, and why it did not come to any the last time."""
        member.problem = f"{doing} (it {member.setback})" if member.setback else doing

    def stage(self, staged: Staged, probe: Probe | None, adapter: AdapterShape | None) -> None:
        """Begins to stage a version everywhere; what was staged and not switched to is left."""
        staged.retain()
        self._staging = self._tasks.start(
            self._stage(PoolUpdate(staged.weights, probe, adapter)),
            f"staging version {staged.weight_version}",
            staged.release,
        )

    async def _stage(self, update: PoolUpdate) -> None:
        payload = await asyncio.to_thread(Payload, update.weights, update.adapter)
        before, self._fanout = (
            self._fanout,
            Fanout(
                payload,
                self._epoch,
                self._rules,
                update.probe,
                differing=self._differing(payload),
            ),
        )
        if before is not None:
            await before.close()
        for member in self._roster.members:
            if member.state in (State.SERVING, State.SWITCHING):
                # Who does not take it says so at the switch. Who joins is brought up to date after it.
                self._fanout.begin(member).add_done_callback(_heard)

    def _differing(self, payload: Payload) -> Differing | None:
        """What changes the active version into this one, where engine servers could put that together."""
        opens, active, here = self.open_version, self.active, host_id()
        hosts = len({member.host_id for member in self._roster.rotation} - {here})
        adapters = payload.adapter is not None or self._adapter is not None
        if opens is None or adapters or not hosts or not self._rules.differences:
            return None
        # It goes to each host from the hub, and the whole to so many.
        from_hub = min(self._rules.branches or hosts, hosts)
        return Differing(active, lambda: opens(active), payload.length_bytes * from_hub // hosts)

    async def switch(
        self, update: PoolUpdate, policy: InFlight, begin: Callable[[], Awaitable[None]]
    ) -> Switched:
        """Until every engine in rotation has it; `begin` is awaited before the first of them switches.

        Raises DomainError where none takes it and some could have.
        """
        version = update.weights.weight_version
        if self._staging is not None:
            await asyncio.wait([self._staging])
            self._staging = None
        if self._fanout is None or self._fanout.weight_version != version:
            await self._stage(update)
        assert self._fanout is not None
        fanout, self._fanout = self._fanout, None
        switch = PoolSwitch(self._roster, self._rules, fanout, policy, self._expect_aborts)
        self._switch = switch
        try:
            await switch.run(begin)
            # No await from here on, since the look at the rotation.
            if switch.taken_by_none:
                self._taken_by_none(switch)
            for member in self._roster.rotation:
                if member.version != version:
                    # It came back into rotation with the version before.
                    without = f"has not version {version}"
                    member.leave_rotation(switch.given_up.get(member, without))
            self.active, self._probe, self._adapter = version, update.probe, update.adapter
            if update.adapter is None:
                self._full = version
            self._sharing.forget()
        finally:
            self._switch = None
            await fanout.close()
            self._roster.rotate()
            for member in self._roster.members:
                if member.state is State.JOINING:
                    self._roster.poke(member)
        answers = switch.answers
        pause = max((answer.pause.ToNanoseconds() / 1e9 for answer in answers), default=0.0)
        probes = [answer.probe for answer in answers if answer.HasField("probe")]
        worst = max(probes, key=lambda probe: probe.mean_difference, default=None)
        result = worst and ProbeResult(worst.mean_difference, worst.max_difference)
        return Switched(version, pause, result)

    def rotation_changed(self) -> None:
        """Another engine is in rotation, or out of it."""
        if self._switch is not None:
            self._switch.wake()

    def _taken_by_none(self, switch: PoolSwitch) -> NoReturn:
        """Everybody samples what they did, and goes on."""
        version, before = switch.version, self.active
        for member in switch.unanswered:
            member.forget(version)
        for member in switch.declined:
            if member.state is State.JOINING and member.version == before:
                member.serve()
        said = [failure for failure in switch.declined.values() if failure is not None]
        known = (Reason.PROBE_MISMATCH, Reason.WEIGHT_LOAD_FAILED)
        reason = next((r for r in known if said and r.value == said[0].reason), known[1])
        problem = said[0].message if said else next(iter(switch.given_up.values()))
        raise DomainError(
            reason,
            f"none of {len(switch.declined)} engines took version {version}, version {before} goes on: "
            f"{problem}",
            {**(said[0].metadata if said else {}), "weight_version": version, "active": before},
        )

    async def close(self) -> None:
        """Ends what is under way."""
        await self._tasks.cancel()
        if self._fanout is not None:
            await self._fanout.close()
            self._fanout = None


@contextlib.asynccontextmanager
async def _nothing() -> AsyncGenerator[None]:
    yield None


def _heard(task: asyncio.Task[StagedThere]) -> None:
    """Its error is told where it is waited for."""
    if not task.cancelled():
        task.exception()
