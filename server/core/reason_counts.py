"""Counts by reason, where others choose the reasons: each is kept for ever, and is a series of its own in
metrics, so that there may be so many of them and no more."""

from __future__ import annotations

from collections import Counter

from penstock.server.core.errors import MAX_ID_LENGTH

MOST_REASONS = 200
"""Beyond so many kinds, and of such a length, what comes is counted as OTHER."""
OTHER = "OTHER"


class ReasonCounts(Counter[str]):
    """How often each reason was given."""

    def count(self, reason: str, times: int = 1) -> None:
        """Counts one that somebody else chose."""
        known = reason in self or len(self) < MOST_REASONS
        self[reason if known and len(reason) <= MAX_ID_LENGTH else OTHER] += times
