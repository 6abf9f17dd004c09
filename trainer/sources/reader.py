"""A source's problems, read beside the event loop.

Reading one may take long: a row may come over the network, a puzzle may have to be made. On the loop it
would hold up uploads, evaluations and every stream. One thread reads at a time: a source may be gone
through in order, and need not bear two.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

from penstock.trainer.sources.problem import Problem, Source


class Reader:
    """Reads one source, from any thread."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._reading = threading.Lock()

    def problem(self, index: int) -> Problem:
        """The problem of an index, at once. Raises ConfigInvalid."""
        with self._reading:
            return self._source.problem(index)

    async def problems(self, indices: Sequence[int]) -> list[Problem]:
        """Those of some indices, in their order; the loop goes on meanwhile. Raises ConfigInvalid."""
        return await asyncio.to_thread(lambda: [self.problem(index) for index in indices])
