"""`penstock token`: creates, lists and revokes tokens in a server's token file.

The file is replaced atomically, under a lock on its folder. It keeps its mode; a new file is
readable only by its owner. A running server uses the new file from its next call on.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import tomllib
from collections.abc import Generator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import cast

import click
import tomli_w

from penstock.common.answers import as_json
from penstock.common.answers import show as show_result
from penstock.common.token_file import (
    NAME,
    TokenFile,
    TokenFileInvalid,
    hash_token,
    new_token,
    parse_token_file,
    redact,
)

HEADER = (
    "# Written by `penstock token`. It holds hashes: a token is shown once, when it is made.\n\n"
)
UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def create(path: Path, name: str, role: str, expires: str) -> None:
    """Adds a token and prints it, alone on standard output. Raises click.ClickException."""
    if not NAME.fullmatch(name):
        raise click.UsageError(
            "--name allows letters, digits, dots, underscores and dashes, 64 at most, plus an @ and more "
            f"of them if a caller has several tokens; got {redact(name)!r}"
        )
    ends = datetime.now(UTC).replace(microsecond=0) + _duration(expires)
    token = new_token()
    with _locked(path):
        document, found = _read(path, may_be_missing=True)
        if any(entry.name == name for entry in found.tokens):
            raise click.ClickException(
                f"{path} already has a token {name}; revoke it, or choose another name"
            )
        tokens = cast("dict[str, object]", document.setdefault("tokens", {}))
        tokens[name] = {"role": role, "sha256": hash_token(token).hex(), "expires": ends}
        _write(path, document)
    show_result(token, {"token": token, "name": name, "role": role, "expires": _time(ends)})
    click.echo(f"{path}: {name}, {role}, until {_time(ends)}; it will not be shown again", err=True)


def show(path: Path) -> None:
    """Prints names, roles and expiry times. Raises click.ClickException."""
    _, found = _read(path)
    now = datetime.now(UTC)
    lines: list[str] = []
    tokens: list[dict[str, object]] = []
    for entry in found.tokens:
        ends, expired = _time(entry.expires), entry.expires <= now
        word = "expired" if expired else "until"
        lines.append(f"{'token':<12} {entry.name:<32} {entry.role:<8} {word} {ends}")
        tokens.append({"name": entry.name, "role": entry.role, "expires": ends, "expired": expired})
    for name, role in found.certificates.items():
        lines.append(f"{'certificate':<12} {name:<32} {role:<8}".rstrip())
    if lines or as_json():
        show_result("\n".join(lines), {"tokens": tokens, "certificates": dict(found.certificates)})


def revoke(path: Path, name: str) -> None:
    """Removes a token. Raises click.ClickException."""
    with _locked(path):
        document, found = _read(path)
        if all(entry.name != name for entry in found.tokens):
            raise click.ClickException(f"{path} has no token {name}")
        del cast("dict[str, object]", document["tokens"])[name]
        _write(path, document)
    click.echo(f"{path}: revoked {name}", err=True)


def _duration(text: str) -> timedelta:
    match = re.fullmatch(r"([1-9][0-9]{0,5})([mhdw])", text)
    if match is None:
        raise click.UsageError(
            f"--expires must be a number followed by m, h, d or w, such as 30d; got {text!r}"
        )
    return timedelta(**{UNITS[match[2]]: int(match[1])})


def _time(value: datetime) -> str:
    return value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def _read(path: Path, *, may_be_missing: bool = False) -> tuple[dict[str, object], TokenFile]:
    try:
        text = path.read_text(encoding="utf-8")
        return tomllib.loads(text), parse_token_file(text)
    except FileNotFoundError:
        if may_be_missing:
            return {}, TokenFile()
        raise click.ClickException(f"{path}: no such file") from None
    except OSError as error:
        raise click.ClickException(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise click.ClickException(f"{path}: not valid UTF-8") from None
    except tomllib.TOMLDecodeError:
        raise click.ClickException(f"{path}: not valid TOML") from None
    except TokenFileInvalid as error:
        raise click.ClickException(f"{path}: {error}") from None


@contextlib.contextmanager
def _locked(path: Path) -> Generator[None]:
    """Locks the file's folder, so that one process writes at a time."""
    try:
        folder = os.open(path.absolute().parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise click.ClickException(f"{path.absolute().parent}: {error.strerror}") from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _write(path: Path, document: dict[str, object]) -> None:
    """Writes the file atomically: an interruption leaves either the new or the previous version."""
    mode = 0o600
    with contextlib.suppress(FileNotFoundError):
        mode = stat.S_IMODE(path.stat().st_mode)
    new = path.with_name(f".{path.name}.new")
    try:
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write((HEADER + tomli_w.dumps(document)).encode())
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise click.ClickException(f"{path}: {error.strerror}") from None
