"""Figures of the groups of a step: rewards, lag, lengths."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.trainer.batching.batching import TrainingGroup
from penstock.trainer.core.figures import MAX, SUM, breakdown, figure, weighted
from penstock.v1 import trajectory_pb2
from penstock.wire import codec

PER_TRAJECTORY = weighted("trajectories")
PER_ATTEMPT = weighted("attempts")
# An agent may report any name, and each name becomes a curve in a tracker.
MOST_OUTCOME_METRICS = 100


@dataclass(frozen=True, slots=True)
class BatchFigures:
    """Figures of one batch. Trajectories exclude failed ones. A response is everything the policy
    wrote in a trajectory, over all turns."""

    groups: int = figure(0, SUM, "groups", "Groups in the batch.")
    trajectories: int = figure(
        0, SUM, "trajectories", "Trajectories in the batch, without failed ones."
    )
    attempts: int = figure(0, SUM, "attempts", "Trajectories in the batch that are not branches.")
    reward_mean: float = figure(0.0, PER_ATTEMPT, "reward", "Mean reward of the attempts.")
    reward_std: float = figure(
        0.0,
        PER_ATTEMPT,
        "reward",
        "Standard deviation of the attempts' rewards in a step; over several steps, the mean of these.",
    )
    reward_by_source: Mapping[str, float] = breakdown(
        weighted("attempts_by_source"),
        "reward",
        "Mean reward of the attempts of each data source; `unknown` for tasks of another run.",
    )
    attempts_by_source: Mapping[str, int] = breakdown(
        SUM, "attempts", "Attempts of each data source."
    )
    outcome_metrics: Mapping[str, float] = breakdown(
        weighted("outcome_metrics_counts"),
        "",
        "Mean of the metrics that agents report besides the reward (`Outcome.metrics`), by name, "
        "over the trajectories that have it; limited to 100 names.",
    )
    outcome_metrics_counts: Mapping[str, int] = breakdown(
        SUM, "trajectories", "Trajectories that have the metric, by name."
    )
    overlong_penalty_mean: float = figure(
        0.0, PER_TRAJECTORY, "reward", "Mean length penalty of a trajectory; not in `reward_mean`."
    )
    lag_mean: float = figure(
        0.0,
        weighted("tokens_fresh"),
        "versions",
        "Mean lag behind the trainer, over the tokens fresh enough to be trained.",
    )
    lag_max: int = figure(0, MAX, "versions", "Largest lag of such a token.")
    tokens: int = figure(0, SUM, "tokens", "Policy tokens in the batch.")
    tokens_masked: int = figure(0, SUM, "tokens", "Policy tokens masked because of their lag.")
    tokens_fresh: int = figure(0, SUM, "tokens", "Policy tokens fresh enough to be trained.")
    response_tokens_mean: float = figure(
        0.0, PER_TRAJECTORY, "tokens", "Mean length of the responses."
    )
    response_tokens_p10: float = figure(
        0.0,
        PER_TRAJECTORY,
        "tokens",
        "Length that the shortest tenth of a step's responses stays below; over several steps, this and "
        "the next two are means.",
    )
    response_tokens_p50: float = figure(
        0.0, PER_TRAJECTORY, "tokens", "Median length of a step's responses."
    )
    response_tokens_p90: float = figure(
        0.0, PER_TRAJECTORY, "tokens", "Length that a tenth of a step's responses exceed."
    )
    response_tokens_max: int = figure(0, MAX, "tokens", "Length of the longest response.")
    truncated_ratio: float = figure(
        0.0,
        PER_TRAJECTORY,
        "share",
        "Trajectories whose last turn was cut off by the token budget or the context length.",
    )


def describe_batch(
    deliveries: Sequence[trajectory_pb2.TrajectoryGroup],
    groups: Sequence[TrainingGroup],
    sources: Sequence[str],
) -> BatchFigures:
    """Computes the figures of a batch from its groups as delivered, its groups as read, and the
    data source of each, all in the same order."""
    rewards = np.array([reward for group in groups for reward in group.rewards])
    trained = np.array([sample.reward for group in groups for sample in group.samples])
    if not len(rewards):
        return BatchFigures(groups=len(groups))
    lags = np.concatenate([group.lags for group in groups])
    sent = (trajectory for delivery in deliveries for trajectory in delivery.trajectories)
    scored = [one for one in sent if one.outcome.WhichOneof("result") == "reward"]
    lengths = [_response_tokens(one) for one in scored]
    truncated = sum(one.finish_reason == trajectory_pb2.FINISH_REASON_LENGTH for one in scored)
    p10, p50, p90 = np.quantile(lengths, (0.1, 0.5, 0.9)).tolist()
    said = _outcome_metrics(scored)
    tokens = sum(group.policy_tokens for group in groups)
    masked = sum(group.masked_tokens for group in groups)
    of_source: dict[str, list[float]] = defaultdict(list)
    for source, group in zip(sources, groups, strict=True):
        of_source[source] += group.attempt_rewards
    by_source = {name: own for name, own in sorted(of_source.items()) if own}
    attempts = np.array([reward for group in groups for reward in group.attempt_rewards])
    return BatchFigures(
        groups=len(groups),
        trajectories=len(rewards),
        attempts=len(attempts),
        reward_mean=float(attempts.mean()) if len(attempts) else 0.0,
        reward_std=float(attempts.std()) if len(attempts) else 0.0,
        reward_by_source={name: float(np.mean(own)) for name, own in by_source.items()},
        attempts_by_source={name: len(own) for name, own in by_source.items()},
        outcome_metrics={name: float(np.mean(own)) for name, own in said.items()},
        outcome_metrics_counts={name: len(own) for name, own in said.items()},
        overlong_penalty_mean=float((rewards - trained).mean()),
        lag_mean=float(lags.mean()) if len(lags) else 0.0,
        lag_max=int(lags.max()) if len(lags) else 0,
        tokens=tokens,
        tokens_masked=masked,
        tokens_fresh=tokens - masked,
        response_tokens_mean=float(np.mean(lengths)),
        response_tokens_p10=p10,
        response_tokens_p50=p50,
        response_tokens_p90=p90,
        response_tokens_max=max(lengths),
        truncated_ratio=truncated / len(lengths),
    )


def _response_tokens(trajectory: trajectory_pb2.Trajectory) -> int:
    own = (s for s in trajectory.segments if s.author == trajectory_pb2.AUTHOR_POLICY)
    return sum(len(codec.token_ids(segment)) for segment in own)


def _outcome_metrics(scored: Iterable[trajectory_pb2.Trajectory]) -> dict[str, list[float]]:
    """Returns the values that agents reported for each metric, by name."""
    said: dict[str, list[float]] = defaultdict(list)
    for trajectory in scored:
        for name, value in trajectory.outcome.metrics.items():
            said[name].append(value)
    return {name: said[name] for name in sorted(said)[:MOST_OUTCOME_METRICS]}
