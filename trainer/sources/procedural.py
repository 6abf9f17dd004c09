"""Problems that are computed: reasoning-gym."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Protocol, cast

import xxhash

from penstock.trainer.data_config import ReasoningGymConfig
from penstock.trainer.errors import ConfigInvalid
from penstock.trainer.sources.problem import Problem


class _Entries(Protocol):
    def __getitem__(self, index: int) -> Mapping[str, object]: ...


class ReasoningGymSource:
    """A procedural data set. Metadata: `dataset`, `question`, `answer`, `metadata`, and `entry_json`,
    the whole entry as text, because numbers of a protobuf Struct lose their being integers."""

    def __init__(self, config: ReasoningGymConfig, section: str = "data.reasoning_gym") -> None:
        """Raises ConfigInvalid for an unknown data set or setting."""
        import reasoning_gym

        self.name, self.size = config.name, config.size
        own_seed = spread_seed(config.seed)
        settings = json.dumps({**config.model_dump(mode="json"), "seed": own_seed}, sort_keys=True)
        self.identity = f"reasoning_gym {settings}"
        try:
            self._dataset = cast(
                "_Entries",
                reasoning_gym.create_dataset(  # pyright: ignore[reportUnknownMemberType]
                    config.name, size=config.size, seed=own_seed, **config.config
                ),
            )
        except (ValueError, TypeError, AssertionError) as error:
            raise ConfigInvalid(f"{section}: {config.name!r}: {error}") from error

    def problem(self, index: int) -> Problem:
        """One problem; after `size` of them they come again."""
        entry = self._dataset[index % self.size]
        text = json.dumps(entry, default=str)
        plain = cast("dict[str, object]", json.loads(text))
        metadata = {"dataset": self.name, "entry_json": text, **plain}
        return Problem((("user", str(entry["question"])),), metadata, self.name)


def spread_seed(seed: int) -> int:
    """The seed that the library is given: far from those of other seeds, zero for zero.

    Problem i of its seed s is drawn from s + i, so that the problems of seeds 0 and 1 are the same but for
    one. Some data sets take 32 bits at most; of 31 bits at random, two sets of 10,000 problems overlap once
    in 100,000 pairs of seeds.
    """
    return xxhash.xxh32_intdigest(str(seed).encode()) >> 1 if seed else 0
