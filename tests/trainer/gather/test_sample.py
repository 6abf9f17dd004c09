"""The sample of a step: what of it is shown, and of which steps."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from penstock.trainer.core.aio import ComputeThread
from penstock.trainer.gather.sample import ANSWER_LINES, LINE_CHARACTERS, Samples, render
from penstock.v1 import trajectory_pb2
from penstock.wire import codec

CONTEXT, POLICY = trajectory_pb2.AUTHOR_CONTEXT, trajectory_pb2.AUTHOR_POLICY


def segment(author: int, text: str) -> Any:
    ids = np.frombuffer(text.encode("utf-32-le"), np.int32)
    return codec.twin(trajectory_pb2.Segment)(author=author, token_ids=ids.tobytes())


def group(*trajectories: Any) -> Any:
    return codec.twin(trajectory_pb2.TrajectoryGroup)(trajectories=trajectories)


def attempt(*segments: Any, reward: float | None = 1.0, parent: str = "", **metrics: float) -> Any:
    made = codec.twin(trajectory_pb2.Trajectory)(segments=segments, parent_trajectory_id=parent)
    if reward is None:
        made.outcome.failure.reason = "TOOL_TIMEOUT"
    else:
        made.outcome.reward = reward
        made.outcome.metrics.update(metrics)
    return made


def decode(tokens: Any) -> str:
    return "".join(map(chr, tokens))


def test_prompt_answer_and_reward_are_shown() -> None:
    first = attempt(
        segment(CONTEXT, "<user>\nWhat is 2 + 3?\n"),
        segment(POLICY, "It is"),
        segment(POLICY, " 5."),
        segment(CONTEXT, "Sure?"),
        segment(POLICY, "Yes."),
        reward=0.75,
        right=1.0,
        short=0.5,
    )
    assert render(20, [group(first, attempt(reward=0.0))], decode).split("\n") == [
        "a sample of step 20, of 2: reward 0.750 (right 1, short 0.5)",
        "  | <user>",
        "  | What is 2 + 3?",
        "  > It is 5.",
        "  | Sure?",
        "  > Yes.",
    ]


def test_an_attempt_without_a_reward_and_a_branch_are_passed_over() -> None:
    groups = [
        group(attempt(reward=None)),
        group(attempt(segment(POLICY, "branch"), parent="t"), attempt(segment(POLICY, "whole"))),
    ]
    assert "> whole" in render(1, groups, decode)
    assert render(1, [group(attempt(reward=None))], decode) == ""


def test_long_texts_are_cut_and_do_not_reach_the_terminal_as_commands() -> None:
    prompt = "\n".join(f"line {n}" for n in range(50))
    answer = "\n".join(["\x1b[2J\x07" + "a" * 500, *map(str, range(50))])
    lines = render(1, [group(attempt(segment(CONTEXT, prompt), segment(POLICY, answer)))], decode)
    shown = lines.split("\n")
    assert shown[1] == "  | … (44 lines)"
    assert shown[2] == "  | line 44"
    answered = [each for each in shown if each.startswith("  >")]
    assert len(answered) == ANSWER_LINES + 1
    assert answered[0] == "  > �[2J�" + "a" * (LINE_CHARACTERS - 5) + "…"
    assert answered[-1] == "  > … (41 lines)"


@pytest.mark.parametrize(("every", "due"), [(0, []), (1, [1, 2, 3, 4]), (2, [1, 2, 4]), (10, [1])])
async def test_steps_that_are_due_have_one(
    monkeypatch: pytest.MonkeyPatch, every: int, due: list[int]
) -> None:
    loaded: list[str] = []

    def load(path: str) -> Any:
        loaded.append(path)
        return decode

    # The module itself imports torch.
    module: Any = ModuleType("loading")
    module.load_decoder = load
    monkeypatch.setitem(sys.modules, "penstock.trainer.policy.loading", module)
    compute = ComputeThread(0)
    try:
        samples = Samples("model", every, compute)
        groups = [group(attempt(segment(POLICY, "5")))]
        shown = [step for step in range(1, 5) if await samples.of(step, groups)]
    finally:
        compute.close()
    assert shown == due
    assert loaded == (["model"] if due else [])
