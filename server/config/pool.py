"""Configuration of a hub's pool and of peers: the tables [pool] and [peers]."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field, field_validator, model_validator

from penstock.common.section import Section
from penstock.wire.channel import split_address

if TYPE_CHECKING:
    from penstock.wire.security import Security

RoutingPolicy = Literal["sticky", "least_loaded", "round_robin"]


class _Calling(Section):
    """How this server connects to other servers: what it trusts and what it presents."""

    tls: bool = False
    """Whether connections use TLS. Implied by `ca` and `certificate`."""
    ca: Path | None = None
    """PEM file of the authority that signed their certificates."""
    certificate: Path | None = None
    """PEM file of this server's own certificate, for mutual TLS."""
    key: Path | None = None
    """PEM file of the private key of `certificate`."""
    server_name: str = ""
    """Name in their certificates, if it differs from the host of the address."""
    token_file: Path | None = None
    """File with a token for them. A hub needs a token with the role admin; a peer accepts trainer
    or admin."""

    def shown(self) -> Security:
        """The same settings in the form that channels take."""
        from penstock.wire.security import Security

        return Security(**self.model_dump(include=set(_Calling.model_fields)))


class PeersSection(_Calling):
    """Servers from which an upload tells this one to fetch a version;
    see docs/operations/many-engines.md."""

    silent_seconds: float = Field(default=30.0, gt=0)
    """How long a peer may send nothing before the upload is refused."""


class PoolSection(_Calling):
    """Engine servers behind a hub; see docs/operations/many-engines.md."""

    engines: tuple[str, ...] = ()
    """Addresses of the engine servers. Each is HOST:PORT, dns:HOST:PORT for every address of a
    name, or file:PATH for a file with one address a line. Names and files are looked up again every
    `discover_seconds`. If set, this server does not start an engine itself."""
    switch: Literal["rolling", "all"] = "rolling"
    """How engines switch to a version: "rolling" switches some at a time, so that generation never
    stops everywhere; "all" switches all of them at once."""
    switch_part: float = Field(default=0.5, gt=0, le=1)
    """Fraction of the engines that switch at the same time with "rolling"; at least one does."""
    routing: RoutingPolicy = "sticky"
    """Which engine takes a turn. With "sticky" it is the engine that has the turn's prefix in its
    cache, unless that engine is much busier than another. With "least_loaded" it is the least busy
    engine. With "round_robin" engines take turns."""
    margin: float = Field(default=0.25, ge=0)
    """How much busier than the least busy engine the engine with the cached prefix may be, as a
    fraction of its limit."""
    first_turns: int = Field(default=32, ge=1)
    """How many turns an engine gets at a time until its load shows how many it can take."""
    most_turns: int = Field(default=4_096, ge=1)
    """Most turns that an engine ever gets at a time."""
    look_seconds: float = Field(default=1.0, gt=0)
    """Interval between two polls of an engine's load; longer in a large pool."""
    silent_seconds: float = Field(default=600.0, gt=0)
    """Longest time that an engine with turns samples no token, before its turns continue on other
    engines. Time spent in switches does not count. Set it above the time that the longest prompt
    alone takes to its first token."""
    discover_seconds: float = Field(default=5.0, gt=0)
    """Interval between two lookups of the engines' addresses."""
    stage_seconds: float = Field(default=600.0, gt=0)
    """Longest time that an engine takes to receive a version, counted from the request to switch to
    it. After that it leaves the rotation. Allow more for slow links. Set it to several times
    `peers.silent_seconds`, after which an engine whose source hangs fetches from another."""
    switch_seconds: float = Field(default=600.0, gt=0)
    """Longest time that an engine takes to switch, including its turns in flight, before it is
    given up."""
    branches: int = Field(default=2, ge=0)
    """How many hosts the hub and each host forward a version to. 1 makes a chain and 2 or more a
    tree. With 0 the hub sends it to every host directly."""
    differences: bool = True
    """Whether hosts that hold the previous version receive only what changed, if that is fewer
    bytes out of the hub. The hub then has to compare both versions."""

    @field_validator("engines", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        """Splits HOST:PORT,HOST:PORT, the form used on the command line."""
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return value

    @field_validator("engines")
    @classmethod
    def _check(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for entry in value:
            kind, separator, rest = entry.partition(":")
            if kind != "file" or not separator or not rest:
                split_address(rest if kind == "dns" else entry)
        return value

    @model_validator(mode="after")
    def _check_turns(self) -> PoolSection:
        if self.first_turns > self.most_turns:
            raise ValueError(f"first_turns is above most_turns, {self.most_turns}")
        return self
