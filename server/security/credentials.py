"""Authentication: the server's own certificate, and what its callers need by `[security]`:

    nothing                     nothing; on loopback only, unless `insecure` is set
    tokens                      a bearer token; on loopback only, unless `insecure` is set
    certificate, key, tokens    TLS and a bearer token
    ... and client_ca           mutual TLS; without a token, the certificate's common name is the caller

A call with a token is judged by the token alone. The files may change while the server runs: the token
file is checked at each call, the others for each new connection; open ones stay open. If a new file cannot
be read, the server logs that and keeps the previous content. Removing an entry revokes it; removing the
token file revokes nothing.

No token, and nothing sent in place of one, ever appears in an error or a log.
"""

from __future__ import annotations

import hmac
import logging
import os
import ssl
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC
from pathlib import Path
from typing import Literal, cast

import grpc

from penstock.common.token_file import (
    Role,
    TokenEntry,
    TokenFileInvalid,
    hash_token,
    parse_token_file,
)
from penstock.server.config.settings import ConfigError, SecuritySection
from penstock.server.core.errors import DomainError
from penstock.wire.reasons import Reason

logger = logging.getLogger(__name__)

AUTHORIZATION = "authorization"
Signature = tuple[int, int, int]
Metadata = Iterable[tuple[str, str | bytes]]
AuthContext = Mapping[str, Iterable[bytes]]


@dataclass(frozen=True, slots=True)
class Caller:
    kind: Literal["token", "certificate", "host"]
    name: str
    """The token's owner, the certificate's common name, or the calling host."""
    role: Role | None = None
    """None if callers are not authenticated; such a caller may do everything."""
    token: TokenEntry | None = None

    @property
    def key(self) -> tuple[str, str]:
        """Of its account."""
        return self.kind, self.name

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


class TokenStore:
    def __init__(self, path: Path) -> None:
        """Raises ConfigError if the file cannot be read."""
        self._path = path
        self._complaint = ""
        try:
            self._read()
        except (OSError, UnicodeDecodeError, TokenFileInvalid) as error:
            raise ConfigError(f"security.tokens: {path}: {_why(error)}") from None

    def refresh(self) -> bool:
        """Returns whether a new set of tokens is in force."""
        try:
            if _signature(self._path) == self._signature:
                return False
            self._read()
        except (OSError, UnicodeDecodeError, TokenFileInvalid) as error:
            complaint = _why(error)
            if complaint != self._complaint:
                logger.error("%s: %s; keeping the previous tokens", self._path, complaint)
            self._complaint = complaint
            return False
        self._complaint = ""
        logger.info("%s: %d tokens are in force", self._path, len(self.file.tokens))
        return True

    def find(self, token: str) -> TokenEntry | None:
        """The caller has to check the entry's expiry."""
        digest = hash_token(token)
        found = None
        # Look up by the start of the hash, which reveals nothing. Compare in constant time.
        for entry in self._by_start.get(digest[:4], ()):
            if hmac.compare_digest(entry.sha256, digest):
                found = entry
        return found

    def _read(self) -> None:
        # Take the signature first, so that a later write is noticed and read.
        signature = _signature(self._path)
        self.file = parse_token_file(self._path.read_text(encoding="utf-8"))
        self._signature = signature
        self._by_start: dict[bytes, list[TokenEntry]] = {}
        for entry in self.file.tokens:
            self._by_start.setdefault(entry.sha256[:4], []).append(entry)


class Credentials:
    def __init__(self, security: SecuritySection) -> None:
        """Raises ConfigError if a file cannot be read."""
        self._tls: _TlsFiles | None = None
        if security.certificate is not None and security.key is not None:
            self._tls = _TlsFiles(security.certificate, security.key, security.client_ca)
        self.tokens = None if security.tokens is None else TokenStore(security.tokens)
        self._asks_for_certificates = security.client_ca is not None

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """None for plaintext."""
        if self._tls is None:
            return None
        # gRPC accepts None for "unchanged", but the stubs do not declare it.
        fetch = cast("Callable[[], grpc.ServerCertificateConfiguration]", self._tls.changed)
        return grpc.dynamic_ssl_server_credentials(
            self._tls.read(), fetch, self._asks_for_certificates
        )

    def ssl_context(self) -> ssl.SSLContext | None:
        """None for plaintext. Raises ConfigError."""
        if self._tls is None:
            return None
        files = replace(self._tls)
        files.read()
        return files.context()

    def refresh(self) -> bool:
        """Returns whether a new set of tokens is in force."""
        return self.tokens is not None and self.tokens.refresh()

    def identify(
        self, metadata: Metadata, peer: str, auth_context: Callable[[], AuthContext]
    ) -> Caller:
        """Raises TOKEN_MISSING, TOKEN_INVALID and ROLE_NOT_ALLOWED."""
        if self.tokens is None:
            return Caller("host", host_of(peer))
        sent = [value for key, value in metadata if key == AUTHORIZATION]
        if sent:
            return self._by_token(self.tokens, sent)
        if self._asks_for_certificates:
            return self._by_certificate(self.tokens, auth_context())
        raise DomainError(
            Reason.TOKEN_MISSING, 'send a token, as metadata "authorization: Bearer TOKEN"'
        )

    def holds(self, caller: Caller) -> bool:
        """Whether a caller that was admitted would still be admitted now."""
        if self.tokens is None or caller.role is None:
            return True
        if caller.kind == "certificate":
            return self.tokens.file.certificates.get(caller.name) == caller.role
        return caller.token in self.tokens.file.tokens

    def seconds_left(self, caller: Caller) -> float | None:
        """None if the caller's token does not expire."""
        return None if caller.token is None else caller.token.expires.timestamp() - time.time()

    def _by_token(self, tokens: TokenStore, sent: list[str | bytes]) -> Caller:
        value = sent[0]
        scheme, _, token = value.partition(" ") if isinstance(value, str) else ("", "", "")
        if len(sent) > 1 or scheme.lower() != "bearer" or not token:
            raise DomainError(
                Reason.TOKEN_INVALID, 'the metadata "authorization" is not a single "Bearer TOKEN"'
            )
        entry = tokens.find(token.strip())
        if entry is None:
            raise DomainError(Reason.TOKEN_INVALID, "the server does not know this token")
        if entry.expires.timestamp() <= time.time():
            ended = entry.expires.astimezone(UTC).isoformat()
            raise DomainError(
                Reason.TOKEN_INVALID,
                f"the token {entry.name} expired at {ended}",
                {"token": entry.name, "expired": ended},
            )
        return Caller("token", entry.caller, entry.role, entry)

    def _by_certificate(self, tokens: TokenStore, auth_context: AuthContext) -> Caller:
        names = list(auth_context.get("x509_common_name", ()))
        name = names[0].decode("utf-8", "replace") if len(names) == 1 else ""
        role = tokens.file.certificates.get(name)
        if role is None:
            raise DomainError(
                Reason.ROLE_NOT_ALLOWED,
                f"the certificate {name!r} has no role on this server",
                {"certificate": name},
            )
        return Caller("certificate", name, role)


@dataclass(slots=True)
class _TlsFiles:
    """The PEM files of a port, and their state when they were last read."""

    certificate: Path
    key: Path
    client_ca: Path | None
    signatures: tuple[Signature, ...] = ()

    def read(self) -> grpc.ServerCertificateConfiguration:
        """Raises ConfigError."""
        self.signatures = self._look()
        files = {"certificate": self.certificate, "key": self.key, "client_ca": self.client_ca}
        found: dict[str, bytes] = {}
        for name, path in files.items():
            if path is None:
                continue
            try:
                found[name] = path.read_bytes()
            except OSError as error:
                raise ConfigError(f"security.{name}: {path}: {error.strerror}") from None
            if b"-----BEGIN" not in found[name]:
                raise ConfigError(f"security.{name}: {path}: not a PEM file")
        return grpc.ssl_server_certificate_configuration(
            [(found["key"], found["certificate"])], found.get("client_ca")
        )

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Returns the new content if it changed. gRPC calls this for each connection."""
        try:
            if self._look() == self.signatures:
                return None
            return self.read()
        except (OSError, ConfigError) as error:
            logger.error("%s; keeping the previous certificate", _why(error))
            return None

    def context(self) -> ssl.SSLContext:
        """Returns a context that replaces itself with a new one when the files change."""
        context = self._load()
        current = context

        def renew(connection: ssl.SSLObject, _name: str | None, _: ssl.SSLContext) -> None:
            nonlocal current
            if self.changed() is not None:
                try:
                    current = self._load()
                except (OSError, ssl.SSLError) as error:
                    logger.error("%s; keeping the previous certificate", _why(error))
            connection.context = current

        context.sni_callback = renew
        return context

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self.certificate, self.key)
        if self.client_ca is not None:
            context.load_verify_locations(self.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def _look(self) -> tuple[Signature, ...]:
        paths = (self.certificate, self.key, self.client_ca)
        try:
            return tuple(_signature(path) for path in paths if path is not None)
        except OSError as error:
            raise ConfigError(f"security: {error.filename}: {error.strerror}") from None


def host_of(peer: str) -> str:
    """`peer` has gRPC's form, such as "ipv4:127.0.0.1:4711"."""
    kind, _, rest = peer.partition(":")
    return rest.rpartition(":")[0] if kind in ("ipv4", "ipv6") else kind


def _signature(path: Path) -> Signature:
    found = os.stat(path)  # noqa: PTH116 - for each call: without the cost of a Path's.
    return found.st_mtime_ns, found.st_size, found.st_ino


def _why(error: Exception) -> str:
    """Describes an error without revealing the content of a file."""
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    if isinstance(error, UnicodeDecodeError):
        return "not UTF-8"
    return str(error)
