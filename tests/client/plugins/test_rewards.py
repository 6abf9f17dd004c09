"""What rewards of verl and TRL are called with, and what they may leave out."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.client import Message, Outcome, Task
from penstock.client.plugins.rewards import RowIncomplete, _newest_version, trl_reward, verl_reward
from penstock.client.scoring import as_failed
from penstock.client.trial import try_reward

ASKED = (Message("system", "Be brief."), Message("user", "6 times 7?"))


def task(text_prompt: bool = False, **metadata: Any) -> Task:
    return Task("t", prompt=ASKED, metadata=metadata, text_prompt=text_prompt, group_size=2)


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    return float(solution_str == ground_truth)


@pytest.mark.parametrize(
    "row",
    [
        {"reward_model": {"ground_truth": "42"}},
        {"reward_model": {"style": "rule", "ground_truth": "42"}, "answer": "no"},
        {"ground_truth": "42"},
        {"answer": "42"},
    ],
)
async def test_verls_truth_is_where_the_row_has_it(row: dict[str, Any]) -> None:
    assert await try_reward(verl_reward(compute_score, {}), task(**row), "42") == Outcome(1.0)


@pytest.mark.parametrize(
    "row", [{}, {"reward_modle": {"ground_truth": "42"}}, {"reward_model": {"style": "rule"}}]
)
async def test_a_row_without_a_truth_is_an_error_by_name(row: dict[str, Any]) -> None:
    """It was None, and the reward 0.0 for every answer."""
    with pytest.raises(RowIncomplete, match=r"no reward_model\.ground_truth") as raised:
        await try_reward(verl_reward(compute_score, {}), task(**row), "42")
    failed = as_failed(raised.value)
    assert failed.reason == "ROW_INCOMPLETE"
    if "reward_modle" in row:
        assert "reward_modle" in failed.message and "did you mean" in failed.message


def lengths(completions: Any, prompts: Any, **columns: Any) -> list[float]:
    assert isinstance(prompts[0], str) == isinstance(completions[0], str)
    return [float(len(completion)) for completion in completions]


async def test_a_text_prompt_gives_trls_functions_texts() -> None:
    reward = trl_reward(lengths, whole_group=False)
    assert await try_reward(reward, task(text_prompt=True), "four") == Outcome(4.0)
    # Of messages there is one.
    assert await try_reward(reward, task(), "four") == Outcome(1.0)


async def test_a_text_prompt_is_the_rows_own() -> None:
    seen: list[Any] = []

    def reward(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        seen.append(prompts)
        return [0.0]

    await try_reward(trl_reward(reward, whole_group=False), task(text_prompt=True), "x")
    assert seen == [["6 times 7?"]]


async def test_trls_functions_log_and_know_the_step() -> None:
    steps: list[int] = []

    def reward(
        completions: Any, trainer_state: Any, log_metric: Any, log_extra: Any, **columns: Any
    ) -> list[float]:
        steps.append(trainer_state.global_step)
        log_metric("accuracy", 0.5)
        log_extra("parsed", ["forty-two"])
        return [1.0]

    found = await try_reward(trl_reward(reward, whole_group=False), task(), "42")
    assert found == Outcome(1.0, {"accuracy": 0.5}, {"parsed": "forty-two"})
    assert steps == [0]


async def test_the_step_is_the_one_whose_weights_sampled_last() -> None:
    class OfVersions:
        def __init__(self, *versions: int) -> None:
            self.weight_versions = versions

    class Attempt:
        def __init__(self, *turns: OfVersions) -> None:
            self.turns = turns

    attempts: Any = [Attempt(OfVersions(1, 2), OfVersions(3)), Attempt(OfVersions(2)), Attempt()]
    assert _newest_version(attempts) == 3 and _newest_version([]) == 0


@pytest.mark.parametrize(
    ("log", "problem"),
    [
        (lambda metric, extra: metric("a", "high"), "log_metric: a must be a finite number"),
        (lambda metric, extra: metric("a", float("nan")), "log_metric: a must be a finite number"),
        (lambda metric, extra: extra("a", ["x", "y"]), "log_extra: a has 2 values for 1"),
    ],
)
async def test_what_cannot_be_logged_is_an_error(log: Any, problem: str) -> None:
    def reward(completions: Any, log_metric: Any, log_extra: Any, **columns: Any) -> list[float]:
        log(log_metric, log_extra)
        return [1.0]

    with pytest.raises(ValueError, match=problem):
        await try_reward(trl_reward(reward, whole_group=False), task(), "42")
