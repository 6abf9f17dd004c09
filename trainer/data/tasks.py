"""Tasks and their ids: what a problem of the data becomes when it is submitted.

A task's id is `RUN/INDEX`. If its prompt is submitted more than once, a suffix tells the ids apart.
"""

from __future__ import annotations

from google.protobuf import json_format

from penstock.trainer.config.data import DataConfig, SamplingConfig
from penstock.trainer.data.sources.problem import Problem
from penstock.v1 import conversation_pb2, task_service_pb2, trajectory_pb2
from penstock.wire.messages import ChatMessage, SamplingParams, Task

# Separates an index from the suffix that tells apart several task ids of that index.
AGAIN = "~"
# Separates the suffix from the number of times the prompt was asked again after an unusable group.
TIMES = "+"


def build_task(
    problem: Problem,
    *,
    run_id: str,
    index: int,
    config: DataConfig,
    attempts: int | None = None,
    again: str = "",
) -> task_service_pb2.Task:
    """Build the task of one index, the same for the same run and index.

    `attempts` is the number of attempts to start if that is more than the group's size. `again` makes a
    distinct task id, which a server accepts although it knows the first.
    """
    task = describe_problem(problem, config.system_prompt, config.sampling)
    task.task_id = f"{run_id}/{index}{AGAIN}{again}" if again else f"{run_id}/{index}"
    task.purpose, task.index = trajectory_pb2.PURPOSE_TRAIN, index
    task.group_size = attempts or config.group_size
    task.finish_count = config.group_size if attempts else 0
    return task


def describe_problem(
    problem: Problem, system_prompt: str, sampling: SamplingConfig
) -> task_service_pb2.Task:
    """Build a task that carries the problem as agents see it and the sampling parameters.

    Its id, purpose, group size and index are not set.
    """
    parameters = SamplingParams(**sampling.model_dump())
    task = Task(data_source=problem.data_source, sampling_params=parameters)
    messages = problem.messages
    if system_prompt:
        messages = (("system", system_prompt), *messages)
    for role, text in messages:
        value = conversation_pb2.Role.Value(f"ROLE_{role.upper()}")
        task.conversation.messages.append(ChatMessage(role=value, content=text))
    for tool in problem.tools:
        written = task.conversation.tools.add(name=tool.name, description=tool.description)
        json_format.ParseDict(tool.parameters, written.parameters)
    task.text_prompt = problem.text_prompt
    json_format.ParseDict(problem.for_agents, task.metadata)
    return task


def renamed(before: str, again: str) -> str:
    """Replace the suffix's first part by `again`, keeping the count of times asked again."""
    part, plus, times = before.partition(TIMES)
    return f"{again or part}{plus}{times}"


def times_asked_again(task_id: str) -> int:
    """Return how often the task's prompt was asked again because a group of it was unusable."""
    times = task_id.rpartition("/")[2].partition(TIMES)[2]
    return int(times) if times.isdecimal() else 0
