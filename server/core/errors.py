"""The table of errors: maps domain errors to status codes and error details.

Every refusal in the server is a `DomainError`. `rpc/boundary.py` turns it into a status; inside a stream
it becomes a `Rejection`. The metadata has everything in the message, so that clients need not parse it.
"""

from __future__ import annotations

from collections.abc import Mapping

import grpc
from google.protobuf import duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from penstock.v1 import rejection_pb2
from penstock.wire.codec import twin
from penstock.wire.reasons import DOMAIN, Reason

MAX_ID_LENGTH = 256
"""Most characters of an id or a reason that a caller chooses."""

_CODE_OF: dict[grpc.StatusCode, tuple[Reason, ...]] = {
    grpc.StatusCode.INVALID_ARGUMENT: (
        Reason.FIELD_INVALID,
        Reason.PROMPT_TOO_LONG,
        Reason.TOKEN_OUT_OF_RANGE,
        Reason.MALFORMED_MESSAGE,
        Reason.HELLO_EXPECTED,
        Reason.SHAPE_MISMATCH,
        Reason.DTYPE_MISMATCH,
        Reason.TENSOR_MISSING,
        Reason.TENSOR_UNKNOWN,
        Reason.NOT_FINITE,
    ),
    grpc.StatusCode.NOT_FOUND: (Reason.TRAJECTORY_UNKNOWN, Reason.TASK_UNKNOWN),
    grpc.StatusCode.ALREADY_EXISTS: (Reason.TRAJECTORY_EXISTS,),
    grpc.StatusCode.FAILED_PRECONDITION: (
        Reason.TURN_IN_FLIGHT,
        Reason.TRAJECTORY_CLOSED,
        Reason.NOTHING_TO_RESUME,
        Reason.OUTCOME_DIFFERS,
        Reason.WEIGHT_VERSION_STALE,
        Reason.WEIGHT_VERSION_NOT_STAGED,
        Reason.WEIGHT_VERSION_NOT_ACTIVE,
        Reason.BASE_VERSION_MISMATCH,
        Reason.STALE_EPOCH,
        Reason.TRAINER_CONNECTED,
        Reason.ADAPTER_ACTIVE,
        Reason.LEASE_EXPIRED,
        Reason.SOURCE_UNAVAILABLE,
    ),
    grpc.StatusCode.ABORTED: (
        Reason.UPLOAD_IN_PROGRESS,
        Reason.SESSION_REPLACED,
        Reason.WEIGHT_LOAD_FAILED,
    ),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (
        Reason.QUEUE_FULL,
        Reason.MEMORY_BUDGET,
        Reason.SLOW_READER,
        Reason.MESSAGE_TOO_LARGE,
        Reason.DISK_FULL,
        Reason.CALLER_LIMIT,
    ),
    grpc.StatusCode.UNAVAILABLE: (
        Reason.ENGINE_LOST,
        Reason.WEIGHTS_INCONSISTENT,
        Reason.DRAINING,
        Reason.CREDENTIAL_ENDED,
        Reason.JOURNAL_FAILED,
    ),
    grpc.StatusCode.DATA_LOSS: (
        Reason.CHECKSUM_MISMATCH,
        Reason.PROBE_MISMATCH,
        Reason.JOURNAL_CORRUPT,
    ),
    grpc.StatusCode.UNAUTHENTICATED: (Reason.TOKEN_MISSING, Reason.TOKEN_INVALID),
    grpc.StatusCode.PERMISSION_DENIED: (Reason.ROLE_NOT_ALLOWED,),
    grpc.StatusCode.INTERNAL: (Reason.INTERNAL_ERROR,),
}
STATUS_CODES: dict[Reason, grpc.StatusCode] = {
    reason: code for code, reasons in _CODE_OF.items() for reason in reasons
}
RETRY_SECONDS: Mapping[Reason, float] = {
    Reason.QUEUE_FULL: 1.0,
    Reason.MEMORY_BUDGET: 1.0,
    Reason.SLOW_READER: 1.0,
    Reason.CALLER_LIMIT: 1.0,
    # Until a compaction frees room, or the operator does.
    Reason.DISK_FULL: 5.0,
}
"""Default retry delays. MESSAGE_TOO_LARGE has none because a retry does not help."""

# What is sent in the trailers, whose size both ends limit (`wire.channel`).
MAX_TEXT = 400
MAX_VALUE = 200


class DomainError(Exception):
    def __init__(
        self,
        reason: Reason,
        message: str,
        metadata: Mapping[str, object] | None = None,
        *,
        retry_after_seconds: float | None = None,
    ) -> None:
        self.message = message if len(message) <= MAX_TEXT else f"{message[:MAX_TEXT]}..."
        super().__init__(self.message)
        self.reason = reason
        self.metadata = {key: _short(value) for key, value in (metadata or {}).items()}
        default = RETRY_SECONDS.get(reason)
        self.retry_after_seconds = default if retry_after_seconds is None else retry_after_seconds

    @property
    def code(self) -> grpc.StatusCode:
        return STATUS_CODES[self.reason]


class FieldInvalid(DomainError):
    def __init__(self, field: str, description: str, got: object = None) -> None:
        metadata = {"field": field} if got is None else {"field": field, "got": got}
        suffix = "" if got is None else f", got {_short(got)!r}"
        super().__init__(Reason.FIELD_INVALID, f"{field} {description}{suffix}", metadata)
        self.field = field
        self.description = description


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= MAX_VALUE else f"{text[:MAX_VALUE]}..."


class RpcStatus(grpc.Status):
    def __init__(self, code: grpc.StatusCode, details: str, serialized: bytes) -> None:
        self.code = code
        self.details = details
        self.trailing_metadata = (("grpc-status-details-bin", serialized),)


def to_status(error: DomainError) -> RpcStatus:
    """Adds ErrorInfo, and BadRequest or RetryInfo if they apply."""
    details: list[Message] = [
        error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata)
    ]
    if isinstance(error, FieldInvalid):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=error.description
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_seconds is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_seconds * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    status = status_pb2.Status(code=error.code.value[0], message=error.message)
    for detail in details:
        status.details.add().Pack(detail)
    return RpcStatus(error.code, error.message, status.SerializeToString())


def to_rejection(error: DomainError) -> rejection_pb2.Rejection:
    """For errors inside a stream."""
    rejection = twin(rejection_pb2.Rejection)
    return rejection(reason=error.reason, message=error.message, metadata=error.metadata)
