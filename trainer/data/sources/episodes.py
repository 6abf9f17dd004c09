"""Episodes of an environment: which difficulty, and which seed.

An index is a level and a seed of that level, computed, so a run resumes exactly. Levels take turns; with
`prompts_per_level` n, the first n prompts are of the first level, the next n of the first two, and so on.
The environment is the workers': it makes the prompt, so a task has none of its own but the system's.
"""

from __future__ import annotations

import json

from penstock.trainer.config.data import EnvironmentConfig, LevelConfig
from penstock.trainer.core.errors import ConfigInvalid
from penstock.trainer.data.sources.problem import Problem


class EpisodeSource:
    """Metadata: `environment`, `seed`, `options` and `level`, as `penstock rollout --environment` reads
    them."""

    def __init__(self, config: EnvironmentConfig, section: str = "data.environment") -> None:
        """Raises ConfigInvalid for levels of one name."""
        self.name = config.name
        self._config = config
        self._levels = config.levels or (LevelConfig(),)
        self._names = [level.name or str(n) for n, level in enumerate(self._levels)]
        if len(set(self._names)) < len(self._names):
            raise ConfigInvalid(f"{section}.levels: two are named alike: {self._names}")
        if not config.prompts_per_level:
            # Where they begin again, as `Finite` knows it; levels that join later have no such end.
            self.size = config.size * len(self._levels)
        settings = json.dumps(config.model_dump(mode="json"), sort_keys=True)
        self.identity = f"environment {settings}"

    def problem(self, index: int) -> Problem:
        """One episode, counted under the environment and, where there are several, the level."""
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
        """(level, how many of this level were before) of an index."""
        begun, before = 1, [0] * len(self._levels)
        each = self._config.prompts_per_level
        while each and begun < len(self._levels) and index >= each:
            for level in range(begun):
                # Of `each` prompts that `begun` levels take in turns.
                before[level] += (each - level + begun - 1) // begun
            index, begun = index - each, begun + 1
        begun = begun if each else len(self._levels)
        turn, level = divmod(index, begun)
        return level, before[level] + turn
