"""The history checker finds every planted violation, and reports none in a correct history."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.faults.history import (
    Answer,
    Group,
    History,
    Kind,
    Run,
    Step,
    Trajectory,
    explain_fake,
    lineage,
    read_answers,
    violations,
    write_answer,
)
from tests.support.fakes import expected_tokens


def make_trajectory(rng: random.Random, group_id: str, index: int, retry: int) -> Trajectory:
    tokens: list[int] = []
    runs: list[Run] = []
    for _ in range(rng.randint(1, 2)):
        given = [rng.randrange(256) for _ in range(rng.randint(1, 3))]
        runs.append(Run(tuple(given), None))
        tokens += given
        for version in sorted(rng.sample(range(5), rng.randint(1, 2))):
            written, logprobs = expected_tokens(tokens, [version] * rng.randint(1, 3))
            runs.append(Run(tuple(written), version, tuple(logprobs)))
            tokens += written
    name = f"{group_id}-{index}-{retry}"
    return Trajectory(name, index, f"reward {rng.random()}", tuple(runs))


def make_history(rng: random.Random) -> History:
    """A run without violations, with retries, trainer restarts and leftover groups."""
    groups: dict[str, Group] = {}
    answers: list[Answer] = []
    for number in range(rng.randint(4, 10)):
        group_id, trajectories = f"g{number}", list[Trajectory]()
        for index in range(rng.randint(1, 3)):
            retries = rng.choice((0, 0, 1))
            answers += [
                Answer(f"{group_id}-{index}-{retry}", group_id, "failure", retried=True)
                for retry in range(retries)
            ]
            trajectories.append(make_trajectory(rng, group_id, index, retries))
        groups[group_id] = Group(group_id, f"t{number}", tuple(trajectories))
        for trajectory in trajectories:
            answers.append(
                Answer(
                    trajectory.trajectory_id,
                    group_id,
                    trajectory.outcome,
                    trajectory is trajectories[-1],
                    runs=tuple(run for run in trajectory.runs if run.version is not None),
                )
            )
    # Groups are trained two at a time. Sometimes the trainer falls back to its checkpoint.
    ledger: list[Step] = []
    used: dict[str, int] = {}
    waiting, step, final = list(groups), 0, 0
    done: list[tuple[int, list[str]]] = []
    while len(waiting) >= 2 and rng.random() < 0.95:
        batch, waiting = waiting[:2], waiting[2:]
        step += 1
        ledger.append(make_step(step, [groups[group_id] for group_id in batch]))
        used |= dict.fromkeys(batch, step)
        done.append((step, batch))
        if rng.random() < 0.4:
            final = step
        if rng.random() < 0.2:
            again = [group_id for at, ids in done if at > final for group_id in ids]
            done = [(at, ids) for at, ids in done if at <= final]
            waiting, step = [*again, *waiting], final
            for group_id in again:
                del used[group_id]
    return History(answers, ledger, groups, used, frozenset(waiting))


def make_step(step: int, groups: list[Group]) -> Step:
    return Step(
        step,
        tuple(group.group_id for group in groups),
        tuple(group.task_id for group in groups),
        tuple(t.trajectory_id for group in groups for t in group.trajectories),
    )


def trained(history: History, rng: random.Random) -> tuple[int, Step, str]:
    """A surviving step with its index in the ledger, and one of its groups."""
    step = rng.choice(lineage(history.ledger))
    at = max(index for index, found in enumerate(history.ledger) if found == step)
    return at, step, rng.choice(step.group_ids)


def without(history: History, at: int, step: Step, group_id: str) -> History:
    left = [history.groups[found] for found in step.group_ids if found != group_id]
    ledger = list(history.ledger)
    ledger[at] = make_step(step.step, left)
    return replace(history, ledger=ledger)


def used_up(history: History, rng: random.Random) -> tuple[int, Step, str]:
    """As `trained`, but only steps whose groups do not wait again after a fallback of the trainer."""
    known = [step for step in lineage(history.ledger) if set(step.group_ids) <= set(history.used)]
    assume(known)
    step = rng.choice(known)
    at = max(index for index, found in enumerate(history.ledger) if found == step)
    return at, step, rng.choice(step.group_ids)


def lose_a_group(history: History, rng: random.Random) -> History:
    return without(history, *used_up(history, rng))


def lose_what_waits(history: History, rng: random.Random) -> History:
    _, _, group_id = used_up(history, rng)
    ledger = [step for step in history.ledger if group_id not in step.group_ids]
    used = {found: step for found, step in history.used.items() if found != group_id}
    return replace(history, ledger=ledger, used=used)


def double_a_group(history: History, rng: random.Random) -> History:
    _, _, group_id = trained(history, rng)
    last = lineage(history.ledger)[-1].step
    again = make_step(last + 1, [history.groups[group_id]])
    return replace(history, ledger=[*history.ledger, again])


def invent_a_group(history: History, rng: random.Random) -> History:
    last = lineage(history.ledger)[-1].step
    return replace(history, ledger=[*history.ledger, Step(last + 1, ("nobody's",))])


def invent_a_trajectory(history: History, rng: random.Random) -> History:
    at, step, _ = trained(history, rng)
    ledger = list(history.ledger)
    ledger[at] = replace(step, trajectory_ids=(*step.trajectory_ids, "nobody's"))
    return replace(history, ledger=ledger)


def change(
    history: History, rng: random.Random, spoil: Callable[[Trajectory], Trajectory | None]
) -> History:
    group = rng.choice(list(history.groups.values()))
    at = rng.randrange(len(group.trajectories))
    spoiled = spoil(group.trajectories[at])
    kept = () if spoiled is None else (spoiled,)
    trajectories = (*group.trajectories[:at], *kept, *group.trajectories[at + 1 :])
    changed = replace(group, trajectories=trajectories)
    return replace(history, groups={**history.groups, group.group_id: changed})


def lose_an_outcome(history: History, rng: random.Random) -> History:
    return change(history, rng, lambda _: None)


def change_an_outcome(history: History, rng: random.Random) -> History:
    return change(history, rng, lambda t: replace(t, outcome="another"))


def keep_a_failure(history: History, rng: random.Random) -> History:
    """Plant a retried attempt that is in its group after all."""
    group = rng.choice(list(history.groups.values()))
    extra = Trajectory("failed", 99, "failure")
    changed = replace(group, trajectories=(*group.trajectories, extra))
    answer = Answer("failed", group.group_id, "failure", retried=True)
    groups = {**history.groups, group.group_id: changed}
    return replace(history, answers=[*history.answers, answer], groups=groups)


def spoil_run(
    history: History, rng: random.Random, spoil: Callable[[Run], Run], unseen: bool = False
) -> History:
    def change_one(trajectory: Trajectory) -> Trajectory:
        written = [i for i, run in enumerate(trajectory.runs) if run.version is not None]
        at = rng.choice(written)
        runs = list(trajectory.runs)
        runs[at] = spoil(runs[at])
        return replace(trajectory, runs=tuple(runs))

    spoiled = change(history, rng, change_one)
    if unseen:
        spoiled = replace(spoiled, answers=[replace(a, runs=None) for a in spoiled.answers])
    return spoiled


def lose_a_token(history: History, rng: random.Random) -> History:
    return spoil_run(history, rng, lambda r: Run(r.tokens[:-1], r.version, r.logprobs[:-1]))


def double_a_token(history: History, rng: random.Random) -> History:
    def double(run: Run) -> Run:
        return Run((*run.tokens, run.tokens[-1]), run.version, (*run.logprobs, run.logprobs[-1]))

    return spoil_run(history, rng, double, unseen=rng.random() < 0.5)


def mislabel(history: History, rng: random.Random) -> History:
    def label(run: Run) -> Run:
        return replace(run, version=17)

    return spoil_run(history, rng, label, unseen=rng.random() < 0.5)


def other_logprobs(history: History, rng: random.Random) -> History:
    def lower(run: Run) -> Run:
        return replace(run, logprobs=tuple(p - 0.01 for p in run.logprobs))

    return spoil_run(history, rng, lower, unseen=rng.random() < 0.5)


PLANTED = {
    lose_a_group: {Kind.LOST},
    lose_what_waits: {Kind.LOST},
    double_a_group: {Kind.DOUBLED},
    invent_a_group: {Kind.INVENTED},
    invent_a_trajectory: {Kind.INVENTED},
    lose_an_outcome: {Kind.LOST, Kind.INVENTED},
    change_an_outcome: {Kind.OUTCOME},
    keep_a_failure: {Kind.DOUBLED, Kind.LOST},
    lose_a_token: {Kind.TOKENS},
    double_a_token: {Kind.TOKENS},
    mislabel: {Kind.TOKENS},
    other_logprobs: {Kind.TOKENS},
}


@settings(max_examples=40, deadline=None, database=None)
@given(seed=st.integers(0, 1 << 32))
def test_nothing_is_found_where_nothing_is_wrong(seed: int) -> None:
    assert violations(make_history(random.Random(seed)), explain_fake) == []


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
@settings(max_examples=15, deadline=None, database=None)
@given(seed=st.integers(0, 1 << 32))
def test_what_was_planted_is_found(plant: Callable[..., History], seed: int) -> None:
    rng = random.Random(seed)
    history = make_history(rng)
    while not lineage(history.ledger):
        history = make_history(rng)
    found = {violation.kind for violation in violations(plant(history, rng), explain_fake)}
    assert found & PLANTED[plant]
    assert found <= PLANTED[plant]


def test_a_step_takes_back_what_came_after_the_state_it_began_from() -> None:
    steps = [Step(1, ("a",)), Step(2, ("b",)), Step(3, ("c",)), Step(2, ("c",)), Step(3, ("b",))]
    assert lineage(steps) == [steps[0], steps[3], steps[4]]


def test_what_the_server_would_not_deliver_again_is_lost() -> None:
    group = Group("a", "", ())
    told = History([], [Step(1, ()), Step(2, ())], {"a": group}, {"a": 1}, frozenset(("a",)))
    assert [found.kind for found in violations(told)] == [Kind.LOST]
    later = replace(told, used={"a": 3})
    assert violations(later) == []


def test_an_outcome_of_a_group_under_way_is_there_or_lost() -> None:
    answer = Answer("a-0", "a", "reward 1")
    under_way = History([answer], [], {}, open=frozenset(("a",)), closed={"a-0": "reward 1"})
    assert violations(under_way) == []
    assert [v.kind for v in violations(replace(under_way, closed={}))] == [Kind.LOST]
    assert violations(replace(under_way, closed={}, forgotten=frozenset(("a-0",)))) == []
    assert [v.kind for v in violations(replace(under_way, open=frozenset()))] == [Kind.LOST]


def test_logs_are_read_as_they_were_written(tmp_path: Path) -> None:
    history = make_history(random.Random(7))
    log = tmp_path / "agent"
    log.write_text("".join(write_answer(answer) for answer in history.answers) + '{"cut')
    assert read_answers(log) == history.answers
