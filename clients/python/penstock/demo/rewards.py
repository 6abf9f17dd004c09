"""Reward functions of the demo, as `penstock rollout --reward penstock.demo.rewards:NAME` takes them."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.client import BlockingTrajectory, Task

_INTEGER = re.compile(r"-?\d+")


class Scores(Protocol):
    """What this module uses of a reasoning-gym data set."""

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float: ...


def last_integer_is_answer(task: Task, trajectory: BlockingTrajectory) -> float:
    """1 where the last integer of the answer is the one wanted, else 0."""
    return float(last_integer(trajectory.text) == int(task.metadata["answer"]))


def reasoning_gym_score(task: Task, trajectory: BlockingTrajectory) -> float:
    """What the data set's own `score_answer` gives, from 0 to 1."""
    # The entry as text: a protobuf Struct does not tell 1 from 1.0, and some data sets do.
    entry = cast("dict[str, Any]", json.loads(task.metadata["entry_json"]))
    answer = extract_answer(trajectory.text, str(entry.get("answer", "")))
    return float(data_set(str(task.metadata["dataset"])).score_answer(answer, entry))


def printable_share(task: Task, trajectory: BlockingTrajectory) -> float:
    """Share of the tokens that are a printable ASCII character: even random bytes have some."""
    tokens = len(trajectory.last_turn.token_ids)
    printable = sum(" " <= character <= "~" for character in trajectory.text)
    return min(1.0, printable / tokens) if tokens else 0.0


def last_integer(text: str) -> int | None:
    """The last integer in a text, if there is one."""
    found = _INTEGER.findall(text)
    return int(found[-1]) if found else None


def extract_answer(text: str, expected: str) -> str:
    """The part of a reply that a data set should score.

    What stands in `<answer>` tags; else, where an integer is wanted, the last integer; else all of it.
    """
    tagged = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    if tagged:
        return str(tagged[-1]).strip()
    if _INTEGER.fullmatch(expected):
        number = last_integer(text)
        return text.strip() if number is None else str(number)
    return text.strip()


@cache
def data_set(name: str) -> Scores:
    """A data set, for its `score_answer`."""
    import reasoning_gym

    create = cast("Callable[..., Scores]", reasoning_gym.create_dataset)  # pyright: ignore[reportUnknownMemberType]
    return create(name, size=1, seed=0)
