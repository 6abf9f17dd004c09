"""Opens the source that the section `[data]` configures."""

from __future__ import annotations

from penstock.trainer.config.data import MixableConfig, SourceConfig
from penstock.trainer.core.errors import ConfigInvalid
from penstock.trainer.data.sources.episodes import EpisodeSource
from penstock.trainer.data.sources.function import open_own
from penstock.trainer.data.sources.jsonl import open_jsonl
from penstock.trainer.data.sources.mixture import MixtureSource
from penstock.trainer.data.sources.problem import Source, setting
from penstock.trainer.data.sources.procedural import ReasoningGymSource
from penstock.trainer.data.sources.tables import open_huggingface, open_parquet


def open_source(config: MixableConfig, seed: int, section: str = "data") -> Source:
    """Opens the configured source. `seed` is the run's; errors name `section`. Raises ConfigInvalid."""
    if not config.mixture:
        return _open_one(config, seed, section)
    parts: list[tuple[str, float, Source]] = []
    for number, part in enumerate(config.mixture):
        source = _open_one(part, seed, f"{section}.mixture.{number}")
        parts.append((part.name or source.name, part.weight, source))
    return MixtureSource(parts, setting(section, "mixture"))


def _open_one(config: SourceConfig, seed: int, section: str) -> Source:
    if config.reasoning_gym is not None:
        return ReasoningGymSource(config.reasoning_gym, setting(section, "reasoning_gym"))
    if config.jsonl is not None:
        return open_jsonl(config.jsonl, seed, setting(section, "jsonl"))
    if config.parquet is not None:
        return open_parquet(config.parquet, seed, setting(section, "parquet"))
    if config.huggingface is not None:
        return open_huggingface(config.huggingface, seed, setting(section, "huggingface"))
    if config.python is not None:
        return open_own(config.python, seed, setting(section, "python"))
    if config.environment is not None:
        return EpisodeSource(config.environment, setting(section, "environment"))
    raise ConfigInvalid(f"{section}: no source")
