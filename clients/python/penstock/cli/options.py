"""Options and parameter types that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click

_FILE = click.Path(dir_okay=False, path_type=Path)


class Address(click.ParamType[str]):
    """HOST:PORT, or a URI that gRPC resolves."""

    name = "HOST:PORT"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        from penstock.wire.channel import check_target

        address = str(value)
        try:
            check_target(address)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return address


def security_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the authorities that a client trusts and its credentials.

    The command receives a Security as its first argument. The token itself has no option, because every
    user of the host can read a command line.
    """

    @wraps(command)
    def run(**given: Any) -> None:
        from penstock.wire.security import Security

        names = [name for name in given if name.startswith("security_")]
        security = Security(**{name.removeprefix("security_"): given.pop(name) for name in names})
        command(security.with_environment(), **given)

    for option in reversed(_SECURITY):
        run = option(run)
    return run


def style_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the calling convention of user functions: `style` and `arguments`."""
    for option in reversed(_STYLE):
        command = option(command)
    return command


def data_options(*, required: bool) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds the prompts, `data`, and their `columns`: both texts, or None."""
    data = click.option(
        "--data",
        required=required,
        metavar="DATA",
        help="A *.jsonl or *.parquet file, a folder of *.parquet files, or PKG.MODULE:FUNCTION.",
    )
    columns = click.option(
        "--columns",
        metavar="prompt=NAME,answer=NAME",
        show_default="the usual names",
        help="With --data: columns of its rows with the prompt and the right answer.",
    )
    return lambda command: data(columns(command))


overrides_option = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="SECTION.KEY=VALUE",
    help="Override a value of CONFIG. Can be repeated.",
)
"""`--set`."""

_SECURITY = (
    click.option(
        "--tls",
        "security_tls",
        is_flag=True,
        envvar="PENSTOCK_TLS",
        help="Encrypt the connection and trust the certificate authorities bundled with gRPC.",
    ),
    click.option(
        "--ca",
        "security_ca",
        type=_FILE,
        envvar="PENSTOCK_CA",
        help="Encrypt the connection and trust the certificate authority in this PEM file.",
    ),
    click.option(
        "--cert",
        "security_certificate",
        type=_FILE,
        envvar="PENSTOCK_CERT",
        help="Client certificate for mutual TLS, a PEM file.",
    ),
    click.option(
        "--key",
        "security_key",
        type=_FILE,
        envvar="PENSTOCK_KEY",
        help="Private key of the client certificate, a PEM file.",
    ),
    click.option(
        "--server-name",
        "security_server_name",
        default="",
        show_default=False,
        metavar="NAME",
        help="Host name in the server's certificate, if it differs from the address.",
    ),
    click.option(
        "--token-file",
        "security_token_file",
        type=_FILE,
        envvar="PENSTOCK_TOKEN_FILE",
        show_default="the token in PENSTOCK_TOKEN",
        help="File with the access token, read again for each call.",
    ),
)

_STYLE = (
    click.option(
        "--style",
        type=click.Choice(["penstock", "slime", "verl", "trl"]),
        default="penstock",
        help="Calling convention of the functions: Penstock's, or that of the system they were written "
        "for. See docs/guides/migrate.md.",
    ),
    click.option(
        "--args",
        "arguments",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        metavar="FILE",
        help="With --style: TOML file of the args that such functions receive.",
    ),
)
