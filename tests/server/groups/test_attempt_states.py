"""The states of an attempt and the moves between them."""

from __future__ import annotations

import itertools

import pytest

from penstock.server.groups.attempts import (
    Attempt,
    AttemptState,
    Group,
    group_changed,
    recorded_state,
)
from penstock.v1 import trajectory_pb2

WAITING, LEASED, ORPHANED, SUCCEEDED, FAILED = AttemptState
MOVES = {
    (WAITING, LEASED),
    (WAITING, FAILED),
    (LEASED, ORPHANED),
    (LEASED, WAITING),
    (LEASED, SUCCEEDED),
    (LEASED, FAILED),
    (ORPHANED, LEASED),
    (ORPHANED, WAITING),
    (ORPHANED, SUCCEEDED),
    (ORPHANED, FAILED),
    (SUCCEEDED, WAITING),
    (FAILED, WAITING),
}


def attempt_in(state: AttemptState) -> Attempt:
    group = Group("g", 1, None, trajectory_pb2.PURPOSE_TRAIN, 0)
    attempt = Attempt(group, 0, state=state)
    group.attempts.append(attempt)
    return attempt


@pytest.mark.parametrize(("before", "after"), itertools.product(AttemptState, repeat=2))
def test_an_attempt_makes_only_the_moves_of_the_table(before: AttemptState, after: AttemptState):
    attempt = attempt_in(before)
    if (before, after) in MOVES:
        attempt.to(after)
        assert attempt.state is after
        return
    with pytest.raises(ValueError, match=f"from {before.value} to {after.value}"):
        attempt.to(after)
    assert attempt.state is before


@pytest.mark.parametrize("state", AttemptState)
def test_a_record_has_the_state_but_not_whether_the_stream_was_lost(state: AttemptState):
    (recorded,) = group_changed(attempt_in(state).group).group_changed.attempts
    assert recorded_state(recorded) is (LEASED if state is ORPHANED else state)
