"""Scores answers: SQuAD's F1 and exact match (Rajpurkar et al., arXiv 1606.05250, section 6)."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def words(text: str) -> list[str]:
    """The words of a text in normal form: lower case, without punctuation and articles."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def f1(answer: str, right: Iterable[str]) -> float:
    """Harmonic mean of precision and recall over words, for the right answer that matches best."""
    return max((_f1(words(answer), words(one)) for one in right), default=0.0)


def exact(answer: str, right: Iterable[str]) -> bool:
    """Whether an answer equals one of the right ones, word for word."""
    return any(words(answer) == words(one) for one in right)


def _f1(given: list[str], wanted: list[str]) -> float:
    if not given or not wanted:
        return float(given == wanted)
    shared = (Counter(given) & Counter(wanted)).total()
    return 2 * shared / (len(given) + len(wanted))
