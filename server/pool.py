"""Many engine servers behind the seam of one engine; docs/pool.md is the design.

`PoolEngine` is what `Serving` is given in the place of vLLM's engine. What it does by itself:

- For each address a task looks at the engine server (`GetServerInfo`), at intervals and at once after
  a failure, and moves the member's state. One that has not the pool's weights is given them before it
  takes turns.
- Each request is placed (`pool_placing`), and streamed from the engine server as one turn of a
  trajectory that is forgotten there when it ends. Where that breaks, `RequestLost` has the turn made
  again from the exact token.
- A version is staged everywhere as soon as the hub has it, and switched to by `switch`.

Every engine in rotation samples the active version or a newer one: `switch` ends only when none in
rotation has an older one, and nothing comes into rotation with an older one. Both decide without an
`await` between the look and the act.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from penstock.server.engine import (
    Adapter,
    CollectiveUpdate,
    Delta,
    EngineDescription,
    EngineRequest,
    EngineStats,
    Finish,
    RequestLost,
    StagedWeights,
)
from penstock.server.engine_server import (
    EngineServer,
    GenerateRequest,
    Refused,
    StagedThere,
    Unanswered,
)
from penstock.server.errors import DomainError
from penstock.server.own_tasks import OwnTasks
from penstock.server.pool_member import Member, State, describe, difference
from penstock.server.pool_placing import Placing
from penstock.server.pool_uploads import POLICIES, Fanout, Payload
from penstock.server.requests import sampling_message
from penstock.server.routing import RoutingRules, slowness
from penstock.server.turn_limit import LimitRules
from penstock.server.weight_manifest import WeightRefused
from penstock.server.weight_probe import Probe, ProbeResult
from penstock.server.weight_switch import InFlight, Switched
from penstock.server.weight_upload import Staged
from penstock.v1 import rollout_service_pb2, trajectory_pb2, weights_pb2
from penstock.wire import codec
from penstock.wire.reasons import Reason
from penstock.wire.security import Security

if TYPE_CHECKING:
    from numpy.typing import NDArray

logger = logging.getLogger(__name__)

TokenSequence = codec.twin(trajectory_pb2.TokenSequence)
StreamOptions = codec.twin(rollout_service_pb2.StreamOptions)

FINISHES: Mapping[int, Finish] = {
    trajectory_pb2.FINISH_REASON_STOP: Finish.STOP,
    trajectory_pb2.FINISH_REASON_LENGTH: Finish.LENGTH,
    trajectory_pb2.FINISH_REASON_ABORTED: Finish.ABORTED,
}
NO_TOKENS = np.zeros(0, np.int32)
NO_LOGPROBS = np.zeros(0, np.float32)
# At most so many looks a second at a large pool.
LOOKS_PER_SECOND = 200.0
# What a member that is full, and does not say for how long, is left alone for.
FULL_SECONDS = 0.5
BRING_UPS = 8

OpenVersion = Callable[[int], AbstractAsyncContextManager[StagedWeights | None]]


@dataclass(frozen=True, slots=True)
class PoolRules:
    """How a pool is run."""

    routing: RoutingRules = field(default_factory=RoutingRules)
    limits: LimitRules = field(default_factory=LimitRules)
    switches_at_once: bool = False
    """Whether all engines switch at the same time, and no turn begins meanwhile."""
    switch_part: float = 0.5
    """Part of the engines that switch at the same time otherwise; at least one does."""
    look_seconds: float = 1.0
    """Between two looks at an engine."""
    flush_seconds: float = 0.1
    """Longest time that tokens wait on an engine server."""
    switch_seconds: float = 600.0
    """Longest time that one engine takes to switch, its turns in flight included, before it is given up."""


class PoolEngine:
    """See `penstock.server.engine.Engine` for what each method promises."""

    def __init__(
        self,
        addresses: Sequence[str],
        security: Security | None = None,
        rules: PoolRules | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises CredentialsUnusable."""
        self._rules = rules or PoolRules()
        self._security = security or Security()
        self._clock = clock
        self._members: dict[str, Member] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._pokes: dict[str, asyncio.Event] = {}
        self._rotation: list[Member] = []
        self.placing = Placing(lambda: self._rotation, self._rules.routing)
        self._description: EngineDescription | None = None
        self._described = asyncio.Event()
        # Newer than that of any hub before, which engine servers then no longer listen to.
        self._epoch = time.time_ns()
        self._prefix = uuid.uuid4().hex[:12]
        self._count = 0
        self._placed: dict[str, tuple[Member, str]] = {}
        self._requests: set[str] = set()
        """Those whose deltas somebody may still read."""
        self._aborting: set[str] = set()
        self._active = 0
        self._fanout: Fanout | None = None
        self._staging: asyncio.Task[None] | None = None
        self._tasks = OwnTasks()
        self._bringing_up = asyncio.Semaphore(BRING_UPS)
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.open_version: OpenVersion | None = None
        """Opens the bytes of a version for who comes late."""
        self.may_bring_up: Callable[[], bool] = lambda: True
        """Whether the active version is what should be sampled."""
        self.requests_lost = 0
        """Requests that were made again elsewhere."""
        self.set_addresses(addresses)

    # Members

    @property
    def members(self) -> list[Member]:
        """Every engine that is listed."""
        return list(self._members.values())

    @property
    def serving_count(self) -> int:
        """Engines in rotation."""
        return len(self._rotation)

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
            self._retire(member)
        self._rotate()

    def _retire(self, member: Member) -> None:
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

    def replicas(self) -> list[rollout_service_pb2.ReplicaInfo]:
        """As GetServerInfo has them."""
        return [member.message() for member in self._members.values()]

    def _rotate(self) -> None:
        """Whoever is in rotation by now."""
        self._rotation = [m for m in self._members.values() if m.state is State.SERVING]
        known = slowness([member.seconds_per_token for member in self._rotation])
        for member, slow in zip(self._rotation, known, strict=True):
            member.slowness = slow
        self.placing.wake()

    async def _keep(self, member: Member) -> None:
        """Looks at one engine for as long as it is listed."""
        poke = self._pokes[member.address]
        while True:
            poke.clear()
            before = member.state, member.problem
            try:
                await self._look(member)
            except Unanswered as error:
                self._lose(member, str(error))
            except Refused as error:
                # Such as a credential that is not let in.
                self._lose(member, str(error))
            except Exception:
                logger.exception("looking at engine %s failed", member.address)
                self._lose(member, "looking at it failed")
            self._tell(member, before)
            self._rotate()
            pause = member.retry_seconds or max(
                self._rules.look_seconds, len(self._members) / LOOKS_PER_SECOND
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await poke.wait()
                # Whatever it was that failed has just happened.
                await asyncio.sleep(member.retry_seconds)

    def _tell(self, member: Member, before: tuple[State, str]) -> None:
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
        if info.server_id != member.server_id or self._description is None:
            info = await member.server.info(with_tensors=True)
            found = describe(info)
            if self._description is None:
                self._description = replace(found, checkpoint=_folder(info.model))
                self._described.set()
            if member.heard(info):
                self.placing.forget(member)
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
        if member.state is State.SERVING and not (trusted and self._is_current(member)):
            member.leave_rotation("samples weights that are not the pool's")
            self._rotate()
        if member.state is State.JOINING:
            await self._bring_up(member, trusted=trusted)

    def _is_current(self, member: Member) -> bool:
        return member.version is not None and member.version >= self._active

    async def _bring_up(self, member: Member, *, trusted: bool) -> None:
        """Gives it the active version, where it has another one, and then turns."""
        active = self._active
        if not (trusted and self._is_current(member)):
            if not self.may_bring_up():
                member.problem = "waits for the trainer's version"
                return
            async with self._bringing_up:
                await self._give(member)
        # Another version may have become active meanwhile: then it is looked at again at once.
        if self._is_current(member):
            member.state, member.problem, member.failures = State.SERVING, "", 0
        elif self._active != active:
            self._poke(member)

    async def _give(self, member: Member) -> None:
        version = self._active
        opened = self.open_version(version) if self.open_version is not None else _nothing()
        async with opened as weights:
            if weights is None:
                member.problem = f"version {version} is not held: it waits for the next one"
                return
            fanout = Fanout(await asyncio.to_thread(Payload, weights), self._epoch)
            try:
                there = await fanout.begin(member)
                await there.activate(weights_pb2.IN_FLIGHT_POLICY_ABORT)
                member.has(version)
            except Refused as error:
                fanout.settle(member, accepted=False)
                member.leave_rotation(f"did not take version {version}: {error}")
            finally:
                await fanout.close()

    def _lose(self, member: Member, problem: str) -> None:
        member.fail(problem)
        self._rotate()

    def _poke(self, member: Member) -> None:
        if (poke := self._pokes.get(member.address)) is not None:
            poke.set()

    # Turns

    async def generate(self, request: EngineRequest) -> AsyncGenerator[Delta]:
        name = request.request_id
        self._requests.add(name)
        deltas = self._deltas(request)
        # One that is closed before it has begun never comes to its end.
        weakref.finalize(deltas, self._requests.discard, name)
        return deltas

    async def _deltas(self, request: EngineRequest) -> AsyncGenerator[Delta]:
        name = request.request_id
        try:
            member = None if name in self._aborting else await self.placing.place(request)
            if member is None:
                yield Delta(NO_TOKENS, NO_LOGPROBS, self._active, Finish.ABORTED)
                return
            try:
                async with contextlib.aclosing(self._sample(member, request)) as deltas:
                    async for delta in deltas:
                        yield delta
            except Unanswered as error:
                self._lost_at(member, error)
                self._lose_request(error)
            except Refused as error:
                self._refused_at(member, error)
                self._lose_request(error)
            finally:
                self._placed.pop(name, None)
                member.turns.discard(name)
                self._retire(member)
                self.placing.wake()
        finally:
            self._aborting.discard(name)
            self._requests.discard(name)

    def _lost_at(self, member: Member, error: Unanswered) -> None:
        before = member.state, member.problem
        self._lose(member, str(error))
        self._tell(member, before)
        self._poke(member)

    def _refused_at(self, member: Member, error: Refused) -> None:
        """Whether another engine may take it; raises the refusal where none would."""
        if error.is_full:
            seconds = error.failure.retry_after_seconds or FULL_SECONDS
            member.close_for(seconds)
            asyncio.get_running_loop().call_later(seconds, self.placing.wake)
        elif error.failure.reason != Reason.CREDENTIAL_ENDED:
            raise error

    def _lose_request(self, error: Exception) -> NoReturn:
        self.requests_lost += 1
        raise RequestLost(str(error)) from error

    async def _sample(self, member: Member, request: EngineRequest) -> AsyncGenerator[Delta]:
        """One turn on an engine server; raises Unanswered, Refused and RequestLost."""
        self._count += 1
        there = f"{self._prefix}.{self._count}"
        name = request.request_id
        self._placed[name] = member, there
        message, metadata = self._message(there, request, member)
        tokens, began = 0, self._clock()
        async with contextlib.aclosing(member.server.generate(message, metadata)) as events:
            async for event in events:
                kind = event.WhichOneof("event")
                if kind == "started":
                    began = self._clock()
                    if name in self._aborting:
                        # It came before the engine server knew of the turn.
                        await member.server.abort([there])
                elif kind == "segment":
                    segment = event.segment
                    delta = self._delta(member, segment)
                    tokens += len(delta.token_ids)
                    yield delta
                else:
                    finish = FINISHES[event.finished.finish_reason]
                    member.paced(self._clock() - began, tokens)
                    if finish is Finish.ABORTED and name not in self._aborting:
                        # By the engine server itself, which stops, or switches.
                        self._lose_request(Unanswered("the engine aborted it"))
                    cached = event.finished.cached_token_count
                    version = self._active if member.version is None else member.version
                    yield Delta(NO_TOKENS, NO_LOGPROBS, version, finish, cached)
                    return
        raise Unanswered("it ended a turn without a reason")

    def _delta(self, member: Member, segment: trajectory_pb2.Segment) -> Delta:
        version = member.pool_version(segment.weight_version)
        if version is None:
            # Somebody else gives it weights.
            member.version = None
            member.leave_rotation("samples weights that are not the pool's")
            self._rotate()
            self._poke(member)
            raise Unanswered(f"it samples version {segment.weight_version}, which nobody gave it")
        return Delta(codec.token_ids(segment), codec.logprobs(segment), version)

    def _message(
        self, name: str, request: EngineRequest, member: Member
    ) -> tuple[rollout_service_pb2.GenerateRequest, list[tuple[str, str]]]:
        options = StreamOptions()
        flush = 0.0 if request.stream_interval == 1 else self._rules.flush_seconds
        options.flush_interval.FromNanoseconds(int(flush * 1e9))
        message = GenerateRequest(
            trajectory_id=name,
            tokens=TokenSequence(token_ids=codec.array_bytes(request.token_ids)),
            sampling_params=sampling_message(request.sampling),
            stream_options=options,
            priority=request.priority,
            single_turn=True,
        )
        return message, list(request.trace_headers.items())

    async def abort(self, request_ids: Sequence[str]) -> None:
        by_member: dict[Member, list[str]] = {}
        for name in request_ids:
            if name not in self._requests or self.placing.leave(name):
                continue
            self._aborting.add(name)
            if (placed := self._placed.get(name)) is not None:
                by_member.setdefault(placed[0], []).append(placed[1])
        await asyncio.gather(
            *(self._abort_there(member, names) for member, names in by_member.items())
        )

    async def _abort_there(self, member: Member, names: Sequence[str]) -> None:
        try:
            await member.server.abort(names)
        except (Unanswered, Refused) as error:
            logger.info("engine %s did not abort %d turns: %s", member.address, len(names), error)

    def stats(self) -> EngineStats:
        members = [member for member in self._members.values() if member.answers]
        return EngineStats(
            running=len(self._placed),
            waiting=self.placing.waiting_count,
            kv_cache_usage=max((m.load.kv_cache_usage for m in members), default=0.0),
            preemptions=sum(m.load.preemption_count for m in members),
        )

    # Weights

    @property
    def switches_at_once(self) -> bool:
        return self._rules.switches_at_once

    def stage(self, staged: Staged, probe: Probe | None) -> None:
        """Begins to stage a version everywhere; what was staged and not switched to is left."""
        staged.retain()
        self._staging = self._tasks.start(
            self._stage(staged.weights, probe),
            f"staging version {staged.weight_version}",
            staged.release,
        )

    async def _stage(self, weights: StagedWeights, probe: Probe | None) -> None:
        payload = await asyncio.to_thread(Payload, weights)
        before, self._fanout = self._fanout, Fanout(payload, self._epoch, probe)
        if before is not None:
            await before.close()
        for member in self._members.values():
            if member.state in (State.SERVING, State.SWITCHING):
                # Who does not take it says so at the switch. Who joins is brought up to date after it.
                self._fanout.begin(member).add_done_callback(_heard)

    async def switch(self, weights: StagedWeights, policy: InFlight) -> Switched:
        version = weights.weight_version
        if self._staging is not None:
            await asyncio.wait([self._staging])
            self._staging = None
        if self._fanout is None or self._fanout.weight_version != version:
            await self._stage(weights, None)
        assert self._fanout is not None
        fanout, self._fanout = self._fanout, None
        answers: list[weights_pb2.UpdateWeightsResponse] = []
        refusals: list[tuple[Member, Refused]] = []
        before = self._active
        try:
            while behind := [m for m in self._rotation if m.version != version]:
                part = len(behind)
                if not self.switches_at_once:
                    part = max(1, int(len(self._rotation) * self._rules.switch_part))
                turns = [
                    self._switch_one(m, fanout, policy, answers, refusals) for m in behind[:part]
                ]
                await asyncio.gather(*turns)
            if refusals and not answers:
                self._all_refused(refusals, version, before)
            # No await since the look at the rotation.
            self._active = version
        finally:
            await fanout.close()
            self._rotate()
            for member in self._members.values():
                if member.state is State.JOINING:
                    self._poke(member)
        pause = max((answer.pause.ToNanoseconds() / 1e9 for answer in answers), default=0.0)
        probes = [answer.probe for answer in answers if answer.HasField("probe")]
        worst = max(probes, key=lambda probe: probe.mean_difference, default=None)
        result = worst and ProbeResult(worst.mean_difference, worst.max_difference)
        return Switched(version, pause, result)

    async def _switch_one(
        self,
        member: Member,
        fanout: Fanout,
        policy: InFlight,
        answers: list[weights_pb2.UpdateWeightsResponse],
        refusals: list[tuple[Member, Refused]],
    ) -> None:
        version = fanout.weight_version
        try:
            # It goes on taking turns until it has all of it.
            there = await asyncio.shield(fanout.begin(member))
            if member.state is not State.SERVING:
                return
            member.state, member.problem = State.SWITCHING, f"switches to version {version}"
            self._rotate()
            if policy is InFlight.ABORT:
                self._aborting |= member.turns
            async with asyncio.timeout(self._rules.switch_seconds):
                answer = await there.activate(POLICIES[policy.value])
        except (Unanswered, TimeoutError) as error:
            self._lose(member, str(error) or f"did not switch to version {version} in time")
            self._poke(member)
            return
        except Refused as error:
            logger.warning("engine %s refused version %s: %s", member.address, version, error)
            fanout.settle(member, accepted=False)
            member.changes += 1
            member.leave_rotation(f"did not take version {version}: {error}")
            refusals.append((member, error))
            self._rotate()
            return
        member.has(version)
        answers.append(answer)
        if member.state is State.SWITCHING:
            member.state, member.problem = State.SERVING, ""
            self._rotate()

    def _all_refused(
        self, refusals: Sequence[tuple[Member, Refused]], version: int, before: int
    ) -> NoReturn:
        """Nobody took it: everybody samples what they did, and goes on."""
        for member, _ in refusals:
            if member.state is State.JOINING and member.version == before:
                member.state, member.problem, member.failures = State.SERVING, "", 0
        failure = refusals[0][1].failure
        known = (Reason.PROBE_MISMATCH, Reason.WEIGHT_LOAD_FAILED)
        reason = next((r for r in known if r.value == failure.reason), Reason.WEIGHT_LOAD_FAILED)
        raise DomainError(
            reason,
            f"none of {len(refusals)} engines took version {version}, version {before} goes on: "
            f"{failure.message}",
            {**failure.metadata, "weight_version": version, "active": before},
        )

    async def pause(self, *, drop_cache: bool) -> None:
        raise RuntimeError("a pool switches by itself")

    async def load(self, weights: StagedWeights) -> None:
        raise RuntimeError("a pool switches by itself")

    async def resume(self) -> None:
        raise RuntimeError("a pool switches by itself")

    async def score(
        self, token_ids: NDArray[np.int32], adapter_version: int | None = None
    ) -> NDArray[np.float32]:
        raise RuntimeError("a pool's engines score their probes by themselves")

    async def add_adapter(self, adapter: Adapter) -> None:
        raise RuntimeError("a pool that offers no adapters is given none")

    async def remove_adapter(self, weight_version: int) -> None:
        raise RuntimeError("a pool that offers no adapters is given none")

    async def join_collective(
        self, backend: str, rendezvous: Mapping[str, object], seconds: float
    ) -> None:
        raise WeightRefused(
            Reason.SOURCE_UNAVAILABLE,
            "a hub has no engine of its own that could join a collective; upload through the stream",
        )

    async def begin_collective(self) -> None:
        raise RuntimeError("nobody joined a collective")

    async def receive_collective(self, update: CollectiveUpdate, seconds: float) -> None:
        raise RuntimeError("nobody joined a collective")

    async def finish_collective(self, weight_version: int, seconds: float) -> None:
        raise RuntimeError("nobody joined a collective")

    async def abandon_collective(self, seconds: float) -> bool:
        return True

    async def lost(self) -> str:
        """Never: a pool without engines waits for one."""
        return await asyncio.shield(self._lost)

    async def close(self) -> None:
        for keeper in self._keepers.values():
            keeper.cancel()
        await asyncio.gather(*self._keepers.values(), return_exceptions=True)
        await self._tasks.cancel()
        if self._fanout is not None:
            await self._fanout.close()
            self._fanout = None
        await asyncio.gather(*(member.server.close() for member in self._members.values()))


@contextlib.asynccontextmanager
async def _nothing() -> AsyncGenerator[None]:
    yield None


def _folder(model: str) -> Path | None:
    """The folder of a model, where this host has it too."""
    folder = Path(model)
    return folder if folder.is_absolute() and folder.is_dir() else None


def _heard(task: asyncio.Task[StagedThere]) -> None:
    """Its error is told where it is waited for."""
    if not task.cancelled():
        task.exception()
