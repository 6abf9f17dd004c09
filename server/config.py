"""Configuration of `penstock serve`: one TOML file, each field also on the command line.

listen = "127.0.0.1:50051"

[engine]                 # vLLM's own names; here and as options
model = "HuggingFaceTB/SmolLM2-135M-Instruct"
dtype = "bfloat16"
max-model-len = 2048

[leases]
seconds = 60
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.wire.channel import split_address


class ConfigError(Exception):
    """The configuration cannot be used; the message names the value it got."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Leases(_Section):
    """How long leases last and how often an attempt is made."""

    seconds: float = Field(default=60.0, gt=0)
    """Length of a lease without a call on the trajectory."""
    grace_seconds: float = Field(default=10.0, gt=0)
    """What is left of it when the agent's lease stream is lost."""
    max_attempts: int = Field(default=3, ge=1)
    """Times an attempt is made before its failure becomes part of the group."""


class Weights(_Section):
    """How weight versions are taken and switched."""

    in_flight: Literal["keep", "recompute", "drain", "abort"] = "keep"
    """What happens to turns in flight where the trainer leaves it to the server."""
    stage_folder: Path | None = None
    """Where uploads are staged; unset is shared memory, or the temporary folder where that is small."""
    max_staged: int = Field(default=2, ge=1)
    """Versions staged beside the active one; the oldest makes room."""
    hold_active: bool = True
    """Whether the bytes of the active version stay in memory: deltas apply to them, and a version that
    fails to load goes back to them."""
    collective_seconds: float = Field(default=300.0, gt=0, le=86_400)
    """Longest time that joining a collective takes, and each step of an upload by one. Where the engine is
    not back by then it is given up, and the server with it."""


class Streaming(_Section):
    """How turns are streamed where the caller leaves it open."""

    flush_seconds: float = Field(default=0.2, ge=0, le=60)
    """Longest time tokens wait before they are sent."""
    interval: int = Field(default=16, ge=1)
    """Tokens the engine gathers before it hands them over."""


class Limits(_Section):
    """What the server holds at most; beyond it callers get RESOURCE_EXHAUSTED."""

    open_trajectories: int = Field(default=8_192, ge=1)
    """Trajectories open at a time."""
    pending_tasks: int = Field(default=100_000, ge=1)
    """Tasks waiting for an agent."""
    groups_without_trainer: int = Field(default=256, ge=1)
    """Training groups begun and not delivered while no trainer has named its staleness contract."""
    evaluation_groups: int = Field(default=256, ge=1)
    """Evaluation groups begun and not delivered."""
    concurrent_calls: int = Field(default=16_384, ge=1)
    """Calls open at a time."""


class ServeConfig(_Section):
    """Everything `penstock serve` is told."""

    listen: str = "127.0.0.1:50051"
    """HOST:PORT; port 0 takes a free one and prints it."""
    drain_seconds: float = Field(default=30.0, ge=0)
    """How long SIGTERM waits for turns in flight before it aborts them."""
    freshness: bool = True
    """Whether the number of outstanding groups adapts, rather than staying at its largest."""
    engine: dict[str, object] = Field(default_factory=dict[str, object])
    """vLLM's options by their own names."""
    leases: Leases = Leases()
    weights: Weights = Weights()
    streaming: Streaming = Streaming()
    limits: Limits = Limits()

    def engine_options(self) -> list[str]:
        """The engine table as command-line options."""
        options: list[str] = []
        for name, value in self.engine.items():
            flag = f"--{name.replace('_', '-')}"
            if value is True:
                options.append(flag)
            elif value is False:
                options.append(f"--no-{flag[2:]}")
            elif isinstance(value, dict):
                options += [flag, json.dumps(value)]
            elif isinstance(value, list):
                options += [flag, *(str(item) for item in cast("list[object]", value))]
            else:
                options += [flag, str(value)]
        return options


def load(path: Path | None, settings: list[str]) -> ServeConfig:
    """Reads a TOML file and applies `section.key=value` settings over it.

    Raises ConfigError where the file cannot be read or a value does not fit.
    """
    table: dict[str, object] = {}
    if path is not None:
        try:
            table = tomllib.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: {error}") from error
    for setting in settings:
        _apply(table, setting)
    try:
        config = ServeConfig.model_validate(table)
        split_address(config.listen)
    except ValidationError as error:
        found = [
            f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']}, got {item['input']!r}"
            for item in error.errors()
        ]
        raise ConfigError("; ".join(found)) from error
    except ValueError as error:
        raise ConfigError(f"listen: {error}") from error
    return config


def _apply(table: dict[str, object], setting: str) -> None:
    key, separator, text = setting.partition("=")
    if not separator or not key:
        raise ConfigError(f"a setting reads section.key=value, got {setting!r}")
    try:
        value: object = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *sections, name = key.split(".")
    for section in sections:
        inner = table.setdefault(section, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{section} is not a section, in {setting!r}")
        table = cast("dict[str, object]", inner)
    table[name] = value
