"""Reading a refused call: its status, the reason from `google.rpc.ErrorInfo`, and what it carries."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import grpc
from google.rpc import error_details_pb2, status_pb2

NO_ANSWER = (
    grpc.StatusCode.UNAVAILABLE,
    # From the other side only, which ends what is under way as it stops: a call that is cancelled here
    # raises asyncio.CancelledError.
    grpc.StatusCode.CANCELLED,
    # No server answers it: gRPC itself does where a connection breaks in a way that it has no code for,
    # such as at a record that TLS cannot verify.
    grpc.StatusCode.UNKNOWN,
)
"""What a call ends with whose server was lost, or stopped, before it answered."""
# What gRPC itself, on either side, says of a message or of metadata that it does not take.
_TOO_LARGE = ("larger than max", "metadata size exceeds")


@dataclass(frozen=True)
class Failure:
    """What a call failed with; `reason` is empty where the peer sent no ErrorInfo."""

    code: grpc.StatusCode
    message: str
    reason: str = ""
    metadata: dict[str, str] = field(default_factory=dict[str, str])
    retry_after_seconds: float | None = None

    @property
    def is_unanswered(self) -> bool:
        """Whether the same call may succeed once the server is there: it is gone, or too slow."""
        return self.code in NO_ANSWER or self.code == grpc.StatusCode.DEADLINE_EXCEEDED

    @property
    def is_full(self) -> bool:
        """Whether the same call may succeed after a while: a bound is reached for now. The server says when
        to come back; where gRPC itself refused the call nobody does."""
        if self.code != grpc.StatusCode.RESOURCE_EXHAUSTED:
            return False
        if self.retry_after_seconds is not None:
            return True
        return not self.reason and not any(words in self.message for words in _TOO_LARGE)


def read_failure(error: grpc.RpcError) -> Failure:
    """What an error raised by a call says, down to the details of the table in proto/README.md."""
    call = cast("grpc.aio.AioRpcError", error)
    status = status_pb2.Status()
    for key, value in call.trailing_metadata() or ():
        if key == "grpc-status-details-bin" and isinstance(value, bytes):
            status.ParseFromString(value)
    reason, metadata, retry_after = "", dict[str, str](), None
    for detail in status.details:
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        # Unpack says whether the detail is of the message's type.
        if detail.Unpack(info):
            reason, metadata = info.reason, dict(info.metadata)
        elif detail.Unpack(retry):
            retry_after = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
    return Failure(call.code(), call.details() or "", reason, metadata, retry_after)
