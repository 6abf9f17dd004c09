"""The turns of a pool: each runs on one engine server, as one attempt that is forgotten there when it ends.

placed (`placing`) -> streamed -> ended. If the engine is lost, drains or is full, `RequestLost` makes
`turns` repeat the turn from the exact token. If an engine server refuses the request itself, the caller
gets that error.

Broken engines. An engine server that refuses turns although they are valid (`NOT_THE_TURN`) would be idle,
and so attract most new turns. It is therefore left alone like a failing engine, for longer each time until
a turn completes there, and the turn goes elsewhere. A turn that breaks engines looks the same, so the
error of the third engine, or of the last one there is, goes to the caller.

Hanging engines. `roster` ends the turns of an engine that no longer answers looks. An engine may also
answer looks, but sample no token for `silent_seconds` although it has turns (`health`). After one more
look, because a hub that itself stood still has tokens to read first, it is LOST and its calls end. Its
turns continue elsewhere, and `roster` decides when it takes turns again. During a switch it may be silent
for as long as a switch may take (`switch_seconds`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import uuid
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import grpc
import numpy as np

from penstock.server.config.pool import PoolSection
from penstock.server.engine.protocol import WHOLE, Delta, EngineRequest, Finish, RequestLost
from penstock.server.pool.member import Member, State
from penstock.server.pool.placing import Placing
from penstock.server.pool.remote import EngineRefused, Unanswered
from penstock.server.pool.roster import Roster
from penstock.server.turns.requests import sampling_message
from penstock.server.turns.turn import FINISH_REASONS
from penstock.v1 import rollout_service_pb2, trajectory_pb2
from penstock.wire import codec
from penstock.wire.messages import GenerateRequest, StreamOptions, TokenSequence
from penstock.wire.reasons import Reason

logger = logging.getLogger(__name__)


FINISHES = {reason: finish for finish, reason in FINISH_REASONS.items()}
NO_TOKENS = np.zeros(0, np.int32)
NO_LOGPROBS = np.zeros(0, np.float32)
# How long to leave a full member alone if it does not state a delay.
FULL_SECONDS = 0.5
NOT_THE_TURN = (
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
)
"""Refusals that may be the engine's fault, so that another engine may take the turn."""
SEGMENTS_PER_SECOND = 2_000.0
"""Limit for all turns that are not streamed together; with more turns, each waits longer."""
MOST_REFUSALS = 3
"""Number of engines that may refuse a turn like that before the caller gets the error."""


@dataclass(eq=False)
class PoolTurns:
    roster: Roster
    placing: Placing
    rules: PoolSection
    clock: Callable[[], float]
    flush_seconds: float = field(default=0.2, init=False)
    """Longest time that tokens of a streamed turn wait on an engine server. Below the engine server's own
    interval, each token would be sent separately."""
    whole_flush_seconds: float = field(default=1.0, init=False)
    """The same for a turn not read before its end. A lost engine's turns sample up to this much again."""
    _prefix: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    _count: int = 0
    placed: dict[str, tuple[Member, str]] = field(default_factory=dict[str, tuple[Member, str]])
    """For each request on an engine server: the engine, and the request's name there."""
    _requests: set[str] = field(default_factory=set[str])
    """Requests whose deltas may still be read."""
    _aborting: set[str] = field(default_factory=set[str])
    _not_aborted: set[str] = field(default_factory=set[str])
    """Requests that this hub ended itself, because the engine did not confirm their abort."""
    _watched: set[Member] = field(default_factory=set[Member])
    """Engines with turns, which are checked for silence."""
    lost_count: int = 0
    """Number of requests that had to continue on another engine."""

    def expect_aborts(self, member: Member) -> None:
        """Expect an engine to abort its turns, which then end and do not continue elsewhere."""
        self._aborting |= member.turns

    def generate(self, request: EngineRequest) -> AsyncGenerator[Delta]:
        name = request.request_id
        self._requests.add(name)
        deltas = self._deltas(request)
        # The generator's `finally` does not run if it is closed before its first step.
        weakref.finalize(deltas, self._requests.discard, name)
        return deltas

    async def _deltas(self, request: EngineRequest) -> AsyncGenerator[Delta]:
        name = request.request_id
        refused_by: set[Member] = set()
        try:
            while name not in self._aborting:
                member = await self.placing.place(request)
                if member is None:
                    break
                began = False
                try:
                    async with contextlib.aclosing(self._sample(member, request)) as deltas:
                        async for delta in deltas:
                            began = True
                            yield delta
                    return
                except Unanswered as error:
                    if name in self._not_aborted:
                        break
                    if not (member.silent or member.stands_still):
                        self._lost_at(member, error)
                    self._lose_request(error)
                except EngineRefused as error:
                    self._refused_at(member, error, refused_by)
                    if began:
                        self._lose_request(error)
                    self.lost_count += 1
                finally:
                    self.placed.pop(name, None)
                    self.placing.ended(member, request)
                    self.roster.retire(member)
                    self.placing.wake()
            yield Delta(NO_TOKENS, NO_LOGPROBS, self.roster.active_version, Finish.ABORTED)
        finally:
            self._aborting.discard(name)
            self._not_aborted.discard(name)
            self._requests.discard(name)

    def _lost_at(self, member: Member, error: Unanswered) -> None:
        before = member.state, member.problem
        if member.stays and not member.silent:
            # Back off, because it may answer looks but still lose turn after turn.
            self._leave_alone(member, member.refuse(str(error)))
        self.roster.lose(member, str(error))
        self.roster.tell(member, before)
        self.roster.poke(member)

    def _watch(self, member: Member, *, again: bool = False) -> None:
        """End the turns of an engine that was silent for too long; `again` marks the second check."""
        if not member.turns:
            self._watched.discard(member)
            return
        left = self.rules.silent_seconds - member.silence.seconds(self.clock())
        over = left <= 0.0 and member.state is not State.SWITCHING
        if over and again:
            if not member.silent:
                member.silent = True
                problem = f"sampled nothing for {self.rules.silent_seconds:g} s"
                self._lost_at(member, Unanswered(problem))
            member.server.end_turns()
        look = functools.partial(self._watch, member, again=over)
        asyncio.get_running_loop().call_later(max(left, self.rules.look_seconds), look)

    def _refused_at(self, member: Member, error: EngineRefused, refused_by: set[Member]) -> None:
        """Return if another engine may take the turn, else raise. `NOT_THE_TURN` adds to `refused_by`."""
        if error.failure.is_full:
            limited = error.failure.metadata.get("limit") == "turns_in_flight"
            if not (limited and member.refused_at_limit()):
                self._leave_alone(member, error.failure.retry_after_seconds or FULL_SECONDS)
        elif error.failure.code in NOT_THE_TURN:
            if not member.refusals:
                logger.warning("engine %s refuses turns: %s", member.address, error)
            self._leave_alone(member, member.refuse(f"refused a turn: {error}"))
            refused_by.add(member)
            others = (other for other in self.roster.members if other not in refused_by)
            if len(refused_by) == MOST_REFUSALS or not any(other.stays for other in others):
                raise error
        elif error.failure.reason != Reason.CREDENTIAL_ENDED:
            raise error

    def _leave_alone(self, member: Member, seconds: float) -> None:
        member.close_for(seconds)
        asyncio.get_running_loop().call_later(seconds, self.placing.wake)

    def _lose_request(self, error: Exception) -> NoReturn:
        self.lost_count += 1
        raise RequestLost(str(error)) from error

    async def _sample(self, member: Member, request: EngineRequest) -> AsyncGenerator[Delta]:
        """Raises Unanswered, EngineRefused and RequestLost."""
        self._count += 1
        there = f"{self._prefix}.{self._count}"
        name = request.request_id
        self.placed[name] = member, there
        if member not in self._watched:
            self._watched.add(member)
            self._watch(member)
        message, metadata = self._message(there, request), request.trace_headers.items()
        tokens, began = 0, self.clock()
        async with contextlib.aclosing(member.server.generate(message, metadata)) as events:
            async for event in events:
                kind = event.WhichOneof("event")
                if kind == "started":
                    began = self.clock()
                    if name in self._aborting:
                        # The abort was requested before the engine server knew the turn.
                        await member.server.abort([there])
                elif kind == "segment":
                    segment = event.segment
                    delta = self._delta(member, segment)
                    tokens += len(delta.token_ids)
                    member.sampled()
                    yield delta
                else:
                    finish = FINISHES[event.finished.finish_reason]
                    if finish is not Finish.ABORTED:
                        member.worked()
                    member.paced(self.clock() - began, tokens)
                    if finish is Finish.ABORTED and name not in self._aborting:
                        # The engine server aborted it on its own, because it stops or switches.
                        self._lose_request(Unanswered("the engine aborted the turn"))
                    cached = event.finished.cached_token_count
                    active = self.roster.active_version
                    version = active if member.version is None else member.version
                    yield Delta(NO_TOKENS, NO_LOGPROBS, version, finish, cached)
                    return
        raise Unanswered("it ended a turn without a finish reason")

    def _delta(self, member: Member, segment: trajectory_pb2.Segment) -> Delta:
        version = member.pool_version(segment.weight_version)
        if version is None:
            # The engine got weights from elsewhere.
            member.version = None
            member.leave_rotation("samples weights that are not the pool's")
            self.roster.rotate()
            self.roster.poke(member)
            raise Unanswered(
                f"it samples version {segment.weight_version}, which this hub did not give it"
            )
        return Delta(codec.token_ids(segment), codec.logprobs(segment), version)

    def _message(self, name: str, request: EngineRequest) -> rollout_service_pb2.GenerateRequest:
        options = StreamOptions()
        seconds = self.flush_for(request.stream_interval, len(self.placed))
        options.flush_interval.FromNanoseconds(int(seconds * 1e9))
        return GenerateRequest(
            trajectory_id=name,
            tokens=TokenSequence(token_ids=codec.array_bytes(request.token_ids)),
            sampling_params=sampling_message(request.sampling),
            stream_options=options,
            priority=request.priority,
            single_turn=True,
        )

    def flush_for(self, stream_interval: int, turns: int) -> float:
        """Seconds that a request's tokens may wait on the engine server; `turns` are those in flight."""
        if stream_interval == 1:
            return 0.0
        if stream_interval < WHOLE:
            return self.flush_seconds
        return max(self.whole_flush_seconds, turns / SEGMENTS_PER_SECOND)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End requests, wherever they are, with the tokens they have so far."""
        by_member: dict[Member, dict[str, str]] = {}
        for name in request_ids:
            if name not in self._requests or self.placing.leave(name):
                continue
            self._aborting.add(name)
            if (placed := self.placed.get(name)) is not None:
                by_member.setdefault(placed[0], {})[name] = placed[1]
        await asyncio.gather(
            *(self._abort_there(member, names) for member, names in by_member.items())
        )

    async def _abort_there(self, member: Member, turns: Mapping[str, str]) -> None:
        """`turns` maps each request to the engine server's name for it."""
        try:
            await member.server.abort(list(turns.values()))
        except (Unanswered, EngineRefused) as error:
            left = {name: there for name, there in turns.items() if name in self.placed}
            logger.info("engine %s did not abort %d turns: %s", member.address, len(left), error)
            # End them from here: the caller, for example a switch, waits for their ends.
            self._not_aborted |= left.keys()
            member.server.end_turns(left.values())
