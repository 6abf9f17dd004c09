"""The page of the errors, from the enum of the reasons and the server's table of status codes."""

from __future__ import annotations

import ast
import inspect

from penstock.server.core.errors import RETRY_SECONDS, STATUS_CODES
from penstock.wire.reasons import Reason
from tests.support.reference import markdown
from tests.support.reference.markdown import NOTHING, code, prose

OPENING = """After reading this page you know what each reason of a refused call means, and what the caller
does then. The [contract](../../proto/README.md#errors) has the format of an error."""
REST = """A reason comes in the `ErrorInfo` of a call's status, or as a `Rejection` inside a stream. An
error without a reason comes from gRPC, not from the server. "Retry after" is the usual delay in
`RetryInfo`; a call may name another."""


def page() -> str:
    blocks = [markdown.wrapped(REST)]
    texts = reason_texts()
    for status in dict.fromkeys(STATUS_CODES.values()):
        reasons = [reason for reason, code_of in STATUS_CODES.items() if code_of is status]
        rows = [(code(reason), *_split(texts[reason.name]), _retry(reason)) for reason in reasons]
        blocks.append(f"## {status.name}")
        blocks.append(markdown.table(("reason", "meaning", "what to do", "retry after"), rows))
    return markdown.page("Errors", OPENING, *blocks)


def reason_texts() -> dict[str, str]:
    """The docstring below each reason."""
    (enum,) = ast.parse(inspect.getsource(Reason)).body
    assert isinstance(enum, ast.ClassDef)
    found: dict[str, str] = {}
    for member, below in zip(enum.body, enum.body[1:], strict=False):
        if isinstance(member, ast.Assign) and isinstance(below, ast.Expr):
            found[ast.unparse(member.targets[0])] = ast.literal_eval(below.value)
    return found


def _split(text: str) -> tuple[str, str]:
    """The first sentence is the meaning. The rest is what the caller does."""
    meaning, dot, rest = prose(text).partition(". ")
    return (meaning + "." if dot else meaning), rest or NOTHING


def _retry(reason: Reason) -> str:
    seconds = RETRY_SECONDS.get(reason)
    return NOTHING if seconds is None else f"{seconds:g} s"
