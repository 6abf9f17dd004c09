"""Reward functions of the demo, for `penstock rollout --reward penstock.demo.rewards:NAME`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, cast

from penstock.client.environments.reasoning import data_set, extract_answer
from penstock.rewards.texts import numeric

if TYPE_CHECKING:
    from penstock.client import BlockingTrajectory, Task


last_integer_is_answer = numeric()
"""1 if the last number of the answer is the expected one, else 0."""


def reasoning_gym_score(task: Task, trajectory: BlockingTrajectory) -> float:
    """The score of the data set's own `score_answer`, from 0 to 1."""
    # The entry travels as text: a protobuf Struct cannot tell 1 from 1.0, but some data sets do.
    entry = cast("dict[str, Any]", json.loads(task.metadata["entry_json"]))
    answer = extract_answer(trajectory.text, str(entry.get("answer", "")))
    return float(data_set(str(task.metadata["dataset"])).score_answer(answer, entry))


def printable_share(task: Task, trajectory: BlockingTrajectory) -> float:
    """Share of the tokens that are printable ASCII characters. Even random bytes contain some."""
    tokens = len(trajectory.last_turn.token_ids)
    printable = sum(" " <= character <= "~" for character in trajectory.text)
    return min(1.0, printable / tokens) if tokens else 0.0
