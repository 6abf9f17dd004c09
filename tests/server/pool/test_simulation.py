"""The simulator of many engines: no lost group, no token that is too old, and
closed forms of simple cases."""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import Counter
from dataclasses import replace

import pytest
from benchmarks.simulation.engine import EngineTimes, SimulatedEngine, Turn
from benchmarks.simulation.setup import Setup, Tally, TrainerTimes, Workload
from benchmarks.simulation.validation import Pair, errors
from benchmarks.simulation.virtual_run import Group, Simulation, Stuck, simulate
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from penstock.server.config.pool import PoolSection
from penstock.server.groups.staleness_gate import LatePolicy, StalenessContract

STEP = 0.02
TOKENS = 50
CONSTANT = Workload(siblings=2, median_tokens=TOKENS)
VARIED = Workload(
    siblings=2, turns=2, median_tokens=20.0, sigma=1.0, most_tokens=300, tool_seconds=0.2
)
TRAINER = TrainerTimes(step_seconds=1.0, publish_seconds=0.25)


def setup_of(max_lag: int = 0, groups: int = 2, workload: Workload = CONSTANT, **fields: object):
    policy = fields.pop("policy", LatePolicy.MASK)
    assert isinstance(policy, LatePolicy)
    made = Setup(
        StalenessContract(max_lag, groups, policy),
        workload,
        EngineTimes(((1, STEP),)),
        TRAINER,
    )
    return replace(made, **fields)


async def play(setup: Setup, steps: int, seed: int = 1) -> tuple[Simulation, list[dict[int, int]]]:
    """Run a simulation; also return each trained group's tokens by lag."""
    trained: list[dict[int, int]] = []

    def note(group: Group, lags: dict[int, int]) -> None:
        trained.append(lags)

    simulation = Simulation(setup, seed, note)
    simulation.play(steps)
    return simulation, trained


# One engine


def turn_of(tokens: int, context: int = 10, name: str = "a") -> Turn:
    return Turn(None, name, tokens, context, prompt=context, cached=0)


@pytest.mark.parametrize("first_token_steps", [0, 1])
def test_a_turn_takes_a_step_for_each_token(first_token_steps: int) -> None:
    times = EngineTimes(((1, STEP),), first_token_steps=first_token_steps)
    engine = SimulatedEngine("e", times)
    engine.give(turn_of(TOKENS), 3.0)
    assert engine.happen(engine.next_time) == []
    (ended,) = engine.happen(engine.next_time)
    assert ended.token_count == TOKENS
    assert engine.next_time == math.inf
    taken = ended.last_step - ended.first_step + 1
    assert taken == TOKENS
    # If a step yields its token at its start, the engine does not wait
    # for the end of the last step.
    assert engine.busy_seconds == pytest.approx((TOKENS - 1 + first_token_steps) * STEP)


def test_steps_are_as_slow_as_there_are_turns_in_flight() -> None:
    times = EngineTimes(((1, 0.01), (3, 0.03)))
    assert [times.step_seconds(n) for n in (1, 2, 3, 5)] == pytest.approx([0.01, 0.02, 0.03, 0.05])
    assert EngineTimes(((2, 0.02), (4, 0.01))).step_seconds(9) == 0.01


@pytest.mark.parametrize("steps", [(), ((0, 0.1),), ((2, 0.1), (1, 0.1)), ((1, 0.0),)])
def test_times_that_make_no_sense_are_refused(steps: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(ValueError, match="steps must"):
        EngineTimes(steps)


def run_engine(
    engine: SimulatedEngine, arrivals: list[tuple[float, int]], switches: list[float]
) -> dict[str, tuple[float, dict[int, int]]]:
    """For each turn: the time of its end, and its tokens by version."""
    events = [(at, 0, index) for index, at in enumerate(switches, 1)]
    events += [(at, tokens, -index) for index, (at, tokens) in enumerate(arrivals)]
    heapq.heapify(events)
    found: dict[str, tuple[float, dict[int, int]]] = {}
    while events or engine.next_time < math.inf:
        if events and events[0][0] <= engine.next_time:
            at, tokens, index = heapq.heappop(events)
            if tokens:
                engine.give(turn_of(tokens, name=f"{-index}"), at)
            else:
                engine.switch(engine.version + 1, at)
            continue
        now = engine.next_time
        for turn in engine.happen(now):
            found[turn.request_id] = now, dict(engine.versions_of(turn))
    return found


def step_engine(
    times: EngineTimes, arrivals: list[tuple[float, int]], switches: list[float]
) -> dict[str, tuple[float, dict[int, int]]]:
    """The same result, computed step by step."""
    waiting = [(at, f"{index}", tokens) for index, (at, tokens) in enumerate(arrivals)]
    waiting.sort(key=lambda turn: turn[0])
    left: dict[str, int] = {}
    tokens: dict[str, Counter[int]] = {name: Counter() for _, name, _ in waiting}
    found: dict[str, tuple[float, dict[int, int]]] = {}
    version, now = 0, 0.0
    switches = sorted(switches)
    while waiting or left:
        if not left:
            # An idle engine takes a turn or new weights at once. If a turn waits at the end of a
            # step, the engine is not idle.
            while switches and now < waiting[0][0] and switches[0] < waiting[0][0]:
                now = max(now, switches.pop(0)) + times.pause_seconds
                version += 1
            now = max(now, waiting[0][0])
        due = [at for at in switches if at <= now]
        if due:
            # However many switches came since the last boundary, only the last version counts.
            switches = switches[len(due) :]
            version += len(due)
            now_paused = now + times.pause_seconds
        else:
            now_paused = now
        while waiting and waiting[0][0] <= now and len(left) < times.most_running:
            _, name, count = waiting.pop(0)
            left[name] = count
        now = now_paused + times.step_seconds(len(left))
        for name in list(left):
            tokens[name][version] += 1
            left[name] -= 1
            if not left[name]:
                del left[name]
                found[name] = now, dict(tokens[name])
    return found


# Never equal to a boundary, because rounding would then decide the order.
moments = st.integers(1, 2_000).map(lambda number: number * 0.00097531)


@settings(max_examples=200, deadline=None)
@given(
    arrivals=st.lists(
        st.tuples(moments, st.integers(1, 40)),
        min_size=1,
        max_size=12,
        unique_by=lambda arrival: arrival[0],
    ),
    switch=st.none() | moments,
    most_running=st.integers(1, 5),
)
# A switch at a boundary with nothing in flight and one turn waiting; another
# turn arrives during the pause
@example(arrivals=[(0.001, 1), (0.003, 1), (0.012, 1)], switch=0.002, most_running=2)
def test_arithmetic_over_steps_is_the_same_as_one_step_after_another(
    arrivals: list[tuple[float, int]], switch: float | None, most_running: int
) -> None:
    times = EngineTimes(((1, 0.0101), (5, 0.0307)), most_running=most_running, pause_seconds=0.0503)
    # The order of simultaneous events is undefined.
    assume(all(at != switch for at, _ in arrivals))
    switches = [] if switch is None else [switch]
    found = run_engine(SimulatedEngine("e", times), arrivals, switches)
    expected = step_engine(times, arrivals, switches)
    assert found.keys() == expected.keys()
    for name, (at, tokens) in expected.items():
        assert found[name][0] == pytest.approx(at, abs=1e-6)
        assert found[name][1] == tokens


def test_a_turn_that_does_not_fit_in_the_cache_waits_and_one_alone_never_does() -> None:
    times = EngineTimes(((1, STEP),), cache_tokens=100)
    engine = SimulatedEngine("e", times)
    for number in range(2):
        engine.give(turn_of(TOKENS, context=20, name=f"{number}"), 0.0)
    assert engine.happen(engine.next_time) == []
    assert (engine.running_count, engine.waiting_count) == (1, 1)
    assert engine.cache_usage(engine.next_time) > 0.6
    assert [turn.request_id for turn in engine.happen(engine.next_time)] == ["0"]
    engine.give(turn_of(500, context=500, name="long"), engine.next_time)
    ended: list[str] = []
    while engine.next_time < math.inf:
        ended += [turn.request_id for turn in engine.happen(engine.next_time)]
    assert ended == ["1", "long"]


# Closed forms


def test_a_synchronous_step_is_the_sum_of_its_parts() -> None:
    setup = setup_of(
        times=EngineTimes(((1, STEP),), prefill_seconds=1e-3, turn_seconds=0.03, pause_seconds=0.1),
        workload=replace(CONSTANT, siblings=1, prompt_tokens=16),
        groups=1,
        attempt_seconds=0.07,
        switch_seconds=0.4,
    )
    tally = simulate(setup, 1, 10, 2)
    generation = 0.07 + 16 * 1e-3 + TOKENS * STEP + 0.03
    period = generation + 1.0 + 0.25 + 0.4
    assert tally.per_hour == pytest.approx(3600 / period)
    # The trainer also waits for the switch.
    assert tally.idle == pytest.approx((generation + 0.4) / period)
    assert tally.busy == pytest.approx((16 * 1e-3 + TOKENS * STEP) / period)
    assert tally.tokens_by_lag == {0: 10 * TOKENS}


def test_an_engine_that_is_always_full_gives_what_its_batch_gives() -> None:
    agents = 8
    setup = setup_of(
        8,
        times=EngineTimes(((1, 0.01), (8, 0.02))),
        trainer=TrainerTimes(0.001),
        agents=agents,
        freshness=False,
    )
    tally = simulate(setup, 1, 40, 10)
    assert tally.per_hour == pytest.approx(3600 * agents / (TOKENS * 0.02), rel=1e-6)
    assert tally.batch == pytest.approx(agents)
    assert tally.busy == pytest.approx(1.0)


@pytest.mark.parametrize("engines", [1, 3])
def test_a_trainer_that_is_never_kept_waiting_sets_the_pace(engines: int) -> None:
    setup = setup_of(4, times=EngineTimes(((1, 1e-3),)), engines=engines, freshness=False)
    tally = simulate(setup, 1, 20, 10)
    assert tally.per_hour == pytest.approx(3600 * 4 / 1.25, rel=1e-3)
    assert tally.idle == 0.0


def test_a_hub_that_is_always_busy_sets_the_pace() -> None:
    setup = setup_of(
        8,
        times=EngineTimes(((1, 1e-4),)),
        trainer=TrainerTimes(1e-3),
        hub_seconds=0.5,
        freshness=False,
    )
    assert simulate(setup, 1, 20, 10).per_hour == pytest.approx(3600 / 0.5)


def test_a_conversation_is_prefilled_once_where_it_stays() -> None:
    turns, prompt, seen = 3, 100, 7
    workload = Workload(
        siblings=1, turns=turns, prompt_tokens=prompt, observation_tokens=seen, median_tokens=TOKENS
    )
    tally = simulate(setup_of(workload=workload, groups=1), 1, 4)
    assert tally.prefilled == 4 * (prompt + (turns - 1) * seen)
    # What previous turns left in the cache, including the first turn's prompt.
    reused = (prompt + TOKENS) + (prompt + TOKENS + seen + TOKENS)
    assert tally.reused == 4 * reused


def test_siblings_share_their_prompt() -> None:
    workload = Workload(siblings=4, prompt_tokens=100, median_tokens=TOKENS)
    tally = simulate(setup_of(workload=workload, groups=1), 1, 3)
    assert (tally.prefilled, tally.reused) == (3 * 100, 3 * 300)


def test_turns_beyond_all_limits_wait_in_the_hub_and_none_is_lost() -> None:
    rules = PoolSection(first_turns=2, most_turns=2)
    setup = setup_of(2, groups=8, engines=2, rules=rules)
    tally = simulate(setup, 1, 5)
    assert tally.trajectories == 5 * 8 * 2
    assert tally.batch <= 2.0


def test_under_a_cache_that_fills_an_engine_keeps_its_turns() -> None:
    # The cache holds this many turns. A turn takes as long as 50 looks at the engine.
    fit, context, tokens = 24, 990, 10
    setup = setup_of(
        4,
        groups=32,
        workload=Workload(siblings=2, prompt_tokens=context, median_tokens=tokens),
        times=EngineTimes(((1, 5.0),), cache_tokens=fit * (context + tokens)),
        rules=PoolSection(first_turns=64),
    )
    limits: list[int] = []

    async def play_noting() -> None:
        simulation = Simulation(setup, 1)
        (member,) = simulation.pool.members

        def note(_: object) -> None:
            limits.append(member.limit.value)
            simulation.clock.after(1.0, note)

        note(None)
        simulation.play(8)

    asyncio.run(play_noting())
    assert limits[0] == 64
    assert fit // 2 < min(limits) <= fit


def test_an_engine_that_was_slow_once_is_tried_again_and_has_its_share_from_then_on() -> None:
    async def play_with_one_slow() -> list[int]:
        simulation = Simulation(setup_of(4, groups=4, engines=4, freshness=False), 1)
        slow, *others = simulation.pool.members
        # The first turn, while the engine warmed up.
        slow.paced(60.0, TOKENS)
        for member in others:
            member.paced(STEP * TOKENS, TOKENS)
        simulation.play(100)
        return [member.given for member in simulation.pool.members]

    slow, *others = asyncio.run(play_with_one_slow())
    assert slow > 0.5 * sum(others) / len(others)


# Invariants


@settings(max_examples=60, deadline=None)
@given(
    policy=st.sampled_from(LatePolicy),
    max_lag=st.integers(0, 4),
    groups=st.integers(1, 6),
    engines=st.integers(1, 4),
    agents=st.none() | st.integers(1, 20),
    at_once=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_no_group_is_lost_and_no_trained_token_is_too_old(
    policy: LatePolicy,
    max_lag: int,
    groups: int,
    engines: int,
    agents: int | None,
    at_once: bool,
    seed: int,
) -> None:
    setup = setup_of(
        max_lag,
        groups,
        VARIED,
        policy=policy,
        engines=engines,
        agents=agents,
        times=EngineTimes(((1, 0.01), (8, 0.04)), turn_seconds=0.002, pause_seconds=0.05),
        switch_seconds=0.08,
        rules=PoolSection(switch="all" if at_once else "rolling"),
    )
    simulation, trained = asyncio.run(play(setup, 8, seed))
    gate = simulation.gate
    assert simulation.trained_count == 8 * groups == len(trained)
    held = len(simulation.batch) + len(simulation.finished) + len(gate.running)
    assert simulation.admitted_count == simulation.trained_count + simulation.discarded_count + held
    assert gate.outstanding == len(simulation.finished) + len(gate.running)
    assert gate.outstanding <= setup.contract.max_outstanding
    assert simulation.tally.oldest <= max_lag
    if policy is not LatePolicy.MASK or not max_lag:
        assert max(behind for lags in trained for behind in lags) <= max_lag
    if not policy.drops:
        assert simulation.discarded_count == 0
    # Every token of every sibling, exactly once.
    tokens = sum(sum(lags.values()) for lags in trained)
    if policy is LatePolicy.MASK:
        assert sum(simulation.tally.tokens_by_lag.values()) == tokens
    assert all(sum(lags.values()) >= 2 * setup.workload.siblings for lags in trained)


def test_the_same_seed_gives_the_same_run_and_another_one_another() -> None:
    setup = setup_of(2, 6, VARIED, engines=40)
    assert simulate(setup, 7, 6) == simulate(setup, 7, 6)
    assert simulate(setup, 7, 6) != simulate(setup, 8, 6)


def test_the_tokens_of_a_step_are_those_of_its_attempts() -> None:
    setup = setup_of(0, 3, VARIED, engines=2)
    simulation, trained = asyncio.run(play(setup, 2, seed=5))
    planned = [
        sum(turn.token_count for i in range(2) for turn in VARIED.plan(5, task, i))
        for task in range(6)
    ]
    assert sorted(sum(lags.values()) for lags in trained) == sorted(planned)
    assert simulation.tally.steps == 2


def test_a_run_that_nobody_works_on_is_given_up() -> None:
    with pytest.raises(Stuck):
        simulate(setup_of(agents=0, stuck_seconds=100.0), 1, 1)


# Comparison with real runs


def tally_of(per_hour: float, lags: dict[int, int]) -> Tally:
    return Tally(4, steps=1, seconds=3600.0, trajectories=round(per_hour), tokens_by_lag=lags)


def test_an_error_is_the_worst_setting_and_in_it_the_middle_round(
    capsys: pytest.CaptureFixture[str],
) -> None:
    real = tally_of(1000, {0: 50, 2: 50})
    pairs = [
        *(Pair(1, 0, real, tally_of(rate, {0: 50, 2: 50})) for rate in (900, 980, 3000)),
        *(Pair(1, 4, real, tally_of(1000, {0: 60, 2: 40})) for _ in range(3)),
        Pair(2, 4, real, tally_of(5000, {0: 1})),
    ]
    assert errors(pairs, 1) == pytest.approx((0.02, 0.2))
    assert "max_lag 4: off by 0.0%, lag by 20.0%" in capsys.readouterr().out


def test_no_lag_is_as_right_as_can_be_where_there_is_none_and_wrong_where_there_is_some() -> None:
    none, some = tally_of(1, {0: 9}), tally_of(1, {1: 9})
    assert Pair(1, 0, none, none).lag_ratio == 1.0
    assert Pair(1, 0, none, some).lag_ratio == math.inf


def test_tokens_too_old_are_masked_and_no_part_of_the_lag() -> None:
    tally = tally_of(1, {0: 10, 4: 10, 5: 20})
    assert (tally.mean_lag, tally.oldest, tally.masked) == (2.0, 4, 0.5)
