"""The typed content of `search.toml`. Every field has a default, so a file sets only what differs.

The agent runs in workers of `penstock rollout`, which passes no options to agents. So the launcher writes
all settings, with the addresses of the servers that it started, to a file. `RESEARCH_SETTINGS` names that
file.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from research.replicas import Balance
from research.retrieval_client import Method

VARIABLE = "RESEARCH_SETTINGS"


class SettingsInvalid(Exception):
    """The settings cannot be used; the message names the error."""


class Section(BaseModel):
    """A section: immutable, and strict about its keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class RetrievalSettings(Section):
    """The retrieval servers and how they are called."""

    method: Method = "bm25"
    """What searches the chunks. embeddings and hybrid load a sentence-embedding model in each server."""
    shards: int = Field(default=1, ge=1)
    """Parts of the corpus; each part has its own servers."""
    replicas: int = Field(default=2, ge=1)
    """Servers of each shard."""
    servers: tuple[tuple[str, ...], ...] = ()
    """URLs of servers that already run, by shard. If empty, the launcher starts servers."""
    balance: Balance = "least_outstanding"
    window_seconds: float = Field(default=0.005, ge=0)
    """How long the first query of a batch waits for others."""
    max_batch: int = Field(default=64, ge=1)
    timeout_seconds: float = Field(default=10.0, gt=0)
    """Time limit of one call to one server."""
    patience_seconds: float = Field(default=30.0, gt=0)
    """How long a search is retried before it counts as a tool error."""
    count: int = Field(default=1, ge=1)
    """Chunks shown for each query."""


class AgentSettings(Section):
    """Limits of the policy in an attempt."""

    calls: Literal["text", "tools"] = "text"
    """How the policy calls: "text" uses lines of text, which a small model can learn; "tools" uses the tool
    calls of its chat template."""
    max_turns: int = Field(default=3, ge=1)
    """Turns without an answer after which the attempt is stopped."""
    max_parallel: int = Field(default=3, ge=1)
    """Most searches in one turn; more stop the attempt."""
    max_calls: int = Field(default=6, ge=1)
    """Most searches in an attempt; more stop it."""
    max_repeats: int = Field(default=0, ge=0)
    """Most repeated searches for the same words; more stop the attempt."""
    mask_overlong: bool = True
    """Whether an attempt that was cut off by a token budget or the context carries no gradient."""
    on_tool_error: Literal["mask", "fail"] = "mask"
    """What happens to an attempt if a search or refinement fails. With "mask", the policy gets an error
    message, and the attempt continues but carries no gradient. With "fail", it fails and is repeated."""


class RewardSettings(Section):
    """The parts of the reward. An attempt that was stopped has reward 0, whatever it found."""

    f1: float = Field(default=0.7, ge=0)
    """Weight of the answer's F1."""
    found: float = Field(default=0.3, ge=0)
    """Reward if a search found a chunk with the answer."""


class RefineSettings(Section):
    """A second model that reads what was found and summarizes it for the policy."""

    servers: tuple[str, ...] = ()
    """Base URLs of OpenAI-compatible servers, such as http://127.0.0.1:8000/v1. If empty, nothing is
    refined."""
    model: str = ""
    """The model's name on the servers."""
    key_variable: str = "REFINE_API_KEY"
    """Environment variable with their API key; if it is unset, no key is sent."""
    max_tokens: int = Field(default=96, ge=1)
    temperature: float = Field(default=0.0, ge=0)
    balance: Balance = "least_outstanding"
    timeout_seconds: float = Field(default=60.0, gt=0)
    patience_seconds: float = Field(default=120.0, gt=0)


class Settings(Section):
    """All settings of the example."""

    retrieval: RetrievalSettings = RetrievalSettings()
    agent: AgentSettings = AgentSettings()
    reward: RewardSettings = RewardSettings()
    refine: RefineSettings = RefineSettings()


def load(path: Path) -> Settings:
    """Reads a file. Raises SettingsInvalid."""
    try:
        return Settings.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise SettingsInvalid(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, ValidationError) as error:
        raise SettingsInvalid(f"{path}: {error}") from error


def from_environment() -> Settings:
    """Reads the settings that the launcher wrote. Raises SettingsInvalid."""
    if VARIABLE not in os.environ:
        raise SettingsInvalid(f"{VARIABLE} is not set: start the agent with launch.py")
    return load(Path(os.environ[VARIABLE]))
