"""Errors of a call: one root class, and a subclass per kind of answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import grpc

from penstock.wire.failure import NO_ANSWER, connection_problem, read_failure

if TYPE_CHECKING:
    from collections.abc import Mapping


class PenstockError(Exception):
    """A refused or failed call. Root of every error that this package raises about the server."""

    _own_code: ClassVar = grpc.StatusCode.UNKNOWN
    """The code of an error that this package makes itself."""

    def __init__(
        self,
        message: str,
        *,
        code: grpc.StatusCode | None = None,
        reason: str = "",
        metadata: Mapping[str, str] | None = None,
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(f"{reason}: {message}" if reason else message)
        self.code = code or self._own_code
        self.reason = reason
        """Machine-readable reason from `penstock.wire.reasons`; empty if the server gave none."""
        self.message = message
        self.metadata = dict(metadata or {})
        """The values that the message mentions."""
        self.retry_after_seconds = retry_after_seconds
        """Delay after which a retry is likely to help. Zero if a retry can help but the server named
        none. None if the server gave no hint."""


class ServerUnavailable(PenstockError):
    """The server is unreachable, was lost, or does not serve now (UNAVAILABLE)."""

    _own_code = grpc.StatusCode.UNAVAILABLE


class InvalidRequest(PenstockError):
    """The request itself is invalid, so retrying does not help (INVALID_ARGUMENT)."""


class NotFound(PenstockError):
    """The server knows no such trajectory or task (NOT_FOUND)."""


class NotAllowedNow(PenstockError):
    """The state of the trajectory, the lease or the weights forbids the call (FAILED_PRECONDITION,
    ALREADY_EXISTS, ABORTED)."""


class Overloaded(PenstockError):
    """A limit of the server is reached, and waiting did not help (RESOURCE_EXHAUSTED)."""


class DeadlineExceeded(PenstockError):
    """The caller's own deadline expired (DEADLINE_EXCEEDED)."""


class AccessDenied(PenstockError):
    """The caller is unknown or lacks permission (UNAUTHENTICATED, PERMISSION_DENIED)."""


_LEAVES: dict[grpc.StatusCode, type[PenstockError]] = {
    **dict.fromkeys(NO_ANSWER, ServerUnavailable),
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.FAILED_PRECONDITION: NotAllowedNow,
    grpc.StatusCode.ALREADY_EXISTS: NotAllowedNow,
    grpc.StatusCode.ABORTED: NotAllowedNow,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.UNAUTHENTICATED: AccessDenied,
    grpc.StatusCode.PERMISSION_DENIED: AccessDenied,
}


def from_rpc(error: grpc.RpcError, address: str = "") -> PenstockError:
    """The error of a call. If the server could not be reached, it says why, and where at `address`."""
    failure = read_failure(error)
    message = failure.message or failure.code.name
    # The server itself always gives a reason.
    if not failure.reason and (cause := connection_problem(failure.message)):
        message = f"no connection to {address}: {cause}" if address else cause
    leaf = _LEAVES.get(failure.code, PenstockError)
    retry_after = failure.retry_after_seconds
    if retry_after is None and failure.is_full:
        retry_after = 0.0
    return leaf(
        message,
        code=failure.code,
        reason=failure.reason,
        metadata=failure.metadata,
        retry_after_seconds=retry_after,
    )
