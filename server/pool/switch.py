"""One switch of a pool: each engine in rotation goes on to a version, once it has all of it.

What an engine goes through, and how it is shown meanwhile:

    staging     SERVING: takes turns, and the version beside what it samples
    staged      SERVING: takes turns, and waits until it may switch
    switching   SWITCHING: its turns are as the in-flight policy says, new ones go elsewhere
    switched    SERVING, with the version
    given up    JOINING or LOST: takes no turns before it was brought up to date

Order of events:

1. Every engine in rotation is being staged, all at the same time, each by itself. That began before the
   switch was asked for, where the version was there before.
2. Rolling: an engine switches as soon as it has all of the version and fewer than `switch_part` of the
   engines are switching. It waits for nobody who is still being staged. All at once: nobody switches before
   each has it or was given up, then all do.
3. `begin` is awaited before the first of them switches: turns are held back from then on, not before.
4. It ends when no engine in rotation has an older version, which it does: nothing below is waited for
   without an end.

What a failure does:

- refuses the version, staged or switched to: it has gone back to the one before, and is given up;
- does not answer: LOST. Who is seen to be lost, to drain or to be listed no more is not waited for any
  longer, whatever it was at. One that comes back before the end is given the version again;
- has not all of it `stage_seconds` after the switch was asked for, or has not switched `switch_seconds`
  after it was told to: its call is ended, and it is given up;
- has it no more when it is told to switch, since another version that was staged after it is there: it is
  staged once more;
- comes into rotation meanwhile, with the version before: it is staged as the others are, in what is left of
  the same time; but where all switch at once and have begun to, it is given up;
- some refuse the version or are late with it, and none is known to have it: it is refused, and all go on
  with the one before. Who did not say what it did, and may have it all the same, is given the one before.
  Where there is nobody to refuse it, because all are lost, it is the pool's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from penstock.server.pool.member import Member, State
from penstock.server.pool.remote import Refused, StagedThere, Unanswered
from penstock.server.pool.roster import Roster
from penstock.server.pool.rules import PoolRules
from penstock.server.pool.uploads import POLICIES, Fanout, not_taken
from penstock.server.weights.switch import InFlight
from penstock.v1 import weights_pb2
from penstock.wire.failure import Failure
from penstock.wire.reasons import Reason

logger = logging.getLogger(__name__)

NOT_THERE = (Reason.WEIGHT_VERSION_NOT_STAGED, Reason.WEIGHT_VERSION_STALE)
"""Refusals of a switch after which the version has to be staged again, under another number."""


@dataclass(slots=True, eq=False)
class PoolSwitch:
    """To one version, which `fanout` stages."""

    roster: Roster
    rules: PoolRules
    fanout: Fanout
    policy: InFlight
    expect_aborts: Callable[[Member], None]
    """Told of an engine that is about to abort its turns."""
    answers: list[weights_pb2.UpdateWeightsResponse] = field(
        default_factory=list[weights_pb2.UpdateWeightsResponse]
    )
    """Of those that have it."""
    given_up: dict[Member, str] = field(default_factory=dict[Member, str])
    """Those that are not given it any more, and why."""
    declined: dict[Member, Failure | None] = field(default_factory=dict[Member, "Failure | None"])
    """Those of them that sample what they did: what they said, None where they were late."""
    unanswered: set[Member] = field(default_factory=set[Member])
    """Those that were told to switch, and what they did is not known."""
    _staging: dict[Member, asyncio.Task[StagedThere]] = field(
        default_factory=dict[Member, "asyncio.Task[StagedThere]"]
    )
    _switching: dict[Member, asyncio.Task[None]] = field(
        default_factory=dict[Member, "asyncio.Task[None]"]
    )
    _staged_again: set[Member] = field(default_factory=set[Member])
    """Those that had the version no more when they were told to switch to it."""
    _woken: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def version(self) -> int:
        """The version switched to."""
        return self.fanout.weight_version

    @property
    def taken_by_none(self) -> bool:
        """Whether there were engines that could have taken it, and none is known to have."""
        if self.answers or any(m.version == self.version for m in self.roster.rotation):
            return False
        return bool(self.declined)

    def wake(self) -> None:
        """Another engine may be in rotation, or out of it."""
        self._woken.set()

    async def run(self, begin: Callable[[], Awaitable[None]]) -> None:
        """Returns as its last look at the rotation found nobody left, without an await in between."""
        now = asyncio.get_running_loop().time
        deadline = now() + self.rules.stage_seconds
        begun = False
        try:
            while True:
                self._woken.clear()
                self._look()
                staged = [member for member, task in self._staging.items() if task.done()]
                late = [member for member in self._staging if member not in staged]
                if late and now() >= deadline:
                    self._leave(late, f"after {self.rules.stage_seconds:g} s", hung=True)
                    continue
                if late and begun and self.rules.switches_at_once:
                    self._leave(late, "when the others switched to it")
                    continue
                may_switch = bool(staged) and not (late and self.rules.switches_at_once)
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
        """For whatever happens next."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await self._woken.wait()

    def _look(self) -> None:
        """At what has become of everybody since the last time."""
        for member, task in list(self._switching.items()):
            if task.done():
                del self._switching[member]
                if not task.cancelled():
                    task.result()
            elif member.state is not State.SWITCHING:
                # It ends at once, and wakes this.
                task.cancel()
        for member in self.roster.rotation:
            pending = member in self._staging or member in self._switching
            if member.version != self.version and not pending and member not in self.given_up:
                task = self._staging[member] = self.fanout.begin(member)
                task.add_done_callback(self._ended)
        for member, task in list(self._staging.items()):
            if member.state is not State.SERVING:
                del self._staging[member]
            elif task.done():
                self._hear(member, task)

    def _hear(self, member: Member, task: asyncio.Task[StagedThere]) -> None:
        """A failed staging is over; a good one stays where it is."""
        try:
            task.result()
        except Unanswered as error:
            del self._staging[member]
            self._lose(member, str(error))
        except Refused as error:
            del self._staging[member]
            self._refuse(member, error)

    def _ended(self, _: object) -> None:
        self._woken.set()

    def _leave(self, late: list[Member], when: str, *, hung: bool = False) -> None:
        for member in late:
            del self._staging[member]
            self.fanout.end(member)
            self.declined[member] = None
            member.hung = member.hung or hung
            self._give_up(member, f"had not all of version {self.version} {when}")
        self.roster.rotate()

    def _switch(self, staged: list[Member]) -> None:
        """As many of these as may."""
        part = len(staged)
        if not self.rules.switches_at_once:
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
                answer = await there.activate(POLICIES[self.policy.value])
        except Unanswered as error:
            # What is staged there, where it still is, is nothing that could be switched to again.
            self.fanout.end(member)
            self._lose(member, str(error))
            return
        except asyncio.CancelledError:
            # It is lost, or listed no more; where it comes back, it is given all of the version again.
            self.fanout.end(member)
            raise
        except TimeoutError:
            # What it samples by now it will say itself.
            limit = f"{self.rules.switch_seconds:g} s"
            problem = f"did not switch to version {self.version} within {limit}"
            self.given_up[member] = problem
            member.hung = True
            self._lose(member, problem)
            return
        except Refused as error:
            if error.failure.reason in NOT_THERE and member not in self._staged_again:
                # Another version that was staged meanwhile took its place.
                self._staged_again.add(member)
                self.unanswered.discard(member)
                self.fanout.end(member)
                self._goes_on(member)
                return
            self._refuse(member, error)
            return
        # Where it has to be given it again, that is another upload.
        self.fanout.end(member)
        self.unanswered.discard(member)
        member.has(self.version, adapter=self.fanout.is_adapter)
        member.hung = False
        self.answers.append(answer)
        self._goes_on(member)

    def _goes_on(self, member: Member) -> None:
        if member.state is State.SWITCHING:
            member.state, member.problem = State.SERVING, ""
            self.roster.rotate()

    def _lose(self, member: Member, problem: str) -> None:
        self.roster.lose(member, problem)
        self.roster.poke(member)

    def _refuse(self, member: Member, error: Refused) -> None:
        self.unanswered.discard(member)
        self.fanout.settle(member, accepted=False)
        member.changes += 1
        self.declined[member] = error.failure
        self._give_up(member, not_taken(self.version, error))
        self.roster.rotate()

    def _give_up(self, member: Member, problem: str) -> None:
        logger.warning("engine %s %s", member.address, problem)
        self.given_up[member] = problem
        member.leave_rotation(problem)

    async def _break_off(self) -> None:
        """What is still switching, where this was ended early: what it samples is not known then."""
        left, self._switching = self._switching, {}
        for task in left.values():
            task.cancel()
        await asyncio.gather(*left.values(), return_exceptions=True)
        for member in left:
            if member.state is State.SWITCHING:
                self._lose(member, f"its switch to version {self.version} was broken off")
