"""Configuration of leases and limits: the tables [leases] and [limits]."""

from __future__ import annotations

from pydantic import Field

from penstock.common.section import Section
from penstock.server.core.memory_budget import default_bytes
from penstock.wire.channel import MAX_MESSAGE_BYTES


class LeasesSection(Section):
    """How long leases last and how many times an attempt is made."""

    seconds: float = Field(default=60.0, gt=0)
    """How long a lease lasts without a call on its trajectory."""
    grace_seconds: float = Field(default=10.0, gt=0)
    """How long a lease lasts at most after the agent's lease stream is lost."""
    attempt_seconds: float = Field(default=3_600.0, gt=0)
    """How long an attempt may take, from its lease to its close, and how long a group may take that its
    agent opened without a lease. After this and `grace_seconds` the server takes it back, although its
    agent is alive: an attempt that never ends would never free its group's place."""
    max_attempts: int = Field(default=3, ge=1)
    """How many times an attempt is made before its failure becomes part of the group."""
    own_seconds: float = Field(default=7_200.0, gt=0)
    """How long an unleased trajectory stays open without a call on it or a turn in flight. An
    unleased trajectory is one that its agent opened without a lease or a group."""


class CallerLimits(Section):
    """What one caller may have open. A caller is one token or one client certificate, or one host
    if callers are not authenticated."""

    calls: int = Field(default=8_192, ge=1)
    """Calls open at a time."""
    turns_in_flight: int = Field(default=8_192, ge=1)
    """Turns in flight at a time."""
    tokens_in_flight: int = Field(default=1 << 28, ge=1)
    """Tokens of the turns in flight: their contexts and what they may still sample. The turn that
    first exceeds the limit still begins."""
    open_trajectories: int = Field(default=8_192, ge=1)
    """Trajectories open at a time."""
    unread_bytes: int | None = Field(default=None, ge=1)
    """Bytes of answers that the caller has not read yet, and of incomplete HTTP requests. A single
    one may be longer. Defaults to a sixteenth of `limits.memory_bytes`."""
    message_bytes: int = Field(default=MAX_MESSAGE_BYTES, ge=1, le=MAX_MESSAGE_BYTES)
    """Bytes of one message."""


class LimitsSection(Section):
    """What the server holds at most. Beyond these limits callers get RESOURCE_EXHAUSTED."""

    open_trajectories: int = Field(default=8_192, ge=1)
    """Trajectories open at a time."""
    pending_tasks: int = Field(default=100_000, ge=1)
    """Tasks waiting for a worker."""
    groups_without_trainer: int = Field(default=256, ge=1)
    """Training groups begun and not yet delivered while no trainer has declared its staleness contract."""
    evaluation_groups: int = Field(default=256, ge=1)
    """Evaluation groups begun and not yet delivered."""
    memory_bytes: int = Field(default_factory=default_bytes, ge=16 << 20)
    """Memory for trajectories, groups and tasks together. Defaults to a quarter of the machine's
    memory."""
    stalled_seconds: float = Field(default=60.0, gt=0)
    """How long an answer waits for its caller to read it before the server disconnects the caller.
    Also how long a request may take to arrive; over HTTP, how long each 256 KiB of it may take."""
    concurrent_calls: int = Field(default=16_384, ge=1)
    """Calls open at a time."""
    caller: CallerLimits = CallerLimits()
    """Limits of one caller."""
