"""The search example's curriculum: rising levels, and questions that training never sees."""

from __future__ import annotations

import pytest
from research import questions
from research.corpus import Question

KNOWN = [
    Question(
        f"q{number}", f"What is {number}?", ("one",) if number % 2 else ("one two three",), (0,)
    )
    for number in range(400)
]


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fourth question is one whose answer a search for the question does not find."""

    def ranks(asked: list[Question]) -> list[int]:
        return [questions.NEVER if int(each.question_id[1:]) % 4 == 0 else 0 for each in asked]

    monkeypatch.setattr(questions, "_questions", lambda: KNOWN)
    monkeypatch.setattr(questions, "ranks", ranks)


def test_levels_rise_and_an_index_is_always_the_same_prompt() -> None:
    prompts = questions.training(rise=300)
    levels = [prompts[index]["level"] for index in range(600)]
    assert (
        set(levels[:30]) == {0} and levels[300:].count(2) > 180 and set(levels[300:]) == {0, 1, 2}
    )
    again = questions.training(rise=300)
    assert [again[index] for index in (0, 7, 599)] == [prompts[index] for index in (0, 7, 599)]
    assert prompts[0]["data_source"] == questions.LEVELS[0][0]


def test_a_question_is_of_the_first_level_that_takes_it() -> None:
    levels = questions.by_level(KNOWN)
    assert [len(level) for level in levels] == [200, 100, 100]
    assert all(len(question.answers[0].split()) == 1 for question in levels[0])


def test_training_never_asks_what_is_evaluated() -> None:
    prompts = questions.training(rise=100)
    trained = {prompts[index]["question"] for index in range(3000)}
    kept = [questions.evaluation(level, size=24) for level in range(len(questions.LEVELS))]
    assert [len(rows) for rows in kept] == [24, 24, 24]
    for level, rows in enumerate(kept):
        assert {row["level"] for row in rows} == {level}
        assert not trained & {row["question"] for row in rows}
