"""Where turns go in a pool, and how many an engine gets: the pure policies."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.server.config.pool import PoolSection
from penstock.server.engine.turn_limit import LimitRules, TurnLimit
from penstock.server.pool.routing import (
    EngineLoad,
    place,
    retry_seconds,
    widest_limit,
)
from penstock.v1 import rollout_service_pb2
from penstock.wire.messages import ServerLoad

RULES = PoolSection(margin=0.25)


def load(
    name: str,
    turns: int,
    limit: int = 8,
    slow: float = 1.0,
    given: int = 0,
    between: int = 0,
    *,
    proven: bool = True,
) -> EngineLoad:
    return EngineLoad(name, turns, limit, slow, given, between, proven)


loads = st.lists(
    st.builds(
        EngineLoad,
        name=st.uuids().map(str),
        turns=st.integers(0, 20),
        limit=st.integers(1, 16),
        slowness=st.floats(1.0, 8.0),
        given=st.integers(0, 100),
        between=st.integers(0, 20),
        proven=st.booleans(),
    ),
    max_size=8,
    unique_by=lambda engine: engine.name,
)


def test_the_least_busy_takes_it_by_its_part_of_the_limit() -> None:
    found = place([load("a", 4, limit=8), load("b", 6, limit=32)], [], RULES)
    assert found is not None and found.name == "b"


def test_limits_that_were_never_too_high_say_nothing_of_what_an_engine_can_take() -> None:
    untried, tried = load("untried", 6, limit=8, proven=False), load("tried", 7, 16, proven=False)
    found = place([untried, tried], [], RULES)
    assert found is not None and found.name == "untried"
    # A limit that was once too high does count, against either engine.
    small = load("small", 5, limit=8)
    assert small.busy(16) > tried.busy(16) > untried.busy(16)
    # An untried engine also gets no more turns than its limit.
    found = place([load("untried", 8, limit=8, proven=False), tried], [], RULES)
    assert found is not None and found.name == "tried"


def test_what_is_between_two_turns_counts_as_one_and_takes_no_place() -> None:
    engines = [load("a", 2, between=3), load("b", 4)]
    found = place(engines, [], RULES)
    assert found is not None and found.name == "b"
    found = place([load("a", 2, between=8), load("b", 8)], [], RULES)
    assert found is not None and found.name == "a"
    left = place([load("home", 0, between=3), load("idle", 0)], ["home"], RULES)
    assert left is not None and left.name == "idle"


def test_among_equals_the_one_that_had_fewest_so_far() -> None:
    found = place([load("a", 2, given=9), load("b", 2, given=3)], [], RULES)
    assert found is not None and found.name == "b"


def test_home_is_kept_up_to_the_margin_and_no_further() -> None:
    kept = place([load("home", 2), load("idle", 0)], ["home"], RULES)
    assert kept is not None and kept.name == "home"
    left = place([load("home", 3), load("idle", 0)], ["home"], RULES)
    assert left is not None and left.name == "idle"


def test_the_trajectory_s_home_comes_before_the_group_s() -> None:
    found = place([load("group", 0), load("own", 1)], ["own", "group"], RULES)
    assert found is not None and found.name == "own"


def test_a_home_that_is_gone_or_full_is_passed_over() -> None:
    found = place([load("full", 8), load("other", 7)], ["gone", "full"], RULES)
    assert found is not None and found.name == "other"


def test_a_slow_engine_is_as_busy_with_fewer_turns() -> None:
    found = place([load("slow", 2, slow=3.0), load("quick", 5)], [], RULES)
    assert found is not None and found.name == "quick"


@given(loads, st.lists(st.sampled_from("abc"), max_size=2), st.floats(0.0, 1.0))
def test_it_goes_to_one_with_room_that_is_at_most_the_margin_busier_than_the_least(
    engines: list[EngineLoad], homes: list[str], margin: float
) -> None:
    names = [engine.name for engine in engines[: len(homes)]]
    found = place(engines, names, PoolSection(margin=margin))
    free = [engine for engine in engines if engine.turns < engine.limit]
    if not free:
        assert found is None
        return
    assert found in free
    widest = widest_limit(engines)
    least = min(engine.busy(widest) for engine in free)
    assert found.busy(widest) - least <= (margin if found.name in names else 0.0)


def test_without_homes_the_least_busy_takes_it() -> None:
    rules = PoolSection(margin=10.0, routing="least_loaded")
    found = place([load("home", 3), load("idle", 0)], ["home"], rules)
    assert found is not None and found.name == "idle"


def test_round_robin_gives_each_engine_as_many_whatever_they_have() -> None:
    rules = PoolSection(routing="round_robin")
    given = dict.fromkeys("abc", 0)
    for _ in range(30):
        engines = [
            load(name, turns, given=given[name])
            for name, turns in zip("abc", (7, 0, 3), strict=True)
        ]
        found = place(engines, ["a"], rules)
        assert found is not None
        given[found.name] += 1
    assert given == {"a": 10, "b": 10, "c": 10}
    full = place([load("full", 8), load("free", 7, given=9)], [], rules)
    assert full is not None and full.name == "free"


def test_retries_double_up_to_a_bound() -> None:
    assert [retry_seconds(n) for n in range(4)] == [0.0, 0.2, 0.4, 0.8]
    assert retry_seconds(500) == 2.0


# How many


LIMITS = LimitRules(first=8, fewest=1, most=64)
Report = tuple[int, rollout_service_pb2.ServerLoad]


def report(turns: int, waiting: int = 0, usage: float = 0.1, preemptions: int = 0) -> Report:
    load = ServerLoad(
        waiting_turn_count=waiting, kv_cache_usage=usage, preemption_count=preemptions
    )
    return turns, load


def test_a_limit_that_is_reached_with_room_grows() -> None:
    limit = TurnLimit(LIMITS.first)
    assert limit.after(*report(8), LIMITS) == TurnLimit(9, preemptions=0, proven=False)
    assert TurnLimit(64).after(*report(64), LIMITS).value == 64


def test_a_limit_that_is_not_reached_stays() -> None:
    assert TurnLimit(8).after(*report(5), LIMITS).value == 8


def test_turns_that_wait_in_the_engine_teach_nothing_better() -> None:
    assert TurnLimit(8).after(*report(8, 4), LIMITS).value == 8


def test_a_preemption_counts_once_and_lowers_it_below_what_there_was() -> None:
    limit = TurnLimit(40, preemptions=0).after(*report(20, preemptions=3), LIMITS)
    assert limit.value == 15 and limit.proven
    assert limit.after(*report(15, usage=0.9, preemptions=3), LIMITS).value == 15


def test_what_was_preempted_before_the_first_report_is_not_counted() -> None:
    limit = TurnLimit(LIMITS.first).after(*report(0, preemptions=7), LIMITS)
    assert limit.value == LIMITS.first
    assert limit.after(*report(4, preemptions=7), LIMITS).value == LIMITS.first
    assert limit.after(*report(4, preemptions=8), LIMITS).value == 3


def test_a_full_cache_lowers_it_and_an_almost_full_one_does_not_raise_it() -> None:
    assert TurnLimit(8).after(*report(8, usage=0.97), LIMITS).value == 6
    assert TurnLimit(8).after(*report(8, usage=0.9), LIMITS).value == 8


def test_it_falls_once_for_one_time_of_pressure_however_long_the_turns_take_to_end() -> None:
    limit = TurnLimit(32).after(*report(32, usage=1.0, preemptions=1), LIMITS)
    assert limit.value == 24
    # No turn ends, so the cache stays full and preempts turns. This
    # says nothing yet about 24 turns.
    for turns, preemptions in zip((32, 31, 28, 25), (2, 3, 5, 6), strict=True):
        limit = limit.after(*report(turns, usage=1.0, preemptions=preemptions), LIMITS)
        assert limit.value == 24
    # These preemptions happened while there were still more turns than the new limit.
    limit = limit.after(*report(24, usage=0.9, preemptions=7), LIMITS)
    assert limit.value == 24
    assert limit.after(*report(24, usage=0.9, preemptions=8), LIMITS).value == 18


def test_turns_that_came_down_to_a_limit_that_is_still_too_high_lower_it_again() -> None:
    limit = TurnLimit(32).after(*report(32, usage=1.0), LIMITS)
    limit = limit.after(*report(24, usage=1.0), LIMITS)
    assert limit.value == 18
    assert limit.after(*report(19, usage=1.0), LIMITS).value == 18


def test_the_count_of_another_process_is_no_preemption() -> None:
    assert TurnLimit(8, preemptions=90).after(*report(4), LIMITS).value == 8


@given(
    st.lists(
        st.builds(
            report,
            turns=st.integers(0, 100),
            waiting=st.integers(0, 100),
            usage=st.floats(0.0, 1.0),
            preemptions=st.integers(0, 5),
        ),
        max_size=50,
    )
)
def test_the_limit_stays_within_its_bounds(
    reports: list[Report],
) -> None:
    limit = TurnLimit(LIMITS.first)
    for each in reports:
        limit = limit.after(*each, LIMITS)
        assert LIMITS.fewest <= limit.value <= LIMITS.most


def test_rules_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="fewest"):
        LimitRules(first=2, fewest=3)
