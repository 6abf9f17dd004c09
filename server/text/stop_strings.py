"""Stop strings of a turn that the engine samples in several requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from penstock.server.engine.protocol import Delta

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Decode = Callable[[Iterable[int]], str]


class StopAcrossResume:
    """Finds a stop string that began before an abort and ends after the resume.

    To the engine, everything before the resume is prompt, and it looks for stop strings only in the tokens
    it samples itself.
    """

    def __init__(self, stop: tuple[str, ...], before: NDArray[np.int32], decode: Decode) -> None:
        """`before` is what the policy has written in this turn so far."""
        self._decode = decode
        self._stop = stop if len(before) else ()
        self._longest = max((len(text) for text in self._stop), default=0)
        self._written: list[int] = []
        self._before: list[int] = []
        if self._stop:
            # A token is at least one byte and a character at most four.
            reach = 4 * self._longest
            self._before = [int(token) for token in before[-reach:]]

    def cut(self, delta: Delta) -> tuple[Delta, bool]:
        """Cut the delta after the token that completes such a stop string. Also returns whether one did."""
        if not self._stop:
            return delta, False
        start = len(self._decode(self._before))
        for position, token in enumerate(delta.token_ids):
            self._written.append(int(token))
            text = self._decode([*self._before, *self._written])
            if any(text.find(stop, max(0, start - len(stop) + 1)) >= 0 for stop in self._stop):
                return _prefix(delta, position + 1), True
            if len(text) - start >= self._longest:
                # From here on the engine sees every stop string in full.
                self._stop = ()
                return delta, False
        return delta, False


def _prefix(delta: Delta, count: int) -> Delta:
    return Delta(delta.token_ids[:count], delta.logprobs[:count], delta.weight_version)
