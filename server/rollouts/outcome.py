"""Checks the outcomes that agents report."""

from __future__ import annotations

import math

from penstock.server.core.errors import MAX_ID_LENGTH, DomainError, FieldInvalid
from penstock.server.turns.requests import check_depth
from penstock.v1 import trajectory_pb2
from penstock.wire.reasons import Reason

MAX_OUTCOME_BYTES = 1 << 20


def check_outcome(outcome: trajectory_pb2.Outcome) -> None:
    """Checks an outcome that an agent reported.

    Raises FIELD_INVALID if it has no result or a number is not finite, and MESSAGE_TOO_LARGE if it
    would leave too little of a message to its group.
    """
    if (size := outcome.ByteSize()) > MAX_OUTCOME_BYTES:
        raise DomainError(
            Reason.MESSAGE_TOO_LARGE,
            f"the outcome has {size} bytes, {outcome.metadata.ByteSize()} of them metadata; "
            f"at most {MAX_OUTCOME_BYTES} are allowed",
            {
                "byte_count": size,
                "metadata_byte_count": outcome.metadata.ByteSize(),
                "limit": MAX_OUTCOME_BYTES,
            },
        )
    check_depth("outcome.metadata", outcome.metadata)
    kind = outcome.WhichOneof("result")
    if kind is None:
        raise FieldInvalid("outcome.result", "must be a reward or a failure")
    if kind == "reward" and not math.isfinite(outcome.reward):
        raise FieldInvalid("outcome.reward", "must be finite", outcome.reward)
    if kind == "failure" and not outcome.failure.reason:
        raise FieldInvalid("outcome.failure.reason", "must name a reason")
    if kind == "failure" and len(reason := outcome.failure.reason) > MAX_ID_LENGTH:
        raise FieldInvalid(
            "outcome.failure.reason", f"must have at most {MAX_ID_LENGTH} characters", reason
        )
    for name, value in outcome.metrics.items():
        if not math.isfinite(value):
            raise FieldInvalid(f"outcome.metrics[{name}]", "must be finite", value)
    for index, value in enumerate(outcome.turn_rewards):
        if not math.isfinite(value):
            raise FieldInvalid(f"outcome.turn_rewards[{index}]", "must be finite", value)
