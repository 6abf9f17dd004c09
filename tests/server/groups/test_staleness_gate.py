"""The staleness gate: each rule alone, then whole runs on a virtual clock
with every decision checked."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, field
from statistics import fmean

import pytest
from benchmarks.staleness.simulation import Attempt, Group, Load, Simulation, Tally
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from penstock.server.groups.freshness_controller import (
    TOLERATED_WAIT,
    FreshnessController,
    StepObservation,
)
from penstock.server.groups.staleness_gate import (
    LatePolicy,
    Selection,
    StalenessContract,
    StalenessGate,
)
from penstock.wire.staleness import lag

MASK, WAIT, REQUEUE, DROP = LatePolicy


def make_gate(
    max_lag: int,
    groups_per_step: int,
    policy: LatePolicy = MASK,
    *,
    version: int = 0,
    freshness: bool = False,
) -> StalenessGate:
    contract = StalenessContract(max_lag, groups_per_step, policy)
    return StalenessGate(contract, version, freshness=freshness)


def admit_all(gate: StalenessGate, active_version: int, prefix: str = "g") -> list[str]:
    """Admit groups until the gate refuses; return their ids."""
    admitted: list[str] = []
    while gate.may_admit(active_version):
        group_id = f"{prefix}{len(admitted)}"
        gate.admit(group_id, active_version)
        admitted.append(group_id)
    return admitted


def finish_all(gate: StalenessGate, group_ids: list[str], oldest_version: int | None) -> None:
    for group_id in group_ids:
        gate.complete(group_id, oldest_version, 0.0)


# The contract and invalid input


@pytest.mark.parametrize(("max_lag", "groups"), [(-1, 4), (2, 0), (0, -3)])
def test_a_contract_names_the_value_it_refuses(max_lag: int, groups: int) -> None:
    with pytest.raises(ValueError, match=str(max_lag if max_lag < 0 else groups)):
        StalenessContract(max_lag, groups, MASK)


def test_bad_input_is_refused_and_changes_nothing() -> None:
    gate = make_gate(1, 2)
    gate.admit("a", 0)
    gate.admit("b", 0)
    gate.complete("b", 0, 0.0)
    for group_id in ("a", "b"):
        with pytest.raises(ValueError, match=f"'{group_id}' is admitted already"):
            gate.admit(group_id, 0)
        with pytest.raises(ValueError, match=f"'{group_id}' is outstanding already"):
            gate.restore(group_id, 0)
    with pytest.raises(ValueError, match="'b' is not running"):
        gate.complete("b", 0, 0.0)
    with pytest.raises(ValueError, match="'unknown' is not running"):
        gate.complete("unknown", 0, 0.0)
    with pytest.raises(ValueError, match="-1"):
        gate.select(-1, 0.0)
    with pytest.raises(ValueError, match="-2"):
        gate.advance(-2, 0.0)
    with pytest.raises(ValueError, match="-7"):
        make_gate(1, 1, version=-7)
    gate.release("unknown")
    assert (len(gate.running), len(gate.completed), gate.delivered, gate.trainer_version) == (
        1,
        1,
        0,
        0,
    )


def test_a_group_may_not_start_where_the_gate_says_no() -> None:
    gate = make_gate(0, 1)
    gate.admit("a", 0)
    with pytest.raises(ValueError, match="'b' may not start at version 0"):
        gate.admit("b", 0)


def test_an_id_is_known_until_it_was_vacated_or_its_version_is_over() -> None:
    gate = make_gate(1, 2)
    gate.admit("a", 0)
    gate.release("a")
    gate.admit("a", 0)
    gate.complete("a", 0, 0.0)
    assert gate.select(1, 0.0).delivered == ("a",)
    with pytest.raises(ValueError, match="admitted already"):
        gate.admit("a", 0)
    gate.advance(1, 0.0)
    gate.admit("a", 1)


# Admission under every policy


@pytest.mark.parametrize("policy", LatePolicy)
def test_outstanding_and_taken_groups_fill_the_places_of_max_lag_plus_one_batches(
    policy: LatePolicy,
) -> None:
    gate = make_gate(2, 3, policy)
    first = admit_all(gate, 0)
    assert len(first) == gate.outstanding == 9
    finish_all(gate, first[:3], 0)
    assert len(gate.select(3, 0.0).delivered) == 3
    assert not gate.may_admit(0), "a delivered group keeps its place until the next version"
    gate.advance(1, 0.0)
    assert len(admit_all(gate, 1, "h")) == 3


@pytest.mark.parametrize("policy", LatePolicy)
def test_max_lag_zero_admits_one_batch_per_version_and_only_under_its_own_weights(
    policy: LatePolicy,
) -> None:
    gate = make_gate(0, 4, policy, freshness=True)
    for version in range(3):
        gate.advance(version, float(version))
        if version:
            assert not gate.may_admit(version - 1)
        admitted = admit_all(gate, version, f"{version}-")
        assert len(admitted) == 4
        finish_all(gate, admitted, version)
        assert set(gate.select(4, float(version)).delivered) == set(admitted)
        assert not gate.may_admit(version)


@pytest.mark.parametrize("policy", LatePolicy)
def test_a_group_born_too_old_is_not_admitted(policy: LatePolicy) -> None:
    gate = make_gate(2, 4, policy, version=5)
    assert not gate.may_admit(2)
    assert gate.may_admit(3)


@pytest.mark.parametrize("policy", LatePolicy)
def test_a_group_that_fails_frees_its_place(policy: LatePolicy) -> None:
    gate = make_gate(1, 2, policy)
    running, finished, *_ = admit_all(gate, 0)
    finish_all(gate, [finished], 0)
    gate.release(running)
    gate.release(finished)
    gate.release(finished)
    assert gate.outstanding == 2
    assert len(admit_all(gate, 0, "h")) == 2


@pytest.mark.parametrize("policy", LatePolicy)
def test_a_refused_group_gives_its_place_in_the_batch_back(policy: LatePolicy) -> None:
    gate = make_gate(0, 2, policy)
    admitted = admit_all(gate, 0)
    finish_all(gate, admitted, 0)
    gate.select(2, 0.0)
    gate.release(admitted[0])
    assert admit_all(gate, 0, "h") == ["h0"]
    gate.complete("h0", 0, 0.0)
    assert gate.select(1, 0.0).delivered == ("h0",)


# MASK, REQUEUE, DROP


def test_mask_takes_the_oldest_first_and_discards_nothing() -> None:
    gate = make_gate(1, 4, version=0)
    for group_id in "abcd":
        gate.admit(group_id, 0)
    gate.advance(3, 0.0)
    for group_id, oldest in (("a", 2), ("b", 0), ("c", None), ("d", 0)):
        gate.complete(group_id, oldest, 0.0)
    assert gate.select(2, 0.0) == Selection(delivered=("b", "c"))
    assert gate.select(0, 0.0) == Selection()
    assert gate.select(9, 0.0) == Selection(delivered=("d", "a"))


@pytest.mark.parametrize("policy", [REQUEUE, DROP])
def test_groups_with_a_token_past_the_bound_are_discarded_at_selection(policy: LatePolicy) -> None:
    gate = make_gate(1, 3, policy)
    for group_id in "abc":
        gate.admit(group_id, 0)
    gate.advance(2, 0.0)
    gate.complete("a", 1, 0.0)
    gate.complete("b", 0, 0.0)
    assert gate.select(0, 0.0) == Selection(), "without demand nothing is decided"
    assert gate.select(3, 0.0) == Selection(delivered=("a",), late=("b",))
    assert (len(gate.running), len(gate.completed), gate.delivered) == (1, 0, 1)
    gate.admit("b", 2)


@pytest.mark.parametrize("policy", [MASK, REQUEUE, DROP])
def test_what_is_delivered_again_does_not_take_the_place_of_what_is_trained(
    policy: LatePolicy,
) -> None:
    # The server was killed before it received the receipt of "old". The restarted
    # server delivers that group again.
    gate = make_gate(0, 1, policy, version=1)
    gate.adopt("new", 1)
    gate.restore("old", 0 if policy is MASK else 1)
    assert gate.select(1, 0.0).delivered == ("old",)
    gate.complete("new", 1, 0.0)
    assert gate.select(1, 0.0).delivered == ("new",)
    # The receipt names a step that is over.
    gate.release("old")
    assert gate.delivered == 1
    assert not gate.may_admit(1), "it would be trained at version 2"
    gate.advance(2, 0.0)
    assert gate.may_admit(2)


def test_of_more_than_a_batch_those_that_are_not_refused_keep_their_places() -> None:
    gate = make_gate(1, 2, MASK)
    admitted = admit_all(gate, 0)
    finish_all(gate, admitted, 0)
    assert len(gate.select(4, 0.0).delivered) == 4
    for group_id in admitted[:2]:
        gate.release(group_id)
    assert (gate.delivered, len(admit_all(gate, 0, "h"))) == (2, 2)
    gate.release(admitted[2])
    assert (gate.delivered, len(admit_all(gate, 0, "i"))) == (1, 1)


def test_a_run_whose_weights_never_change_remembers_a_bounded_number() -> None:
    gate = make_gate(1, 3, MASK)
    for number in range(5000):
        gate.admit(str(number), 0)
        gate.complete(str(number), 0, 0.0)
        assert gate.select(1, 0.0).delivered == (str(number),)
    assert (gate.delivered, gate.outstanding) == (3, 0)
    assert gate.may_admit(0)
    assert len(gate._batch) <= 1024


# WAIT


def test_wait_keeps_the_trainer_waiting_for_the_group_that_would_grow_too_old() -> None:
    gate = make_gate(1, 2, WAIT)
    old = admit_all(gate, 0)
    finish_all(gate, old[:2], 0)
    assert gate.select(2, 0.0).delivered == ("g0", "g1")
    gate.advance(1, 0.0)
    assert admit_all(gate, 1, "h") == ["h0", "h1"]
    finish_all(gate, ["h0", "h1"], 1)
    assert gate.select(2, 0.0).delivered == (), "g2 and g3 are due at version 1"
    gate.complete("g2", 0, 0.0)
    assert gate.select(2, 0.0).delivered == (), "g3 is due as well"
    gate.complete("g3", 0, 0.0)
    assert gate.select(2, 0.0).delivered == ("g2", "g3")


def test_wait_does_not_wait_for_a_group_that_can_be_taken_later() -> None:
    gate = make_gate(1, 2, WAIT)
    old = admit_all(gate, 0)
    finish_all(gate, old[:2], 0)
    gate.select(2, 0.0)
    gate.release("g3")
    gate.advance(1, 0.0)
    admit_all(gate, 1, "h")
    gate.complete("h0", 1, 0.0)
    gate.complete("h1", 1, 0.0)
    assert gate.select(2, 0.0).delivered == (), "g2 is due, so only one place is free"
    gate.release("g2")
    assert gate.select(2, 0.0).delivered == ("h0", "h1")


def test_wait_gives_a_group_the_time_its_first_token_was_late() -> None:
    gate = make_gate(1, 1, WAIT)
    admit_all(gate, 0)
    gate.complete("g0", 0, 0.0)
    gate.select(1, 0.0)
    gate.advance(1, 0.0)
    gate.admit("h", 1)
    gate.complete("h", 1, 0.0)
    gate.complete("g1", 1, 0.0)
    assert gate.select(1, 0.0).delivered == ("h",), "g1 waited for an agent until version 1"


def test_wait_delivers_a_whole_batch_or_the_whole_of_a_smaller_demand() -> None:
    gate = make_gate(2, 3, WAIT)
    finish_all(gate, admit_all(gate, 0)[:2], 0)
    assert gate.select(3, 0.0).delivered == ()
    assert gate.select(1, 0.0).delivered == ("g0",)
    assert gate.select(2, 0.0).delivered == ()
    gate.complete("g5", 0, 0.0)
    assert gate.select(2, 0.0).delivered == ("g1", "g5")


def test_wait_keeps_demand_beyond_the_batch_for_the_next_version() -> None:
    gate = make_gate(2, 2, WAIT)
    finish_all(gate, admit_all(gate, 0), 0)
    assert gate.select(5, 0.0).delivered == ("g0", "g1")
    assert gate.select(3, 0.0).delivered == ()
    gate.advance(1, 0.0)
    assert gate.select(3, 0.0).delivered == ("g2", "g3")


def test_wait_delivers_overdue_groups_where_a_trainer_stepped_without_a_batch() -> None:
    gate = make_gate(1, 2, WAIT)
    finish_all(gate, admit_all(gate, 0), 0)
    gate.advance(5, 0.0)
    assert not gate.may_admit(5), "no place is left before those are delivered"
    assert gate.select(2, 0.0).delivered == ("g0", "g1")
    gate.advance(6, 0.0)
    assert gate.select(2, 0.0).delivered == ("g2", "g3")


# Restarts


@pytest.mark.parametrize("policy", LatePolicy)
def test_groups_delivered_again_are_taken_before_new_ones_are_admitted(policy: LatePolicy) -> None:
    gate = make_gate(1, 2, policy)
    first = admit_all(gate, 0)
    finish_all(gate, first, 0)
    delivered = list(gate.select(2, 0.0).delivered)
    gate.advance(1, 0.0)
    delivered += gate.select(2, 0.0).delivered
    assert admit_all(gate, 1, "h") == ["h0", "h1"]
    gate.advance(0, 0.0)
    for group_id in delivered:
        gate.restore(group_id, 0)
    assert (len(gate.running), len(gate.completed), gate.delivered) == (2, 4, 0)
    assert not gate.may_admit(1)
    assert set(gate.select(2, 0.0).delivered) == {"g0", "g1"}
    assert gate.select(0, 0.0).late == ()


def test_a_lost_stream_gives_undelivered_groups_their_places_back() -> None:
    gate = make_gate(1, 2, WAIT)
    finish_all(gate, admit_all(gate, 0), 0)
    assert gate.select(2, 0.0).delivered == ("g0", "g1")
    gate.advance(0, 0.0)
    gate.restore("g0", 0)
    gate.restore("g1", 0)
    assert gate.delivered == 0
    assert set(gate.select(2, 0.0).delivered) <= {"g0", "g1", "g2", "g3"}


def test_running_groups_are_due_earlier_once_older_weights_may_sample_them() -> None:
    gate = make_gate(1, 1, WAIT, version=4)
    gate.admit("a", 4)
    gate.advance(2, 0.0)
    gate.admit("b", 4)
    gate.complete("b", 4, 0.0)
    assert gate.select(1, 0.0).delivered == ("b",)
    gate.advance(3, 0.0)
    gate.admit("c", 3)
    gate.complete("c", 3, 0.0)
    assert gate.select(1, 0.0).delivered == (), "a may hold tokens of version 2"
    gate.complete("a", 2, 0.0)
    assert gate.select(1, 0.0).delivered == ("a",)


def test_a_group_admitted_ahead_of_a_restarted_trainer_is_due_by_its_version() -> None:
    gate = make_gate(1, 1, WAIT, version=2)
    gate.admit("a", 5)
    gate.admit("b", 5)
    gate.complete("b", 5, 0.0)
    assert gate.select(1, 0.0).delivered == ("b",)
    gate.advance(3, 0.0)
    gate.admit("c", 3)
    gate.complete("c", 3, 0.0)
    assert gate.select(1, 0.0).delivered == (), "a may hold tokens of version 2 or 3 by now"


@pytest.mark.parametrize("policy", LatePolicy)
def test_a_new_gate_takes_over_what_is_under_way(policy: LatePolicy) -> None:
    gate = make_gate(1, 1, policy, version=3)
    gate.adopt("old", 1)
    gate.adopt("young", 3)
    gate.restore("done", 3)
    assert (len(gate.running), len(gate.completed)) == (2, 1)
    assert not gate.may_admit(3)
    with pytest.raises(ValueError, match="'old' is admitted already"):
        gate.adopt("old", 1)
    overdue_first = policy is WAIT
    assert gate.select(1, 0.0).delivered == (() if overdue_first else ("done",))
    gate.complete("old", 1, 0.0)
    selection = gate.select(1, 0.0)
    assert (selection.late if policy.drops else selection.delivered) == ("old",)


# The freshness controller


def observed(
    starved: float, *, surplus: int = 0, lacking: int = 1_000, filled: bool = True
) -> StepObservation:
    return StepObservation(60.0, starved, surplus, lacking, filled)


@pytest.mark.parametrize("groups_per_step", [1, 2, 4, 16, 100])
def test_the_target_moves_over_its_whole_range_for_every_size_of_batch(
    groups_per_step: int,
) -> None:
    ceiling = 9 * groups_per_step
    controller = FreshnessController(groups_per_step, groups_per_step + 1, ceiling)
    for _ in range(40):
        controller.observe(observed(30.0))
    assert controller.target == ceiling
    for _ in range(1000):
        controller.observe(observed(0.0))
    assert controller.target == groups_per_step + 1
    controller.observe(observed(60.0))
    assert controller.target >= 2 * groups_per_step


def test_the_target_rests_where_the_wait_is_the_tolerated_one() -> None:
    controller = FreshnessController(16, 17, 144)
    before = controller.target
    controller.observe(observed(60.0 * TOLERATED_WAIT))
    assert controller.target == before


def test_the_target_does_not_rise_where_no_agent_would_take_another_group() -> None:
    controller = FreshnessController(16, 17, 144)
    before = controller.target
    controller.observe(observed(30.0, filled=False))
    assert controller.target == before


def test_a_light_load_brings_the_target_down_faster_than_a_busy_trainer_does() -> None:
    slow, fast = FreshnessController(16, 17, 144), FreshnessController(16, 17, 144)
    for _ in range(5):
        slow.observe(observed(0.0, surplus=8))
        fast.observe(observed(0.0, surplus=64))
    assert fast.target < slow.target < 32


def test_two_batches_are_not_given_up_after_one_good_step() -> None:
    """With one group fewer than one batch ahead of training, each step waits for a whole group."""
    controller = FreshnessController(4, 5, 8)
    targets: list[int] = []
    for _ in range(30):
        controller.observe(observed(0.0))
        targets.append(controller.target)
    # The target falls by a fiftieth of a batch per step, so it falls by one
    # group after this many steps.
    assert targets.index(7) == 12
    controller.observe(observed(30.0))
    assert controller.target == 8


def test_one_lacking_group_raises_it_by_one_and_a_lower_bound_is_tried_when_that_is_paid_for() -> (
    None
):
    controller = FreshnessController(4, 5, 36)
    waits: list[float] = []
    targets: list[int] = []
    late = False
    for _ in range(2_000):
        # With fewer than two batches, a step waits half its time for a
        # group, and so does the next step.
        short = controller.target < 8
        starved = 30.0 if short or late else 0.0
        late = short
        controller.observe(observed(starved, lacking=1 if starved else 0))
        waits.append(starved / 60.0)
        targets.append(controller.target)
    assert set(targets) == {7, 8}
    assert targets.count(7) < len(targets) / 20
    assert fmean(waits) == pytest.approx(TOLERATED_WAIT, rel=0.3)


def test_more_lacking_than_was_raised_is_no_edge() -> None:
    controller = FreshnessController(16, 17, 144)
    controller.observe(observed(30.0, lacking=10))
    assert controller.target == 42
    # If it had been ten groups late, the next step would lack no more than those.
    controller.observe(observed(30.0, lacking=10))
    assert controller.target == 42
    rising = FreshnessController(16, 17, 144)
    rising.observe(observed(30.0, lacking=10))
    rising.observe(observed(30.0, lacking=11))
    assert rising.target == 42 + math.ceil(16 * (30.0 - 60.0 * TOLERATED_WAIT) / 30.0)


def test_the_third_step_that_starves_in_a_row_raises_it_by_all_of_that() -> None:
    controller = FreshnessController(16, 17, 144)
    targets: list[int] = []
    for starved in (30.0, 30.0, 0.0, 30.0, 30.0, 30.0):
        controller.observe(observed(starved, lacking=1 if starved else 0))
        targets.append(controller.target)
    assert targets == [33, 33, 33, 34, 34, 50]


def test_a_step_of_no_length_is_no_observation() -> None:
    controller = FreshnessController(4, 5, 8)
    controller.observe(StepObservation(0.0, 0.0, 0, 0, filled=True))
    assert controller.target == 8


def test_the_gate_measures_how_long_the_trainer_starves() -> None:
    gate = make_gate(8, 4, freshness=True)
    finish_all(gate, admit_all(gate, 0), 0)
    gate.select(4, 0.0)
    gate.advance(1, 0.0)
    before = gate.target
    assert gate.select(4, 0.0).delivered
    admitted = admit_all(gate, 1, "h")
    gate.advance(2, 60.0)  # The step of version 1 never starved.
    assert gate.target <= before
    before = gate.target
    gate.select(4, 60.0)
    for group_id in admitted[:4]:
        gate.complete(group_id, 1, 90.0)
    gate.select(4, 90.0)
    admit_all(gate, 2, "i")
    gate.advance(3, 150.0)  # The step of version 2 starved for 30 of 90 seconds.
    assert gate.target > before


def test_a_trainer_that_waits_for_an_old_group_does_not_starve() -> None:
    gate = make_gate(4, 1, WAIT, freshness=True)
    gate.advance(1, 0.0)
    gate.admit("old", 1)
    for version in range(1, 5):
        gate.admit(f"{version}", version)
        gate.complete(f"{version}", version, 0.0)
        assert gate.select(1, version * 60.0).delivered == (f"{version}",)
        gate.advance(version + 1, version * 60.0 + 60.0)
    fresh = admit_all(gate, 5)
    finish_all(gate, fresh, 5)
    before = gate.target
    assert gate.select(1, 300.0).delivered == ()
    gate.complete("old", 1, 9000.0)
    assert gate.select(1, 9000.0).delivered == ("old",)
    gate.advance(6, 9060.0)
    assert gate.target <= before


def heavy_tailed(rng: random.Random) -> Attempt:
    longest = rng.lognormvariate(4.0, 1.0)
    return Attempt(((0.0, longest), (0.0, longest * rng.random())), longest)


@pytest.mark.parametrize("groups_per_step", [2, 8])
def test_under_the_controller_the_trainer_waits_for_the_tolerated_part_of_its_time(
    groups_per_step: int,
) -> None:
    contract = StalenessContract(8, groups_per_step, MASK)
    tally = Simulation(contract, Load(heavy_tailed), 1, warmup_steps=30).run(400)
    assert tally.idle < 2.5 * TOLERATED_WAIT
    fixed = Simulation(contract, Load(heavy_tailed), 1, freshness=False, warmup_steps=30).run(400)
    assert tally.mean_lag < 0.6 * fixed.mean_lag


def test_too_few_agents_do_not_wind_the_target_up() -> None:
    load = Load(heavy_tailed, agents=8)
    simulation = Simulation(StalenessContract(8, 8, MASK), load, 1)
    simulation.run(100)
    assert simulation.gate.target < 32


# Whole runs with failures and restarts; each decision is checked against the written rule


@dataclass
class Referee:
    """Judges each decision from the simulation's records, without asking the gate."""

    fragile: bool
    """Whether the trainer may restart. Groups that were never due together
    may then become due together."""
    most_decisions: int = 100_000
    floor: dict[str, int] = field(default_factory=dict[str, int])
    """Oldest version that may have sampled each group."""
    delivered: Counter[int] = field(default_factory=Counter[int])
    """Groups delivered at the version that the trainer holds, and at no other."""
    waits: int = 0
    decisions: int = 0
    restored: int = 0

    def admitted(self, simulation: Simulation, group: Group) -> None:
        contract, books = simulation.contract, simulation
        outstanding = len(books.running) + len(books.finished)
        assert outstanding <= contract.max_outstanding
        assert lag(books.version, group.admission_version) <= contract.max_lag
        if contract.max_lag == 0:
            assert outstanding + self.delivered.total() <= contract.groups_per_step
        self.floor[group.group_id] = min(group.admission_version, books.version)
        if contract.late_policy is WAIT:
            deadline = self.floor[group.group_id] + contract.max_lag
            self._check_invariant(simulation, from_deadline=deadline)

    def selected(self, simulation: Simulation, selection: Selection) -> None:
        self.decisions += 1
        assert self.decisions < self.most_decisions, "the run does not end"
        contract, books = simulation.contract, simulation
        self.delivered = Counter(
            {books.version: self.delivered[books.version] + len(selection.delivered)}
        )
        assert len(books.running) + len(books.finished) <= contract.max_outstanding + self.restored
        if not contract.late_policy.drops:
            assert selection.late == ()
        if contract.late_policy is not WAIT:
            assert books.credit == 0 or not books.finished, "waits although a group is finished"
            return
        if selection.delivered and not self.fragile:
            self._check_invariant(simulation)
        missing = min(books.credit, contract.groups_per_step - len(books.batch))
        if missing > 0 and len(books.finished) >= missing:
            self.waits += 1
            assert not self._some_batch_is_valid(simulation, missing), "waits without a reason"

    def restarted(self, simulation: Simulation, restored: list[Group]) -> None:
        self.restored += len(restored)
        self.delivered.clear()
        for group_id in simulation.running:
            self.floor[group_id] = min(self.floor[group_id], simulation.version)
        for group in restored:
            self.floor[group.group_id] = simulation.version

    def _deadline(self, simulation: Simulation, group: Group) -> int:
        oldest = group.oldest_version
        if group.group_id in simulation.running or oldest is None:
            oldest = self.floor[group.group_id]
        return oldest + simulation.contract.max_lag

    def _due(self, simulation: Simulation) -> list[int]:
        groups = [*simulation.running.values(), *simulation.finished.values()]
        deadlines = [self._deadline(simulation, group) for group in groups]
        horizon = range(simulation.contract.max_lag + 1)
        return [sum(d <= simulation.version + k for d in deadlines) for k in horizon]

    def _check_invariant(self, simulation: Simulation, from_deadline: int = 0) -> None:
        capacity, delivered = simulation.contract.groups_per_step, len(simulation.batch)
        for k, due in enumerate(self._due(simulation)):
            if simulation.version + k >= from_deadline:
                assert due + delivered <= capacity * (k + 1), f"{due} due within {k} versions"

    def _some_batch_is_valid(self, simulation: Simulation, missing: int) -> bool:
        """Try every choice of `missing` finished groups; groups with the same deadline are
        equivalent.

        `choices` are the numbers of groups that can be delivered with a deadline up to the one reached,
        such that the groups left over fit into the versions up to it.
        """
        contract, due = simulation.contract, self._due(simulation)
        delivered = len(simulation.batch) + missing
        slack = [
            self._deadline(simulation, group) - simulation.version
            for group in simulation.finished.values()
        ]
        choices = {0}
        for k in range(min([0, *slack]), max([contract.max_lag, *slack]) + 1):
            here = slack.count(k)
            choices = {
                total
                for chosen in choices
                for total in range(chosen, min(chosen + here, missing) + 1)
                if not 0 <= k <= contract.max_lag
                or due[k] - total + delivered <= contract.groups_per_step * (k + 1)
            }
        return missing in choices


def random_attempt(rng: random.Random) -> Attempt:
    """Heavy-tailed siblings, some of which first wait for an agent, and a
    few groups without any token."""
    if rng.random() < 0.05:
        return Attempt((), rng.uniform(0.0, 60.0))
    begins = [rng.choice((0.0, 0.0, rng.expovariate(1 / 40.0))) for _ in range(rng.randint(1, 3))]
    spans = tuple((begin, begin + rng.lognormvariate(3.9, 1.1)) for begin in begins)
    return Attempt(spans, max(end for _, end in spans))


def whole(_rng: random.Random, missing: int) -> int:
    return missing


def in_pieces(rng: random.Random, missing: int) -> int:
    return rng.randint(1, missing)


def too_much(rng: random.Random, missing: int) -> int:
    return missing + rng.randint(0, 2 * missing)


def random_run(
    policy: LatePolicy, seed: int, steps: int = 20
) -> tuple[Simulation, Load, Referee, Tally]:
    rng = random.Random(seed)
    contract = StalenessContract(rng.randint(0, 8), rng.randint(1, 16), policy)
    load = Load(
        random_attempt,
        step_seconds=rng.choice((5.0, 60.0, 200.0)),
        switch_seconds=rng.choice((0.0, 1.0, 30.0)),
        agents=rng.choice((None, None, 1, 10)),
        failure_rate=rng.choice((0.0, 0.1, 0.4)),
        restart_rate=rng.choice((0.0, 0.0, 0.15)),
        checkpoint_steps=rng.randint(1, 6),
        weights_fall_back=rng.random() < 0.5,
    )
    referee = Referee(fragile=load.restart_rate > 0.0, most_decisions=5_000 * steps)
    simulation = Simulation(
        contract,
        load,
        seed,
        freshness=rng.random() < 0.7,
        demand=rng.choice((whole, in_pieces, too_much)),
        observer=referee,
    )
    return simulation, load, referee, simulation.run(steps=steps)


@pytest.mark.parametrize("policy", LatePolicy)
def test_no_token_is_trained_too_old_and_nothing_deadlocks_over_100_seeds(
    policy: LatePolicy,
) -> None:
    waits = restarts = failures = masked = discarded = 0
    for seed in range(100):
        simulation, load, referee, tally = random_run(policy, seed)
        contract = simulation.contract
        assert tally.steps == 20, f"seed {seed}"
        assert tally.oldest_trained <= contract.max_lag, f"seed {seed}"
        if not policy.drops:
            assert tally.discarded == 0, f"seed {seed}"
        if policy is WAIT and not (load.restart_rate and load.weights_fall_back):
            assert tally.masked_tokens == 0.0, f"seed {seed}"
        waits += referee.waits
        restarts += tally.restarts
        failures += tally.failed
        masked += tally.masked_tokens > 0.0
        discarded += tally.discarded
    assert restarts > 100
    assert failures > 1000
    assert (waits > 100) == (policy is WAIT)
    assert (discarded > 100) == policy.drops
    assert masked > 0 or policy is not MASK


# Calls in any order, including orders that no server produces


class AnyOrder(RuleBasedStateMachine):
    """Checks the gate's records against sets, under calls in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = make_gate(1, 2)
        self.running: dict[str, int] = {}
        self.finished: dict[str, int | None] = {}
        self.delivered: dict[str, int | None] = {}
        self.names = 0

    @rule(
        policy=st.sampled_from(LatePolicy),
        max_lag=st.integers(0, 3),
        groups=st.integers(1, 4),
        freshness=st.booleans(),
    )
    @precondition(lambda self: not self.names)
    def begin(self, policy: LatePolicy, max_lag: int, groups: int, freshness: bool) -> None:
        self.gate = make_gate(max_lag, groups, policy, freshness=freshness)

    @rule(behind=st.integers(0, 5), count=st.integers(1, 6))
    def admit(self, behind: int, count: int) -> None:
        active = max(0, self.gate.trainer_version - behind)
        for _ in range(count):
            if self.gate.may_admit(active):
                self.names += 1
                self.gate.admit(f"g{self.names}", active)
                self.running[f"g{self.names}"] = active

    @rule(version=st.integers(0, 5))
    def adopt(self, version: int) -> None:
        self.names += 1
        self.gate.adopt(f"g{self.names}", version)
        self.running[f"g{self.names}"] = version

    @rule(data=st.data(), later=st.integers(-3, 3))
    @precondition(lambda self: self.running)
    def complete(self, data: st.DataObject, later: int) -> None:
        group_id = data.draw(st.sampled_from(sorted(self.running)))
        active = self.running.pop(group_id)
        oldest = None if later == 3 else max(0, active + later)
        self.gate.complete(group_id, oldest, 0.0)
        self.finished[group_id] = oldest

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        known = sorted({*self.running, *self.finished, *self.delivered, "unknown"})
        group_id = data.draw(st.sampled_from(known))
        for state in (self.running, self.finished, self.delivered):
            state.pop(group_id, None)
        self.gate.release(group_id)

    @rule(data=st.data())
    @precondition(lambda self: self.delivered)
    def restore(self, data: st.DataObject) -> None:
        group_id = data.draw(st.sampled_from(sorted(self.delivered)))
        self.finished[group_id] = self.delivered.pop(group_id)
        self.gate.restore(group_id, self.finished[group_id])

    @rule(version=st.integers(-4, 3))
    def advance(self, version: int) -> None:
        self.gate.advance(max(0, self.gate.trainer_version + version), 0.0)

    @rule(credit=st.integers(0, 9))
    def select(self, credit: int) -> None:
        selection = self.gate.select(credit, 0.0)
        assert len(selection.delivered) <= credit
        for group_id in selection.delivered:
            self.delivered[group_id] = self.finished.pop(group_id)
        for group_id in selection.late:
            assert self.gate.contract.late_policy.drops
            del self.finished[group_id]
        # If no group is running, a finished group must never be stuck, whatever happened before.
        if credit and not self.running and self.gate.delivered == 0:
            wanted = min(credit, self.gate.contract.groups_per_step)
            assert selection.delivered or len(self.finished) < wanted

    @invariant()
    def the_books_agree(self) -> None:
        assert (len(self.gate.running), len(self.gate.completed)) == (
            len(self.running),
            len(self.finished),
        )
        contract = self.gate.contract
        assert contract.fewest_outstanding <= self.gate.target <= contract.max_outstanding


def test_the_books_agree_after_calls_in_any_order() -> None:
    run_state_machine_as_test(
        AnyOrder,
        settings=settings(
            max_examples=60,
            stateful_step_count=40,
            deadline=None,
            database=None,
            derandomize=True,
        ),
    )
