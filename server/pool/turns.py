"""The turns of a pool: each runs on one engine server, as one attempt that is forgotten there when
it ends.

placed (`placing`) -> streamed -> ended. If the engine is lost, drains or is full,
`RequestLost` makes `turns` repeat the turn from the exact token. If an engine server refuses the
request itself, the caller gets that error.

Broken engines. An engine server that refuses turns although they are valid (`NOT_THE_TURN`) would be idle,
and so attract most new turns. It is therefore left alone like a failing engine, for longer each time until
a turn completes there, and the turn goes elsewhere. A turn that breaks engines looks the same, so the
error of the third engine, or of the last one there is, goes to the caller.

Hanging engines. `roster` ends the turns of an engine that no longer answers looks. An engine
may also answer looks but sample nothing. If it has turns and samples no token for `silent_seconds`
(`health`), it counts as lost, and its turns continue elsewhere. `roster` decides when
it takes turns again. Order: the time is over -> one more look, because a hub that itself stood
still has tokens to read first -> the member is LOST and its calls end. During a switch it may be
silent for as long as a switch may take (`switch_seconds`).
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
from penstock.server.pool.remote import EngineRefused, GenerateRequest, Unanswered
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
# How long to leave a full member alone if it does not state a delay.
FULL_SECONDS = 0.5
NOT_THE_TURN = (
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
)
"""Refusals that may be the engine's fault, so that another engine may take the turn."""
MOST_REFUSALS = 3
"""Number of engines that may refuse a turn like that before the caller gets the error."""


class PoolTurns:
    def __init__(
        self,
        roster: Roster,
        placing: Placing,
        rules: PoolRules,
        clock: Callable[[], float],
    ) -> None:
        self._roster = roster
        self._placing = placing
        self._rules = rules
        self._clock = clock
        self._prefix = uuid.uuid4().hex[:12]
        self._count = 0
        self._placed: dict[str, tuple[Member, str]] = {}
        self._requests: set[str] = set()
        """Requests whose deltas may still be read."""
        self._aborting: set[str] = set()
        self._not_aborted: set[str] = set()
        """Requests that this hub ended itself, because the engine did not confirm their abort."""
        self._watched: set[Member] = set()
        """Engines with turns, which are checked for silence."""
        self.lost_count = 0
        """Number of requests that had to continue on another engine."""

    @property
    def placed_count(self) -> int:
        return len(self._placed)

    @property
    def is_idle(self) -> bool:
        """Whether no state of any request is left."""
        return not (self._placed or self._requests or self._aborting)

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
                except EngineRefused as error:
                    self._refused_at(member, error, refused_by)
                    if began:
                        self._lose_request(error)
                    self.lost_count += 1
                finally:
                    self._placed.pop(name, None)
                    self._placing.ended(member, request)
                    self._roster.retire(member)
                    self._placing.wake()
            yield Delta(NO_TOKENS, NO_LOGPROBS, self._roster.active_version, Finish.ABORTED)
        finally:
            self._aborting.discard(name)
            self._not_aborted.discard(name)
            self._requests.discard(name)

    async def _place(self, request: EngineRequest) -> Member | None:
        """None if the request is to end."""
        return None if request.request_id in self._aborting else await self._placing.place(request)

    def _lost_at(self, member: Member, error: Unanswered) -> None:
        before = member.state, member.problem
        if member.stays and not member.silent:
            # Back off, because it may answer looks but still lose turn after turn.
            self._leave_alone(member, member.refuse(str(error)))
        self._roster.lose(member, str(error))
        self._roster.tell(member, before)
        self._roster.poke(member)

    def _watch(self, member: Member, *, again: bool = False) -> None:
        """End the turns of an engine that was silent for too long; `again` marks the second check."""
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

    def _refused_at(self, member: Member, error: EngineRefused, refused_by: set[Member]) -> None:
        """Return if another engine may take the turn, else raise. `NOT_THE_TURN` adds to `refused_by`."""
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
        """Whether any other engine takes turns, or will after its switch."""
        return any(member.stays for member in self._roster.members if member not in members)

    def _lose_request(self, error: Exception) -> NoReturn:
        self.lost_count += 1
        raise RequestLost(str(error)) from error

    async def _sample(self, member: Member, request: EngineRequest) -> AsyncGenerator[Delta]:
        """Raises Unanswered, EngineRefused and RequestLost."""
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
                    member.paced(self._clock() - began, tokens)
                    if finish is Finish.ABORTED and name not in self._aborting:
                        # The engine server aborted it on its own, because it stops or switches.
                        self._lose_request(Unanswered("the engine aborted the turn"))
                    cached = event.finished.cached_token_count
                    version = (
                        self._roster.active_version if member.version is None else member.version
                    )
                    yield Delta(NO_TOKENS, NO_LOGPROBS, version, finish, cached)
                    return
        raise Unanswered("it ended a turn without a finish reason")

    def _delta(self, member: Member, segment: trajectory_pb2.Segment) -> Delta:
        version = member.pool_version(segment.weight_version)
        if version is None:
            # The engine got weights from elsewhere.
            member.version = None
            member.leave_rotation("samples weights that are not the pool's")
            self._roster.rotate()
            self._roster.poke(member)
            raise Unanswered(
                f"it samples version {segment.weight_version}, which this hub did not give it"
            )
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
        """End requests, wherever they are, with the tokens they have so far."""
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
        """`turns` maps each request to the engine server's name for it."""
        try:
            await member.server.abort(list(turns.values()))
        except (Unanswered, EngineRefused) as error:
            left = {name: there for name, there in turns.items() if name in self._placed}
            logger.info("engine %s did not abort %d turns: %s", member.address, len(left), error)
            # End them from here: the caller, for example a switch, waits for their ends.
            self._not_aborted |= left.keys()
            member.server.end_turns(left.values())
