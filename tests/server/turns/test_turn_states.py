"""The states of a turn and the moves between them."""

from __future__ import annotations

import itertools

import pytest
from opentelemetry import trace

from penstock.server.turns.trajectory import PromptKind, TrajectoryRecord, Turn
from penstock.server.turns.turn import TurnSampling, TurnState

NEW, STARTING, WAITING, SAMPLING, MOVING, RECORDING, FINISHED = TurnState
MOVES = {
    (NEW, STARTING),
    (STARTING, WAITING),
    (WAITING, SAMPLING),
    (WAITING, RECORDING),
    (SAMPLING, WAITING),
    (SAMPLING, MOVING),
    (SAMPLING, RECORDING),
    (MOVING, WAITING),
    (MOVING, RECORDING),
    (RECORDING, FINISHED),
    (FINISHED, STARTING),
}


def turn_in(state: TurnState) -> Turn:
    sampling = TurnSampling()
    return Turn(
        record=TrajectoryRecord("t", PromptKind.TOKENS, sampling),
        index=0,
        sampling=sampling,
        budget=8,
        context_token_count=0,
        span=trace.INVALID_SPAN,
        trace_headers={},
        stream_interval=1,
        state=state,
        request_id="t/0/1",
        adapter_version=3,
    )


@pytest.mark.parametrize(("before", "after"), itertools.product(TurnState, repeat=2))
def test_a_turn_makes_only_the_moves_of_the_table(before: TurnState, after: TurnState):
    turn = turn_in(before)
    if (before, after) in MOVES:
        turn.to(after)
        assert turn.state is after
        return
    with pytest.raises(ValueError, match=f"from {before.value} to {after.value}"):
        turn.to(after)
    assert turn.state is before
    assert (turn.request_id, turn.adapter_version) == ("t/0/1", 3)


@pytest.mark.parametrize(("before", "after"), sorted(MOVES, key=str))
def test_a_turn_has_a_request_only_while_the_engine_works_on_it(
    before: TurnState, after: TurnState
):
    turn = turn_in(before)
    turn.to(after)
    kept = after in (SAMPLING, MOVING)
    assert (turn.request_id, turn.adapter_version) == (("t/0/1", 3) if kept else (None, None))


def test_a_turn_is_in_flight_from_the_start_of_an_attempt_to_its_end():
    assert {state for state in TurnState if not turn_in(state).in_flight} == {NEW, FINISHED}
