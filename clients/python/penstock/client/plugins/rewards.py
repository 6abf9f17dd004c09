"""Adapts reward functions of verl and TRL to a worker's reward functions.

    verl   compute_score(data_source, solution_str, ground_truth, extra_info) -> number, or a table
    trl    reward(prompts=, completions=, completion_ids=, trainer_state=, log_metric=, log_extra=,
                  **columns) -> list of numbers

verl's function is called per attempt. TRL's receives lists: of one attempt, or, as a group reward,
of all siblings. If the data has the prompt as a text, prompts and completions are texts; otherwise
messages. `trainer_state` has `global_step` only. In a table, `score` is the reward.

The answer is all the text that the policy wrote, over all turns, without the environment's text.
The other arguments come from the task's metadata, which is the row of the data.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, SupportsFloat, cast

from penstock.client.blocking import is_async, run_in_thread
from penstock.client.conversation import Message, PromptKind, write_chat_message
from penstock.client.outcome import Failed, Outcome
from penstock.client.scoring import AttemptFailed
from penstock.common.suggestions import did_you_mean, listed

if TYPE_CHECKING:
    from penstock.client.scoring import Agent
    from penstock.client.tasks import Task
    from penstock.client.trajectory import Trajectory


class RewardMissing(Exception):
    """A reward function gave no reward for an attempt."""


class RowIncomplete(AttemptFailed):
    """The row lacks what the reward needs."""


async def call_plugin(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Calls a function, on the event loop if async, else in a thread."""
    if is_async(function):
        return await function(*arguments, **named)
    result = await run_in_thread(lambda: function(*arguments, **named))
    # An async function behind a plain decorator returns an awaitable.
    return await result if inspect.isawaitable(result) else result


def score_of(value: Any, key: str | None = "score") -> Outcome:
    """Reads a number, or a table with the reward in `key`, whose other numbers become metrics.

    Raises RewardMissing.
    """
    if not isinstance(value, Mapping):
        if value is None:
            raise RewardMissing("the reward function returned None")
        return Outcome(float(value))
    table = cast("Mapping[str, Any]", value)
    if key is None or table.get(key) is None:
        raise RewardMissing(f"the reward has no {key!r}, only {', '.join(table)}: set reward_key")
    numbers = {name: _number(value) for name, value in table.items() if name != key}
    metrics = {name: n for name, n in numbers.items() if n is not None and math.isfinite(n)}
    return Outcome(float(table[key]), metrics)


def _number(value: Any) -> float | None:
    """Converts numbers, including numpy's and torch's; None if it is not a single number."""
    if isinstance(value, str | bytes) or not isinstance(value, SupportsFloat):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None  # Several.


def verl_reward(function: Callable[..., Any], args: Mapping[str, Any]) -> Agent:
    """Makes a reward of a `compute_score`. Each call also receives `args["reward_kwargs"]`."""
    extra: Mapping[str, Any] = args.get("reward_kwargs", {})

    async def reward(task: Task, trajectory: Trajectory) -> Outcome:
        row = task.metadata
        truth = _ground_truth(row)
        value = await call_plugin(
            function,
            data_source=str(row.get("data_source") or task.data_source),
            solution_str=_answer(trajectory),
            ground_truth=truth,
            extra_info=row.get("extra_info", dict(row)),
            **extra,
        )
        return score_of(value)

    return reward


def _ground_truth(row: Mapping[str, Any]) -> object:
    """Raises RowIncomplete, where verl raises KeyError: a reward without the truth is no reward."""
    model: Any = row.get("reward_model")
    holder = cast("Mapping[str, Any]", model) if isinstance(model, Mapping) else row
    if "ground_truth" in holder:
        return holder["ground_truth"]
    if "answer" in row:
        return row["answer"]
    raise RowIncomplete(
        f"the row has no reward_model.ground_truth and no answer, only {listed(sorted(row))}"
        f"{did_you_mean('reward_model', row)}"
    )


def trl_reward(function: Callable[..., Any], *, whole_group: bool) -> Agent:
    wanted = inspect.signature(function).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in wanted.values())

    async def ask(task: Task, trajectories: Sequence[Trajectory]) -> list[Outcome | Failed]:
        chat = task.prompt_kind is PromptKind.MESSAGES and not task.text_prompt
        prompt = messages_of(task) if chat else _prompt_text(task)
        logged = _Logged(len(trajectories))
        given: dict[str, Any] = {
            name: [value] * len(trajectories) for name, value in task.metadata.items()
        }
        given |= {
            "prompts": [prompt] * len(trajectories),
            "completions": [_messages(t) if chat else _answer(t) for t in trajectories],
            "completion_ids": [
                [int(i) for turn in t.turns for i in turn.token_ids] for t in trajectories
            ],
            "trainer_state": SimpleNamespace(global_step=_newest_version(trajectories)),
            "log_metric": logged.metric,
            "log_extra": logged.extra,
        }
        if not takes_all:
            given = {name: value for name, value in given.items() if name in wanted}
        values: Any = await call_plugin(function, **given)
        if not hasattr(values, "__len__") or len(values) != len(trajectories):
            raise RewardMissing(
                f"{len(trajectories)} attempts need a reward each, but the function returned {values!r}"
            )
        nothing = Failed("REWARD_MISSING", "the reward function returned None for this attempt")
        return [
            nothing if value is None else logged.added_to(score_of(value), place)
            for place, value in enumerate(values)
        ]

    async def one(task: Task, trajectory: Trajectory) -> Outcome | Failed:
        return (await ask(task, [trajectory]))[0]

    return ask if whole_group else one


class _Logged:
    """What a function of TRL logs: numbers become metrics of the attempts, columns their metadata."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._metrics: dict[str, float] = {}
        self._columns: dict[str, Sequence[Any]] = {}

    def metric(self, name: str, value: Any) -> None:
        number = _number(value)
        if number is None or not math.isfinite(number):
            raise ValueError(f"log_metric: {name} must be a finite number, not {value!r}")
        self._metrics[name] = number

    def extra(self, column: str, values: Sequence[Any]) -> None:
        if len(values) != self._count:
            raise ValueError(
                f"log_extra: {column} has {len(values)} values for {self._count} completions"
            )
        self._columns[column] = values

    def added_to(self, outcome: Outcome, place: int) -> Outcome:
        columns = {column: str(values[place]) for column, values in self._columns.items()}
        return replace(
            outcome,
            metrics={**self._metrics, **outcome.metrics},
            metadata={**columns, **outcome.metadata},
        )


def _newest_version(trajectories: Sequence[Trajectory]) -> int:
    """The trainer's step whose weights sampled the newest token: each step makes a version."""
    return max(
        (v for t in trajectories for turn in t.turns for v in turn.weight_versions), default=0
    )


def _prompt_text(task: Task) -> str:
    if task.prompt_kind is not PromptKind.MESSAGES:
        return task.prompt if isinstance(task.prompt, str) else ""
    messages = cast("Sequence[Message]", task.prompt or ())
    return next((m.content for m in reversed(messages) if m.role == "user"), "")


def _answer(trajectory: Trajectory) -> str:
    return "".join(turn.text for turn in trajectory.turns)


def _messages(trajectory: Trajectory) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": turn.text} for turn in trajectory.turns]


def messages_of(task: Task) -> list[dict[str, Any]]:
    return [write_chat_message(message) for message in cast("Sequence[Message]", task.prompt or ())]
