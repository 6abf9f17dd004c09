"""What an evaluation found: groups as measured, and the figures made of them. Pure.

    TrajectoryGroup -> MeasuredPrompt -> Figures, of all prompts and of those of each source

- The mean reward is the mean over prompts of the mean over their samples. Its standard error is that of the
  means of prompts, s / sqrt(n): samples of one prompt are not independent, prompts are.
- pass@k is the chance that of k samples at least one is right, without bias for n >= k samples of which c
  are: 1 - C(n-c, k) / C(n, k), averaged over prompts (Chen et al., arXiv 2107.03374, equation 1).
- A failed trajectory is in none of these figures, and is counted. A prompt with no sample that did not fail
  is in none of them either, and one with fewer than k not in pass@k.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.v1 import trajectory_pb2
from penstock.wire import codec


@dataclass(frozen=True, slots=True)
class MeasuredPrompt:
    """One prompt's samples."""

    data_source: str
    rewards: tuple[float, ...]
    """Of the samples that did not fail."""
    tokens: tuple[int, ...]
    """Policy tokens of each of those, over all turns."""
    truncated: int
    """How many of those the token budget or the context ended."""
    failure_reasons: tuple[str, ...] = ()
    """Of each sample that failed."""
    versions: tuple[int, ...] = ()
    """Weight versions that sampled a token of the samples that did not fail, each once."""
    failed_versions: tuple[int, ...] = ()
    """Those of the others: in no figure."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What a number of prompts came to; None where there is nothing to take a figure of."""

    prompts: int
    """With at least one sample that did not fail."""
    samples: int
    """That did not fail."""
    failures: int
    reward_mean: float | None
    reward_stderr: float | None
    """None for fewer than two prompts, of which no spread is known."""
    pass_at: dict[str, float]
    """pass@k by k: the powers of two up to the samples of a prompt, and their number; empty for one."""
    tokens_mean: float | None
    truncated_share: float | None


@dataclass(slots=True)
class EvaluationRecord:
    """One evaluation; the field names are the keys of its line in `metrics.jsonl`, which begins with
    `"kind": "evaluation"`. Times are unix seconds."""

    name: str
    step: int
    """Last step that the weights contain with which it began."""
    weight_version: int
    """Version sampled when it began."""
    mode: str
    """pinned or on_the_fly."""
    figures: Figures
    by_source: dict[str, Figures]
    prompts_asked: int
    """Prompts of the set."""
    prompts_missing: int = 0
    """Prompts of which nothing came: it ended before."""
    failure_reasons: dict[str, int] = field(default_factory=dict[str, int])
    oldest_weight_version: int | None = None
    """Smallest version that sampled a token of what the figures are of; None where there is none."""
    newest_weight_version: int | None = None
    mixed_groups: int = 0
    """Prompts whose tokens are of more than one version."""
    mixed_share: float = 0.0
    """Of the prompts measured."""
    asked_again: int = 0
    """Times that a prompt was asked again because its answers were of another version."""
    lag: int = 0
    """Versions that the trainer was ahead of the oldest one measured when it ended."""
    skipped: int = 0
    """Evaluations of the set that were not begun since the one before, because that was still running."""
    seconds: float = 0.0
    seconds_held: float = 0.0
    """Of those, how long a switch waited for it."""
    time_start: float = 0.0
    time: float = 0.0
    """When it ended."""


def read_measured(group: trajectory_pb2.TrajectoryGroup, data_source: str) -> MeasuredPrompt:
    """A delivered group. Trajectories that branch from another are part of it, and no samples."""
    rewards: list[float] = []
    tokens: list[int] = []
    failures: list[str] = []
    versions: set[int] = set()
    failed_versions: set[int] = set()
    sent = {trajectory.trajectory_id: trajectory for trajectory in group.trajectories}
    truncated = 0
    for trajectory in group.trajectories:
        length = 0
        failed = _failed(trajectory) or _failed(_sample_of(trajectory, sent))
        for segment in trajectory.segments:
            if segment.author == trajectory_pb2.AUTHOR_POLICY and (
                count := len(codec.token_ids(segment))
            ):
                length += count
                (failed_versions if failed else versions).add(segment.weight_version)
        if trajectory.parent_trajectory_id:
            continue
        if failed:
            failures.append(trajectory.outcome.failure.reason)
            continue
        rewards.append(trajectory.outcome.reward)
        tokens.append(length)
        truncated += trajectory.finish_reason == trajectory_pb2.FINISH_REASON_LENGTH
    return MeasuredPrompt(
        data_source,
        tuple(rewards),
        tuple(tokens),
        truncated,
        tuple(failures),
        tuple(sorted(versions)),
        tuple(sorted(failed_versions)),
    )


def _failed(trajectory: trajectory_pb2.Trajectory) -> bool:
    return trajectory.outcome.WhichOneof("result") != "reward"


def _sample_of(
    trajectory: trajectory_pb2.Trajectory, sent: Mapping[str, trajectory_pb2.Trajectory]
) -> trajectory_pb2.Trajectory:
    """The one that a trajectory branches from, however far back; itself where it branches from none."""
    for _ in sent:
        trajectory = sent.get(trajectory.parent_trajectory_id, trajectory)
    return trajectory


def make_record(
    prompts: Sequence[MeasuredPrompt],
    *,
    name: str,
    step: int,
    weight_version: int,
    mode: str,
    samples_per_prompt: int,
    passes_from: float,
    prompts_asked: int,
) -> EvaluationRecord:
    """The record of what was measured; when and how fast is the caller's to add."""

    def take(of: Iterable[MeasuredPrompt]) -> Figures:
        return take_figures(of, samples_per_prompt=samples_per_prompt, passes_from=passes_from)

    sources = sorted({prompt.data_source for prompt in prompts})
    versions = [version for prompt in prompts for version in prompt.versions]
    mixed = sum(len(prompt.versions) > 1 for prompt in prompts)
    # Of a prompt that failed whole there is no token, so it is neither.
    sampled = sum(bool(prompt.versions) for prompt in prompts)
    return EvaluationRecord(
        name=name,
        step=step,
        weight_version=weight_version,
        mode=mode,
        figures=take(prompts),
        by_source={
            source: take(p for p in prompts if p.data_source == source) for source in sources
        },
        prompts_asked=prompts_asked,
        prompts_missing=prompts_asked - len(prompts),
        failure_reasons=dict(Counter(r for p in prompts for r in p.failure_reasons)),
        oldest_weight_version=min(versions, default=None),
        newest_weight_version=max(versions, default=None),
        mixed_groups=mixed,
        mixed_share=mixed / sampled if sampled else 0.0,
    )


def take_figures(
    prompts: Iterable[MeasuredPrompt], *, samples_per_prompt: int, passes_from: float
) -> Figures:
    """Figures over prompts; see the module."""
    # In one order, whatever came first: sums come out the same.
    every = sorted(prompts, key=lambda p: (p.data_source, p.rewards, p.tokens))
    measured = [prompt for prompt in every if prompt.rewards]
    means = [math.fsum(p.rewards) / len(p.rewards) for p in measured]
    lengths = [length for prompt in measured for length in prompt.tokens]
    mean = math.fsum(means) / len(means) if means else None
    stderr = None
    if mean is not None and len(means) > 1:
        variance = math.fsum((one - mean) ** 2 for one in means) / (len(means) - 1)
        stderr = math.sqrt(variance / len(means))
    pass_at: dict[str, float] = {}
    for k in _counts(samples_per_prompt):
        chances = [_pass_at(p.rewards, k, passes_from) for p in measured if len(p.rewards) >= k]
        if chances:
            pass_at[str(k)] = math.fsum(chances) / len(chances)
    return Figures(
        prompts=len(measured),
        samples=len(lengths),
        failures=sum(len(prompt.failure_reasons) for prompt in every),
        reward_mean=mean,
        reward_stderr=stderr,
        pass_at=pass_at,
        tokens_mean=sum(lengths) / len(lengths) if lengths else None,
        truncated_share=sum(p.truncated for p in measured) / len(lengths) if lengths else None,
    )


def _counts(samples: int) -> list[int]:
    """The k of pass@k."""
    if samples < 2:
        return []
    powers = [1 << exponent for exponent in range(samples.bit_length())]
    return sorted({*(k for k in powers if k <= samples), samples})


def _pass_at(rewards: Sequence[float], k: int, passes_from: float) -> float:
    wrong = sum(reward < passes_from for reward in rewards)
    return 1.0 - math.comb(wrong, k) / math.comb(len(rewards), k)
