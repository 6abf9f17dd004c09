"""What an external process receives: its environment variables, and the task as a file.

Of the worker's own environment it receives only what programs need to run, plus the variables named
by `--env`. Environments often hold tokens for the worker, hubs and clouds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from penstock.client.conversation import Message, PromptKind, write_chat_message, write_chat_tool
from penstock.client.sampling import SamplingParams

if TYPE_CHECKING:
    from penstock.client.external.settings import CommandSettings
    from penstock.client.tasks import Task
    from penstock.client.trajectory import Trajectory

TASK_FILE = "task.json"
RESULT_FILE = "result.json"
PASSED_ON = ("PATH", "LANG", "LANGUAGE", "TZ", "LC_ALL", "LC_CTYPE")


@dataclass(frozen=True)
class Access:
    base_url: str
    """Base URL of the compatible endpoints; empty for none."""
    key: str
    """Key for these endpoints. It is useless elsewhere and after the attempt."""
    address: str
    """Address of the gRPC services; empty if the process cannot reach them."""
    model: str


def process_environment(
    settings: CommandSettings, access: Access, trajectory: Trajectory, folder: Path
) -> dict[str, str]:
    """Returns the complete environment of a process. Raises OSError if its token cannot be read."""
    environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    environment |= {
        "HOME": str(folder),
        "PWD": str(folder),
        "PENSTOCK_TRAJECTORY_ID": trajectory.trajectory_id,
        "PENSTOCK_GROUP_ID": trajectory.group_id,
        "PENSTOCK_SAMPLE_INDEX": str(trajectory.sample_index),
        "PENSTOCK_TASK_FILE": str(folder / TASK_FILE),
        "PENSTOCK_RESULT_FILE": str(folder / RESULT_FILE),
        "PENSTOCK_MODEL": access.model,
        "PENSTOCK_WORKER_FOLDER": str(Path.cwd()),
    }
    if access.base_url:
        for name in ("OPENAI", "ANTHROPIC"):
            environment[f"{name}_BASE_URL"] = access.base_url
            environment[f"{name}_API_KEY"] = access.key
    if access.address:
        environment["PENSTOCK_ADDRESS"] = access.address
        if settings.token_file is not None:
            environment["PENSTOCK_TOKEN"] = settings.token_file.read_text("ascii").strip()
    for given in settings.environment:
        name, separator, value = given.partition("=")
        if separator:
            environment[name] = value
        elif name in os.environ:
            environment[name] = os.environ[name]
    return environment


def task_json(task: Task) -> str:
    """Returns the task as JSON, in the format of OpenAI's chat completions.

    A process can send `messages` and `tools` unchanged.

        {"task_id", "purpose", "data_source", "index", "metadata": {...},
        "sampling": {fields that the task sets},
        and for the prompt, one of "messages" (with "tools"), "text" and "token_ids"}
    """
    unset = asdict(SamplingParams())
    sampling = {k: value for k, value in asdict(task.sampling).items() if value != unset[k]}
    document: dict[str, Any] = {
        "task_id": task.task_id,
        "purpose": task.purpose.value,
        "data_source": task.data_source,
        "index": task.index,
        "metadata": task.metadata,
        "sampling": sampling,
    }
    match task.prompt_kind:
        case PromptKind.TEXT:
            document["text"] = task.prompt
        case PromptKind.TOKENS:
            document["token_ids"] = np.asarray(task.prompt).tolist()
        case PromptKind.MESSAGES:
            messages = cast("Sequence[Message]", task.prompt or ())
            document["messages"] = [write_chat_message(message) for message in messages]
            if task.tools:
                document["tools"] = [write_chat_tool(tool) for tool in task.tools]
        case None:
            pass
    return json.dumps(document, ensure_ascii=False)
