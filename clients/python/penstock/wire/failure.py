"""Reads a failed call: its status, the reason from `google.rpc.ErrorInfo`, and other details."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import grpc
from google.rpc import error_details_pb2, status_pb2

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
