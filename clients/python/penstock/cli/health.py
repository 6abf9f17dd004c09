"""The command `penstock health`: unlike the gRPC probe built into Kubernetes, it works over TLS too."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any, cast

import click

from penstock.cli.options import Address, security_options
from penstock.common.answers import Exit, complain, show

if TYPE_CHECKING:
    from penstock.wire.security import Security

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
    try:
        serves = asyncio.run(_check(address, security, timeout))
    except _NoAnswer as error:
        sys.exit(complain("penstock health", error, Exit.FAILED, address))
    state = "SERVING" if serves else "NOT_SERVING"
    show(f"{address}: {state}", {"address": address, "serving": serves})
    sys.exit(Exit.DONE if serves or alive else Exit.FAILED)


class _NoAnswer(Exception):
    """The server could not be asked; the message says why."""


async def _check(address: str, security: Security, timeout: float) -> bool:
    """Whether the server serves. Raises _NoAnswer."""
    import grpc

    from penstock.wire.failure import HEALTH, connection_problem
    from penstock.wire.security import CredentialsUnusable, open_channel

    try:
        async with open_channel(address, security) as channel:
            # Without serializers, requests and responses are bytes; the type stubs do not allow that.
            check = cast("Any", channel).unary_unary(HEALTH)
            answer: bytes = await check(EVERYTHING, timeout=timeout)
    except CredentialsUnusable as error:
        raise _NoAnswer(str(error)) from error
    except grpc.aio.AioRpcError as error:
        details = error.details() or ""
        cause = connection_problem(details) or f"{error.code().name}: {details}"
        if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
            cause = f"no answer within {timeout:g} s"
        raise _NoAnswer(cause) from error
    return answer == SERVING
