"""Configuration of `penstock serve`: one TOML file, each field also on the command line.

listen = "127.0.0.1:50051"

[engine]                 # vLLM's own names; here and as options
model = "HuggingFaceTB/SmolLM2-135M-Instruct"
dtype = "bfloat16"
max-model-len = 2048

[leases]
seconds = 60

[security]
certificate = "server.pem"
key = "server-key.pem"
tokens = "tokens.toml"
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from pydantic import (
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from penstock.common.section import Section
from penstock.common.settings import SettingInvalid, apply_setting, read_table
from penstock.common.token_file import redact
from penstock.server.core.memory_budget import default_bytes
from penstock.server.pool.routing import Policy
from penstock.wire.channel import LAST_PORT, MAX_MESSAGE_BYTES, is_loopback, split_address

if TYPE_CHECKING:
    from penstock.wire.security import Security as ClientSecurity


class ConfigError(Exception):
    """The configuration cannot be used; the message names the value it got."""


class Leases(Section):
    """How long leases last and how often an attempt is made."""

    seconds: float = Field(default=60.0, gt=0)
    """Length of a lease without a call on the trajectory."""
    grace_seconds: float = Field(default=10.0, gt=0)
    """What is left of it when the agent's lease stream is lost."""
    max_attempts: int = Field(default=3, ge=1)
    """Times an attempt is made before its failure becomes part of the group."""
    own_seconds: float = Field(default=7_200.0, gt=0)
    """How long a trajectory that its agent opened for itself, without a lease or a group, stays open
    without a call on it or a turn in flight."""


class Weights(Section):
    """How weight versions are taken and switched."""

    in_flight: Literal["keep", "recompute", "drain", "abort"] = "keep"
    """What happens to turns in flight where the trainer leaves it to the server."""
    stage_folder: Path | None = None
    """Where uploads are staged; unset is shared memory, or the temporary folder where that is small."""
    max_staged: int = Field(default=2, ge=1)
    """Versions staged beside the active one; the oldest makes room."""
    await_trainer: bool = False
    """Whether turns wait until a trainer is there and the version it holds is active: for a server that is
    started again in the middle of a run. With a journal that is known by itself."""
    hold_active: bool = True
    """Whether the bytes of the active version stay in memory: deltas apply to them, and a version that
    fails to load goes back to them."""
    prepare_ahead: bool = True
    """Whether a version is made ready while generation goes on, so that the pause is short: meanwhile the
    engine has a second copy of the weights. Where there is no room for one, or the model is of a kind for
    which it cannot be done, the pause is the whole load."""
    collective_seconds: float = Field(default=300.0, gt=0, le=86_400)
    """Longest time that joining a collective takes, and each step of an upload by one. Where the engine is
    not back by then it is given up, and the server with it."""


class JournalSection(Section):
    """What survives the server."""

    folder: Path | None = None
    """Where groups, outcomes and open trajectories are kept; without it and `url` they are in memory only,
    and a server that restarts has lost them. One server writes to a folder."""
    url: str | None = None
    """nats://HOST:PORT of a NATS server with JetStream, where they are kept instead; several, with commas
    between, of one cluster, unless `durability` is "fsync". Needs the extra `jetstream`;
    docs/many-hubs.md."""
    stream: str = "PENSTOCK"
    """Name of the stream there; it is made where there is none. One server writes to a stream."""
    durability: Literal["fsync", "process", "none"] = "fsync"
    """What an answer promises: that what it says survives the loss of power, or kill -9 of the server, or
    nothing, which is what is left where there is neither `folder` nor `url`. With `url` "fsync" needs
    `monitor`."""
    monitor: str | None = None
    """http://HOST:PORT at which the NATS server is monitored: it is asked whether it syncs every write."""
    credentials: Path | None = None
    """File of NATS credentials, as `nsc` writes it; in `url` no password and no token may stand."""
    ca: Path | None = None
    """PEM file of the authority that signed the NATS server's certificate; with it or `certificate`
    connections are made by TLS only."""
    certificate: Path | None = None
    """PEM file of a certificate of this server's own, for mutual TLS."""
    key: Path | None = None
    """PEM file of its private key."""
    patience_seconds: float = Field(default=60.0, gt=0)
    """Longest time that the NATS server may be away while something waits for it. Beyond it this server
    ends, as with a disk that fails."""
    max_bytes: int = Field(default=64 << 30, ge=4 << 20)
    """Most bytes on the disk, or in the stream. Nearly a third of them may be in use: the rest is for what
    compaction is about to free, and for its copy. Beyond that callers get DISK_FULL."""
    refers_from_bytes: int = Field(default=16 << 10, ge=1)
    """Of a finished group, segments of so many bytes or more are not written again: its record refers to
    those of its turns. Each is a read of its own for the trainer. Not with `url`."""
    segment_bytes: int = Field(default=128 << 20, ge=1 << 20)
    """Size of one file, allocated whole, and at most a sixteenth of `max_bytes` whatever stands here; in a
    stream, how much that nobody needs makes for a compaction."""

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
        """Nothing is promised that nobody asked for."""
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
                f'durability "{self.durability}" needs folder or url: without either all is in memory only'
            )
        if self.url is not None and self.folder is not None:
            raise ValueError("folder and url exclude each other")
        if self.url is not None and self.durability == "fsync" and self.monitor is None:
            raise ValueError(
                'with url, durability "fsync" needs monitor, where the NATS server says whether it syncs '
                'every write; durability "process" does not'
            )
        if self.url is not None and self.durability == "fsync" and "," in self.url:
            raise ValueError(
                f'durability "fsync" needs one server in url, the one that monitor is of; got {self.url}'
            )
        if self.key is not None and self.certificate is None:
            raise ValueError("key needs certificate")
        return self


class Streaming(Section):
    """How turns are streamed where the caller leaves it open."""

    flush_seconds: float = Field(default=0.2, ge=0, le=60)
    """Longest time tokens wait before they are sent."""
    interval: int = Field(default=16, ge=1)
    """Tokens the engine gathers before it hands them over."""


class Http(Section):
    """Endpoints that SDKs of other services know; docs/endpoints.md."""

    listen: str | None = None
    """HOST:PORT; unset is gRPC's host, and the port after gRPC's, or a free one where that is 0 or the last
    there is. Empty is off."""

    def address(self, beside: str, port: int) -> str | None:
        """Where to listen beside gRPC on the address `beside`, which got `port`; None where it is off."""
        if self.listen is not None:
            return self.listen or None
        host, asked = split_address(beside)
        return f"{host}:{port + 1 if 0 < asked < LAST_PORT else 0}"


class ConversationSection(Section):
    """How what the policy writes in a conversation is read; docs/conversations.md."""

    tool_parser: str = ""
    """vLLM's name of the parser that finds tool calls, such as "hermes"; empty leaves them text."""
    reasoning_parser: str = ""
    """vLLM's name of the parser that finds reasoning, such as "qwen3"; empty leaves it text."""


class _Calling(Section):
    """What is shown to other servers, and trusted of them."""

    tls: bool = False
    """Whether they are spoken to by TLS; implied by `ca` and `certificate`."""
    ca: Path | None = None
    """PEM file of the authority that signed their certificates."""
    certificate: Path | None = None
    """PEM file of this server's own, for mutual TLS."""
    key: Path | None = None
    """PEM file of its private key."""
    server_name: str = ""
    """Name that their certificates are for, where it is not the address's."""
    token_file: Path | None = None
    """File with a token there: of the role admin for a hub, of trainer or admin for a peer."""

    def shown(self) -> ClientSecurity:
        """The same, as channels are made with it."""
        from penstock.wire.security import Security

        return Security(
            tls=self.tls,
            ca=self.ca,
            certificate=self.certificate,
            key=self.key,
            server_name=self.server_name,
            token_file=self.token_file,
        )


class Peers(_Calling):
    """Servers that an upload says to take a version from; docs/pool.md."""

    silent_seconds: float = Field(default=30.0, gt=0)
    """How long one may send nothing before the upload is refused."""


class Pool(_Calling):
    """Engine servers behind a hub; docs/pool.md."""

    engines: tuple[str, ...] = ()
    """Where they are: HOST:PORT each; dns:HOST:PORT for every address of a name, looked up again and again;
    file:PATH for a file with one a line, likewise. Given, this server has no engine of its own."""
    switch: Literal["rolling", "all"] = "rolling"
    """Whether engines switch to a version in parts, so that generation never stops as a whole, or all at
    the same time."""
    switch_part: float = Field(default=0.5, gt=0, le=1)
    """Part of the engines that switch at the same time with "rolling"; at least one does."""
    routing: Policy = "sticky"
    """Which engine takes a turn: with "sticky" the one that has its prefix in its cache, unless that is
    much busier than another; with "least_loaded" the least busy one; with "round_robin" each in turn."""
    margin: float = Field(default=0.25, ge=0)
    """How much busier than the least busy engine one may be that has a turn's prefix in its cache, as a
    part of its limit."""
    first_turns: int = Field(default=32, ge=1)
    """Turns that an engine is given at a time, until its load says how many it can have."""
    most_turns: int = Field(default=4_096, ge=1)
    """Most that it is ever given."""
    look_seconds: float = Field(default=1.0, gt=0)
    """Between two looks at an engine's load; longer in a large pool."""
    silent_seconds: float = Field(default=600.0, gt=0)
    """Longest time that an engine has turns and samples no token of any of them, before those go on
    elsewhere; switches are left out. Longer than the first token of the longest prompt takes alone."""
    discover_seconds: float = Field(default=5.0, gt=0)
    """Between two looks for addresses."""
    stage_seconds: float = Field(default=600.0, gt=0)
    """Longest time that an engine takes to have all of a version, after the switch to it was asked for,
    before it leaves the rotation; longer where links are slow. Some times `peers.silent_seconds`, after
    which one whose source hangs takes it from another."""
    switch_seconds: float = Field(default=600.0, gt=0)
    """Longest time that an engine takes to switch, its turns in flight included, before it is given up."""
    branches: int = Field(default=2, ge=0)
    """Hosts that the hub, and each host, hands a version on to. 1 makes a chain of them, 2 and more a tree;
    with 0 the hub sends it to each by itself."""
    differences: bool = True
    """Whether hosts that hold the version before are sent what changed, where that is fewer bytes out of
    the hub; it costs the hub a comparison of both."""

    @field_validator("engines", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        """HOST:PORT,HOST:PORT, as on the command line."""
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
    def _check_turns(self) -> Pool:
        if self.first_turns > self.most_turns:
            raise ValueError(f"first_turns is above most_turns, {self.most_turns}")
        return self


class Security(Section):
    """Who is let in, and what the connection is; docs/security.md."""

    certificate: Path | None = None
    """PEM file of the server's certificate and what it was signed by; with it and `key` connections are
    made by TLS only."""
    key: Path | None = None
    """PEM file of its private key."""
    client_ca: Path | None = None
    """PEM file of the authority of client certificates; with it connections are made by mutual TLS only."""
    tokens: Path | None = None
    """File of tokens and roles that `penstock token` writes; without it nobody is asked who it is."""
    insecure: bool = False
    """Whether an address that is not of loopback may be listened on without the above: where the network
    is closed otherwise."""


class CallerLimits(Section):
    """What one caller has open at most: one token, one client certificate or, where nobody is asked who it
    is, one host."""

    calls: int = Field(default=8_192, ge=1)
    """Calls open at a time."""
    turns_in_flight: int = Field(default=8_192, ge=1)
    """Turns begun and not ended."""
    tokens_in_flight: int = Field(default=1 << 28, ge=1)
    """Tokens of the turns in flight: their contexts, and what they may still sample. The turn that comes
    to be over it still begins."""
    open_trajectories: int = Field(default=8_192, ge=1)
    """Trajectories opened and not closed."""
    unread_bytes: int | None = Field(default=None, ge=1)
    """Bytes of answers that it has not read yet, and of requests over HTTP that are not whole yet; one
    alone may be longer. Unset is a sixteenth of `limits.memory_bytes`."""
    message_bytes: int = Field(default=MAX_MESSAGE_BYTES, ge=1, le=MAX_MESSAGE_BYTES)
    """Length of one message."""


class Limits(Section):
    """What the server holds at most; beyond it callers get RESOURCE_EXHAUSTED."""

    open_trajectories: int = Field(default=8_192, ge=1)
    """Trajectories open at a time."""
    pending_tasks: int = Field(default=100_000, ge=1)
    """Tasks waiting for an agent."""
    groups_without_trainer: int = Field(default=256, ge=1)
    """Training groups begun and not delivered while no trainer has named its staleness contract."""
    evaluation_groups: int = Field(default=256, ge=1)
    """Evaluation groups begun and not delivered."""
    memory_bytes: int = Field(default_factory=default_bytes, ge=16 << 20)
    """Most memory for trajectories, groups and tasks together; by default a quarter of the machine's."""
    stalled_seconds: float = Field(default=60.0, gt=0)
    """Longest time that an answer waits for its caller to read, before the caller is cut off; and that a
    request takes to be whole, over HTTP each 256 KiB of it."""
    concurrent_calls: int = Field(default=16_384, ge=1)
    """Calls open at a time."""
    caller: CallerLimits = CallerLimits()
    """What one caller has of all this."""


class ServeConfig(Section):
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
    journal: JournalSection = JournalSection()
    streaming: Streaming = Streaming()
    http: Http = Http()
    conversation: ConversationSection = ConversationSection()
    limits: Limits = Limits()
    pool: Pool = Pool()
    peers: Peers = Peers()
    security: Security = Security()

    @property
    def addresses(self) -> dict[str, str]:
        """Every address that it names to listen on, by the name of its setting."""
        named = {"listen": self.listen, "http.listen": self.http.listen}
        return {name: address for name, address in named.items() if address}

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
    try:
        table = read_table(path) if path is not None else {}
        for setting in settings:
            apply_setting(table, setting)
    except SettingInvalid as error:
        raise ConfigError(str(error)) from error
    try:
        config = ServeConfig.model_validate(table)
    except ValidationError as error:
        found: list[str] = []
        for item in error.errors():
            place, got = ".".join(map(str, item["loc"])), f", got {item['input']!r}"
            # Some say it themselves.
            said = item["msg"].removeprefix("Value error, ").removesuffix(got)
            found.append(f"{place}: {said}{got}")
        # What is refused may be an address with a password in it.
        raise ConfigError(re.sub(r"//[^/@\s]+@", "//***@", redact("; ".join(found)))) from None
    for name, address in config.addresses.items():
        try:
            split_address(address)
        except ValueError as error:
            raise ConfigError(f"{name}: {error}") from error
        check_exposure(address, config.security)
    return config


def check_exposure(listen: str, security: Security) -> None:
    """Raises ConfigError where anybody could come in from outside, or listen to those who may."""
    if (security.certificate is None) != (security.key is None):
        raise ConfigError("security.certificate and security.key are given together")
    if security.client_ca is not None and security.certificate is None:
        raise ConfigError("security.client_ca needs security.certificate and security.key")
    if security.client_ca is not None and security.tokens is None:
        raise ConfigError("security.client_ca needs security.tokens, which names the roles")
    if security.insecure or is_loopback(listen):
        return
    missing = [name for name in ("certificate", "key", "tokens") if not getattr(security, name)]
    if missing:
        names = ", ".join(f"security.{name}" for name in missing)
        raise ConfigError(
            f"{listen} can be reached from outside and needs {names}; listen on 127.0.0.1, or set "
            "security.insecure=true where the network is closed otherwise"
        )
