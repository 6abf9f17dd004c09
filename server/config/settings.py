"""Configuration of `penstock serve`: one TOML file, whose tables are the sections below.

`--set section.key=value` overrides a field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, cast

from pydantic import Field, field_validator

from penstock.common.explaining import read_config
from penstock.common.section import Section
from penstock.common.settings import SettingInvalid
from penstock.server.config.journal import JournalSection
from penstock.server.config.limits import LeasesSection, LimitsSection
from penstock.server.config.pool import PeersSection, PoolSection
from penstock.wire.channel import LAST_PORT, is_loopback, split_address


class ConfigError(Exception):
    """The configuration cannot be used. The message names the offending value."""


class AddressInUse(Exception):
    """The server cannot listen on the address."""


class WeightsSection(Section):
    """How the server receives weight versions and switches to them."""

    in_flight: Literal["keep", "recompute", "drain", "abort"] = "keep"
    """What happens to turns in flight during a switch, if the trainer does not choose."""
    stage_folder: Path | None = None
    """Folder where uploads are staged. Defaults to shared memory, or to the temporary folder if
    shared memory is small."""
    max_staged: int = Field(default=2, ge=1)
    """Most versions staged in addition to the active one. The oldest is removed to make room."""
    await_trainer: bool = False
    """Whether turns wait until a trainer is connected and the version it holds is active. Use it for a
    server that is restarted in the middle of a run. With a journal the server detects this on its own."""
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


class StreamingSection(Section):
    """How turns are streamed if the caller does not choose."""

    flush_seconds: float = Field(default=0.2, ge=0, le=60)
    """Longest time that sampled tokens wait before they are sent."""
    interval: int = Field(default=16, ge=1)
    """How many tokens the engine gathers before it hands them over."""


class HttpSection(Section):
    """The HTTP endpoints, compatible with the SDKs of other services; see docs/guides/endpoints.md."""

    listen: str | None = None
    """HOST:PORT. Defaults to gRPC's host and the port after gRPC's, or a free port if gRPC's is 0 or the
    last one. An empty string turns the endpoints off."""

    @field_validator("listen")
    @classmethod
    def _check_listen(cls, value: str | None) -> str | None:
        if value:
            split_address(value)
        return value

    def address(self, beside: str, port: int) -> str | None:
        """Returns the address for HTTP, or None if it is off. gRPC was configured with the address
        `beside` and listens on `port`."""
        if self.listen is not None:
            return self.listen or None
        host, asked = split_address(beside)
        return f"{host}:{port + 1 if 0 < asked < LAST_PORT else 0}"


class ConversationSection(Section):
    """How the policy's messages in a conversation are parsed; see docs/concepts/conversations.md."""

    tool_parser: str = ""
    """vLLM's name of the parser that finds tool calls, such as "hermes". If empty, they remain text."""
    reasoning_parser: str = ""
    """vLLM's name of the parser that finds reasoning, such as "qwen3". If empty, it remains text."""


class SecuritySection(Section):
    """Who may connect and how connections are protected; see docs/operations/security.md."""

    certificate: Path | None = None
    """PEM file of the server's certificate and its chain. With `certificate` and `key`, connections
    use TLS only."""
    key: Path | None = None
    """PEM file of the private key of `certificate`."""
    client_ca: Path | None = None
    """PEM file of the authority of client certificates. If set, connections use mutual TLS only."""
    tokens: Path | None = None
    """File of tokens and roles that `penstock token` writes. Without it callers are not authenticated."""
    insecure: bool = False
    """Whether the server may listen on a non-loopback address without the settings above. Only for
    a network that is closed by other means."""


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
    leases: LeasesSection = LeasesSection()
    weights: WeightsSection = WeightsSection()
    journal: JournalSection = JournalSection()
    streaming: StreamingSection = StreamingSection()
    http: HttpSection = HttpSection()
    conversation: ConversationSection = ConversationSection()
    limits: LimitsSection = LimitsSection()
    pool: PoolSection = PoolSection()
    peers: PeersSection = PeersSection()
    security: SecuritySection = SecuritySection()

    @field_validator("listen")
    @classmethod
    def _check_listen(cls, value: str) -> str:
        split_address(value)
        return value

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


OPTIONS = {
    "listen": "--listen",
    "http.listen": "--http-listen",
    "pool.engines": "--engines",
    "engine.model": "--model",
}
"""Options of `penstock serve` that set a value, by its name."""


def labelled(options: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """The values of options with the options' own names, for `read_with_origins`."""
    return {name: (OPTIONS[name], value) for name, value in options.items()}


def load(
    path: Path | None, settings: list[str], options: Mapping[str, str] | None = None
) -> ServeConfig:
    """Reads a TOML file and applies `section.key=value` settings over it, then `options` by name.

    Raises ConfigError with a line per mistake if the file cannot be read or a value is invalid.
    """
    try:
        config = read_config(ServeConfig, path, settings, labelled(options or {}))
    except SettingInvalid as error:
        raise ConfigError(str(error)) from error
    for address in config.addresses.values():
        check_exposure(address, config.security)
    return config


def check_exposure(listen: str, security: SecuritySection) -> None:
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
