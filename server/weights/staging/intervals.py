"""Tracks which bytes of a payload have been received."""

from __future__ import annotations

import bisect
from itertools import pairwise


class Intervals:
    """Disjoint byte ranges, merged where they touch."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []

    def add(self, begin: int, end: int) -> bool:
        """Add [begin, end) unless it overlaps an existing range; returns whether it was added."""
        at = bisect.bisect_right(self._begins, begin)
        if at and self._ends[at - 1] > begin:
            return False
        if at < len(self._begins) and self._begins[at] < end:
            return False
        follows = bool(at) and self._ends[at - 1] == begin
        precedes = at < len(self._begins) and self._begins[at] == end
        if follows and precedes:
            self._ends[at - 1] = self._ends.pop(at)
            del self._begins[at]
        elif follows:
            self._ends[at - 1] = end
        elif precedes:
            self._begins[at] = begin
        else:
            self._begins.insert(at, begin)
            self._ends.insert(at, end)
        return True

    def first_gap(self, length: int) -> tuple[int, int] | None:
        """Return the first missing range of [0, length), or None."""
        edges = [(0, 0), *zip(self._begins, self._ends, strict=True), (length, length)]
        return next(((a[1], b[0]) for a, b in pairwise(edges) if a[1] < b[0]), None)
