"""`penstock token`: makes, lists and revokes tokens in a server's file.

The file is replaced whole, under a lock on its folder, and keeps its mode; a new one is its owner's only.
A server that has it open sees the new one at its next call.
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
            "--name is letters, digits, dots, underscores and dashes, 64 at most, with an @ and more of "
            f"them where a caller has several tokens; got {redact(name)!r}"
        )
    ends = datetime.now(UTC).replace(microsecond=0) + _duration(expires)
    token = new_token()
    with _locked(path):
        document, found = _read(path, may_be_missing=True)
        if any(entry.name == name for entry in found.tokens):
            raise click.ClickException(
                f"{path} has a token {name}; revoke it, or take another name"
            )
        tokens = cast("dict[str, object]", document.setdefault("tokens", {}))
        tokens[name] = {"role": role, "sha256": hash_token(token).hex(), "expires": ends}
        _write(path, document)
    click.echo(token)
    click.echo(f"{path}: {name}, {role}, until {_time(ends)}; it is not shown again", err=True)


def show(path: Path) -> None:
    """Prints names, roles and ends. Raises click.ClickException."""
    _, found = _read(path)
    now = datetime.now(UTC)
    for entry in found.tokens:
        ends = f"expired {_time(entry.expires)}"
        if entry.expires > now:
            ends = f"until {_time(entry.expires)}"
        click.echo(f"{'token':<12} {entry.name:<32} {entry.role:<8} {ends}")
    for name, role in found.certificates.items():
        click.echo(f"{'certificate':<12} {name:<32} {role:<8}".rstrip())


def revoke(path: Path, name: str) -> None:
    """Removes a token. Raises click.ClickException."""
    with _locked(path):
        document, found = _read(path)
        if all(entry.name != name for entry in found.tokens):
            raise click.ClickException(f"{path} has no token {name}")
        del cast("dict[str, object]", document["tokens"])[name]
        _write(path, document)
    click.echo(f"{path}: {name} is revoked", err=True)


def _duration(text: str) -> timedelta:
    match = re.fullmatch(r"([1-9][0-9]{0,5})([mhdw])", text)
    if match is None:
        raise click.UsageError(f"--expires is a number and m, h, d or w, such as 30d; got {text!r}")
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
        raise click.ClickException(f"{path}: there is no such file") from None
    except OSError as error:
        raise click.ClickException(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise click.ClickException(f"{path}: it is not UTF-8") from None
    except tomllib.TOMLDecodeError:
        raise click.ClickException(f"{path}: it is not TOML") from None
    except TokenFileInvalid as error:
        raise click.ClickException(f"{path}: {error}") from None


@contextlib.contextmanager
def _locked(path: Path) -> Generator[None]:
    """One writer at a time, over processes."""
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
    """The whole file or the one before, whenever this is interrupted."""
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
