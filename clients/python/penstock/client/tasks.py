"""Tasks, the work that agents attempt in groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from penstock.client.conversation import (
    Observation,
    PromptKind,
    Tool,
    prompt_kind,
    read_message,
    read_tool,
    write_prompt,
)
from penstock.client.sampling import SamplingParams, read_sampling
from penstock.client.values import from_struct, to_struct
from penstock.v1 import task_service_pb2, trajectory_pb2
from penstock.wire import codec, messages


class Purpose(StrEnum):
    TRAIN = "train"
    """Its trajectories feed the optimizer."""
    EVAL = "eval"
    """Its trajectories measure one weight version."""


_PURPOSES = {
    Purpose.TRAIN: trajectory_pb2.PURPOSE_TRAIN,
    Purpose.EVAL: trajectory_pb2.PURPOSE_EVAL,
}


@dataclass(frozen=True, slots=True)
class Task:
    """A task: `Task("sum-1", prompt="What is 2 + 3?", metadata={"answer": "5"})`."""

    task_id: str
    """Chosen by the submitter and unique in the run, which makes submission idempotent."""
    prompt: Observation | None = None
    """Text (encoded without a chat template), messages or tokens. None: the agent builds the prompt."""
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """JSON values for acting and scoring. A number without a fraction arrives as an int."""
    group_size: int = 1
    """Number of trajectories to sample, which form one group."""
    finish_count: int = 0
    """Number of rewarded trajectories that complete the group, in order of their end. Zero: all."""
    purpose: Purpose = Purpose.TRAIN
    tools: tuple[Tool, ...] = ()
    """Tools the policy may call; requires messages."""
    data_source: str = ""
    index: int = 0
    """Position in the data."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """Sampling parameters for those that the agent's call leaves unset."""
    text_prompt: bool = False
    """Whether the data has the prompt as a text, which is here the only user message."""

    @property
    def prompt_kind(self) -> PromptKind | None:
        return PromptKind.MESSAGES if self.tools else prompt_kind(self.prompt)


@dataclass(frozen=True, slots=True)
class Submission:
    accepted_count: int
    duplicate_count: int
    pending_count: int
    """Tasks waiting for an agent."""


def write_purpose(purpose: Purpose | None) -> trajectory_pb2.Purpose.ValueType:
    return trajectory_pb2.PURPOSE_UNSPECIFIED if purpose is None else _PURPOSES[purpose]


def write_task(task: Task) -> task_service_pb2.Task:
    return messages.Task(
        task_id=task.task_id,
        purpose=write_purpose(task.purpose),
        group_size=task.group_size,
        finish_count=task.finish_count,
        **write_prompt(task.prompt, task.tools),
        metadata=to_struct(task.metadata),
        data_source=task.data_source,
        index=task.index,
        sampling_params=task.sampling.to_wire(),
        text_prompt=task.text_prompt,
    )


def read_task(task: task_service_pb2.Task) -> Task:
    """Reads a task from a twin message (`penstock.wire.codec`)."""
    prompt: Observation | None = None
    tools: tuple[Tool, ...] = ()
    match task.WhichOneof("prompt"):
        case "text":
            prompt = task.text
        case "conversation":
            prompt = tuple(read_message(message) for message in task.conversation.messages)
            tools = tuple(read_tool(tool) for tool in task.conversation.tools)
        case "tokens":
            prompt = codec.token_ids(task.tokens)
        case None:
            pass
    return Task(
        task_id=task.task_id,
        prompt=prompt,
        metadata=from_struct(task.metadata),
        group_size=task.group_size,
        finish_count=task.finish_count,
        purpose=Purpose.EVAL if task.purpose == trajectory_pb2.PURPOSE_EVAL else Purpose.TRAIN,
        tools=tools,
        data_source=task.data_source,
        index=task.index,
        sampling=read_sampling(task.sampling_params),
        text_prompt=task.text_prompt,
    )
