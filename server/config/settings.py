"""Configuration of `penstock serve`: one TOML file. Every field is also a command-line option.

listen = "127.0.0.1:50051"

[engine]                 # vLLM's own names, here and as options
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
from penstock.common.settings import SettingInvalid, read_settings
from penstock.common.token_file import redact
from penstock.server.core.memory_budget import default_bytes
from penstock.wire.channel import LAST_PORT, MAX_MESSAGE_BYTES, is_loopback, split_address

if TYPE_CHECKING:
    from penstock.wire.security import Security as ClientSecurity


RoutingPolicy = Literal["sticky", "least_loaded", "round_robin"]


class ConfigError(Exception):
    """The configuration cannot be used. The message names the offending value."""


class Leases(Section):
    """How long leases last and how many times an attempt is made."""

    seconds: float = Field(default=60.0, gt=0)
    """How long a lease lasts without a call on its trajectory."""
    grace_seconds: float = Field(default=10.0, gt=0)
    """How long a lease lasts at most after the agent's lease stream is lost."""
    max_attempts: int = Field(default=3, ge=1)
    """How many times an attempt is made before its failure becomes part of the group."""
    own_seconds: float = Field(default=7_200.0, gt=0)
    """How long an unleased trajectory stays open without a call on it or a turn in flight. An
    unleased trajectory is one that its agent opened without a lease or a group."""


class Weights(Section):
    """How the server receives weight versions and switches to them."""

    in_flight: Literal["keep", "recompute", "drain", "abort"] = "keep"
    """What happens to turns in flight during a switch, if the trainer does not choose."""
    stage_folder: Path | None = None
    """Folder where uploads are staged. Defaults to shared memory, or to the temporary folder if
    shared memory is small."""
    max_staged: int = Field(default=2, ge=1)
    """Most versions staged in addition to the active one. The oldest is removed to make room."""
    await_trainer: bool = False
    """Whether turns wait until a trainer is connected and the version it holds is active. Use it
    for a server that is restarted in the middle of a run. With a journal the server detects this on
    its own."""
    hold_active: bool = True
    """Whether the bytes of the active version stay in memory. Deltas apply to them, and the server
    returns to them if a version fails to load."""
    prepare_ahead: bool = True
    """Whether a version is prepared while generation continues, which keeps the pause short.
    Meanwhile the engine holds a second copy of the weights. If there is no room for one, or the
    kind of model does not allow it, the pause lasts for the whole load."""
    collective_seconds: float = Field(default=300.0, gt=0, le=86_400)
    """Longest time for joining a collective, and for each step of an upload through one. An engine
    that exceeds it is given up, and the server stops with it."""


class JournalSection(Section):
    """The journal: what survives a restart of the server."""

    folder: Path | None = None
    """Folder that keeps groups, outcomes and open trajectories. Without `folder` and `url` they are
    in memory only, and a restart loses them. Only one server may write to a folder."""
    url: str | None = None
    """nats://HOST:PORT of a NATS server with JetStream that keeps the journal instead of a folder.
    Unless `durability` is "fsync", it can list several servers of one cluster, separated by commas.
    Needs the extra `jetstream`; see docs/many-hubs.md."""
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
    """File of NATS credentials, as `nsc` writes it. `url` must not contain a password or a
    token."""
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


class Streaming(Section):
    """How turns are streamed if the caller does not choose."""

    flush_seconds: float = Field(default=0.2, ge=0, le=60)
    """Longest time that sampled tokens wait before they are sent."""
    interval: int = Field(default=16, ge=1)
    """How many tokens the engine gathers before it hands them over."""


class Http(Section):
    """The HTTP endpoints, compatible with the SDKs of other services; see docs/endpoints.md."""

    listen: str | None = None
    """HOST:PORT. Defaults to gRPC's host and the port after gRPC's, or a free port if gRPC's is 0 or the
    last one. An empty string turns the endpoints off."""

    def address(self, beside: str, port: int) -> str | None:
        """Returns the address for HTTP, or None if it is off. gRPC was configured with the address
        `beside` and listens on `port`."""
        if self.listen is not None:
            return self.listen or None
        host, asked = split_address(beside)
        return f"{host}:{port + 1 if 0 < asked < LAST_PORT else 0}"


class ConversationSection(Section):
    """How the policy's messages in a conversation are parsed; see docs/conversations.md."""

    tool_parser: str = ""
    """vLLM's name of the parser that finds tool calls, such as "hermes". If empty, they remain
    text."""
    reasoning_parser: str = ""
    """vLLM's name of the parser that finds reasoning, such as "qwen3". If empty, it remains
    text."""


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

    def shown(self) -> ClientSecurity:
        """The same settings in the form that channels take."""
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
    """Servers from which an upload tells this one to fetch a version; see docs/pool.md."""

    silent_seconds: float = Field(default=30.0, gt=0)
    """How long a peer may send nothing before the upload is refused."""


class Pool(_Calling):
    """Engine servers behind a hub; see docs/pool.md."""

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
    def _check_turns(self) -> Pool:
        if self.first_turns > self.most_turns:
            raise ValueError(f"first_turns is above most_turns, {self.most_turns}")
        return self


class Security(Section):
    """Who may connect and how connections are protected; see docs/security.md."""

    certificate: Path | None = None
    """PEM file of the server's certificate and its chain. With `certificate` and `key`, connections
    use TLS only."""
    key: Path | None = None
    """PEM file of the private key of `certificate`."""
    client_ca: Path | None = None
    """PEM file of the authority of client certificates. If set, connections use mutual TLS only."""
    tokens: Path | None = None
    """File of tokens and roles that `penstock token` writes. Without it callers are not
    authenticated."""
    insecure: bool = False
    """Whether the server may listen on a non-loopback address without the settings above. Only for
    a network that is closed by other means."""


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


class Limits(Section):
    """What the server holds at most. Beyond these limits callers get RESOURCE_EXHAUSTED."""

    open_trajectories: int = Field(default=8_192, ge=1)
    """Trajectories open at a time."""
    pending_tasks: int = Field(default=100_000, ge=1)
    """Tasks waiting for a worker."""
    groups_without_trainer: int = Field(default=256, ge=1)
    """Training groups begun and not yet delivered while no trainer has declared its staleness
    contract."""
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


class ServeConfig(Section):
    """All settings of `penstock serve`."""

    listen: str = "127.0.0.1:50051"
    """HOST:PORT. With port 0 the server takes a free port and prints it."""
    drain_seconds: float = Field(default=30.0, ge=0)
    """How long SIGTERM waits for turns in flight before it aborts them."""
    freshness: bool = True
    """Whether the number of outstanding groups adapts instead of staying at its maximum."""
    engine: dict[str, object] = Field(default_factory=dict[str, object])
    """vLLM's options under their own names."""
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
        """Every address that the server is to listen on, by the name of its setting."""
        named = {"listen": self.listen, "http.listen": self.http.listen}
        return {name: address for name, address in named.items() if address}

    def engine_options(self) -> list[str]:
        """The engine table as vLLM command-line options."""
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

    Raises ConfigError if the file cannot be read or a value is invalid.
    """
    try:
        config = ServeConfig.model_validate(read_settings(path, settings))
    except SettingInvalid as error:
        raise ConfigError(str(error)) from error
    except ValidationError as error:
        found: list[str] = []
        for item in error.errors():
            place, got = ".".join(map(str, item["loc"])), f", got {item['input']!r}"
            # Some messages already name the value.
            said = item["msg"].removeprefix("Value error, ").removesuffix(got)
            found.append(f"{place}: {said}{got}")
        # The refused value can be an address that contains a password.
        raise ConfigError(re.sub(r"//[^/@\s]+@", "//***@", redact("; ".join(found)))) from None
    for name, address in config.addresses.items():
        try:
            split_address(address)
        except ValueError as error:
            raise ConfigError(f"{name}: {error}") from error
        check_exposure(address, config.security)
    return config


def check_exposure(listen: str, security: Security) -> None:
    """Raises ConfigError if anyone outside could call the server or eavesdrop on its callers."""
    if (security.certificate is None) != (security.key is None):
        raise ConfigError("security.certificate and security.key must be given together")
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
            "security.insecure=true if the network is closed by other means"
        )
