"""What `search.toml` says, typed; every field has a default, so that a file says only what differs.

The agent runs in workers that `penstock rollout` starts, which take no options of an agent's. So the
launcher writes all of it, with the addresses of what it started, to a file, and names that in
`RESEARCH_SETTINGS`.
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
    """The file cannot be used; the message names what is wrong."""


class Section(BaseModel):
    """Frozen, and without keys that nobody reads."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class RetrievalSettings(Section):
    """The retrieval servers and how they are asked."""

    method: Method = "bm25"
    """hybrid and embeddings load a sentence-embedding model in each server."""
    shards: int = Field(default=1, ge=1)
    """Parts of the corpus, each with servers of its own."""
    replicas: int = Field(default=2, ge=1)
    """Servers of each part."""
    servers: tuple[tuple[str, ...], ...] = ()
    """URLs of servers that run already: those of each part. Empty: the launcher starts them."""
    balance: Balance = "least_outstanding"
    window_seconds: float = Field(default=0.005, ge=0)
    """How long a server lets the first query of a batch wait for others."""
    max_batch: int = Field(default=64, ge=1)
    timeout_seconds: float = Field(default=10.0, gt=0)
    """Of one call of one server."""
    patience_seconds: float = Field(default=30.0, gt=0)
    """How long a search goes on being tried before it is a tool error."""
    count: int = Field(default=1, ge=1)
    """Chunks shown for each query."""


class AgentSettings(Section):
    """What the policy may do."""

    calls: Literal["text", "tools"] = "text"
    """How it calls: by lines of text, which a small model can learn, or by tool calls of its template."""
    max_turns: int = Field(default=3, ge=1)
    """Turns without an answer that end an attempt."""
    max_parallel: int = Field(default=3, ge=1)
    """Searches of one turn; more end the attempt."""
    max_calls: int = Field(default=6, ge=1)
    """Searches of an attempt; more end it."""
    max_repeats: int = Field(default=0, ge=0)
    """Searches for the same words again; more end the attempt."""
    mask_overlong: bool = True
    """Whether an attempt that a token budget or the context cut off carries no gradient."""
    on_tool_error: Literal["mask", "fail"] = "mask"
    """What becomes of an attempt whose search or refinement failed: the policy is told, goes on, and the
    attempt carries no gradient; or it fails, and is made again."""


class RewardSettings(Section):
    """What counts. An attempt that was stopped has reward 0, whatever it found."""

    f1: float = Field(default=0.7, ge=0)
    """For an answer, times its F1."""
    found: float = Field(default=0.3, ge=0)
    """For a search that finds a chunk with the answer."""


class RefineSettings(Section):
    """A second model that reads what was found and tells the policy what matters."""

    servers: tuple[str, ...] = ()
    """Base URLs of OpenAI-compatible servers, such as http://127.0.0.1:8000/v1; none: no refining."""
    model: str = ""
    """As the servers know it."""
    key_variable: str = "REFINE_API_KEY"
    """Environment variable that has their key; unset: none is sent."""
    max_tokens: int = Field(default=96, ge=1)
    temperature: float = Field(default=0.0, ge=0)
    balance: Balance = "least_outstanding"
    timeout_seconds: float = Field(default=60.0, gt=0)
    patience_seconds: float = Field(default=120.0, gt=0)


class Settings(Section):
    """All of it."""

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
    """Those that the launcher wrote. Raises SettingsInvalid."""
    if VARIABLE not in os.environ:
        raise SettingsInvalid(f"{VARIABLE} names no file: start the agent with launch.py")
    return load(Path(os.environ[VARIABLE]))
