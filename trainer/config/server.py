"""`[server]`: the addresses of the rollout servers, and how to connect to them."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, field_validator

from penstock.common.section import Section
from penstock.wire.channel import check_target


class ServerConfig(Section):
    """The rollout server or servers."""

    address: str | tuple[str, ...] = "127.0.0.1:50051"
    """HOST:PORT of the server. A list divides the run over several servers; see
    docs/operations/many-hubs.md."""
    tls: bool = False
    """Whether the connection is encrypted; implied by `ca` and `certificate`."""
    ca: Path | None = None
    """PEM file of the authority that signed the server's certificate; unset for gRPC's default roots."""
    certificate: Path | None = None
    """PEM file of the trainer's certificate, for mutual TLS."""
    key: Path | None = None
    """PEM file of the certificate's private key."""
    server_name: str = ""
    """Name in the server's certificate, if it differs from the address."""
    token_file: Path | None = None
    """File with the token to present, read again for each call; unset for the variable PENSTOCK_TOKEN."""
    give_up_after_seconds: float = Field(default=120.0, gt=0)
    """How long a server may be unreachable, at the start or during the run, before the trainer stops."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """The address of every server. All other settings apply to each of them."""
        return (self.address,) if isinstance(self.address, str) else self.address

    @field_validator("address")
    @classmethod
    def _each_once(cls, address: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not address:
            raise ValueError("must be HOST:PORT, or a list of at least one")
        each = (address,) if isinstance(address, str) else address
        for one in each:
            check_target(one)
        if twice := next((one for one in each if each.count(one) > 1), None):
            raise ValueError(f"{twice} is listed twice; list each server once")
        return address
