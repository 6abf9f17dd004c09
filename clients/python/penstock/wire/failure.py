"""Reads a failed call: its status, the reason from `google.rpc.ErrorInfo`, and other details."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, cast

import grpc
from google.rpc import error_details_pb2, status_pb2

HEALTH = "/grpc.health.v1.Health/Check"
NO_ANSWER = (
    grpc.StatusCode.UNAVAILABLE,
    # Always from the server, which ends calls in progress as it stops. A call that is cancelled on this
    # side raises asyncio.CancelledError instead.
    grpc.StatusCode.CANCELLED,
    # No server sends this code. gRPC uses it if a connection breaks in a way that has no code, such as a
    # TLS record that fails verification.
    grpc.StatusCode.UNKNOWN,
)
"""Status codes of a call whose server was lost or stopped before it answered."""
# How gRPC itself, on either side, reports a message or metadata that is too large.
_CAUSES = (
    ("Connection refused", "connection refused; is a server running there?"),
    ("lookup", "there is no host of this name"),
    ("DNS resolution failed", "there is no host of this name"),
    ("http1.x server", "an HTTP server answers there; give the address that gRPC listens on"),
    ("Received http2 header with status", "an HTTP server answers there; give gRPC's address"),
    ("Method not found", "what answers there is no Penstock server"),
    ("WRONG_VERSION_NUMBER", "it does not use TLS; leave the options for TLS out"),
    (
        "CERTIFICATE_VERIFY_FAILED",
        "its certificate cannot be verified; name the authority that signed it (--ca, or ca in a file)",
    ),
    ("Tls handshake failed", "the TLS handshake failed"),
    ("No such file or directory", "there is no such socket"),
    ("No route to host", "there is no route to this host"),
    ("Network is unreachable", "the network is unreachable"),
)
"""What gRPC writes into the details of a failed connection, and what it means. The first match applies."""
_FAILED_TO_CONNECT = re.compile(r"failed to connect to all addresses; last error: \w+: (\S+?: )?")
_TOO_LARGE = ("larger than max", "metadata size exceeds")


@dataclass(frozen=True)
class Failure:
    """How a call failed; `reason` is empty if the peer sent no ErrorInfo."""

    code: grpc.StatusCode
    message: str
    reason: str = ""
    metadata: dict[str, str] = field(default_factory=dict[str, str])
    retry_after_seconds: float | None = None

    @property
    def is_unanswered(self) -> bool:
        """Whether a retry may succeed once the server is available: it is gone, or too slow."""
        if self.code == grpc.StatusCode.INTERNAL:
            # A server gives a reason with this code. Without one it comes from gRPC, for example if the
            # call ends while this side still writes. The status of the call is then not known.
            return not self.reason
        return self.code in NO_ANSWER or self.code == grpc.StatusCode.DEADLINE_EXCEEDED

    @property
    def is_full(self) -> bool:
        """Whether a retry may succeed later, because a limit is reached for now. The server then says when
        to retry; gRPC itself does not."""
        if self.code != grpc.StatusCode.RESOURCE_EXHAUSTED:
            return False
        if self.retry_after_seconds is not None:
            return True
        return not self.reason and not any(words in self.message for words in _TOO_LARGE)


def connection_problem(details: str) -> str:
    """Why a server cannot be reached, in words, from gRPC's details. Empty if they say anything else."""
    for mark, cause in _CAUSES:
        if mark in details:
            return cause
    if (failed := _FAILED_TO_CONNECT.match(details)) is None:
        return ""
    rest = details[failed.end() :]
    if rest == "Socket closed":
        return "it closed the connection; does it use TLS (--tls, --ca)?"
    return rest[:1].lower() + rest[1:]


async def why_unreachable(channel: grpc.aio.Channel, seconds: float = 1.0) -> str:
    """Asks a server once for its health, and returns why it cannot be reached; empty if it answers."""
    check = cast("Any", channel).unary_unary(HEALTH)
    try:
        # Unlike calls that gRPC retries, this one fails with the cause at once.
        await check(b"", timeout=seconds)
    except grpc.aio.AioRpcError as error:
        if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
            return "it does not answer"
        return connection_problem(error.details() or "")
    return ""


def read_failure(error: grpc.RpcError) -> Failure:
    """Reads the error of a call, including its details; see the table in proto/README.md."""
    call = cast("grpc.aio.AioRpcError", error)
    status = status_pb2.Status()
    for key, value in call.trailing_metadata() or ():
        if key == "grpc-status-details-bin" and isinstance(value, bytes):
            status.ParseFromString(value)
    reason, metadata, retry_after = "", dict[str, str](), None
    for detail in status.details:
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        # Unpack returns whether the detail has the message's type.
        if detail.Unpack(info):
            reason, metadata = info.reason, dict(info.metadata)
        elif detail.Unpack(retry):
            retry_after = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
    return Failure(call.code(), call.details() or "", reason, metadata, retry_after)
