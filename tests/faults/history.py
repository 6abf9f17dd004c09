"""Decides afterwards what happened to every group, from what the three sides wrote down.

    agents    `Answer`: the answer to a close, and every token that was seen before it
    trainer   `Step`: the groups of each optimizer step, in the order of the steps (the ledger)
    server    the journal or, without one, the groups as they were delivered

`violations` is a function of these alone. It finds

    LOST        an accepted group that is neither trained in the surviving lineage, nor still held,
                nor dropped with a reason; an answered outcome that its group does not contain
    DOUBLED     a group, task, trajectory or sample of a group that was trained twice
    INVENTED    a group or trajectory that was trained but never accepted
    OUTCOME     an outcome that differs from the answered one
    TOKENS      tokens, versions or log-probabilities that differ from what the agent saw, or from
                what the fake engine computes

A trainer that resumes after step k makes step k + 1 again. So a step of the ledger replaces every
earlier entry with the same or a greater number. The remaining steps are the surviving lineage.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from penstock.v1 import trajectory_pb2
from penstock.wire import codec
from tests.support.fakes import expected_tokens

POLICY = trajectory_pb2.AUTHOR_POLICY


class Kind(Enum):
    LOST = "lost"
    DOUBLED = "doubled"
    INVENTED = "invented"
    OUTCOME = "outcome"
    TOKENS = "tokens"


@dataclass(frozen=True)
class Violation:
    kind: Kind
    subject: str
    """Id of the group, task or trajectory."""
    what: str

    def __str__(self) -> str:
        return f"{self.kind.name} {self.subject}: {self.what}"


@dataclass(frozen=True)
class Run:
    """Consecutive tokens with one author and one version."""

    tokens: tuple[int, ...]
    version: int | None
    """None for context tokens."""
    logprobs: tuple[float, ...] = ()


@dataclass(frozen=True)
class Trajectory:
    """One trajectory as the server delivered it."""

    trajectory_id: str
    sample_index: int
    outcome: str
    """In any form that is equal if and only if the outcomes are equal."""
    runs: tuple[Run, ...] = ()
    branch: bool = False
    """Whether it branches from another trajectory of its group, and so shares its sample index."""


@dataclass(frozen=True)
class Group:
    """One finished group as the server delivered it."""

    group_id: str
    task_id: str
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True)
class Answer:
    """An answered close, as its agent logged it."""

    trajectory_id: str
    group_id: str
    outcome: str
    group_completed: bool = False
    retried: bool = False
    """The attempt failed, and the server retries it."""
    runs: tuple[Run, ...] | None = None
    """The policy's tokens as the agent saw them; None if it did not look."""


@dataclass(frozen=True)
class Step:
    """One optimizer step, as the trainer's ledger has it."""

    step: int
    group_ids: tuple[str, ...]
    task_ids: tuple[str, ...] = ()
    trajectory_ids: tuple[str, ...] = ()


def step_with(number: int, groups: Sequence[Group]) -> Step:
    """A step that trained these groups."""
    return Step(
        number,
        tuple(group.group_id for group in groups),
        tuple(group.task_id for group in groups),
        tuple(t.trajectory_id for group in groups for t in group.trajectories),
    )


@dataclass(frozen=True)
class History:
    """The records of all three sides."""

    answers: Sequence[Answer]
    ledger: Sequence[Step]
    groups: Mapping[str, Group]
    """Finished groups by id, as far as any side recorded their contents."""
    used: Mapping[str, int] = field(default_factory=dict[str, int])
    """Used groups that the server knows of, with the step that used each."""
    held: frozenset[str] = frozenset()
    """Groups that the server would still deliver."""
    open: frozenset[str] = frozenset()
    """Groups in progress."""
    closed: Mapping[str, str] = field(default_factory=dict[str, str])
    """Outcomes of closed trajectories in groups that are still in progress."""
    dropped: frozenset[str] = frozenset()
    """Groups that were dropped with a reason."""
    forgotten: frozenset[str] = frozenset()
    """Trajectories whose attempt is retried."""


def lineage(ledger: Iterable[Step]) -> list[Step]:
    """The steps that the surviving model state contains, oldest first."""
    found: list[Step] = []
    for step in ledger:
        while found and found[-1].step >= step.step:
            found.pop()
        found.append(step)
    return found


def violations(
    history: History, explain: Callable[[Trajectory], str] | None = None
) -> list[Violation]:
    """Return the violations in a history, an empty list if there are none.

    `explain` describes what is wrong with the tokens of a trajectory. It returns "" if nothing is.
    """
    return [
        *_trained_once(history),
        *_none_lost(history),
        *_none_invented(history),
        *_outcomes_kept(history),
        *_tokens_kept(history, explain),
    ]


def _trained_once(history: History) -> Iterable[Violation]:
    steps = lineage(history.ledger)
    for what, ids in (
        ("group", [found for step in steps for found in step.group_ids]),
        ("task", [found for step in steps for found in step.task_ids if found]),
        ("trajectory", [found for step in steps for found in step.trajectory_ids]),
    ):
        for subject, count in Counter(ids).items():
            if count > 1:
                yield Violation(Kind.DOUBLED, subject, f"{what} trained {count} times")
    for group in history.groups.values():
        places = Counter(t.sample_index for t in group.trajectories if not t.branch)
        for index, count in places.items():
            if count > 1:
                yield Violation(
                    Kind.DOUBLED, group.group_id, f"{count} trajectories of sample {index}"
                )


def _none_lost(history: History) -> Iterable[Violation]:
    steps = lineage(history.ledger)
    trained = {found for step in steps for found in step.group_ids}
    last = steps[-1].step if steps else 0
    accepted = {a.group_id for a in history.answers if a.group_completed} | set(history.groups)
    for group_id in sorted(accepted - trained - history.dropped):
        used = history.used.get(group_id)
        if used is not None and used <= last:
            what = f"the server was told that step {used} used it, and no surviving step did"
            yield Violation(Kind.LOST, group_id, what)
        elif group_id not in history.held:
            yield Violation(Kind.LOST, group_id, "accepted, not trained, and no longer there")


def _none_invented(history: History) -> Iterable[Violation]:
    accepted = {a.group_id for a in history.answers if a.group_completed} | set(history.groups)
    for step in lineage(history.ledger):
        for group_id in step.group_ids:
            if group_id not in accepted:
                yield Violation(Kind.INVENTED, group_id, f"step {step.step} used it")
            elif group_id in history.dropped:
                what = f"step {step.step} used it, and it was dropped"
                yield Violation(Kind.INVENTED, group_id, what)
        known = [history.groups.get(group_id) for group_id in step.group_ids]
        if not step.trajectory_ids or not all(known):
            continue
        wanted = {t.trajectory_id for group in known if group for t in group.trajectories}
        for trajectory_id in sorted(set(step.trajectory_ids) - wanted):
            yield Violation(Kind.INVENTED, trajectory_id, f"step {step.step} used it")
        for trajectory_id in sorted(wanted - set(step.trajectory_ids)):
            what = f"in its group, and step {step.step} did not use it"
            yield Violation(Kind.LOST, trajectory_id, what)


def _outcomes_kept(history: History) -> Iterable[Violation]:
    for answer in history.answers:
        group = history.groups.get(answer.group_id)
        found = None
        if group is not None:
            by_id = {t.trajectory_id: t.outcome for t in group.trajectories}
            found = by_id.get(answer.trajectory_id)
        elif answer.group_id in history.open:
            found = history.closed.get(answer.trajectory_id)
        else:
            # No side recorded the group's contents. Other checks look for lost groups.
            known = answer.group_completed or answer.group_id in history.dropped | history.held
            known = known or any(answer.group_id in step.group_ids for step in history.ledger)
            if answer.group_id and not answer.retried and not known:
                what = "its outcome was answered, and its group is nowhere"
                yield Violation(Kind.LOST, answer.trajectory_id, what)
            continue
        if answer.retried:
            if found is not None:
                what = "it was to be made again, and is in its group"
                yield Violation(Kind.DOUBLED, answer.trajectory_id, what)
        elif found is None:
            if answer.trajectory_id not in history.forgotten:
                what = "its outcome was answered, and its group has none of it"
                yield Violation(Kind.LOST, answer.trajectory_id, what)
        elif found != answer.outcome:
            what = f"answered {answer.outcome}, kept {found}"
            yield Violation(Kind.OUTCOME, answer.trajectory_id, what)


def _tokens_kept(
    history: History, explain: Callable[[Trajectory], str] | None
) -> Iterable[Violation]:
    seen = {a.trajectory_id: a.runs for a in history.answers if a.runs is not None}
    for group in history.groups.values():
        for trajectory in group.trajectories:
            runs = seen.get(trajectory.trajectory_id)
            if runs is not None and _flat(runs) != _flat(
                run for run in trajectory.runs if run.version is not None
            ):
                what = "they are not what the agent saw"
                yield Violation(Kind.TOKENS, trajectory.trajectory_id, what)
            wrong = explain(trajectory) if explain is not None else ""
            if wrong:
                yield Violation(Kind.TOKENS, trajectory.trajectory_id, wrong)


def _flat(runs: Iterable[Run]) -> list[tuple[int, int | None, float | None]]:
    return [
        (token, run.version, run.logprobs[index] if index < len(run.logprobs) else None)
        for run in runs
        for index, token in enumerate(run.tokens)
    ]


def explain_fake(trajectory: Trajectory) -> str:
    """Describe the first tokens that the fake engine would not have written; "" if there are none."""
    context: list[int] = []
    for run in trajectory.runs:
        if run.version is not None:
            tokens, logprobs = expected_tokens(context, [run.version] * len(run.tokens))
            if tokens != list(run.tokens):
                return f"version {run.version} does not write them after {len(context)} tokens"
            if len(logprobs) != len(run.logprobs) or any(
                abs(a - b) > 1e-4 for a, b in zip(logprobs, run.logprobs, strict=True)
            ):
                return f"version {run.version} gives them other log-probabilities"
        context += run.tokens
    return ""


# From the wire and from files


def read_outcome(outcome: trajectory_pb2.Outcome) -> str:
    """An outcome, typed or twin, in a form that is equal if and only if the outcomes are equal."""
    return outcome.SerializeToString(deterministic=True).hex()


def read_runs(segments: Iterable[trajectory_pb2.Segment]) -> tuple[Run, ...]:
    """The runs in the segments of a twin message."""
    return tuple(
        Run(
            tuple(int(token) for token in codec.token_ids(segment)),
            segment.weight_version if segment.author == POLICY else None,
            tuple(float(logprob) for logprob in codec.logprobs(segment)),
        )
        for segment in segments
    )


def read_group(group: trajectory_pb2.TrajectoryGroup) -> Group:
    """The group in a twin message."""
    return Group(
        group.group_id,
        group.task_id,
        tuple(
            Trajectory(
                trajectory.trajectory_id,
                trajectory.sample_index,
                read_outcome(trajectory.outcome),
                read_runs(trajectory.segments),
                bool(trajectory.parent_trajectory_id),
            )
            for trajectory in group.trajectories
        ),
    )


def write_answer(answer: Answer) -> str:
    return json.dumps(asdict(answer)) + "\n"


def read_answers(path: Path) -> list[Answer]:
    """Read an agent's log. An incomplete last line is ignored."""
    found: list[Answer] = []
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            entry: dict[str, Any] = json.loads(line)
            runs = entry.pop("runs")
            if runs is not None:
                runs = tuple(
                    Run(tuple(run["tokens"]), run["version"], tuple(run["logprobs"]))
                    for run in runs
                )
            found.append(Answer(**entry, runs=runs))
    return found
