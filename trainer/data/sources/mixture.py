"""Several sources, interleaved by weight.

The order is a smooth weighted round-robin: nothing is drawn. With whole weights w that sum to W it repeats
after W problems, of which source k has exactly w_k; at any point no source is a whole problem ahead of its
share. Which source index i belongs to, and which problem of that source it is, follow from i alone, so a
mixture is resumed exactly, and each source is itself gone through without gap and without repetition.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from penstock.trainer.core.errors import ConfigInvalid
from penstock.trainer.data.sources.problem import Problem, Source

# Beyond it the order takes long to make, and a share is that of too small a number of problems.
LONGEST_CYCLE = 10_000


class Interleaving:
    """Which source an index belongs to, and which of that source's problems it is."""

    def __init__(self, weights: Sequence[float], section: str = "data.mixture") -> None:
        """Raises ConfigInvalid, naming `section`, where the weights have no common measure that is large
        enough."""
        self.weights = whole_weights(weights, section)
        """The same weights as whole numbers, the smallest."""
        total = sum(self.weights)
        credit, given = [0] * len(self.weights), [0] * len(self.weights)
        self._cycle: list[tuple[int, int]] = []
        for _ in range(total):
            credit = [c + w for c, w in zip(credit, self.weights, strict=True)]
            source = credit.index(max(credit))
            credit[source] -= total
            self._cycle.append((source, given[source]))
            given[source] += 1

    def place(self, index: int) -> tuple[int, int]:
        """(source, index in that source) of an index of the mixture."""
        cycle, offset = divmod(index, len(self._cycle))
        source, before = self._cycle[offset]
        return source, cycle * self.weights[source] + before


class MixtureSource:
    """Several sources as one."""

    name = "mixture"

    def __init__(self, parts: Sequence[tuple[str, float, Source]], section: str) -> None:
        """Each part is a name, its own, a weight and a source; `section` is what errors name. Raises
        ConfigInvalid."""
        names = [name for name, _, _ in parts]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ConfigInvalid(f"{section}: two parts are named {twice!r}; give them names")
        self._parts = tuple((name, source) for name, _, source in parts)
        self._interleaving = Interleaving([weight for _, weight, _ in parts], section)
        weights = self._interleaving.weights
        self.identity = "mixture " + "; ".join(
            f"{weight} of {source.identity}"
            for weight, (_, source) in zip(weights, self._parts, strict=True)
        )

    def problem(self, index: int) -> Problem:
        """One problem, under the name of its part; a level of an environment stays one, "part/level"."""
        part, own_index = self._interleaving.place(index)
        name, source = self._parts[part]
        problem = source.problem(own_index)
        below = problem.data_source.removeprefix(f"{source.name}/")
        under = f"{name}/{below}" if below != problem.data_source else name
        return replace(problem, data_source=under)


def whole_weights(weights: Sequence[float], section: str = "data.mixture") -> tuple[int, ...]:
    """The smallest whole numbers with the same proportions, as the weights are written: 0.7 is 7/10.

    Raises ConfigInvalid where they sum to more than LONGEST_CYCLE.
    """
    exact = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(fraction.denominator for fraction in exact))
    whole = [int(fraction * scale) for fraction in exact]
    divisor = math.gcd(*whole)
    smallest = tuple(weight // divisor for weight in whole)
    if sum(smallest) > LONGEST_CYCLE:
        raise ConfigInvalid(
            f"{section}: the weights {list(weights)} are as {':'.join(map(str, smallest))}, which "
            f"repeats after {sum(smallest)} problems; with rounder ones it is {LONGEST_CYCLE} at most"
        )
    return smallest
