"""Configuration of the journal: the table [journal]."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, cast

from pydantic import Field, ValidationInfo, field_validator, model_validator

from penstock.common.section import Section


class JournalSection(Section):
    """The journal: what survives a restart of the server."""

    folder: Path | None = None
    """Folder that keeps groups, outcomes and open trajectories. Without `folder` and `url` they are
    in memory only, and a restart loses them. Only one server may write to a folder."""
    url: str | None = None
    """nats://HOST:PORT of a NATS server with JetStream that keeps the journal instead of a folder.
    Unless `durability` is "fsync", it can list several servers of one cluster, separated by commas.
    Needs the extra `jetstream`; see docs/operations/many-hubs.md."""
    stream: str = "PENSTOCK"
    """Name of the stream there; it is created if it does not exist. Only one server may write to a
    stream."""
    durability: Literal["fsync", "process", "none"] = "fsync"
    """What an acknowledged call survives: loss of power ("fsync"), kill -9 of the server
    ("process"), or nothing ("none"). It is "none" if neither `folder` nor `url` is set. "fsync"
    with `url` needs `monitor`."""
    monitor: str | None = None
    """http://HOST:PORT of the NATS server's monitoring endpoint. It reports whether the NATS server
    syncs every write."""
    credentials: Path | None = None
    """File of NATS credentials, as `nsc` writes it. `url` must not contain a password or a token."""
    ca: Path | None = None
    """PEM file of the authority that signed the NATS server's certificate. With `ca` or
    `certificate`, connections use TLS only."""
    certificate: Path | None = None
    """PEM file of this server's own certificate, for mutual TLS."""
    key: Path | None = None
    """PEM file of the private key of `certificate`."""
    patience_seconds: float = Field(default=60.0, gt=0)
    """How long the NATS server may be unreachable while an operation waits for it. After that this
    server stops, as it does when a disk fails."""
    max_bytes: int = Field(default=64 << 30, ge=4 << 20)
    """Size limit of the journal on disk or in the stream. Live data can use nearly a third of it.
    The rest is for data that compaction is about to free and for the copy it makes. Beyond that
    callers get DISK_FULL."""
    refers_from_bytes: int = Field(default=16 << 10, ge=1)
    """Segments of this many bytes or more are not written again when their group finishes. The
    group's record refers to those of its turns instead, and the trainer reads each one separately.
    Has no effect with `url`."""
    segment_bytes: int = Field(default=128 << 20, ge=1 << 20)
    """Size of one file, which is allocated in full. It is never more than a sixteenth of
    `max_bytes`. In a stream, how many unneeded bytes start a compaction."""

    @field_validator("stream")
    @classmethod
    def _check_stream(cls, value: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,128}", value):
            raise ValueError("must be letters, digits, - and _")
        return value

    @field_validator("url", "monitor")
    @classmethod
    def _check_addresses(cls, value: str | None, info: ValidationInfo) -> str | None:
        known = ("nats://", "tls://") if info.field_name == "url" else ("http://", "https://")
        for address in [] if value is None else value.split(","):
            if not address.startswith(known):
                raise ValueError(f"must begin with {' or '.join(known)}")
            if "@" in address:
                raise ValueError("must hold neither user nor password; name a file of credentials")
        return value

    @model_validator(mode="before")
    @classmethod
    def _without_a_place(cls, table: object) -> object:
        """Defaults `durability` to "none" if neither a folder nor a URL is given."""
        if not isinstance(table, dict):
            return table
        given = cast("dict[str, object]", table)
        if given.get("folder") is None and given.get("url") is None:
            return {"durability": "none", **given}
        return given

    @model_validator(mode="after")
    def _check_place(self) -> JournalSection:
        if self.url is None and self.folder is None and self.durability != "none":
            raise ValueError(
                f'durability "{self.durability}" needs folder or url; without them nothing is on disk'
            )
        if self.url is not None and self.folder is not None:
            raise ValueError("folder and url are mutually exclusive")
        if self.url is not None and self.durability == "fsync" and self.monitor is None:
            raise ValueError(
                'with url, durability "fsync" needs monitor, which reports whether the NATS server '
                'syncs every write; durability "process" does not'
            )
        if self.url is not None and self.durability == "fsync" and "," in self.url:
            raise ValueError(
                f'durability "fsync" needs a single server in url, the one behind monitor; got {self.url}'
            )
        if self.key is not None and self.certificate is None:
            raise ValueError("key needs certificate")
        return self
