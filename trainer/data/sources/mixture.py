"""Several sources, interleaved by weight.

The order is a smooth weighted round-robin without randomness. With integer weights w that sum to W, it
repeats after W problems, of which source k has exactly w_k. At any point, no source is a whole problem
ahead of its share. The source of index i, and the problem of that source, follow from i alone. A mixture
therefore resumes exactly, and reads each of its sources without gaps or repetitions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from penstock.trainer.core.errors import ConfigInvalid
from penstock.trainer.data.sources.problem import Problem, Source

# A longer order takes long to compute, and fulfils a share only over too many problems.
LONGEST_CYCLE = 10_000


class Interleaving:
    """Maps an index to a source and to one of that source's problems."""

    def __init__(self, weights: Sequence[float], section: str = "data.mixture") -> None:
        """Raises ConfigInvalid, naming `section`, if the weights do not reduce to small integers."""
        self.weights = whole_weights(weights, section)
        """The same proportions as the smallest possible integers."""
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
        """Returns (source, index in that source) for an index of the mixture."""
        cycle, offset = divmod(index, len(self._cycle))
        source, before = self._cycle[offset]
        return source, cycle * self.weights[source] + before


class MixtureSource:
    """Several sources combined into one."""

    name = "mixture"

    def __init__(self, parts: Sequence[tuple[str, float, Source]], section: str) -> None:
        """Each part is a unique name, a weight and a source. Raises ConfigInvalid, naming `section`."""
        names = [name for name, _, _ in parts]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ConfigInvalid(
                f"{section}: two parts are named {twice!r}; give each a unique name"
            )
        self._parts = tuple((name, source) for name, _, source in parts)
        self._interleaving = Interleaving([weight for _, weight, _ in parts], section)
        weights = self._interleaving.weights
        self.identity = "mixture " + "; ".join(
            f"{weight} of {source.identity}"
            for weight, (_, source) in zip(weights, self._parts, strict=True)
        )

    def problem(self, index: int) -> Problem:
        """Returns one problem, counted under its part; a level of an environment, under "part/level"."""
        part, own_index = self._interleaving.place(index)
        name, source = self._parts[part]
        problem = source.problem(own_index)
        below = problem.data_source.removeprefix(f"{source.name}/")
        under = f"{name}/{below}" if below != problem.data_source else name
        return replace(problem, data_source=under)


def whole_weights(weights: Sequence[float], section: str = "data.mixture") -> tuple[int, ...]:
    """Returns the smallest integers with the same proportions. Weights are read as decimals: 0.7 is 7/10.

    Raises ConfigInvalid if they sum to more than LONGEST_CYCLE.
    """
    exact = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(fraction.denominator for fraction in exact))
    whole = [int(fraction * scale) for fraction in exact]
    divisor = math.gcd(*whole)
    smallest = tuple(weight // divisor for weight in whole)
    if sum(smallest) > LONGEST_CYCLE:
        raise ConfigInvalid(
            f"{section}: the weights {list(weights)} reduce to {':'.join(map(str, smallest))}, "
            f"which repeats only after {sum(smallest)} problems; use rounder weights, which repeat "
            f"after at most {LONGEST_CYCLE}"
        )
    return smallest
