"""The security options of every command that calls a server: trusted authorities and credentials.

The token itself has no option, because every user of the host can read a command line.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path

import click

_FILE = click.Path(dir_okay=False, path_type=Path)


def security_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options to a command, which receives a Security as its first argument."""

    @wraps(command)
    def run(
        security_tls: bool,
        security_ca: Path | None,
        security_certificate: Path | None,
        security_key: Path | None,
        security_server_name: str,
        security_token_file: Path | None,
        **others: object,
    ) -> None:
        from penstock.wire.security import Security

        security = Security(
            tls=security_tls,
            ca=security_ca,
            certificate=security_certificate,
            key=security_key,
            server_name=security_server_name,
            token_file=security_token_file,
        )
        command(security.with_environment(), **others)

    for option in reversed(_OPTIONS):
        run = option(run)
    return run


_OPTIONS = (
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
        metavar="NAME",
        help="Host name in the server's certificate, if it differs from the address.",
    ),
    click.option(
        "--token-file",
        "security_token_file",
        type=_FILE,
        envvar="PENSTOCK_TOKEN_FILE",
        help="File with the access token, read again for each call. Default: the token in the "
        "environment variable PENSTOCK_TOKEN.",
    ),
)
