"""The turns of a pool: each on one engine server, as one attempt that is forgotten there when it ends.

placed (`pool_placing`) -> streamed -> ended. Where an engine is lost, drains or is full, `RequestLost` has
the turn made again from the exact token; `turns` does that. What an engine server refuses for the request's
own sake is told to whoever asked.

An engine server that refuses turns for what is wrong with itself (`NOT_THE_TURN`) would, being idle, be
given most of them. So it is left alone as one that fails is, for longer each time until a turn comes to its
end there, and the turn goes elsewhere. A turn that breaks engines looks the same: what the third of them
says, or the last that there is, is told.

An engine that does nothing may go on answering looks; where it does not, `pool_roster` ends its turns. So
one that has turns and samples no token of any of them for `silent_seconds` (`engine_silence`) is lost like
one that does not answer, and its turns go on elsewhere; when it takes turns again, `pool_roster` says.
Order: the time is over -> it is looked at once more, for a hub that stood still itself has tokens to read
first -> the member is LOST, its calls end. While it switches it may be silent for as long as a switch may
take (`switch_seconds`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import uuid
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import NoReturn

import grpc
import numpy as np

from penstock.server.engine.protocol import Delta, EngineRequest, Finish, RequestLost
from penstock.server.pool.member import Member, State
from penstock.server.pool.placing import Placing
from penstock.server.pool.remote import GenerateRequest, Refused, Unanswered
from penstock.server.pool.roster import Roster
from penstock.server.pool.rules import PoolRules
from penstock.server.turns.requests import sampling_message
from penstock.v1 import rollout_service_pb2, trajectory_pb2
from penstock.wire import codec
from penstock.wire.reasons import Reason

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
# What a member that is full, and does not say for how long, is left alone for.
FULL_SECONDS = 0.5
NOT_THE_TURN = (
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
)
"""Refusals that need not be of the turn: another engine may take it."""
MOST_REFUSALS = 3
"""Engines that refuse a turn so, before that is told."""


class PoolTurns:
    """Requests under way, wherever they are."""

    def __init__(
        self,
        roster: Roster,
        placing: Placing,
        active: Callable[[], int],
        rules: PoolRules,
        clock: Callable[[], float],
    ) -> None:
        """`active` has the pool's version."""
        self._roster = roster
        self._placing = placing
        self._active = active
        self._rules = rules
        self._clock = clock
        self._prefix = uuid.uuid4().hex[:12]
        self._count = 0
        self._placed: dict[str, tuple[Member, str]] = {}
        self._requests: set[str] = set()
        """Those whose deltas somebody may still read."""
        self._aborting: set[str] = set()
        self._not_aborted: set[str] = set()
        """Those of them that are ended from here: their engine did not say that it had."""
        self._watched: set[Member] = set()
        """Those that have had turns, and are looked at for whether they sample."""
        self.lost_count = 0
        """Requests that were made again elsewhere."""

    @property
    def placed_count(self) -> int:
        """Requests that an engine has."""
        return len(self._placed)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is kept of any request."""
        return not (self._placed or self._requests or self._aborting)

    def expect_aborts(self, member: Member) -> None:
        """The engine is about to abort the turns it has: those end, and are not made again elsewhere."""
        self._aborting |= member.turns

    def generate(self, request: EngineRequest) -> AsyncGenerator[Delta]:
        """What is sampled for a request, from its place on."""
        name = request.request_id
        self._requests.add(name)
        deltas = self._deltas(request)
        # One that is closed before it has begun never comes to its end.
        weakref.finalize(deltas, self._requests.discard, name)
        return deltas

    async def _deltas(self, request: EngineRequest) -> AsyncGenerator[Delta]:
        name = request.request_id
        refused_by: set[Member] = set()
        try:
            while (member := await self._place(request)) is not None:
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
                except Refused as error:
                    self._refused_at(member, error, refused_by)
                    if began:
                        self._lose_request(error)
                    self.lost_count += 1
                finally:
                    self._placed.pop(name, None)
                    self._placing.ended(member, request)
                    self._roster.retire(member)
                    self._placing.wake()
            yield Delta(NO_TOKENS, NO_LOGPROBS, self._active(), Finish.ABORTED)
        finally:
            self._aborting.discard(name)
            self._not_aborted.discard(name)
            self._requests.discard(name)

    async def _place(self, request: EngineRequest) -> Member | None:
        """The engine that takes it; None where it is to end."""
        return None if request.request_id in self._aborting else await self._placing.place(request)

    def _lost_at(self, member: Member, error: Unanswered) -> None:
        before = member.state, member.problem
        if member.stays and not member.silent:
            # It may answer looks, and lose turn after turn.
            self._leave_alone(member, member.refuse(str(error)))
        self._roster.lose(member, str(error))
        self._roster.tell(member, before)
        self._roster.poke(member)

    def _watch(self, member: Member, *, again: bool = False) -> None:
        """Has an engine lose its turns that was silent for too long; `again` is the second look at that."""
        if not member.turns:
            self._watched.discard(member)
            return
        left = self._rules.silent_seconds - member.silent_seconds
        over = left <= 0.0 and member.state is not State.SWITCHING
        if over and again:
            if not member.silent:
                member.silent = True
                problem = f"sampled nothing for {self._rules.silent_seconds:g} s"
                self._lost_at(member, Unanswered(problem))
            member.server.end_turns()
        look = functools.partial(self._watch, member, again=over)
        asyncio.get_running_loop().call_later(max(left, self._rules.look_seconds), look)

    def _refused_at(self, member: Member, error: Refused, refused_by: set[Member]) -> None:
        """Whether another engine may take it; raises the refusal where none would. `refused_by` are those
        that refused it before for what need not be its own sake."""
        if error.is_full:
            limited = error.failure.metadata.get("limit") == "turns_in_flight"
            if not (limited and member.refused_at_limit()):
                self._leave_alone(member, error.failure.retry_after_seconds or FULL_SECONDS)
        elif error.failure.code in NOT_THE_TURN:
            if not member.refusals:
                logger.warning("engine %s refuses turns: %s", member.address, error)
            self._leave_alone(member, member.refuse(f"refused a turn: {error}"))
            refused_by.add(member)
            if len(refused_by) == MOST_REFUSALS or not self._has_others(refused_by):
                raise error
        elif error.failure.reason != Reason.CREDENTIAL_ENDED:
            raise error

    def _leave_alone(self, member: Member, seconds: float) -> None:
        member.close_for(seconds)
        asyncio.get_running_loop().call_later(seconds, self._placing.wake)

    def _has_others(self, members: set[Member]) -> bool:
        """Whether any but these takes turns, or will once it has switched."""
        return any(member.stays for member in self._roster.members if member not in members)

    def _lose_request(self, error: Exception) -> NoReturn:
        self.lost_count += 1
        raise RequestLost(str(error)) from error

    async def _sample(self, member: Member, request: EngineRequest) -> AsyncGenerator[Delta]:
        """One turn on an engine server; raises Unanswered, Refused and RequestLost."""
        self._count += 1
        there = f"{self._prefix}.{self._count}"
        name = request.request_id
        self._placed[name] = member, there
        if member not in self._watched:
            self._watched.add(member)
            self._watch(member)
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
                    member.sampled()
                    yield delta
                else:
                    finish = FINISHES[event.finished.finish_reason]
                    if finish is not Finish.ABORTED:
                        member.worked()
                    member.paced(self._clock() - began, tokens)
                    if finish is Finish.ABORTED and name not in self._aborting:
                        # By the engine server itself, which stops, or switches.
                        self._lose_request(Unanswered("the engine aborted it"))
                    cached = event.finished.cached_token_count
                    version = self._active() if member.version is None else member.version
                    yield Delta(NO_TOKENS, NO_LOGPROBS, version, finish, cached)
                    return
        raise Unanswered("it ended a turn without a reason")

    def _delta(self, member: Member, segment: trajectory_pb2.Segment) -> Delta:
        version = member.pool_version(segment.weight_version)
        if version is None:
            # Somebody else gives it weights.
            member.version = None
            member.leave_rotation("samples weights that are not the pool's")
            self._roster.rotate()
            self._roster.poke(member)
            raise Unanswered(f"it samples version {segment.weight_version}, which nobody gave it")
        return Delta(codec.token_ids(segment), codec.logprobs(segment), version)

    def _message(
        self, name: str, request: EngineRequest, member: Member
    ) -> tuple[rollout_service_pb2.GenerateRequest, list[tuple[str, str]]]:
        options = StreamOptions()
        seconds = self._rules.flush_for(request.stream_interval, len(self._placed))
        options.flush_interval.FromNanoseconds(int(seconds * 1e9))
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
        """Ends these, wherever they are, with what they have."""
        by_member: dict[Member, dict[str, str]] = {}
        for name in request_ids:
            if name not in self._requests or self._placing.leave(name):
                continue
            self._aborting.add(name)
            if (placed := self._placed.get(name)) is not None:
                by_member.setdefault(placed[0], {})[name] = placed[1]
        await asyncio.gather(
            *(self._abort_there(member, names) for member, names in by_member.items())
        )

    async def _abort_there(self, member: Member, turns: Mapping[str, str]) -> None:
        """`turns` has what the engine server calls each request."""
        try:
            await member.server.abort(list(turns.values()))
        except (Unanswered, Refused) as error:
            left = {name: there for name, there in turns.items() if name in self._placed}
            logger.info("engine %s did not abort %d turns: %s", member.address, len(left), error)
            # Whoever aborts them waits for their ends, a switch among others.
            self._not_aborted |= left.keys()
            member.server.end_turns(left.values())
