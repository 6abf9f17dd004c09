"""The engines of a pool: which are listed, and which are in rotation.

A task per address looks at the engine server (`GetServerInfo`), at intervals and immediately after a
failure, and updates the member's state (docs/operations/many-engines.md has a diagram). An engine without
the pool's weights is brought up to date before it takes turns; `weights` does that.

What a failure does. If an engine does not answer or refuses the hub, the member is LOST, and is retried
with increasing delays. An engine that was silent with its turns (`turns`) still answers. It is asked for a
token of a test request, which may take as long as its turns had, until one arrives; meanwhile it stays
LOST. An engine with another model than the pool's is REFUSED until another process answers at its address.

The turns of a dead process end with its connection. If only its event loop hangs, its kernel and gRPC's
threads keep the connection open. So the hub ends the turns itself, once two looks in a row have timed out
and no token came meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from penstock.server.config.pool import PoolSection
from penstock.server.core.aio import Broadcast, OwnTasks
from penstock.server.engine.protocol import AdapterLimits, EngineDescription, TensorMeta
from penstock.server.engine.turn_limit import LimitRules
from penstock.server.pool.health import usual_pace
from penstock.server.pool.member import Member, State
from penstock.server.pool.placing import Placing
from penstock.server.pool.remote import EngineRefused, EngineServer, OutOfTime, Unanswered
from penstock.v1 import rollout_service_pb2
from penstock.wire.security import Security

logger = logging.getLogger(__name__)

# Limits the rate of looks at a large pool.
LOOKS_PER_SECOND = 200.0
# Interval between two comparisons of the engines' paces, each of which iterates over all engines.
COMPARE_SECONDS = 1.0


@dataclass(eq=False)
class Roster:
    """All listed engines, each watched by a separate task."""

    security: Security
    rules: PoolSection
    clock: Callable[[], float]
    placing: Placing
    bring_up: Callable[[Member, bool], Awaitable[None]]
    """Gives an engine the pool's weights and puts it into rotation. The flag states whether the version
    that the engine reports can be trusted."""
    _members: dict[str, Member] = field(default_factory=dict[str, Member])
    _keepers: dict[str, asyncio.Task[None]] = field(default_factory=dict[str, asyncio.Task[None]])
    _pokes: dict[str, asyncio.Event] = field(default_factory=dict[str, asyncio.Event])
    _description: EngineDescription | None = None
    _described: asyncio.Event = field(default_factory=asyncio.Event)
    _tasks: OwnTasks = field(default_factory=OwnTasks)
    _compared_at: float = -COMPARE_SECONDS
    _states: tuple[list[Member], list[State]] = field(default=([], []), init=False)
    """The listed engines and their states, as of the last `rotate`."""
    rotation: list[Member] = field(default_factory=list[Member])
    """Engines that take turns; a new list whenever that changes."""
    active_version: int = 0
    rotated: Broadcast = field(default_factory=Broadcast)
    """Notified of a new rotation or state: a switch also waits for engines outside the rotation."""

    @property
    def members(self) -> list[Member]:
        """In rotation or not."""
        return list(self._members.values())

    def set_addresses(self, addresses: Sequence[str]) -> None:
        """Unlisted engines get no new turns but end those they have. Raises CredentialsUnusable."""
        limits = LimitRules(first=self.rules.first_turns, most=self.rules.most_turns)
        for address in addresses:
            if address not in self._members:
                member = Member(EngineServer(address, self.security), limits, self.clock)
                self._members[address] = member
                self._pokes[address] = asyncio.Event()
                keeping = asyncio.create_task(self._keep(member), name=f"engine {address}")
                self._keepers[address] = keeping
        for address in [address for address in self._members if address not in addresses]:
            member = self._members.pop(address)
            member.state, member.problem = State.DRAINING, "is no longer listed"
            self._keepers.pop(address).cancel()
            del self._pokes[address]
            self.retire(member)
        self.rotate()

    def retire(self, member: Member) -> None:
        """Close the connections of an engine that is no longer listed and has no turns left."""
        if self._members.get(member.address) is not member and not member.turns:
            self._tasks.start(member.server.close(), f"closing {member.address}")

    def is_current(self, member: Member) -> bool:
        """Whether an engine samples the pool's version or a newer one."""
        return member.version is not None and member.version >= self.active_version

    async def described(self) -> EngineDescription:
        """Wait for the first engine that answers, whose description becomes the pool's."""
        await self._described.wait()
        return self.description

    @property
    def description(self) -> EngineDescription:
        if self._description is None:
            raise RuntimeError("no engine has answered yet")
        return self._description

    def rotate(self) -> None:
        """Recompute the rotation from the members' states, and place requests that wait for it."""
        before, listed = self._states, list(self._members.values())
        self._states = listed, [member.state for member in listed]
        self.rotation = [member for member in listed if member.state is State.SERVING]
        self._compare()
        self.placing.wake()
        if self._states != before:
            self.rotated.notify()

    def _compare(self) -> None:
        """Update the members' usual pace, at most once in COMPARE_SECONDS."""
        now = self.clock()
        if now < self._compared_at + COMPARE_SECONDS:
            return
        self._compared_at = now
        usual = usual_pace(member.pace for member in self.rotation)
        for member in self.rotation:
            member.usual_pace = usual

    async def _keep(self, member: Member) -> None:
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
                    # Repeat at each further look, because a turn may have been on its way there.
                    member.server.end_turns()
            except (Unanswered, EngineRefused) as error:
                # It may refuse a look if, for example, it does not accept the hub's credential.
                self.lose(member, str(error))
            except Exception:
                logger.exception("checking engine %s failed", member.address)
                self.lose(member, "checking it failed, see the hub's log")
            self.tell(member, before)
            self.rotate()
            pause = member.retry_seconds or max(
                self.rules.look_seconds, len(self._members) / LOOKS_PER_SECOND
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await poke.wait()
                # A poke follows a failure that has only just happened, so back off as well.
                await asyncio.sleep(member.retry_seconds)

    def tell(self, member: Member, before: tuple[State, str]) -> None:
        """Log a member's state and problem if they differ from `before`."""
        if (member.state, member.problem) == before or member.state is State.SWITCHING:
            return
        if member.state is State.SERVING:
            logger.info("engine %s takes turns, version %s", member.address, member.version)
        else:
            name = member.state.name.lower()
            logger.warning("engine %s takes no turns, %s: %s", member.address, name, member.problem)

    async def _look(self, member: Member) -> None:
        changes = member.changes
        # Waiting for the connection notices a lost engine as soon as it listens again.
        info = await member.server.info(wait=member.state is State.LOST)
        if (twin := self._twin(member, info.server_id)) is not None:
            # It has only one set of weights. Two members would overwrite each other's versions forever.
            member.server_id = ""
            member.state, member.problem = State.REFUSED, f"is also the engine at {twin.address}"
            return
        if info.server_id != member.server_id or self._description is None:
            info = await member.server.info(with_tensors=True)
            found = describe(info)
            if self._description is None:
                self._description = replace(found, checkpoint=_folder(info.model))
                self._described.set()
            if member.heard(info):
                self.placing.forget(member)
                # Take it out now, because it lacks the pool's weights and what follows may take a while.
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
                await member.server.sample(self.rules.silent_seconds)
            # Its answer is outdated by now. An engine that is not trusted is given weights first.
            member.speak()
            return
        if member.state is State.SERVING and not (trusted and self.is_current(member)):
            member.leave_rotation("samples weights that are not the pool's")
            self.rotate()
        if member.state is State.JOINING:
            await self.bring_up(member, trusted)

    def _twin(self, member: Member, server_id: str) -> Member | None:
        """Return the member that represents the same process under another address, if any."""
        same = (m for m in self._members.values() if m is not member and m.server_id == server_id)
        return next((other for other in same if other.answers), None)

    def lose(self, member: Member, problem: str) -> None:
        member.fail(problem)
        self.rotate()

    def poke(self, member: Member) -> None:
        """Look at a member again at once."""
        if (poke := self._pokes.get(member.address)) is not None:
            poke.set()

    async def close(self) -> None:
        for keeper in self._keepers.values():
            keeper.cancel()
        await asyncio.gather(*self._keepers.values(), return_exceptions=True)
        await self._tasks.cancel()
        await asyncio.gather(*(member.server.close() for member in self._members.values()))


def describe(info: rollout_service_pb2.GetServerInfoResponse) -> EngineDescription:
    """`info` includes the engine server's tensors."""
    return EngineDescription(
        model=info.model,
        vocab_size=info.vocab_size,
        max_context_length=info.max_context_length,
        eos_token_ids=tuple(info.eos_token_ids),
        weight_dtype=info.weight_dtype,
        tensors={t.name: TensorMeta(tuple(t.shape), t.optional) for t in info.tensors},
        adapters=AdapterLimits(info.lora.max_rank, info.lora.max_adapters)
        if info.HasField("lora")
        else None,
    )


def difference(pool: EngineDescription, engine: EngineDescription) -> str:
    """Why an engine cannot join; empty if it can. Shapes identify a model, because its path may differ
    between hosts. An engine may have a longer context and higher adapter limits."""
    for name in ("vocab_size", "max_context_length", "eos_token_ids", "weight_dtype"):
        ours, theirs = getattr(pool, name), getattr(engine, name)
        if ours != theirs and not (name == "max_context_length" and theirs > ours):
            return f"{name} is {theirs}, the pool's is {ours}"
    if pool.tensors != engine.tensors:
        both = pool.tensors.keys() | engine.tensors.keys()
        names = sorted(n for n in both if pool.tensors.get(n) != engine.tensors.get(n))
        return f"{len(names)} tensors differ from the pool's, for example {names[0]}"
    if pool.adapters is None:
        return ""
    if engine.adapters is None:
        return "it takes no LoRA adapters, but the pool does: start it with --enable-lora"
    for name in ("max_rank", "max_adapters"):
        ours, theirs = getattr(pool.adapters, name), getattr(engine.adapters, name)
        if theirs < ours:
            return f"{name} of its LoRA adapters is {theirs}, the pool's is {ours}"
    return ""


def _folder(model: str) -> Path | None:
    """None if this host does not have the model."""
    folder = Path(model)
    return folder if folder.is_absolute() and folder.is_dir() else None
