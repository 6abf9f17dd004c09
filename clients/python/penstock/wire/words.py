"""Values of `penstock.v1` in the words that users and other programs know them by."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.v1 import conversation_pb2, trajectory_pb2, weights_pb2

if TYPE_CHECKING:
    from penstock.v1 import rollout_service_pb2

ROLES = {
    name.removeprefix("ROLE_").lower(): role for name, role in conversation_pb2.Role.items() if role
}
"""system, user, assistant, tool"""
IN_FLIGHT = {
    name.removeprefix("IN_FLIGHT_POLICY_").lower(): policy
    for name, policy in weights_pb2.InFlightPolicy.items()
    if policy
}
"""keep, recompute, drain, abort"""
FINISH_REASONS = {
    name.removeprefix("FINISH_REASON_").lower(): reason
    for name, reason in trajectory_pb2.FinishReason.items()
    if reason
}
"""stop, length, aborted"""
ORDINARY = frozenset({"SAMPLING", "TRAINER_BUSY"})
"""Causes of a wait that every run has at times."""


def wait_in_words(wait: rollout_service_pb2.Wait) -> str:
    return f"{wait.cause} for {wait.duration.ToSeconds()} s: {wait.message}; {wait.advice}"
