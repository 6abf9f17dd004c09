"""Maps domain errors to an HTTP status and to the body that each SDK reads.

A gRPC code becomes the HTTP status that Google's APIs use for it (google/rpc/code.proto), except that a
message that is too large gets 413, because SDKs would retry a 429. The reason is the error's `code`, unless
SDKs know the case by another name.

SDKs retry 408, 409, 429 and 5xx on their own. The mapping gives these only to errors that a retry may fix.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from http import HTTPStatus

import grpc

from penstock.server.core.errors import DomainError
from penstock.wire.reasons import Reason

STATUSES: Mapping[grpc.StatusCode, HTTPStatus] = {
    grpc.StatusCode.INVALID_ARGUMENT: HTTPStatus.BAD_REQUEST,
    grpc.StatusCode.FAILED_PRECONDITION: HTTPStatus.BAD_REQUEST,
    grpc.StatusCode.UNAUTHENTICATED: HTTPStatus.UNAUTHORIZED,
    grpc.StatusCode.PERMISSION_DENIED: HTTPStatus.FORBIDDEN,
    grpc.StatusCode.NOT_FOUND: HTTPStatus.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS: HTTPStatus.CONFLICT,
    grpc.StatusCode.ABORTED: HTTPStatus.CONFLICT,
    grpc.StatusCode.RESOURCE_EXHAUSTED: HTTPStatus.TOO_MANY_REQUESTS,
    grpc.StatusCode.INTERNAL: HTTPStatus.INTERNAL_SERVER_ERROR,
    grpc.StatusCode.DATA_LOSS: HTTPStatus.INTERNAL_SERVER_ERROR,
    grpc.StatusCode.UNAVAILABLE: HTTPStatus.SERVICE_UNAVAILABLE,
}

# Cases that agents recognize by the original service's name.
_KNOWN_CODES = {Reason.PROMPT_TOO_LONG: "context_length_exceeded"}
_OPENAI_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}
_ANTHROPIC_TYPES = {
    **_OPENAI_TYPES,
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
}


def status_of(error: DomainError) -> HTTPStatus:
    if error.reason is Reason.MESSAGE_TOO_LARGE:
        return HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    return STATUSES[error.code]


def headers_of(error: DomainError) -> dict[str, str]:
    """Returns retry headers, if waiting helps."""
    if error.retry_after_seconds is None:
        return {}
    # The SDKs read the first, in milliseconds; other clients read the second.
    return {
        "retry-after-ms": str(round(error.retry_after_seconds * 1000)),
        "retry-after": str(math.ceil(error.retry_after_seconds)),
    }


def openai_body(error: DomainError) -> dict[str, object]:
    return {"error": _described(error, _type(error, _OPENAI_TYPES, "server_error"))}


def anthropic_body(error: DomainError) -> dict[str, object]:
    return {
        "type": "error",
        "error": _described(error, _type(error, _ANTHROPIC_TYPES, "api_error")),
    }


def _type(error: DomainError, types: Mapping[HTTPStatus, str], of_server: str) -> str:
    status = status_of(error)
    return types.get(status, "invalid_request_error" if status < 500 else of_server)


def _described(error: DomainError, kind: str) -> dict[str, object]:
    field = error.metadata.get("field")
    return {
        "message": error.message,
        "type": kind,
        # Here sampling parameters are top-level fields.
        "param": None if field is None else field.removeprefix("sampling_params."),
        "code": _KNOWN_CODES.get(error.reason, str(error.reason)),
        "metadata": error.metadata,
    }
