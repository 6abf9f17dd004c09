"""The search example's reward and corpus: F1 as in SQuAD's own evaluation, and chunks that lose
nothing.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from research import corpus
from research.scoring import exact, f1

WORDS = st.sampled_from(
    ["the", "a", "an", "Nile", "nile,", "1,900", "(river)", "river", "theatre", "é"]
)
TEXTS = st.lists(WORDS, max_size=6).map(" ".join)


def normalize(text: str) -> str:
    """As in the official evaluation script of SQuAD 1.1."""
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def official_f1(prediction: str, truth: str) -> float:
    """As in the official evaluation script of SQuAD 1.1."""
    predicted, true = normalize(prediction).split(), normalize(truth).split()
    same = sum((Counter(predicted) & Counter(true)).values())
    if same == 0:
        return 0.0
    precision, recall = same / len(predicted), same / len(true)
    return 2 * precision * recall / (precision + recall)


@given(answer=TEXTS, right=st.lists(TEXTS, min_size=1, max_size=3))
def test_scores_are_those_of_the_official_evaluation(answer: str, right: list[str]) -> None:
    # The script gives 0 for two empty answers. No question has an empty answer, so 1 is harmless.
    expected = max(
        1.0 if not normalize(answer) and not normalize(one) else official_f1(answer, one)
        for one in right
    )
    assert f1(answer, right) == pytest.approx(expected)
    assert exact(answer, right) == any(normalize(answer) == normalize(one) for one in right)


def test_f1_of_some_answers() -> None:
    assert f1("The Nile river", ["Nile"]) == pytest.approx(2 / 3)
    assert f1("in 1900", ["1900", "the year 1900"]) == pytest.approx(2 / 3)
    assert f1("", ["Nile"]) == f1("Danube", ["Nile"]) == f1("Nile", []) == 0.0


@given(
    st.lists(st.lists(st.sampled_from(["Alpha", "beta", "gamma", "12"]), min_size=1, max_size=70))
)
def test_chunks_are_whole_sentences_and_lose_nothing(sentences: list[list[str]]) -> None:
    text = " ".join(" ".join(sentence).capitalize() + "." for sentence in sentences)
    chunks = list(corpus.split(text))
    assert " ".join(chunks) == text
    assert all(chunk.endswith(".") for chunk in chunks if chunk)
    longest = max((len(sentence) for sentence in sentences), default=0)
    assert all(len(chunk.split()) <= max(corpus.CHUNK_WORDS, longest) for chunk in chunks)


def squad(passage: str, question: str, *answers: str) -> dict[str, Any]:
    query = f"Title: The_River\nBackground: {passage}\nQuestion: {question}\nAnswer:"
    return {"id": question, "query": query, "answers_text": list(answers)}


def test_questions_know_the_chunks_that_hold_their_answer() -> None:
    filler = " ".join(["word"] * 45)
    passage = f"It is long: 6,650 km. {filler.capitalize()}. It ends in Egypt."
    boolq = {"query": "Danube -- It passes Vienna.\nQuestion: does it?\nAnswer:"}
    chunks, questions = corpus.build(
        [
            squad(passage, "How long?", "6,650 km", "6650 km"),
            squad(passage, "Where?", "Egypt"),
            squad(passage, "Who?", "nobody"),
        ],
        [boolq, boolq],
    )
    assert [(chunk.chunk_id, chunk.passage, chunk.title) for chunk in chunks] == [
        (0, 0, "The River"),
        (1, 0, "The River"),
        (2, 0, "The River"),
        (3, 1, "Danube"),
    ]
    assert " ".join(chunk.text for chunk in chunks[:3]) == passage
    assert [(one.question, one.gold) for one in questions] == [
        ("How long?", (0,)),
        ("Where?", (2,)),
    ]
    assert questions[0].answers == ("6,650 km", "6650 km")


def test_another_form_of_the_data_is_refused() -> None:
    with pytest.raises(corpus.CorpusUnavailable, match="unexpected format"):
        corpus.build([{"id": "1", "query": "What?", "answers_text": []}], [])
