"""Counts by reason, for reasons that callers choose.

Each reason is kept forever and is a separate series in the metrics, so their number is limited.
"""

from __future__ import annotations

from collections import Counter

from penstock.server.core.errors import MAX_ID_LENGTH

MOST_REASONS = 200
"""Maximum number of distinct reasons; further ones, and overlong ones, count as OTHER."""
OTHER = "OTHER"


class ReasonCounts(Counter[str]):
    def count(self, reason: str, times: int = 1) -> None:
        """Counts as OTHER if the reason is one too many or too long."""
        known = reason in self or len(self) < MOST_REASONS
        self[reason if known and len(reason) <= MAX_ID_LENGTH else OTHER] += times
