"""What a server reports that it or its peers wait for, in one line for logs and terminals."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.v1 import rollout_service_pb2

ORDINARY = frozenset({"SAMPLING", "TRAINER_BUSY"})
"""Causes that every run has at times."""


def in_words(wait: rollout_service_pb2.Wait) -> str:
    return f"{wait.cause} for {wait.duration.ToSeconds()} s: {wait.message}; {wait.advice}"
