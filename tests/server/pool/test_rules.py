"""The parameters that a hub sends to its engine servers with each turn."""

from __future__ import annotations

import pytest

from penstock.server.config.settings import StreamingSection
from penstock.server.engine.protocol import WHOLE
from penstock.server.pool.engine import PoolEngine
from penstock.server.pool.turns import SEGMENTS_PER_SECOND

TURNS = PoolEngine(()).turns


@pytest.mark.parametrize(
    ("interval", "turns", "seconds"),
    [
        (1, 10_000, 0.0),
        (16, 10_000, 0.2),
        (WHOLE, 1, 1.0),
        (WHOLE, 2_000, 1.0),
        (WHOLE, 10_000, 5.0),
    ],
)
def test_tokens_wait_longer_the_less_their_caller_waits_for_them(
    interval: int, turns: int, seconds: float
) -> None:
    assert TURNS.flush_for(interval, turns) == seconds


def test_turns_that_are_read_as_a_whole_never_take_more_segments_than_the_rule() -> None:
    for turns in range(1, 50_000, 97):
        assert turns / TURNS.flush_for(WHOLE, turns) <= SEGMENTS_PER_SECOND + 1e-6


def test_an_engine_server_gathers_tokens_for_a_hub() -> None:
    # An engine server asked for a shorter interval than its own would hand over single tokens.
    own = StreamingSection()
    assert TURNS.flush_for(own.interval, 1) >= own.flush_seconds
    assert TURNS.flush_for(WHOLE, 1) >= own.flush_seconds
