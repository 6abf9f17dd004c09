"""The weights of a pool: staging, switching, and bringing late engines up to date.

    stage     a version goes to every engine as soon as the hub has it (`fanout`), while all sample
    switch    in parts or all at once (`switch`); ends when no engine in rotation has an older version
    bring_up  a joining engine is given the active version before it takes turns

Every engine in rotation samples the active version or a newer one. `switch` and `bring_up` both decide
that without an `await` between the check and the action.

An adapter is a version like any other. A joining engine gets it second: first the full weights below it,
unless it is known to have them. An engine with a foreign adapter on the right full weights needs only the
pool's adapter. On other full weights it can be given neither (ADAPTER_ACTIVE), and stays out until another
process replaces it.

A joining engine must receive the version within the limits of a switch, `stage_seconds` and
`switch_seconds`; otherwise it is retried later. Its `problem` states what it waits for. Joining engines of
one host are sent the version once, as in a switch: the first one opens it, those that join meanwhile use
the same one, and the last to finish closes it. At most `PLACES` engines are given it at the same time.
Engines that took too long before use separate places, so that they delay no others.

What a failure does. An engine that refuses a version or takes too long leaves the rotation. It is then
brought up to date, with the probe that the version came with. A version that no engine takes is refused as
a whole. An engine that is lost meanwhile is not waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import random
import time
from collections.abc import AsyncGenerator, Callable, Hashable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, NoReturn

from opentelemetry import trace

from penstock.common.memory_file import host_id
from penstock.server.config.pool import PoolSection
from penstock.server.core.aio import OwnTasks
from penstock.server.core.errors import DomainError
from penstock.server.engine.protocol import StagedWeights
from penstock.server.pool.differences import Differing
from penstock.server.pool.fanout import Fanout, not_taken
from penstock.server.pool.member import Member, State
from penstock.server.pool.payload import VersionPayload
from penstock.server.pool.remote import EngineRefused, Unanswered
from penstock.server.pool.roster import Roster
from penstock.server.pool.switch import PoolSwitch
from penstock.server.pool.turns import PoolTurns
from penstock.server.turns.runner import TurnRunner
from penstock.server.weights.adapter_manifest import AdapterShape
from penstock.server.weights.probe import Probe, ProbeResult
from penstock.server.weights.switch import (
    InFlight,
    Switched,
    SwitchPhase,
    Update,
    VersionBefore,
    WeightSwitch,
    abort_required,
)
from penstock.v1 import weights_pb2
from penstock.wire.reasons import Reason

logger = logging.getLogger(__name__)
tracer = trace.get_tracer("penstock.server")

PLACES = 8
"""Joining engines that are given the pool's version at the same time."""
PLACES_OF_HUNG = 2
"""The same of engines that took too long before."""

OpenVersion = Callable[[int], AbstractAsyncContextManager[StagedWeights | None]]
Opening = AbstractAsyncContextManager[Fanout | None]


class Sharing:
    """Open versions by key, shared by engines of one host that join at the same time. The engine that
    opened one may finish before the others."""

    def __init__(self) -> None:
        self._open: dict[Hashable, _Shared] = {}

    @contextlib.asynccontextmanager
    async def use(
        self, key: Hashable, make: Callable[[], Opening]
    ) -> AsyncGenerator[Fanout | None]:
        """Join the fanout open under `key`, else open one with `make`. Raises what opening raises."""
        shared = self._open.get(key)
        if shared is None:
            shared = self._open[key] = _Shared(make())
        shared.users += 1
        try:
            yield await asyncio.shield(shared.opened)
        finally:
            shared.users -= 1
            if not shared.users:
                if self._open.get(key) is shared:
                    del self._open[key]
                await asyncio.shield(shared.close())

    def forget(self) -> None:
        """Current users keep the fanouts that are open now."""
        self._open.clear()


class _Shared:
    """An open fanout. A task opens it, which ends even if the user that needed it first is cancelled."""

    def __init__(self, opening: Opening) -> None:
        self.users = 0
        self._stack = contextlib.AsyncExitStack()
        self.opened = asyncio.create_task(
            self._stack.enter_async_context(opening), name="a version for joining engines"
        )
        self.opened.add_done_callback(_heard)

    async def close(self) -> None:
        await asyncio.wait([self.opened])
        await self._stack.aclose()


@dataclass(eq=False)
class PoolWeights:
    """The version that the pool samples, and its distribution to every engine: the `Switcher` of a pool."""

    holds_adapters = True
    """An engine that joins late needs the adapter after the full weights."""

    roster: Roster
    rules: PoolSection
    pool_turns: PoolTurns
    state: WeightSwitch
    turns: TurnRunner
    open_version: OpenVersion
    """Opens the bytes of a version for engines that join late."""
    # Larger than any previous hub's, whose uploads engine servers then refuse.
    _epoch: int = field(default_factory=time.time_ns)
    _fanout: Fanout | None = None
    _staging: asyncio.Task[Fanout] | None = None
    _staging_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Around every change of `_fanout` that waits."""
    _running: PoolSwitch | None = None
    _tasks: OwnTasks = field(default_factory=OwnTasks)
    _sharing: Sharing = field(default_factory=Sharing)
    _full: int = 0
    """Version of the full weights; equal to `active` unless that is an adapter."""
    _adapter: AdapterShape | None = None
    """Shape of the active version if it is an adapter."""
    _probe: Probe | None = None
    """Probe that the active version came with."""

    def __post_init__(self) -> None:
        self._places = asyncio.Semaphore(PLACES)
        self._places_of_hung = asyncio.Semaphore(PLACES_OF_HUNG)

    @property
    def active(self) -> int:
        return self.roster.active_version

    @property
    def adapter_versions(self) -> list[int]:
        """Adapters still in use on some engine, oldest first, as of the last look at each."""
        found = {v for member in self.roster.members for v in member.adapter_versions}
        return sorted(found | ({self.active} if self._adapter is not None else set()))

    async def bring_up(self, member: Member, trusted: bool) -> None:
        """Give a joining engine the active version, unless it has it, and put it into rotation."""
        active = self.active
        if self._is_kept_out(member):
            return
        if not (trusted and self.roster.is_current(member)):
            if self.state.awaiting_trainer:
                member.problem = "waits for the trainer's version"
                return
            if not trusted:
                # Its weights failed to load, whatever version it reports.
                member.version = member.full_version = None
            # Separate places, so that hanging engines leave room for the others.
            places = self._places_of_hung if member.hung else self._places
            if places.locked():
                self._tell(member, f"waits to be given version {active}, after other engines")
            async with places:
                await self._give(member)
                member.hung = member.hung and not self.roster.is_current(member)
        # If another version has become active meanwhile, look at the engine again at once.
        if self.roster.is_current(member):
            member.serve()
        elif self.active != active:
            self.roster.poke(member)

    def _is_kept_out(self, member: Member) -> bool:
        """Whether to leave it out until the end of the switch whose version it did not take. If no other
        engine takes turns, its version is still the pool's."""
        switch = self._running
        if switch is None or member.version == switch.version:
            return False
        if member.server_id not in switch.given_up:
            return False
        return any(m.stays for m in self.roster.members if m is not member)

    async def _give(self, member: Member) -> None:
        """Give it the active version, after the full weights below if it has other ones."""
        if self._adapter is not None and member.full_version != self._full:
            await self._give_version(member, self._full)
            if member.full_version != self._full:
                return
        # With the probe, because an engine that failed it may come here too.
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
        # Engines that hung before do not share with others, which would wait for their bytes.
        key = member.host_id, version, adapter is None, member.hung
        opening = functools.partial(self._open_fanout, member.host_id, version, probe, adapter)
        async with self._sharing.use(key, opening) as fanout:
            if fanout is None:
                waits = f"version {version} is not held by the hub: waits for the next one"
                lacks = f"its full weights are not version {version}, which is not held by the hub"
                member.problem = waits if version == self.active else lacks
                return
            self._tell(member, f"is being given version {version}")
            limit, doing = self.rules.stage_seconds, "did not have all of"
            try:
                async with asyncio.timeout(limit):
                    there = await fanout.begin(member)
                limit, doing = self.rules.switch_seconds, "did not switch to"
                async with asyncio.timeout(limit):
                    await there.activate(weights_pb2.IN_FLIGHT_POLICY_ABORT)
                member.has(version, adapter=adapter is not None)
            except EngineRefused as error:
                fanout.settle(member, accepted=False)
                member.decline(version)
                member.leave_rotation(not_taken(version, error))
            except Unanswered:
                # The process may be gone or unable to serve.
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
        """None if the hub does not hold the version."""
        async with self.open_version(version) as weights:
            if weights is None:
                yield None
                return
            payload = await asyncio.to_thread(VersionPayload, weights, adapter)
            holders = [other for other in self.roster.rotation if other.version == version]
            random.shuffle(holders)
            # Engines on the same host come first.
            holders.sort(key=lambda other: other.host_id != host)
            fanout = Fanout(payload, self._epoch, self.rules, probe, holders=holders)
            try:
                yield fanout
            finally:
                await fanout.close()

    def _tell(self, member: Member, doing: str) -> None:
        """Set `problem` to what it waits for, plus the reason of its last setback."""
        member.problem = f"{doing} (it {member.setback})" if member.setback else doing

    def stage(self, update: Update) -> None:
        """Drops a version staged before and not activated."""
        staged = update.staged.retain()
        self._staging = self._tasks.start(
            self._stage(update), f"staging version {staged.weight_version}", staged.release
        )

    async def _stage(self, update: Update) -> Fanout:
        """Returns the fanout of the version, which a newer version's may have replaced already."""
        payload = await asyncio.to_thread(VersionPayload, update.staged.weights, update.adapter)
        async with self._staging_lock:
            before, differing = self._fanout, self._differing(payload)
            fanout = Fanout(payload, self._epoch, self.rules, update.probe, differing=differing)
            self._fanout = fanout
            if before is not None:
                await before.close()
            for member in self.roster.members:
                if member.state in (State.SERVING, State.SWITCHING):
                    # Refusals are handled at the switch. Joining engines are brought up to date after it.
                    fanout.begin(member).add_done_callback(_heard)
            return fanout

    def _differing(self, payload: VersionPayload) -> Differing | None:
        """The difference from the active version; None if engine servers could not apply it."""
        opens, active, here = self.open_version, self.active, host_id()
        hosts = len({member.host_id for member in self.roster.rotation} - {here})
        adapters = payload.adapter is not None or self._adapter is not None
        if adapters or not hosts or not self.rules.differences:
            return None
        # The hub sends the difference to each host, but the whole version only to `from_hub` of them.
        from_hub = min(self.rules.branches or hosts, hosts)
        return Differing(active, lambda: opens(active), payload.length_bytes * from_hub // hosts)

    async def switch(self, update: Update, policy: InFlight, before: VersionBefore) -> Switched:
        """Returns when every engine in rotation has the version; each returns separately. Raises
        WEIGHT_LOAD_FAILED or PROBE_MISMATCH if engines could have taken the version but none did."""
        version, adapter = update.weight_version, update.adapter is not None
        async with self.state.change():
            with tracer.start_as_current_span("penstock.switch_weights") as span:
                span.set_attribute("penstock.weight_version", version)
                span.set_attribute("penstock.in_flight", policy.value)
                span.set_attribute("penstock.adapter", adapter)
                switched = await self._switch(update, policy)
                self.state.adopt(version, adapter=adapter)
                span.set_attribute("penstock.pause_seconds", switched.pause_seconds)
                return switched

    async def _begin(self) -> None:
        at_once = self.rules.switch == "all"
        await self.state.hold_turns(SwitchPhase.CLOSED if at_once else SwitchPhase.ROLLING)
        await abort_required(self.turns)

    async def _switch(self, update: Update, policy: InFlight) -> Switched:
        version = update.weight_version
        if (staging := self._staging) is not None:
            await asyncio.wait([staging])
            if self._staging is staging:
                self._staging = None
        async with self._staging_lock:
            # A newer version that is staged meanwhile waits for the lock, or has its own fanout by now.
            fanout = self._fanout
        if fanout is None or fanout.weight_version != version:
            fanout = await self._stage(update)
        if self._fanout is fanout:
            self._fanout = None
        expect_aborts = self.pool_turns.expect_aborts
        switch = PoolSwitch(self.roster, self.rules, fanout, policy, expect_aborts)
        self._running = switch
        try:
            await switch.run(self._begin)
            # No await from here on: the switch's last look at the rotation must still hold.
            if switch.taken_by_none:
                self._taken_by_none(switch)
            for member in self.roster.rotation:
                if member.version != version:
                    # It came back into rotation with the previous version.
                    without = f"does not have version {version}"
                    member.leave_rotation(switch.given_up.get(member.server_id, without))
            self.roster.active_version = version
            self._probe, self._adapter = update.probe, update.adapter
            if update.adapter is None:
                self._full = version
            self._sharing.forget()
        finally:
            self._running = None
            await fanout.close()
            self.roster.rotate()
            for member in self.roster.members:
                if member.state is State.JOINING:
                    self.roster.poke(member)
        answers = switch.answers
        pause = max((answer.pause.ToNanoseconds() / 1e9 for answer in answers), default=0.0)
        probes = [answer.probe for answer in answers if answer.HasField("probe")]
        worst = max(probes, key=lambda probe: probe.mean_difference, default=None)
        result = worst and ProbeResult(worst.mean_difference, worst.max_difference)
        return Switched(version, pause, result)

    def _taken_by_none(self, switch: PoolSwitch) -> NoReturn:
        """Refuse the version; every engine continues with the previous one."""
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
            f"none of {len(switch.declined)} engines took version {version}; "
            f"version {before} stays active: {problem}",
            {**(said[0].metadata if said else {}), "weight_version": version, "active": before},
        )

    async def spoiled(self, weight_version: int, problem: str) -> None:
        """Log it: engines check what they read themselves."""
        logger.error("version %s is not held: %s", weight_version, problem)

    async def close(self) -> None:
        await self._tasks.cancel()
        if self._fanout is not None:
            await self._fanout.close()
            self._fanout = None


def _heard(task: asyncio.Future[Any]) -> None:
    """Mark the error as retrieved: the switch, or users that still wait, raise it."""
    if not task.cancelled():
        task.exception()
