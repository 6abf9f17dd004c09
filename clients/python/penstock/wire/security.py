"""Authentication between client and server; all channels of a client are made here.

    Security()                                   plaintext without authentication: a server on loopback
    Security(ca=..., token_file=...)             TLS, and a bearer token
    Security(ca=..., certificate=..., key=...)   mutual TLS

The token is part of each call's metadata. It is read from its file each time, so a replaced token is used
from the next call on. Checks before anything is sent, in order: a token is sent in plaintext only to
loopback -> certificate and key are given together -> the files can be read.

- If a token file is empty or cannot be read, the first call fails. Later calls use the last token read, and
  one warning is logged.
- A proxy from the environment is not used if a token is sent in plaintext: the token would leave this host.
- Certificates are read when the channel is made. A client must restart to use a new certificate.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc

from penstock.wire.channel import Options, check_target, client_options, is_loopback
from penstock.wire.token_channel import TokenChannel

logger = logging.getLogger("penstock.wire")

TOKEN_VARIABLE = "PENSTOCK_TOKEN"

Pairs = tuple[tuple[str, str], ...]


class CredentialsUnusable(Exception):
    """A client's credentials cannot be used; the message contains no secret."""


@dataclass(frozen=True, slots=True)
class Security:
    """What a client trusts and presents; the default is plaintext without a token."""

    tls: bool = False
    """Whether to encrypt the connection; implied by `ca` and `certificate`. Without `ca`, the server's
    certificate is verified with gRPC's built-in roots."""
    ca: Path | None = None
    """PEM file of the certificate authority that signed the server's certificate."""
    certificate: Path | None = None
    """PEM file of the client's own certificate, for mutual TLS."""
    key: Path | None = None
    """PEM file of the client's private key."""
    server_name: str = ""
    """Name to expect in the server's certificate, if it differs from the address."""
    token_file: Path | None = None
    """File with a bearer token."""
    token: str = field(default="", repr=False)
    """The token itself; ignored if there is a file."""

    @property
    def encrypted(self) -> bool:
        return self.tls or self.ca is not None or self.certificate is not None

    def with_environment(self) -> Security:
        """A copy with the token from PENSTOCK_TOKEN, unless a token or its file is set."""
        if self.token_file is not None or self.token:
            return self
        return replace(self, token=os.environ.get(TOKEN_VARIABLE, "").strip())

    def over(self, other: Security) -> Security:
        """A copy in which `other` fills what is not set here.

        A certificate comes with its key. A token that is set here overrides the other's token file.
        """
        shown = self if self.certificate or self.key else other
        known = self if self.token_file or self.token else other
        return Security(
            tls=self.tls or other.tls,
            ca=self.ca or other.ca,
            certificate=shown.certificate,
            key=shown.key,
            server_name=self.server_name or other.server_name,
            token_file=known.token_file,
            token=known.token,
        )

    def check(self, address: str) -> None:
        """Checks the credentials for a channel to `address`.

        Raises CredentialsUnusable if the channel could not or must not be made, and ValueError if
        `address` is malformed.
        """
        tokens, _, _ = _prepared(address, self, own_connection=False)
        if tokens is not None:
            tokens.metadata()


class TokenSource:
    """Provides the token for each call; reads it from its file, if there is one."""

    def __init__(self, path: Path | None, token: str) -> None:
        self._path = path
        self._last = _checked(token, "the token") if path is None else ""
        self._lost = False

    def metadata(self) -> Pairs:
        """The metadata for a call. Raises CredentialsUnusable until a token has been read."""
        if self._path is not None:
            self._read(self._path)
        return (("authorization", f"Bearer {self._last}"),)

    def _read(self, path: Path) -> None:
        try:
            self._last = _checked(path.read_text(encoding="ascii").strip(), str(path))
            self._lost = False
        except (OSError, UnicodeDecodeError, CredentialsUnusable) as error:
            # The error itself is left out: it may quote the file's content.
            why = error.strerror if isinstance(error, OSError) else "it does not hold a token"
            if not self._last:
                raise CredentialsUnusable(f"{path}: {why}") from None
            if not self._lost:
                logger.warning("%s: %s; continuing with the last token read", path, why)
            self._lost = True


def open_channel(
    address: str, security: Security | None = None, *, own_connection: bool = False
) -> grpc.aio.Channel:
    """A channel to "host:port". Raises CredentialsUnusable and ValueError.

    `own_connection` gives the channel a connection that it shares with no other channel of the process.
    """
    tokens, credentials, options = _prepared(address, security or Security(), own_connection)
    if credentials is None:
        channel = grpc.aio.insecure_channel(address, options=options)
    else:
        channel = grpc.aio.secure_channel(address, credentials, options=options)
    return channel if tokens is None else TokenChannel(channel, tokens.metadata)


def open_blocking_channel(
    address: str, security: Security | None = None, *, own_connection: bool = False
) -> tuple[grpc.Channel, TokenSource | None]:
    """The same for blocking calls. Each call must pass the metadata of the returned source."""
    tokens, credentials, options = _prepared(address, security or Security(), own_connection)
    if credentials is None:
        return grpc.insecure_channel(address, options=options), tokens
    return grpc.secure_channel(address, credentials, options=options), tokens


def open_token_source(security: Security, address: str) -> TokenSource | None:
    """The token source for calls to `address`; None without a token. Raises CredentialsUnusable."""
    if security.token_file is None and not security.token:
        return None
    if not security.encrypted and not is_loopback(address):
        raise CredentialsUnusable(
            f"a token is not sent in plaintext to {address}: give the certificate authority of its TLS "
            "certificate, or use a loopback address"
        )
    return TokenSource(security.token_file, security.token)


def _channel_credentials(security: Security) -> grpc.ChannelCredentials | None:
    if (security.certificate is None) != (security.key is None):
        raise CredentialsUnusable("a client's certificate and its key must be given together")
    if not security.encrypted:
        return None
    return grpc.ssl_channel_credentials(
        _read(security.ca),
        private_key=_read(security.key),
        certificate_chain=_read(security.certificate),
    )


def _prepared(
    address: str, security: Security, own_connection: bool
) -> tuple[TokenSource | None, grpc.ChannelCredentials | None, Options]:
    """What a channel is made with, checked in the order of the module's docstring."""
    check_target(address)
    tokens = open_token_source(security, address)
    credentials = _channel_credentials(security)
    options = client_options(own_connection=own_connection)
    if security.server_name:
        options.append(("grpc.ssl_target_name_override", security.server_name))
    if not security.encrypted and (security.token_file is not None or security.token):
        options.append(("grpc.enable_http_proxy", 0))
    return tokens, credentials, options


def _read(path: Path | None) -> bytes | None:
    try:
        return None if path is None else path.read_bytes()
    except OSError as error:
        raise CredentialsUnusable(f"{path}: {error.strerror}") from None


def _checked(text: str, what: str) -> str:
    """Checks that a token can be sent in a header."""
    if not text or not all("!" <= character <= "~" for character in text):
        raise CredentialsUnusable(f"{what}: it does not hold a token")
    return text
