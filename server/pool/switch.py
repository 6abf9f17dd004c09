"""One switch of a pool: every engine in rotation activates a version once it has all of it.

Phases of an engine, and the state it shows meanwhile:

    staging     SERVING: takes turns while it receives the version
    staged      SERVING: takes turns until it may switch
    switching   SWITCHING: the in-flight policy applies to its turns; new turns go elsewhere
    switched    SERVING, with the version
    given up    JOINING or LOST: takes no turns until it was brought up to date

Order of events:

1. Every engine in rotation stages the version, all at the same time and independently. Staging began before
   the switch was requested if the version was uploaded earlier.
2. Rolling: an engine switches once it has all of the version and fewer than `switch_part` of the engines
   are switching, without waiting for those that still stage. All at once: no engine switches before each
   has the version or was given up; then all do.
3. `begin` is awaited before the first engine switches. Only then are new turns held back.
4. The switch ends when no engine in rotation has an older version. Every wait below is bounded, so it ends.

What a failure does:

- The engine refuses the version, when staging or switching: it went back to the previous version, and is
  given up.
- It does not answer: LOST. The switch stops waiting for an engine that is lost, draining or no longer
  listed, whatever its phase. An engine that comes back before the end is given the version again, and so
  is another process at the address of one that was given up.
- It does not have all of the version `stage_seconds` after the switch was requested, or does not switch
  within `switch_seconds`: its call is cancelled, and it is given up.
- It no longer has the version when told to switch, because another version was staged there since: the
  version is staged once more.
- It comes into rotation meanwhile, with the previous version: it stages like the others, within what is
  left of the same time. If all switch at once and have begun to, it is given up.
- Some engines refuse the version or are late, and none is known to have it: the version is refused, and
  all continue with the previous one. An engine that did not answer may have the version; it is given the
  previous one. If no engine is left to refuse it, because all are lost, the version becomes the pool's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from penstock.server.config.pool import PoolSection
from penstock.server.pool.fanout import Fanout, not_taken
from penstock.server.pool.member import Member, State
from penstock.server.pool.remote import EngineRefused, StagedThere, Unanswered
from penstock.server.pool.roster import Roster
from penstock.server.weights.switch import InFlight
from penstock.v1 import weights_pb2
from penstock.wire.failure import Failure
from penstock.wire.reasons import Reason
from penstock.wire.words import IN_FLIGHT

logger = logging.getLogger(__name__)

NOT_THERE = (Reason.WEIGHT_VERSION_NOT_STAGED, Reason.WEIGHT_VERSION_STALE)
"""Refusals after which the version must be staged again, under another number."""


@dataclass(eq=False)
class PoolSwitch:
    """One switch, to the version that `fanout` stages."""

    roster: Roster
    rules: PoolSection
    fanout: Fanout
    policy: InFlight
    expect_aborts: Callable[[Member], None]
    """Called with an engine that is about to abort its turns."""
    given_up: dict[str, str] = field(default_factory=dict[str, str])
    """Engine processes (server ids) that this switch no longer gives the version, and why."""
    declined: dict[Member, Failure | None] = field(default_factory=dict[Member, "Failure | None"])
    """Given-up engines that still sample their previous version: their refusal, or None if late."""
    unanswered: set[Member] = field(default_factory=set[Member])
    """Engines whose switch was requested and that have not reported the result."""
    _staged_again: set[Member] = field(default_factory=set[Member])
    """Engines that no longer had the version when told to switch, and stage it again."""

    def __post_init__(self) -> None:
        self.answers: list[weights_pb2.UpdateWeightsResponse] = []
        self._at_once = self.rules.switch == "all"
        self._staging: dict[Member, asyncio.Task[StagedThere]] = {}
        self._switching: dict[Member, asyncio.Task[None]] = {}

    @property
    def version(self) -> int:
        return self.fanout.weight_version

    @property
    def taken_by_none(self) -> bool:
        """Whether engines could have taken the version, but none is known to have it."""
        if self.answers or any(m.version == self.version for m in self.roster.rotation):
            return False
        return bool(self.declined)

    async def run(self, begin: Callable[[], Awaitable[None]]) -> None:
        """Returns without an `await` after its last look, when all engines in rotation had the version."""
        now = asyncio.get_running_loop().time
        deadline = now() + self.rules.stage_seconds
        begun = False
        try:
            while True:
                self._look()
                staged = [member for member, task in self._staging.items() if task.done()]
                late = [member for member in self._staging if member not in staged]
                if late and now() >= deadline:
                    self._leave(late, f"after {self.rules.stage_seconds:g} s", hung=True)
                    continue
                if late and begun and self._at_once:
                    self._leave(late, "when the others switched to it")
                    continue
                may_switch = bool(staged) and not (late and self._at_once)
                ended = not (self._staging or self._switching)
                if not begun and (may_switch or (ended and not self.taken_by_none)):
                    begun = True
                    await begin()
                    continue
                if ended:
                    return
                if may_switch:
                    self._switch(staged)
                await self._wait(deadline if late else None)
        finally:
            await self._break_off()

    async def _wait(self, deadline: float | None) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await self.roster.rotated.wait()

    def _look(self) -> None:
        for member, task in list(self._switching.items()):
            if task.done():
                del self._switching[member]
                if not task.cancelled():
                    task.result()
            elif member.state is not State.SWITCHING:
                # The cancelled task ends at once and wakes this loop.
                task.cancel()
        for member in self.roster.rotation:
            pending = member in self._staging or member in self._switching
            given_up = member.server_id in self.given_up
            if member.version != self.version and not pending and not given_up:
                task = self._staging[member] = self.fanout.begin(member)
                task.add_done_callback(self._ended)
        for member, task in list(self._staging.items()):
            if member.state is not State.SERVING:
                del self._staging[member]
            elif task.done():
                self._hear(member, task)

    def _hear(self, member: Member, task: asyncio.Task[StagedThere]) -> None:
        """Handle a finished staging: remove a failed one, keep a successful one for the switch."""
        try:
            task.result()
        except Unanswered as error:
            del self._staging[member]
            # It may have staged the version under this number, which it would then refuse.
            self.fanout.end(member)
            self._lose(member, str(error))
        except EngineRefused as error:
            del self._staging[member]
            self._refuse(member, error)

    def _ended(self, _: object) -> None:
        self.roster.rotated.notify()

    def _leave(self, late: list[Member], when: str, *, hung: bool = False) -> None:
        for member in late:
            del self._staging[member]
            self.fanout.end(member)
            self.declined[member] = None
            member.hung = member.hung or hung
            self._give_up(member, f"did not have all of version {self.version} {when}")
        self.roster.rotate()

    def _switch(self, staged: list[Member]) -> None:
        """Begin to switch as many of these engines as the rules allow."""
        part = len(staged)
        if not self._at_once:
            count = len(self.roster.rotation) + len(self._switching)
            most = max(1, int(count * self.rules.switch_part))
            part = max(0, most - len(self._switching))
        for member in staged[:part]:
            there = self._staging.pop(member).result()
            member.state, member.problem = State.SWITCHING, f"switches to version {self.version}"
            if self.policy is InFlight.ABORT:
                self.expect_aborts(member)
            name = f"{member.address} to version {self.version}"
            task = asyncio.create_task(self._activate(member, there), name=name)
            task.add_done_callback(self._ended)
            self._switching[member] = task
        if part:
            self.roster.rotate()

    async def _activate(self, member: Member, there: StagedThere) -> None:
        self.unanswered.add(member)
        try:
            async with asyncio.timeout(self.rules.switch_seconds):
                answer = await there.activate(IN_FLIGHT[self.policy.value])
        except Unanswered as error:
            # Whatever is still staged there cannot be activated a second time.
            self.fanout.end(member)
            self._lose(member, str(error))
            return
        except asyncio.CancelledError:
            # It was lost or is no longer listed. If it comes back, it is given all of the version again.
            self.fanout.end(member)
            raise
        except TimeoutError:
            # The next look at the engine shows which version it samples.
            limit = f"{self.rules.switch_seconds:g} s"
            problem = f"did not switch to version {self.version} within {limit}"
            self.given_up[member.server_id] = problem
            member.hung = True
            self._lose(member, problem)
            return
        except EngineRefused as error:
            if error.failure.reason in NOT_THERE and member not in self._staged_again:
                # Another version, staged meanwhile, replaced it.
                self._staged_again.add(member)
                self.unanswered.discard(member)
                self.fanout.end(member)
                self._serve_again(member)
                return
            self._refuse(member, error)
            return
        # If the engine needs the version again, that takes another upload.
        self.fanout.end(member)
        self.unanswered.discard(member)
        member.has(self.version, adapter=self.fanout.is_adapter)
        member.hung = False
        self.answers.append(answer)
        self._serve_again(member)

    def _serve_again(self, member: Member) -> None:
        if member.state is State.SWITCHING:
            member.state, member.problem = State.SERVING, ""
            self.roster.rotate()

    def _lose(self, member: Member, problem: str) -> None:
        self.roster.lose(member, problem)
        self.roster.poke(member)

    def _refuse(self, member: Member, error: EngineRefused) -> None:
        self.unanswered.discard(member)
        self.fanout.settle(member, accepted=False)
        member.changes += 1
        self.declined[member] = error.failure
        self._give_up(member, not_taken(self.version, error))
        self.roster.rotate()

    def _give_up(self, member: Member, problem: str) -> None:
        logger.warning("engine %s %s", member.address, problem)
        self.given_up[member.server_id] = problem
        member.leave_rotation(problem)

    async def _break_off(self) -> None:
        """Engines whose switch is cancelled then sample an unknown version."""
        left, self._switching = self._switching, {}
        for task in left.values():
            task.cancel()
        await asyncio.gather(*left.values(), return_exceptions=True)
        for member in left:
            if member.state is State.SWITCHING:
                self._lose(member, f"its switch to version {self.version} was interrupted")
