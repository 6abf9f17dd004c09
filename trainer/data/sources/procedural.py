"""Computed problems from reasoning-gym."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from typing import Final, cast

import numpy as np
import xxhash

from penstock.common.suggestions import did_you_mean
from penstock.trainer.config.data import ReasoningGymConfig
from penstock.trainer.core.errors import ConfigInvalid
from penstock.trainer.data.sources.problem import Problem

HASH_ORDERED: Final = frozenset(
    ("isomorphic_strings", "polynomial_multiplication", "ransom_note", "word_ladder")
)
"""Data sets that iterate over sets of strings, whose order depends on Python's hash seed."""


class ReasoningGymSource:
    """A procedural data set. Metadata: `dataset`, `question`, `answer`, `metadata`, and `entry_json`, the
    whole entry as text, because numbers of a protobuf Struct lose their integer type.

    Some data sets draw from Python's random generator, which is therefore seeded for each problem and then
    restored. numpy's generator is restored as well; data sets that use it seed it themselves. Some depend
    on PYTHONHASHSEED, which a process cannot set for itself, and are refused without it. Another version
    of the library may compute different problems, so it counts as another source.
    """

    def __init__(self, config: ReasoningGymConfig, section: str = "data.reasoning_gym") -> None:
        """Raises ConfigInvalid for an unknown data set or setting. Also raises it if the problems
        depend on the hash seed and none is set."""
        import reasoning_gym
        from reasoning_gym import factory

        hashes = os.environ.get("PYTHONHASHSEED", "random") if config.name in HASH_ORDERED else ""
        if hashes == "random":
            raise ConfigInvalid(
                f"{section}: the problems of {config.name!r} differ between processes unless "
                "PYTHONHASHSEED is fixed: set it in the environment, such as PYTHONHASHSEED=0"
            )
        self.name, self.size = config.name, config.size
        own_seed = spread_seed(config.seed)
        self._seed = own_seed
        settings = json.dumps({**config.model_dump(mode="json"), "seed": own_seed}, sort_keys=True)
        version = metadata.version("reasoning-gym")
        self.identity = f"reasoning_gym {version} {settings}"
        if hashes:
            self.identity += f", PYTHONHASHSEED={hashes}"
        try:
            self._dataset = cast(
                "Sequence[Mapping[str, object]]",
                reasoning_gym.create_dataset(  # pyright: ignore[reportUnknownMemberType]
                    config.name, size=config.size, seed=own_seed, **config.config
                ),
            )
        except (ValueError, TypeError, AssertionError) as error:
            names = cast("dict[str, object]", factory.DATASETS)  # pyright: ignore[reportUnknownMemberType]
            meant = "" if config.name in names else did_you_mean(config.name, names)
            raise ConfigInvalid(f"{section}: {config.name!r}: {error}{meant}") from error

    def problem(self, index: int) -> Problem:
        """Returns one problem. They repeat after `size` problems."""
        place = index % self.size
        with _drawing_from(f"{self._seed} {place}"):
            entry = self._dataset[place]
        text = json.dumps(entry, default=str)
        plain = cast("dict[str, object]", json.loads(text))
        metadata = {"dataset": self.name, "entry_json": text, **plain}
        messages = (("user", str(entry["question"])),)
        return Problem(messages, metadata, self.name, text_prompt=True)


@contextmanager
def _drawing_from(seed: str) -> Generator[None]:
    before, numpys = random.getstate(), np.random.get_state()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(numpys)


def spread_seed(seed: int) -> int:
    """Returns a seed for the library that is far from those of other seeds; zero for zero.

    Problem i of the library's seed s is drawn from s + i. Seeds 0 and 1 would therefore share all
    problems but one. Some data sets accept at most 32 bits. With 31 random bits, two sets of 10,000
    problems overlap for one in 100,000 pairs of seeds.
    """
    return xxhash.xxh32_intdigest(str(seed).encode()) >> 1 if seed else 0
