"""Results of an evaluation: measured groups, and the figures computed from them. Pure.

    TrajectoryGroup -> MeasuredPrompt -> Figures, over all prompts and over those of each source

- The mean reward is the mean over prompts of the mean over their samples. Its standard error is s /
  sqrt(n) over the means of prompts, because samples of one prompt are not independent, but prompts are.
- pass@k is the probability that at least one of k samples is correct. The unbiased estimate for n >= k
  samples, c of them correct, is 1 - C(n-c, k) / C(n, k), averaged over prompts (Chen et al., arXiv
  2107.03374, equation 1).
- A failed trajectory enters none of these figures and is counted. A prompt whose samples all failed is in
  none of them either. A prompt with fewer than k samples is not in pass@k.
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
    """The samples of one prompt."""

    data_source: str
    rewards: tuple[float, ...]
    """Rewards of the samples that did not fail."""
    tokens: tuple[int, ...]
    """Policy tokens of each of these samples, over all turns."""
    truncated: int
    """How many of these samples the token budget or the context length cut off."""
    failure_reasons: tuple[str, ...] = ()
    """Failure reason of each sample that failed."""
    versions: tuple[int, ...] = ()
    """Weight versions that sampled a token of the samples that did not fail, each once."""
    failed_versions: tuple[int, ...] = ()
    """Weight versions that sampled a token of the failed samples. They enter no figure."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures over a number of prompts; None if there is no data for a figure."""

    prompts: int
    """Prompts with at least one sample that did not fail."""
    samples: int
    """Samples that did not fail."""
    failures: int
    reward_mean: float | None
    reward_stderr: float | None
    """None for fewer than two prompts, because their spread is unknown."""
    pass_at: dict[str, float]
    """pass@k by k: the powers of two up to the number of samples of a prompt, and that number;
    empty for one sample."""
    tokens_mean: float | None
    truncated_share: float | None


@dataclass(slots=True)
class EvaluationRecord:
    """One evaluation. The field names are the keys of its line in `metrics.jsonl`, which begins
    with `"kind": "evaluation"`. Times are in Unix seconds."""

    name: str
    step: int
    """Last step contained in the weights it began with."""
    weight_version: int
    """Version sampled when it began."""
    mode: str
    """`pinned`, `on_the_fly` or `alone`."""
    figures: Figures
    by_source: dict[str, Figures]
    prompts_asked: int
    """Number of prompts in the set."""
    prompts_missing: int = 0
    """Prompts without a result, because the evaluation ended first."""
    failure_reasons: dict[str, int] = field(default_factory=dict[str, int])
    oldest_weight_version: int | None = None
    """Smallest version that sampled a token in the figures; None without such tokens."""
    newest_weight_version: int | None = None
    mixed_groups: int = 0
    """Prompts whose tokens come from more than one version."""
    mixed_share: float = 0.0
    """Share of `mixed_groups` among the prompts with tokens."""
    asked_again: int = 0
    """How many times a prompt was asked again because its answers came from another version."""
    lag: int = 0
    """How many versions the trainer was ahead of the oldest measured version at the end."""
    skipped: int = 0
    """Evaluations of the set that were skipped since the previous one, because it was still running."""
    seconds: float = 0.0
    seconds_held: float = 0.0
    """How much of `seconds` a switch spent waiting for it."""
    time_start: float = 0.0
    time: float = 0.0
    """When it ended."""


def read_measured(group: trajectory_pb2.TrajectoryGroup, data_source: str) -> MeasuredPrompt:
    """Reads a delivered group. Branches are part of it, but do not count as samples."""
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
    """Follows a branch to the attempt it came from. Returns an attempt unchanged."""
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
    """Builds the record of the measured prompts. The caller adds times and lag."""

    def take(of: Iterable[MeasuredPrompt]) -> Figures:
        return take_figures(of, samples_per_prompt=samples_per_prompt, passes_from=passes_from)

    sources = sorted({prompt.data_source for prompt in prompts})
    versions = [version for prompt in prompts for version in prompt.versions]
    mixed = sum(len(prompt.versions) > 1 for prompt in prompts)
    # A prompt whose samples all failed has no tokens, so it is neither mixed nor unmixed.
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
    """Computes figures over prompts; see the module."""
    # A fixed order makes sums independent of the order of arrival.
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
    powers = [1 << exponent for exponent in range(samples.bit_length())]
    return sorted({*powers, samples}) if samples > 1 else []


def _pass_at(rewards: Sequence[float], k: int, passes_from: float) -> float:
    wrong = sum(reward < passes_from for reward in rewards)
    return 1.0 - math.comb(wrong, k) / math.comb(len(rewards), k)
