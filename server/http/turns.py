"""Turns requests that carry a whole conversation into turns of the trajectories that hold its tokens.

The server compares a request's messages with those that the attempt's trajectories hold (`history`). The
resulting turn is the same as for a gRPC call: `Opening` opens, extends, branches or resumes, `TurnRunner`
runs it, and the same limits apply.

    ask ─► lock of the attempt ─► a retry? ─► match ─► limits ─► Opening ─► turn begun ─► unlock ─► answer

States of an answer:

    following ──► whole                   the turn ended STOP or LENGTH, and the journal has it
        │ ▲
        │ └── resumed, or joined          the turn ended ABORTED: it resumes at the exact token, and the
        │                                 agent only notices a delay
        └──► failed, or left              an error, or the connection was lost: the turn is aborted, as
                                          for a gRPC call, and can be resumed

**Retries.** SDKs retry requests on their own. Two requests are equal if their endpoint and bytes are. The
second is a retry of the first if its `x-stainless-retry-count` is above zero, or if the first was
never answered in full because its connection was lost. A retry samples no token again: the server repeats
the answer of a whole turn, follows a turn in flight from the beginning, and resumes an aborted one.

An equal request that is not a retry asks for another sample, as voting agents do, and becomes a branch. So
does the retry of a refused request, because none of the equal requests' answers is its own.

**Other parameters.** The same conversation with other sampling parameters is not a retry. The rest of an
interrupted turn is sampled as the last request asks, if a new turn with those parameters could have got as
far. Otherwise the request becomes a branch.

A request without an attempt gets a separate trajectory. It is never trained on, and the server forgets it
once the request is answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import grpc

from penstock.server.core.errors import DomainError
from penstock.server.core.telemetry import ServerMetrics
from penstock.server.groups.task_queue import TaskQueue
from penstock.server.http.asked import Answer, Asked, RefusedRequests, named, no_answer
from penstock.server.rollouts.start import Opening, StreamWish
from penstock.server.rpc.turn_events import TurnEvents
from penstock.server.security.ownership import Ownership
from penstock.server.turns.matching import Match, MatchKind, match
from penstock.server.turns.prompts import Said
from penstock.server.turns.runner import TurnRunner
from penstock.server.turns.store import TrajectoryStore
from penstock.server.turns.trajectory import Answered, TrajectoryRecord, Turn
from penstock.v1 import rollout_service_pb2, trajectory_pb2
from penstock.wire.messages import ContinueRequest, GenerateRequest, SamplingParams, StreamOptions
from penstock.wire.reasons import Reason

if TYPE_CHECKING:
    from penstock.server.text.messages import Message


@dataclass(frozen=True, eq=False)
class AgentTurns:
    """Begins and follows the turns of agents that send whole conversations."""

    opening: Opening
    events: TurnEvents
    store: TrajectoryStore
    queue: TaskQueue
    ownership: Ownership
    turns: TurnRunner
    metrics: ServerMetrics
    _refused: RefusedRequests = field(default_factory=RefusedRequests, init=False)
    _locks: WeakValueDictionary[str, asyncio.Lock] = field(
        default_factory=WeakValueDictionary[str, asyncio.Lock], init=False
    )

    @contextlib.asynccontextmanager
    async def ask(self, asked: Asked) -> AsyncGenerator[Answer]:
        """Yields an answer whose turn has begun. If its last follower leaves before it is whole, the turn
        is aborted. Raises DomainError."""
        if asked.attempt_id:
            # Of two concurrent requests, the second must see what the first one stored.
            async with self._locks.setdefault(asked.attempt_id, asyncio.Lock()):
                answer = await self._begin(asked)
        else:
            if asked.request.previous is not None:
                raise no_answer(asked.request.previous)
            answer = await self._open(asked, f"http-{uuid.uuid4().hex}")
        answer.note.followers += 1
        try:
            yield answer
        except DomainError:
            # If the turn failed before its first token, the store has no trace of it.
            record = answer.turn.record
            held = self.store.find(record.trajectory_id) is record
            if asked.attempt_id and answer.finished is None and not held:
                self._refused.add(asked.digest)
            raise
        finally:
            answer.note.followers -= 1
            if answer.finished is None and not answer.note.followers:
                self.turns.abort_soon(answer.turn)
            if not asked.attempt_id:
                self.events.forget_soon(answer.turn)

    # From a request to a turn that has begun.

    async def _begin(self, asked: Asked) -> Answer:
        self.queue.attempt_of(asked.attempt_id)
        records = self._open_records(asked.attempt_id)
        says_retry = asked.says_retry and not self._refused.take(asked.digest)
        retried = [
            (record, note)
            for record in records
            if (note := record.answered) is not None
            and note.is_retried_by(asked.digest, says_so=says_retry)
        ]
        if retried:
            # Voting agents send equal requests. The retry repeats one whose answer was not
            # delivered, or else the last one: an answer that was sent did not necessarily arrive.
            record, note = min(
                retried, key=lambda it: (it[1].delivered, it[1].followers, -it[1].asked_at)
            )
            return await self._again(record, note, asked)
        try:
            return await self._begin_new(records, asked)
        except DomainError:
            self._refused.add(asked.digest)
            raise

    def _open_records(self, attempt_id: str) -> list[TrajectoryRecord]:
        """The attempt's trajectory and its open branches; empty before its first turn. Raises
        TRAJECTORY_CLOSED."""
        if self.store.find(attempt_id) is None and self.store.closed_mark(attempt_id) is None:
            return []
        root = self.store.get(attempt_id)
        if root.closed:
            raise DomainError(
                Reason.TRAJECTORY_CLOSED,
                f"trajectory {attempt_id} is closed",
                {"trajectory_id": attempt_id},
            )
        return [root, *root.open_branches()]

    async def _begin_new(self, records: Sequence[TrajectoryRecord], asked: Asked) -> Answer:
        request = asked.request
        if records:
            if request.previous is None:
                found = match(records, request.messages, request.tools)
            else:
                found = named(records, request.previous, request)
            if found.record is not None and not found.new_messages:
                found = self._cut_off(found, found.record, asked)
            answer, kind = await self._go_by(found, records[0], asked), found.kind
        else:
            if request.previous is not None:
                raise no_answer(request.previous)
            answer, kind = await self._open(asked, asked.attempt_id), MatchKind.NEW
        self.metrics.conversation(kind.value)
        return answer

    async def _again(self, record: TrajectoryRecord, note: Answered, asked: Asked) -> Answer:
        """Returns the turn of the request that a retry repeats."""
        # The turn can also have ended normally at the moment its last follower left.
        if note.finished is None and note.turn.resumable:
            return await self._extend(record, asked)
        self.ownership.check_own(record.trajectory_id)
        how = self.opening.how(_options(asked.request.stream))
        return Answer(note.turn, how, asked.trace, note, note.finished)

    async def _go_by(self, found: Match, root: TrajectoryRecord, asked: Asked) -> Answer:
        record = found.record
        if found.kind is MatchKind.BRANCHED or record is None:
            branch = f"{root.trajectory_id}/{uuid.uuid4().hex[:12]}"
            after = None if asked.request.previous is None else found.message_count
            return await self._open(asked, branch, record or root, after)
        # Without new messages the request is worded differently, or the server restarted. Even then the
        # rest is sampled as this request asks.
        said = Said(list(found.new_messages)) if found.new_messages else None
        return await self._extend(record, asked, self._sampling(asked), said)

    async def _open(
        self,
        asked: Asked,
        trajectory_id: str,
        parent: TrajectoryRecord | None = None,
        after: int | None = None,
    ) -> Answer:
        parent_id = "" if parent is None else parent.trajectory_id
        self.ownership.begin_turn(trajectory_id, parent_id, opens=True)
        turn, how = await self.opening.open(
            GenerateRequest(
                trajectory_id=trajectory_id,
                parent_trajectory_id=parent_id,
                sampling_params=self._sampling(asked),
                stream_options=_options(asked.request.stream),
            ),
            asked.trace,
            Said(asked.request.messages, asked.request.tools, after),
        )
        return self._answer(turn, how, asked)

    async def _extend(
        self,
        record: TrajectoryRecord,
        asked: Asked,
        params: rollout_service_pb2.SamplingParams | None = None,
        said: Said | None = None,
    ) -> Answer:
        """Without `params` sampling is unchanged; without `said` the turn resumes at the exact token."""
        self.ownership.begin_turn(record.trajectory_id)
        request = _continuation(record, asked.request.stream)
        if params is not None:
            request.sampling_params.CopyFrom(params)
        turn, how = await self.opening.extend(request, asked.trace, said)
        return self._answer(turn, how, asked)

    def _cut_off(self, found: Match, record: TrajectoryRecord, asked: Asked) -> Match:
        """Resumes an interrupted turn; branches if it cannot continue with this request's parameters."""
        turn, note = record.turn, record.answered
        sampling = self.opening.sampling(self._sampling(asked))
        if turn is None or sampling == turn.sampling:
            return found
        # Requests that follow the turn were promised its current sampling parameters.
        followed = note is not None and note.turn is turn and note.followers > 0
        if not followed and self.turns.lets_stand(turn, sampling):
            return found
        return replace(found, kind=MatchKind.BRANCHED)

    def _answer(self, turn: Turn, how: StreamWish, asked: Asked) -> Answer:
        note = turn.record.answered
        if note is None or note.turn is not turn or note.digest != asked.digest:
            note = turn.record.answered = Answered(turn, asked.digest)
        return Answer(turn, how, asked.trace, note)

    def _sampling(self, asked: Asked) -> rollout_service_pb2.SamplingParams:
        """Merges the request's sampling parameters over those of its task."""
        params: Any = SamplingParams()
        attempt = self.queue.attempt_of(asked.attempt_id) if asked.attempt_id else None
        if attempt is not None and attempt.group.task is not None:
            params.CopyFrom(attempt.group.task.sampling_params)
        given = asked.request.sampling
        # MergeFrom would append to lists.
        for name in given.keys() & {"stop", "stop_token_ids"}:
            params.ClearField(name)
        params.MergeFrom(SamplingParams(**given))
        for name in given.keys() & {"max_tokens", "top_k", "ignore_eos"}:
            # MergeFrom would skip a zero in these.
            setattr(params, name, given[name])
        return params

    # From there to the end of the turn.

    async def follow(self, answer: Answer) -> AsyncGenerator[list[int]]:
        """Ends when the turn is whole. Raises DomainError if it fails or another caller continued the
        trajectory."""
        turn, taken = answer.turn, 0
        how = replace(answer.how, detach=True)
        while answer.finished is None:
            async with contextlib.aclosing(self.events.stream(turn, how, answer.trace)) as events:
                async for event in events:
                    count = turn.policy_token_count
                    if count > taken and not how.final_only:
                        yield turn.policy_tokens(count, taken).tolist()
                        taken = count
                    ended = event.get("finished")
                    if ended is None:
                        continue
                    if ended.finish_reason == trajectory_pb2.FINISH_REASON_ABORTED:
                        break
                    answer.finished = answer.note.finished = ended
            if answer.finished is None:
                await self._go_on(answer)
        if taken < answer.finished.policy_token_count and not how.final_only:
            # The turn was whole before this request arrived.
            yield turn.policy_tokens(answer.finished.policy_token_count, taken).tolist()

    async def told(self, answer: Answer, message: Message) -> None:
        """Stores the message that the agent receives, if it differs from the parsed one. The journal has
        it before the agent receives the end of it. Raises JOURNAL_FAILED."""
        assert answer.finished is not None
        turn, read = answer.turn, answer.finished.message
        if (message.content, message.reasoning) == (read.content, read.reasoning):
            return
        history = turn.record.history
        if history is not None and turn.record.turn is turn and not turn.in_flight:
            history.set_written(message, turn.record.token_count)
            # The journal's answer is shared with what refers to this record.
            await asyncio.shield(self.turns.recorder.record(turn.record))

    async def _go_on(self, answer: Answer) -> None:
        """Resumes an aborted turn once there is room for it, unless another request already has."""
        turn, record = answer.turn, answer.turn.record
        while record.turn is turn and turn.resumable:
            resumption = _continuation(record, not answer.how.final_only)
            try:
                await self.opening.extend(resumption, answer.trace)
            except DomainError as refusal:
                full = refusal.code is grpc.StatusCode.RESOURCE_EXHAUSTED
                if not full or refusal.retry_after_seconds is None:
                    raise
                await asyncio.sleep(refusal.retry_after_seconds)
        if record.turn is not turn:
            raise DomainError(
                Reason.TURN_IN_FLIGHT,
                f"another caller has continued {record.trajectory_id}",
                {"trajectory_id": record.trajectory_id},
            )


def _options(stream: bool) -> rollout_service_pb2.StreamOptions:
    return StreamOptions(final_only=not stream)


def _continuation(record: TrajectoryRecord, stream: bool) -> rollout_service_pb2.ContinueRequest:
    return ContinueRequest(trajectory_id=record.trajectory_id, stream_options=_options(stream))
