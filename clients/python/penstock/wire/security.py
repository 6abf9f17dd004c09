"""How a client knows whom it speaks to, and proves who it is: the one place where its channels are made.

    Security()                                   plaintext, nobody is asked: a server on loopback
    Security(ca=..., token_file=...)             TLS, and a bearer token
    Security(ca=..., certificate=..., key=...)   mutual TLS

The token goes into the metadata of each call, read from its file each time, so that one that is replaced is
used from the next call on. Order of what is checked, before anything is sent: a token is not sent in
plaintext but to loopback -> certificate and key come together -> the files can be read.

- A token file that cannot be read, or is empty, fails the first call; later ones go on with the last token
  read, and the log says so once.
- A proxy of the environment is not used where a token goes out in plaintext: loopback would end at it.
- Certificates are read when the channel is made. A client's own are replaced by starting it again.
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
    """What a client was given to prove itself with cannot be used; the message holds no secret."""


@dataclass(frozen=True, slots=True)
class Security:
    """What a client trusts and what it shows; the default is plaintext without a token."""

    tls: bool = False
    """Whether the connection is encrypted; implied by `ca` and `certificate`. Without `ca` the server's
    certificate is checked against the roots that come with gRPC."""
    ca: Path | None = None
    """PEM file of the authority that signed the server's certificate."""
    certificate: Path | None = None
    """PEM file of the client's own certificate, for mutual TLS."""
    key: Path | None = None
    """PEM file of its private key."""
    server_name: str = ""
    """Name that the server's certificate has to be for, where it is not the address's."""
    token_file: Path | None = None
    """File with a bearer token."""
    token: str = field(default="", repr=False)
    """The token itself; ignored where there is a file."""

    @property
    def encrypted(self) -> bool:
        """Whether the connection is encrypted."""
        return self.tls or self.ca is not None or self.certificate is not None

    def with_environment(self) -> Security:
        """The same with the token of PENSTOCK_TOKEN, where neither a file nor a token was given."""
        if self.token_file is not None or self.token:
            return self
        return replace(self, token=os.environ.get(TOKEN_VARIABLE, "").strip())

    def over(self, other: Security) -> Security:
        """This, and what it leaves open as another has it. A certificate comes with its key, and a token
        alone is over the other's file."""
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
        """Raises CredentialsUnusable where a channel to `address` could not be made, or must not, and
        ValueError where it is no address."""
        check_target(address)
        tokens = open_token_source(self, address)
        _channel_credentials(self)
        if tokens is not None:
            tokens.metadata()


class TokenSource:
    """The token of each call, from its file where it has one."""

    def __init__(self, path: Path | None, token: str) -> None:
        self._path = path
        self._last = _checked(token, "the token") if path is None else ""
        self._lost = False

    def metadata(self) -> Pairs:
        """What a call carries. Raises CredentialsUnusable while no token was ever read."""
        if self._path is not None:
            self._read(self._path)
        return (("authorization", f"Bearer {self._last}"),)

    def _read(self, path: Path) -> None:
        try:
            self._last = _checked(path.read_text(encoding="ascii").strip(), str(path))
            self._lost = False
        except (OSError, UnicodeDecodeError, CredentialsUnusable) as error:
            # Not the error itself: it may quote what it could not read.
            why = error.strerror if isinstance(error, OSError) else "it does not hold a token"
            if not self._last:
                raise CredentialsUnusable(f"{path}: {why}") from None
            if not self._lost:
                logger.warning("%s: %s; going on with the token read last", path, why)
            self._lost = True


def open_channel(
    address: str, security: Security | None = None, *, own_connection: bool = False
) -> grpc.aio.Channel:
    """A channel to "host:port". Raises CredentialsUnusable and ValueError.

    `own_connection` gives it a connection that no other channel of the process shares.
    """
    check_target(address)
    security = security or Security()
    tokens = open_token_source(security, address)
    credentials = _channel_credentials(security)
    options = _options(security, own_connection)
    if credentials is None:
        channel = grpc.aio.insecure_channel(address, options=options)
    else:
        channel = grpc.aio.secure_channel(address, credentials, options=options)
    return channel if tokens is None else TokenChannel(channel, tokens)


def open_blocking_channel(
    address: str, security: Security | None = None, *, own_connection: bool = False
) -> tuple[grpc.Channel, TokenSource | None]:
    """The same for blocking calls, each of which has to be given the source's `metadata()`."""
    check_target(address)
    security = security or Security()
    tokens = open_token_source(security, address)
    credentials = _channel_credentials(security)
    options = _options(security, own_connection)
    if credentials is None:
        return grpc.insecure_channel(address, options=options), tokens
    return grpc.secure_channel(address, credentials, options=options), tokens


def open_token_source(security: Security, address: str) -> TokenSource | None:
    """The token of calls to `address`; None where none is shown. Raises CredentialsUnusable."""
    if security.token_file is None and not security.token:
        return None
    if not security.encrypted and not is_loopback(address):
        raise CredentialsUnusable(
            f"a token is not sent in plaintext to {address}: give the authority of its TLS "
            "certificate, or use an address of this host's loopback"
        )
    return TokenSource(security.token_file, security.token)


def _channel_credentials(security: Security) -> grpc.ChannelCredentials | None:
    if (security.certificate is None) != (security.key is None):
        raise CredentialsUnusable("a client's certificate and its key are given together")
    if not security.encrypted:
        return None
    return grpc.ssl_channel_credentials(
        _read(security.ca),
        private_key=_read(security.key),
        certificate_chain=_read(security.certificate),
    )


def _options(security: Security, own_connection: bool) -> Options:
    options = client_options(own_connection=own_connection)
    if security.server_name:
        options.append(("grpc.ssl_target_name_override", security.server_name))
    if not security.encrypted and (security.token_file is not None or security.token):
        options.append(("grpc.enable_http_proxy", 0))
    return options


def _read(path: Path | None) -> bytes | None:
    try:
        return None if path is None else path.read_bytes()
    except OSError as error:
        raise CredentialsUnusable(f"{path}: {error.strerror}") from None


def _checked(text: str, what: str) -> str:
    """A token as a header may carry it."""
    if not text or not all("!" <= character <= "~" for character in text):
        raise CredentialsUnusable(f"{what}: it does not hold a token")
    return text
