"""Balances work over ranks: similar cost, and equal numbers of pieces. Pure functions."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

# Sequence length at which attention, whose cost is quadratic, costs as much as everything else, whose cost
# is linear. It is about 6 x the hidden size of the model, here for 1.5 to 3 billion parameters.
ATTENTION_TOKENS = 12_288


def attention_cost(length: int) -> float:
    """Returns the cost of a row of `length` tokens, in units of a token of a short row."""
    return length + length * length / ATTENTION_TOKENS


def spread_evenly(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Assigns items to ranks, from the costliest down, each to the rank with the least load, and returns
    the indices of each rank in order. No two ranks differ by more than the costliest item."""
    own: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0.0, rank) for rank in range(ranks)]
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        load, rank = heapq.heappop(loads)
        own[rank].append(index)
        heapq.heappush(loads, (load + costs[index], rank))
    return [sorted(indices) for indices in own]


def level(pieces: Sequence[Sequence[T]], count: int) -> list[list[T]]:
    """Returns the same items in `count` pieces: the longest is halved as long as possible, and empty ones
    fill the rest."""
    levelled = [list(piece) for piece in pieces]
    while len(levelled) < count:
        longest = max(range(len(levelled)), key=lambda index: len(levelled[index]), default=None)
        if longest is None or len(levelled[longest]) < 2:
            return levelled + [[] for _ in range(count - len(levelled))]
        halved, middle = levelled[longest], len(levelled[longest]) // 2
        levelled[longest : longest + 1] = [halved[:middle], halved[middle:]]
    return levelled
