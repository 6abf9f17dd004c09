"""The engines of a pool: who is listed, who is in rotation.

For each address a task looks at the engine server (`GetServerInfo`), at intervals and at once after a
failure, and moves the member's state (docs/pool.md has the picture). One that has not the pool's weights is
brought up to date before it takes turns; how, `pool_weights` knows.

What a failure does. No answer, or one that refuses to talk: the member is LOST and tried again, later each
time. One that was silent with its turns (`pool_turns`) answers all the same: it is asked for a token that
is nobody's, for which it has as long as its turns had, again and again, and stays LOST until one comes. An
engine that is not the pool's model is REFUSED until another process answers at its address.

The turns of one whose process is gone end with its connection. Where only its event loop stands still, its
kernel and gRPC's own threads keep the connection, and nothing would end them: they are ended from here,
once a second look in a row has run out of time and no token came meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

from penstock.server.core.own_tasks import OwnTasks
from penstock.server.engine.protocol import EngineDescription
from penstock.server.pool.member import Member, State, describe, difference
from penstock.server.pool.pace import usual_pace
from penstock.server.pool.remote import EngineServer, OutOfTime, Refused, Unanswered
from penstock.server.pool.rules import PoolRules
from penstock.v1 import rollout_service_pb2
from penstock.wire.security import Security

logger = logging.getLogger(__name__)

# At most so many looks a second at a large pool.
LOOKS_PER_SECOND = 200.0
# Between two comparisons of how fast the engines are: each looks at all of them.
COMPARE_SECONDS = 1.0


class Roster:
    """Every engine that is listed, each looked at by a task of its own."""

    def __init__(self, security: Security, rules: PoolRules, clock: Callable[[], float]) -> None:
        self._security = security
        self._rules = rules
        self._clock = clock
        self._members: dict[str, Member] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._pokes: dict[str, asyncio.Event] = {}
        self._description: EngineDescription | None = None
        self._described = asyncio.Event()
        self._tasks = OwnTasks()
        self._compared_at = -COMPARE_SECONDS
        self._states: tuple[list[Member], list[State]] = [], []
        """Of those that were listed as the rotation was looked at last."""
        self.rotation: list[Member] = []
        """Engines that take turns; another list whenever that changes."""
        self.is_current: Callable[[Member], bool] = lambda member: member.version is not None
        """Whether it samples what the pool does."""
        self.bring_up: Callable[[Member, bool], Awaitable[None]] = _leave_out
        """Gives it the pool's weights and then turns; without the flag what it samples is not known."""
        self.on_change: Callable[[], None] = lambda: None
        """Told when the rotation, or what those in it can take, may have changed."""
        self.on_rotation: Callable[[], None] = lambda: None
        """Told when another engine is in rotation, or out of it, or any is in another state: a switch waits
        for those that switch, which are in no rotation."""
        self.on_other_process: Callable[[Member], None] = lambda member: None
        """Told when another process answers at a member's address."""

    @property
    def members(self) -> list[Member]:
        """Every engine that is listed."""
        return list(self._members.values())

    def set_addresses(self, addresses: Sequence[str]) -> None:
        """The engines that are listed from now on; one that is not any more takes no turns, and those
        it has go on to their ends."""
        for address in addresses:
            if address not in self._members:
                member = Member(
                    EngineServer(address, self._security), self._rules.limits, self._clock
                )
                self._members[address] = member
                self._pokes[address] = asyncio.Event()
                keeping = asyncio.create_task(self._keep(member), name=f"engine {address}")
                self._keepers[address] = keeping
        for address in [address for address in self._members if address not in addresses]:
            member = self._members.pop(address)
            member.state, member.problem = State.DRAINING, "is not listed any more"
            self._keepers.pop(address).cancel()
            del self._pokes[address]
            self.retire(member)
        self.rotate()

    def retire(self, member: Member) -> None:
        """Closes the connections of one that is not listed any more, once it has no turns."""
        if self._members.get(member.address) is not member and not member.turns:
            self._tasks.start(member.server.close(), f"closing {member.address}")

    async def described(self) -> EngineDescription:
        """Waits for the first engine that answers; the pool is what it is."""
        await self._described.wait()
        return self.description

    @property
    def description(self) -> EngineDescription:
        if self._description is None:
            raise RuntimeError("no engine has answered yet")
        return self._description

    def rotate(self) -> None:
        """Whoever is in rotation by now."""
        serving = State.SERVING
        before, listed = self._states, list(self._members.values())
        self._states = listed, [member.state for member in listed]
        self.rotation = [member for member in listed if member.state is serving]
        self._compare()
        self.on_change()
        if self._states != before:
            self.on_rotation()

    def _compare(self) -> None:
        """Tells each how fast the others are, where that was not looked at just before."""
        now = self._clock()
        if now < self._compared_at + COMPARE_SECONDS:
            return
        self._compared_at = now
        usual = usual_pace(member.pace for member in self.rotation)
        for member in self.rotation:
            member.usual_pace = usual

    async def _keep(self, member: Member) -> None:
        """Looks at one engine for as long as it is listed."""
        poke = self._pokes[member.address]
        while True:
            poke.clear()
            before = member.state, member.problem
            try:
                await self._look(member)
            except OutOfTime as error:
                member.miss()
                self.lose(member, str(error))
                if member.stands_still:
                    # Again at each further look, for one may have been on its way there.
                    member.server.end_turns()
            except Unanswered as error:
                self.lose(member, str(error))
            except Refused as error:
                # Such as a credential that is not let in.
                self.lose(member, str(error))
            except Exception:
                logger.exception("looking at engine %s failed", member.address)
                self.lose(member, "looking at it failed")
            self.tell(member, before)
            self.rotate()
            pause = member.retry_seconds or max(
                self._rules.look_seconds, len(self._members) / LOOKS_PER_SECOND
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await poke.wait()
                # Whatever it was that failed has just happened.
                await asyncio.sleep(member.retry_seconds)

    def tell(self, member: Member, before: tuple[State, str]) -> None:
        """Logs what has become of a member that was in this state, for this reason."""
        if (member.state, member.problem) == before or member.state is State.SWITCHING:
            return
        if member.state is State.SERVING:
            logger.info("engine %s takes turns, version %s", member.address, member.version)
        else:
            name = member.state.name.lower()
            logger.warning("engine %s takes no turns, %s: %s", member.address, name, member.problem)

    async def _look(self, member: Member) -> None:
        changes = member.changes
        # One that comes back is seen as soon as it listens.
        info = await member.server.info(wait=member.state is State.LOST)
        if (twin := self._twin(member, info.server_id)) is not None:
            # It has one set of weights: two that number its versions would overwrite each other's for ever.
            member.server_id = ""
            member.state, member.problem = State.REFUSED, f"is the engine at {twin.address}, too"
            return
        if info.server_id != member.server_id or self._description is None:
            info = await member.server.info(with_tensors=True)
            found = describe(info)
            if self._description is None:
                self._description = replace(found, checkpoint=_folder(info.model))
                self._described.set()
            if member.heard(info):
                self.on_other_process(member)
                # What follows may take a while, and it has none of the pool's weights.
                self.rotate()
            member.refusal = difference(self.description, found)
        elif member.changes == changes:
            member.heard(info)
        if member.refusal:
            member.state, member.problem = State.REFUSED, member.refusal
            return
        if info.draining:
            member.state, member.problem = State.DRAINING, "was told to stop"
            return
        trusted = info.replicas[0].state != rollout_service_pb2.REPLICA_STATE_UNAVAILABLE
        if member.silent:
            if trusted:
                await member.server.sample(self._rules.silent_seconds)
            # What it said of itself is old by now; and one that is not trusted is given weights first.
            member.speak()
            return
        if member.state is State.SERVING and not (trusted and self.is_current(member)):
            member.leave_rotation("samples weights that are not the pool's")
            self.rotate()
        if member.state is State.JOINING:
            await self.bring_up(member, trusted)

    def _twin(self, member: Member, server_id: str) -> Member | None:
        """Another address of the same process, which is in the pool by that one."""
        same = (m for m in self._members.values() if m is not member and m.server_id == server_id)
        return next((other for other in same if other.answers), None)

    def lose(self, member: Member, problem: str) -> None:
        """It does not answer, or cannot serve."""
        member.fail(problem)
        self.rotate()

    def poke(self, member: Member) -> None:
        """It is looked at again at once."""
        if (poke := self._pokes.get(member.address)) is not None:
            poke.set()

    async def close(self) -> None:
        """Nobody is looked at any more."""
        for keeper in self._keepers.values():
            keeper.cancel()
        await asyncio.gather(*self._keepers.values(), return_exceptions=True)
        await self._tasks.cancel()
        await asyncio.gather(*(member.server.close() for member in self._members.values()))


async def _leave_out(member: Member, trusted: bool) -> None:
    """Nobody has weights for it."""


def _folder(model: str) -> Path | None:
    """The folder of a model, where this host has it too."""
    folder = Path(model)
    return folder if folder.is_absolute() and folder.is_dir() else None
