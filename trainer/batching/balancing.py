"""Work over ranks: about as much for each, and as many pieces for each. Pure functions."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

# Length at which attention, whose cost grows with its square, costs as much as all the rest, whose cost
# grows with it: about 6 x the hidden size of the model, here one of 1.5 to 3 billion parameters.
ATTENTION_TOKENS = 12_288


def attention_cost(length: int) -> float:
    """What a row of so many tokens costs, in tokens of a short one."""
    return length + length * length / ATTENTION_TOKENS


def spread_evenly(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Which items each rank takes, in their order: the costliest first, each to whom has least so far.

    No two ranks differ by more than the costliest item.
    """
    own: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0.0, rank) for rank in range(ranks)]
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        load, rank = heapq.heappop(loads)
        own[rank].append(index)
        heapq.heappush(loads, (load + costs[index], rank))
    return [sorted(indices) for indices in own]


def level(pieces: Sequence[Sequence[T]], count: int) -> list[list[T]]:
    """The same items in `count` pieces: the longest is halved as long as there is something to halve, and
    what is then missing are empty ones."""
    levelled = [list(piece) for piece in pieces]
    while len(levelled) < count:
        longest = max(range(len(levelled)), key=lambda index: len(levelled[index]), default=None)
        if longest is None or len(levelled[longest]) < 2:
            return levelled + [[] for _ in range(count - len(levelled))]
        halved = levelled[longest]
        middle = len(halved) // 2
        levelled[longest : longest + 1] = [halved[:middle], halved[middle:]]
    return levelled
