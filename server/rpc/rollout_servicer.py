"""RolloutService: turns and trajectories. Weight uploads are in `weights.upload.service`."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

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
from penstock.wire.messages import (
    AbortedTurn,
    AbortResponse,
    ContinueResponse,
    GenerateResponse,
    GetTrajectoryResponse,
)


@dataclass(eq=False)
class RolloutServicer:
    opening: Opening
    events: TurnEvents
    store: TrajectoryStore
    queue: TaskQueue
    turns: TurnRunner
    find_finished: Callable[[str], Awaitable[trajectory_pb2.Trajectory | None]]
    """Finds a closed trajectory in its finished group, by id."""

    async def generate(
        self, request: rollout_service_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[rollout_service_pb2.GenerateResponse]:
        turn, how = await self.opening.open(request, context)
        try:
            async with contextlib.aclosing(self.events.stream(turn, how, context)) as events:
                async for event in events:
                    yield GenerateResponse(**event)
        finally:
            if request.single_turn:
                self.events.forget_soon(turn)

    async def continue_(
        self, request: rollout_service_pb2.ContinueRequest, context: Context
    ) -> AsyncIterator[rollout_service_pb2.ContinueResponse]:
        """Extend a trajectory, or resume its last turn."""
        turn, how = await self.opening.extend(request, context)
        async with contextlib.aclosing(self.events.stream(turn, how, context)) as events:
            async for event in events:
                yield ContinueResponse(**event)

    async def abort(
        self, request: rollout_service_pb2.AbortRequest
    ) -> rollout_service_pb2.AbortResponse:
        """Returns once the engine no longer works on the turns."""
        selector = request.WhichOneof("selector")
        in_flight = self.turns.in_flight
        if selector == "trajectories":
            ids = request.trajectories.trajectory_ids
            wanted = set(requests.identifiers("trajectories.trajectory_ids", ids))
            chosen = [turn for turn in in_flight if turn.record.trajectory_id in wanted]
        elif selector == "groups":
            wanted = set(requests.identifiers("groups.group_ids", request.groups.group_ids))
            chosen = [turn for turn in in_flight if turn.record.group_id in wanted]
        elif selector == "all":
            chosen = in_flight
        else:
            raise FieldInvalid("selector", "must be set")
        stopped = await self.turns.abort(chosen)
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
        self.queue.attempt_of(trajectory_id)
        finished = await self.find_finished(trajectory_id)
        if finished is not None:
            return GetTrajectoryResponse(trajectory=finished, open=False)
        record = self.store.get(trajectory_id)
        response = GetTrajectoryResponse(trajectory=record.message(), open=not record.closed)
        if (turn := record.turn) is not None and not turn.in_flight:
            response.last_turn.CopyFrom(await self.events.finished(turn, turn.attempt))
        return response
