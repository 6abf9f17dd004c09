"""The file of credentials: who may enter, as what, and until when.

`penstock token` writes it, the server reads it. It holds SHA-256 hashes and never a token, so that whoever
reads it can enter nowhere:

    [tokens."workers@2026-11"]
    role = "agent"
    sha256 = "5f70bf18a086007016e948b04aed3b82103a36bea41755b6cddfaf10ace3c6ef"
    expires = 2026-12-20T12:00:00Z

    [certificates]            # with mutual TLS: common name of the client's certificate -> role
    trainer-1 = "trainer"

A token is 256 random bits behind a prefix that scanners of logs and repositories recognise, and `redact`
too. It needs no slow hash: there is nothing to guess.
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
"""What a token may be called; what follows an @ tells the tokens of one caller apart."""

_TOKEN = re.compile(re.escape(PREFIX) + r"[A-Za-z0-9_-]{43}")
_PLACE = re.compile(r"\(at [^)]*\)")


class Role(StrEnum):
    """What a caller is, and so what it may do."""

    AGENT = "agent"
    TRAINER = "trainer"
    ADMIN = "admin"


class TokenFileInvalid(Exception):
    """The file says something that it cannot mean; the message holds no part of a secret."""


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """One token, by its hash."""

    name: str
    role: Role
    sha256: bytes = field(repr=False)
    expires: datetime
    """With its time zone."""

    @property
    def caller(self) -> str:
        """Whose token it is. What a caller has open stays its own when its token is replaced."""
        return self.name.partition("@")[0]


@dataclass(frozen=True, slots=True)
class TokenFile:
    """Everything the file says."""

    tokens: tuple[TokenEntry, ...] = ()
    certificates: Mapping[str, Role] = field(default_factory=dict[str, Role])
    """Common name -> role."""


def new_token() -> str:
    """A token nobody has seen."""
    return PREFIX + secrets.token_urlsafe(32)


def hash_token(token: str) -> bytes:
    """What the file holds of a token, 32 bytes."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def redact(text: str) -> str:
    """The text without the tokens in it: for messages that quote what somebody wrote elsewhere."""
    return _TOKEN.sub(f"{PREFIX}***", text)


def parse_token_file(text: str) -> TokenFile:
    """Reads the file's text. Raises TokenFileInvalid, which names the entry and never its value."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        # What it quotes may be a part of a secret; where it stands is not.
        place = _PLACE.search(str(error))
        raise TokenFileInvalid(f"not TOML {place.group() if place else ''}".rstrip()) from None
    unknown = [name for name in document if name not in ("tokens", "certificates")]
    if unknown:
        raise TokenFileInvalid("it has other tables than [tokens.NAME] and [certificates]")
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
                f"the name of token {number} is not letters, digits, dots, underscores and dashes, 64 at "
                "most, with an @ and more of them"
            )
        where = f"tokens.{name}"
        table = _table(value, where)
        if set(table) != {"role", "sha256", "expires"}:
            raise TokenFileInvalid(f"{where} needs role, sha256 and expires, and nothing else")
        digest, expires = table["sha256"], table["expires"]
        if not isinstance(digest, str) or not re.fullmatch(r"[0-9a-fA-F]{64}", digest):
            raise TokenFileInvalid(f"{where}.sha256 is not 64 hexadecimal digits")
        if not isinstance(expires, datetime) or expires.tzinfo is None:
            raise TokenFileInvalid(f"{where}.expires is not a time with its zone")
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
