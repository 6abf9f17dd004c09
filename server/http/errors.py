"""Domain error -> HTTP status and the body that each SDK reads; the reasons are those of `errors`.

A gRPC code becomes the HTTP status that Google's APIs give it (google/rpc/code.proto), but for one: a
message that is too large is 413, since 429 would have an SDK send it again. The reason is the error's
`code`, except where SDKs know the case by another name, and its metadata is beside it.

    OpenAI      {"error": {"message", "type", "param", "code", "metadata"}}
    Anthropic   {"type": "error", "error": {"type", "message", "param", "code", "metadata"}}

What SDKs send again by themselves (408, 409, 429 and from 500 on) is what another try may help with.
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

# What agents look for by the name that the services they were written for give it.
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
    """The HTTP status of an error."""
    if error.reason is Reason.MESSAGE_TOO_LARGE:
        return HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    return STATUSES[error.code]


def headers_of(error: DomainError) -> dict[str, str]:
    """When to come back, where waiting helps."""
    if error.retry_after_seconds is None:
        return {}
    # SDKs read the first to the millisecond, everybody else the second.
    return {
        "retry-after-ms": str(round(error.retry_after_seconds * 1000)),
        "retry-after": str(math.ceil(error.retry_after_seconds)),
    }


def openai_body(error: DomainError) -> dict[str, object]:
    """What the `openai` SDKs read."""
    return {"error": _described(error, _type(error, _OPENAI_TYPES, "server_error"))}


def anthropic_body(error: DomainError) -> dict[str, object]:
    """What the `anthropic` SDKs read."""
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
        # Parameters of sampling have no table of their own here.
        "param": None if field is None else field.removeprefix("sampling_params."),
        "code": _KNOWN_CODES.get(error.reason, str(error.reason)),
        "metadata": error.metadata,
    }
