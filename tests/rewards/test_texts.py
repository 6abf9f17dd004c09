"""Rewards of texts and numbers, and their composition."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock import rewards
from penstock.client import Failed, Outcome, Task
from penstock.client.blocking import is_async


def score(reward: Any, text: str, answer: object = "5", field: str = "answer") -> Any:
    task = Task("t", metadata={field: answer})
    return reward(task, SimpleNamespace(text=text))


@pytest.mark.parametrize(
    ("answer", "text", "expected"),
    [
        ("5", " 5\n", 1.0),
        ("5", "It is 5", 0.0),
        ("Paris", "paris", 0.0),
        (5, "5", 1.0),
        ("5", "", 0.0),
    ],
)
def test_exact_compares_the_whole_answer(answer: object, text: str, expected: float) -> None:
    assert score(rewards.exact(), text, answer) == expected


def test_exact_may_ignore_case_and_read_another_field() -> None:
    assert score(rewards.exact(ignore_case=True, field="label"), "PARIS", "Paris", "label") == 1.0


@pytest.mark.parametrize(
    ("answer", "text", "expected"),
    [
        ("22", "17 + 5 = 22.", 1.0),
        ("22", "17 + 5 = 23", 0.0),
        ("... so she has 1,234.\n#### 1,234", "She has 1234 eggs", 1.0),
        (-3, "x is -3", 1.0),
        ("3", "from 5-3", 1.0),
        ("3", "it is -3", 0.0),
        ("0.5", "it is .5", 1.0),
        ("150000", "about 1.5e5", 1.0),
        ("5", "no number", 0.0),
        ("5", "", 0.0),
        (22, "about 22.5", 0.0),
    ],
)
def test_numeric_compares_the_last_numbers(answer: object, text: str, expected: float) -> None:
    assert score(rewards.numeric(), text, answer) == expected


def test_numeric_tolerates_what_it_is_told_to() -> None:
    assert score(rewards.numeric(tolerance=0.01), "It is 3.14", 3.14159) == 1.0
    assert score(rewards.numeric(), "It is 3.14", 3.14159) == 0.0


def test_an_answer_that_cannot_be_compared_fails_the_attempt_and_is_not_worth_nothing() -> None:
    with pytest.raises(ValueError, match=r"metadata\['answer'\] has no number: 'five'"):
        score(rewards.numeric(), "5", "five")
    with pytest.raises(TypeError, match=r"must be a text or a number, got \['5'\]"):
        score(rewards.exact(), "5", ["5"])
    with pytest.raises(KeyError, match="answer"):
        score(rewards.exact(), "5", field="label")


def test_regex_takes_the_group_of_the_last_match_or_the_whole_match() -> None:
    answer = rewards.regex(pattern=r"Answer: (\w+)", ignore_case=True)
    assert score(answer, "Answer: A. No, Answer: b", "B") == 1.0
    assert score(answer, "Answer: b. No, Answer: A", "B") == 0.0
    assert score(answer, "B", "B") == 0.0
    assert score(rewards.regex(pattern=r"\d+"), "not 4 but 5 apples") == 1.0


def test_format_is_about_the_form_alone() -> None:
    assert score(rewards.format(), "<think>\nwell\n</think>\nIt is 6") == 1.0
    for text in ("It is 5", "<think></think>5", "<think>well</think>", "5 <think>a</think> b"):
        assert score(rewards.format(), text) == 0.0
    assert score(rewards.format(pattern=r"\{.*\}"), '{"a":\n1}') == 1.0


def test_a_weighted_sum_reports_its_parts() -> None:
    def detailed(task: Task, trajectory: Any) -> Outcome:
        return Outcome(0.5, {"words": 2.0})

    reward = rewards.weighted(exact=1.0, format=0.2, style=(0.1, detailed))
    assert score(reward, "5") == Outcome(
        1.05, {"exact": 1.0, "format": 0.0, "style": 0.5, "style.words": 2.0}
    )


async def test_a_weighted_sum_with_an_async_part_is_async() -> None:
    async def judged(task: Task, trajectory: Any) -> float:
        return 0.5

    reward = rewards.weighted(judged=(2.0, judged), own=(1.0, lambda task, trajectory: 1.0))
    assert is_async(reward)
    text: Any = SimpleNamespace(text="5")
    # A plain part is called in a thread, with a trajectory whose calls block.
    assert await reward(Task("t"), text) == Outcome(2.0, {"judged": 0.5, "own": 1.0})


def test_a_part_that_fails_fails_the_attempt() -> None:
    failed = Failed("JUDGE_SILENT")
    reward = rewards.weighted(exact=1.0, judge=(1.0, lambda task, trajectory: failed))
    assert score(reward, "5") is failed


def test_parts_that_do_not_exist_are_named() -> None:
    with pytest.raises(ValueError, match=r"no ready-made reward exat; did you mean exact\?"):
        rewards.weighted(exat=1.0)
    with pytest.raises(ValueError, match=r"no ready-made reward mine; give \(weight, function\)"):
        rewards.weighted(mine=1.0)
    with pytest.raises(ValueError, match=r"such as weighted\(exact=1\.0\)"):
        rewards.weighted()


def test_the_package_lists_what_it_has_and_only_that() -> None:
    assert dir(rewards) == sorted(rewards.MODULES)
    assert all(callable(getattr(rewards, name)) for name in dir(rewards))
    with pytest.raises(AttributeError, match="has no attribute 'exat'"):
        rewards.exat  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]
