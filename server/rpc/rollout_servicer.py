"""RolloutService: turns and trajectories. Weight uploads are in `weights.upload.service`."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from opentelemetry.context import Context

from penstock.server.core.errors import FieldInvalid
from penstock.server.engine.protocol import Finish
from penstock.server.groups.task_queue import TaskQueue
from penstock.server.rollouts.start import Opening
from penstock.server.rpc.turn_events import TurnEvents
from penstock.server.turns import requests
from penstock.server.turns.runner import TurnRunner
from penstock.server.turns.store import TrajectoryStore
from penstock.v1 import rollout_service_pb2, trajectory_pb2
from penstock.wire.codec import twin

GenerateResponse = twin(rollout_service_pb2.GenerateResponse)
ContinueResponse = twin(rollout_service_pb2.ContinueResponse)
AbortResponse = twin(rollout_service_pb2.AbortResponse)
AbortedTurn = twin(rollout_service_pb2.AbortedTurn)
GetTrajectoryResponse = twin(rollout_service_pb2.GetTrajectoryResponse)

FindFinished = Callable[[str], Awaitable[trajectory_pb2.Trajectory | None]]


class RolloutServicer:
    def __init__(
        self,
        opening: Opening,
        events: TurnEvents,
        store: TrajectoryStore,
        queue: TaskQueue,
        turns: TurnRunner,
        find_finished: FindFinished,
    ) -> None:
        """`find_finished` looks up a closed trajectory in its finished group, by id."""
        self._opening = opening
        self._events = events
        self._store = store
        self._queue = queue
        self._turns = turns
        self._find_finished = find_finished

    # Generate and Continue

    async def generate(
        self, request: rollout_service_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[rollout_service_pb2.GenerateResponse]:
        turn, how = await self._opening.open(request, context)
        try:
            async with contextlib.aclosing(self._events.stream(turn, how, context)) as events:
                async for event in events:
                    yield GenerateResponse(**event)
        finally:
            if request.single_turn:
                self._events.forget_soon(turn)

    async def continue_(
        self, request: rollout_service_pb2.ContinueRequest, context: Context
    ) -> AsyncIterator[rollout_service_pb2.ContinueResponse]:
        """Extend a trajectory, or resume its last turn."""
        turn, how = await self._opening.extend(request, context)
        async with contextlib.aclosing(self._events.stream(turn, how, context)) as events:
            async for event in events:
                yield ContinueResponse(**event)

    # Abort, GetTrajectory

    async def abort(
        self, request: rollout_service_pb2.AbortRequest
    ) -> rollout_service_pb2.AbortResponse:
        """Returns once the engine no longer works on the turns."""
        selector = request.WhichOneof("selector")
        in_flight = self._turns.in_flight
        if selector == "trajectories":
            wanted = set(
                requests.identifiers(
                    "trajectories.trajectory_ids", request.trajectories.trajectory_ids
                )
            )
            chosen = [turn for turn in in_flight if turn.record.trajectory_id in wanted]
        elif selector == "groups":
            wanted = set(requests.identifiers("groups.group_ids", request.groups.group_ids))
            chosen = [turn for turn in in_flight if turn.record.group_id in wanted]
        elif selector == "all":
            chosen = in_flight
        else:
            raise FieldInvalid("selector", "must be set")
        stopped = await self._turns.abort(chosen)
        return AbortResponse(
            aborted_turns=[
                AbortedTurn(
                    trajectory_id=turn.record.trajectory_id,
                    policy_token_count=attempt.policy_token_count,
                )
                for turn, attempt in stopped
                if attempt.finish is Finish.ABORTED
            ]
        )

    async def get_trajectory(
        self, request: rollout_service_pb2.GetTrajectoryRequest
    ) -> rollout_service_pb2.GetTrajectoryResponse:
        """Return a trajectory as the server holds it, or as delivered with its group."""
        trajectory_id = requests.identifier("trajectory_id", request.trajectory_id)
        self._queue.attempt_of(trajectory_id)
        finished = await self._find_finished(trajectory_id)
        if finished is not None:
            return GetTrajectoryResponse(trajectory=finished, open=False)
        record = self._store.get(trajectory_id)
        response = GetTrajectoryResponse(trajectory=record.message(), open=not record.closed)
        if record.turn is not None and not record.turn.in_flight:
            response.last_turn.CopyFrom(
                await self._events.finished(record.turn, record.turn.attempt)
            )
        return response
