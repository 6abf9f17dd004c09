"""Which part of a server serves each rpc and each HTTP endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.server.assembly import Serving
from penstock.server.rpc.boundary import Call, Handler
from penstock.server.weights.upload.handout import WeightHandout

if TYPE_CHECKING:
    from starlette.applications import Starlette


def handlers(serving: Serving) -> Mapping[str, Handler]:
    """By service and name."""
    rollouts, tasks = serving.rollouts, serving.tasks

    def update_weights(requests: Any, call: Call) -> object:
        return serving.uploads.update_weights(requests, call.write)

    handout = WeightHandout(serving.weights.complete, lambda: serving.uploads.arriving)

    def exchange(requests: Any, call: Call) -> object:
        return serving.trainer.exchange(requests, call.write)

    return {
        "RolloutService/Generate": lambda request, call: rollouts.generate(request, call.trace),
        "RolloutService/Continue": lambda request, call: rollouts.continue_(request, call.trace),
        "RolloutService/Abort": lambda request, _: rollouts.abort(request),
        "RolloutService/UpdateWeights": update_weights,
        "RolloutService/FetchWeights": lambda request, _: handout.fetch_weights(request),
        "RolloutService/GetServerInfo": lambda request, _: serving.info.get_server_info(request),
        "RolloutService/GetTrajectory": lambda request, _: rollouts.get_trajectory(request),
        "TaskService/SubmitTasks": lambda request, _: tasks.submit_tasks(request),
        "TaskService/LeaseTasks": lambda request, _: tasks.lease_tasks(request),
        "TaskService/RenewLease": lambda request, _: tasks.renew_lease(request),
        "TaskService/CompleteTrajectory": lambda request, _: tasks.complete_trajectory(request),
        "TrainerService/Exchange": exchange,
    }


def endpoints(serving: Serving) -> Starlette:
    # These import vllm, which takes seconds, so import them only if they are served.
    from penstock.server.http.app import Endpoints
    from penstock.server.http.chat import ChatCompletions
    from penstock.server.http.messages import Messages
    from penstock.server.http.responses import Responses
    from penstock.server.http.turns import AgentTurns

    assert serving.gate is not None, "HTTP requires a gate"
    turns = AgentTurns(
        serving.opening,
        serving.events,
        serving.store,
        serving.queue,
        serving.ownership,
        serving.turns,
        serving.metrics,
    )
    messages = Messages()
    return Endpoints(
        {"chat/completions": ChatCompletions(), "responses": Responses(), "messages": messages},
        messages,
        turns,
        serving.renderer,
        str(serving.engine.description.model),
        serving.gate,
        serving.budget.check,
        serving.config.limits.stalled_seconds,
    ).application()
