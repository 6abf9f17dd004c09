from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.client.plugins.arguments import read_arguments
from penstock.client.plugins.styles import Style, load_functions, load_slime
from penstock.client.plugins.whole_rollout import WholeRollout
from penstock.client.scoring import BadFunction, find
from penstock.client.tasks import Purpose
from penstock.client.worker import Worker, WorkerSettings

if TYPE_CHECKING:
    from penstock.client.calls import Calls


def load_worker(
    style_name: str,
    generate: str | None,
    reward: str | None,
    rollout_function: str | None,
    arguments: Path | None,
    settings: WorkerSettings,
) -> Callable[[Calls], Worker | WholeRollout]:
    style = Style(style_name)
    args = read_arguments(arguments)
    if rollout_function is None:
        functions = load_functions(style, generate, reward, args, whole_group=settings.group_reward)

        def work(calls: Calls) -> Worker:
            functions.connect(calls)
            return Worker(calls, functions.generate, functions.reward, settings)

        return work
    if style is not Style.SLIME:
        raise BadFunction("--rollout-function requires --style slime")
    if settings.purpose is Purpose.EVAL:
        raise BadFunction(
            "--rollout-function makes training batches and cannot be combined with --purpose eval"
        )
    if settings.attempt_seconds is not None:
        raise BadFunction(
            "--rollout-function runs many attempts per call and cannot be combined with --attempt-timeout"
        )
    agent = load_slime(generate, reward, args, whole_group=settings.group_reward)
    positional = ("args", "rollout_id", "data_source")
    function = find(rollout_function, "--rollout-function", positional, {"evaluation": False})

    def whole(calls: Calls) -> WholeRollout:
        agent.connect(calls)
        return WholeRollout(calls, function, agent, settings)

    return whole
