"""The credentials file: which callers the server accepts, in which role, and until when.

`penstock token` writes it, and the server reads it. It holds SHA-256 hashes and no tokens, so reading the
file gives no access:

    [tokens."workers@2026-11"]
    role = "agent"
    sha256 = "5f70bf18a086007016e948b04aed3b82103a36bea41755b6cddfaf10ace3c6ef"
    expires = 2026-12-20T12:00:00Z

    [certificates]            # with mutual TLS: common name of the client's certificate -> role
    trainer-1 = "trainer"

A token is 256 random bits after a prefix that secret scanners and `redact` recognise. It needs no slow
hash, because it cannot be guessed.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import cast

PREFIX = "penstock_"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}(@[A-Za-z0-9._-]{1,64})?")
"""Valid names of a token. The part after an @ distinguishes several tokens of one caller."""

_TOKEN = re.compile(re.escape(PREFIX) + r"[A-Za-z0-9_-]{43}")
_PLACE = re.compile(r"\(at [^)]*\)")


class Role(StrEnum):
    """What a caller is, which decides what it may do."""

    AGENT = "agent"
    TRAINER = "trainer"
    ADMIN = "admin"


class TokenFileInvalid(Exception):
    """The file's content is invalid; the message contains no part of a secret."""


@dataclass(frozen=True, slots=True)
class TokenEntry:
    name: str
    role: Role
    sha256: bytes = field(repr=False)
    expires: datetime
    """Always with a time zone."""

    @property
    def caller(self) -> str:
        """The caller that the token belongs to. A caller keeps its open calls and trajectories when its
        token is replaced."""
        return self.name.partition("@")[0]


@dataclass(frozen=True, slots=True)
class TokenFile:
    tokens: tuple[TokenEntry, ...] = ()
    certificates: Mapping[str, Role] = field(default_factory=dict[str, Role])
    """Common name -> role."""


def new_token() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def hash_token(token: str) -> bytes:
    """The SHA-256 hash of a token as stored in the file, 32 bytes."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def redact(text: str) -> str:
    """Masks tokens in a text, for messages that quote foreign input."""
    return _TOKEN.sub(f"{PREFIX}***", text)


def parse_token_file(text: str) -> TokenFile:
    """Parses the file's text. Raises TokenFileInvalid, which names the entry but never its value."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        # The parser's message may quote a part of a secret; the position is safe.
        place = _PLACE.search(str(error))
        raise TokenFileInvalid(f"not TOML {place.group() if place else ''}".rstrip()) from None
    unknown = [name for name in document if name not in ("tokens", "certificates")]
    if unknown:
        raise TokenFileInvalid("it has tables other than [tokens.NAME] and [certificates]")
    tokens = tuple(_entries(_table(document.get("tokens", {}), "tokens")))
    if len({entry.sha256 for entry in tokens}) != len(tokens):
        raise TokenFileInvalid("two entries have the same sha256")
    named = _table(document.get("certificates", {}), "certificates")
    roles = {name: _role(role, f"certificates.{name}") for name, role in named.items()}
    return TokenFile(tokens, roles)


def _entries(tables: Mapping[str, object]) -> Iterator[TokenEntry]:
    for number, (name, value) in enumerate(tables.items(), 1):
        if not NAME.fullmatch(name) or _TOKEN.search(name):
            raise TokenFileInvalid(
                f"the name of token {number} must be letters, digits, dots, underscores and dashes, at "
                "most 64, optionally followed by @ and more of them"
            )
        where = f"tokens.{name}"
        table = _table(value, where)
        if set(table) != {"role", "sha256", "expires"}:
            raise TokenFileInvalid(f"{where} needs role, sha256 and expires, and nothing else")
        digest, expires = table["sha256"], table["expires"]
        if not isinstance(digest, str) or not re.fullmatch(r"[0-9a-fA-F]{64}", digest):
            raise TokenFileInvalid(f"{where}.sha256 is not 64 hexadecimal digits")
        if not isinstance(expires, datetime) or expires.tzinfo is None:
            raise TokenFileInvalid(f"{where}.expires is not a time with a time zone")
        role = _role(table["role"], f"{where}.role")
        yield TokenEntry(name, role, bytes.fromhex(digest), expires.astimezone(UTC))


def _table(value: object, where: str) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise TokenFileInvalid(f"{where} is not a table")
    return cast("dict[str, object]", value)


def _role(value: object, where: str) -> Role:
    if value not in tuple(Role):
        raise TokenFileInvalid(f"{where} is not one of {', '.join(Role)}")
    return Role(cast("str", value))
