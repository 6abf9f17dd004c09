"""The parameters that a hub sends to its engine servers with each turn."""

from __future__ import annotations

import pytest

from penstock.server.config.settings import StreamingSection
from penstock.server.engine.protocol import WHOLE
from penstock.server.pool.rules import PoolRules

RULES = PoolRules(flush_seconds=0.2, whole_flush_seconds=1.0, segments_per_second=2_000.0)


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
    assert RULES.flush_for(interval, turns) == seconds


def test_turns_that_are_read_as_a_whole_never_take_more_segments_than_the_rule() -> None:
    for turns in range(1, 50_000, 97):
        assert turns / RULES.flush_for(WHOLE, turns) <= RULES.segments_per_second + 1e-6


def test_an_engine_server_gathers_tokens_for_a_hub() -> None:
    # An engine server asked for a shorter interval than its own would hand over single tokens.
    asked, own = PoolRules(), StreamingSection()
    assert asked.flush_for(own.interval, 1) >= own.flush_seconds
    assert asked.flush_for(WHOLE, 1) >= own.flush_seconds
