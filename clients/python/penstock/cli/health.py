"""The command `penstock health`: unlike the gRPC probe built into Kubernetes, it works over TLS too."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any, cast

import click

from penstock.cli.options import Address, security_options

if TYPE_CHECKING:
    from penstock.wire.security import Security

CHECK = "/grpc.health.v1.Health/Check"
EVERYTHING = b""
"""A HealthCheckRequest that names no service."""
SERVING = b"\x08\x01"
"""The HealthCheckResponse for SERVING. The client does not depend on the package that defines it."""


@click.command(
    "health",
    epilog="Exit status: 0 if the server serves, or answers and --alive is given; 1 otherwise; 2 if "
    "the command line is invalid.",
)
@click.argument("address", metavar="HOST:PORT", type=Address())
@click.option(
    "--alive", is_flag=True, help="Accept any answer, including that the server does not serve yet."
)
@click.option(
    "--timeout",
    default=5.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Time limit for the answer.",
)
@security_options
def health(security: Security, address: str, alive: bool, timeout: float) -> None:
    """Ask the server at HOST:PORT whether it serves.

    A server does not serve while it starts, drains, or waits for the weights of the run's trainer.
    No token is needed.
    """
    sys.exit(asyncio.run(_check(address, security, alive=alive, timeout=timeout)))


async def _check(address: str, security: Security, *, alive: bool, timeout: float) -> int:
    import grpc

    from penstock.wire.security import CredentialsUnusable, open_channel

    try:
        async with open_channel(address, security) as channel:
            # Without serializers, requests and responses are bytes; the type stubs do not allow that.
            check = cast("Any", channel).unary_unary(CHECK)
            answer: bytes = await check(EVERYTHING, timeout=timeout)
    except CredentialsUnusable as error:
        click.echo(f"penstock health: {error}", err=True)
        return 1
    except grpc.aio.AioRpcError as error:
        click.echo(f"{address}: {error.code().name}: {error.details()}", err=True)
        return 1
    serves = answer == SERVING
    click.echo(f"{address}: {'SERVING' if serves else 'NOT_SERVING'}")
    return 0 if serves or alive else 1
