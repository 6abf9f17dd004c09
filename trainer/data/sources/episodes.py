"""Episodes of an environment: computes the difficulty level and seed of each index.

An index maps to a level and a seed of that level by arithmetic, so a run resumes exactly. Levels
take turns. With `prompts_per_level` n, the first n prompts use the first level, the next n the
first two, and so on. The environment runs in the workers and makes the prompt. A task therefore has
no prompt except the system message.
"""

from __future__ import annotations

import json

from penstock.trainer.config.data import EnvironmentConfig, LevelConfig
from penstock.trainer.core.errors import ConfigInvalid
from penstock.trainer.data.sources.problem import Problem


class EpisodeSource:
    """A source of episodes. Its metadata are `environment`, `seed`, `options` and `level`, as read
    by `penstock rollout --environment`."""

    def __init__(self, config: EnvironmentConfig, section: str = "data.environment") -> None:
        """Raises ConfigInvalid if two levels have the same name."""
        self.name = config.name
        self._config = config
        self._levels = config.levels or (LevelConfig(),)
        self._names = [level.name or str(n) for n, level in enumerate(self._levels)]
        if len(set(self._names)) < len(self._names):
            raise ConfigInvalid(f"{section}.levels: two have the same name: {self._names}")
        if not config.prompts_per_level:
            # Seeds repeat after this many indices, as `Finite` requires. With levels that join
            # later, there is no such number.
            self.size = config.size * len(self._levels)
        settings = json.dumps(config.model_dump(mode="json"), sort_keys=True)
        self.identity = f"environment {settings}"

    def problem(self, index: int) -> Problem:
        """Returns one episode, counted under the environment and, if there are several, the level."""
        number, place = self.place(index)
        level = self._levels[number]
        metadata: dict[str, object] = {
            "environment": self.name,
            "seed": self._config.seed + place % self._config.size,
            "options": dict(level.options),
            "level": number,
        }
        several = len(self._levels) > 1
        name = f"{self.name}/{self._names[number]}" if several else self.name
        return Problem((), metadata, name)

    def place(self, index: int) -> tuple[int, int]:
        """Returns the level of an index, and the number of earlier indices with that level."""
        begun, before = 1, [0] * len(self._levels)
        each = self._config.prompts_per_level
        while each and begun < len(self._levels) and index >= each:
            for level in range(begun):
                # The share of this level in `each` prompts that `begun` levels take in turns.
                before[level] += (each - level + begun - 1) // begun
            index, begun = index - each, begun + 1
        begun = begun if each else len(self._levels)
        turn, level = divmod(index, begun)
        return level, before[level] + turn
