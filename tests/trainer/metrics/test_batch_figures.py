"""The figures that describe a batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.trainer.batching.batching import read_group
from penstock.trainer.metrics.batch_figures import (
    MOST_OUTCOME_METRICS,
    BatchFigures,
    describe_batch,
)
from penstock.v1 import trajectory_pb2
from penstock.wire import codec
from penstock.wire.messages import Failure, Outcome, Segment, Trajectory, TrajectoryGroup


def segment(length: int, *, version: int = 0, context: bool = False) -> Any:
    ids = codec.array_bytes(np.arange(length, dtype=np.int32))
    if context:
        return Segment(author=trajectory_pb2.AUTHOR_CONTEXT, token_ids=ids)
    return Segment(
        author=trajectory_pb2.AUTHOR_POLICY,
        token_ids=ids,
        logprobs=codec.array_bytes(np.full(length, -1.0, np.float32), codec.LOGPROB),
        weight_version=version,
        temperature=1.0,
    )


def trajectory(
    *lengths: int,
    reward: float | None = 0.0,
    truncated: bool = False,
    version: int = 0,
    **metrics: float,
) -> Any:
    """Turns of these lengths, each after three tokens of context. Without a reward it failed."""
    segments = [s for n in lengths for s in (segment(3, context=True), segment(n, version=version))]
    outcome = Outcome(failure=Failure(reason="NO"), metrics=metrics)
    if reward is not None:
        outcome = Outcome(reward=reward, metrics=metrics)
    length, stop = trajectory_pb2.FINISH_REASON_LENGTH, trajectory_pb2.FINISH_REASON_STOP
    return Trajectory(
        segments=segments, outcome=outcome, finish_reason=length if truncated else stop
    )


def describe(*groups: list[Any], sources: list[str]) -> BatchFigures:
    deliveries = [TrajectoryGroup(trajectories=group) for group in groups]
    read = [read_group(delivery, trainer_version=4, max_lag=3) for delivery in deliveries]
    return describe_batch(deliveries, read, sources)


def test_lengths_are_of_responses_that_were_scored() -> None:
    one = [trajectory(length, truncated=length > 8) for length in range(1, 11)]
    other = [trajectory(2, 40), trajectory(500, reward=None, truncated=True)]
    figures = describe(one, other, sources=["a", "a"])
    lengths = [*range(1, 11), 42]
    assert figures.response_tokens_mean == pytest.approx(np.mean(lengths))
    assert figures.response_tokens_p50 == 6.0
    assert (figures.response_tokens_p10, figures.response_tokens_p90) == (2.0, 10.0)
    assert figures.response_tokens_max == 42
    assert figures.truncated_ratio == 2 / 11
    assert (figures.groups, figures.trajectories, figures.tokens) == (2, 11, sum(lengths))


def test_rewards_are_told_apart_by_source() -> None:
    figures = describe(
        [trajectory(1, reward=1.0), trajectory(1, reward=0.0)],
        [trajectory(1, reward=0.25), trajectory(1, reward=None)],
        [trajectory(1, reward=0.5), trajectory(1, reward=0.5)],
        sources=["b", "a", "b"],
    )
    assert figures.reward_by_source == {"a": 0.25, "b": 0.5}
    assert figures.attempts_by_source == {"a": 1, "b": 4}
    assert figures.reward_mean == 2.25 / 5


def test_rewards_are_those_of_attempts_and_not_of_their_branches() -> None:
    branching = [trajectory(1, reward=1.0), trajectory(1, reward=0.0)]
    branching[0].trajectory_id = "a"
    for _ in range(3):
        branching.append(trajectory(4, reward=0.5))
        branching[-1].parent_trajectory_id = "a"
    # The attempt failed, but its branch did not.
    failed = [trajectory(1, reward=None), trajectory(2, reward=1.0)]
    failed[0].trajectory_id = failed[1].parent_trajectory_id = "b"
    figures = describe(branching, failed, sources=["a", "b"])
    assert (figures.reward_mean, figures.reward_std) == (0.5, 0.5)
    assert (figures.reward_by_source, figures.attempts_by_source) == ({"a": 0.5}, {"a": 2})
    assert (figures.attempts, figures.trajectories) == (2, 6)
    # Lengths and similar figures cover everything that is trained.
    assert figures.response_tokens_mean == 16 / 6


def test_lag_is_over_what_is_young_enough() -> None:
    figures = describe(
        [trajectory(10, version=4), trajectory(30, version=2), trajectory(5, version=0)],
        sources=["a"],
    )
    assert (figures.tokens, figures.tokens_masked, figures.tokens_fresh) == (45, 5, 40)
    assert (figures.lag_mean, figures.lag_max) == (30 * 2 / 40, 2)


def test_what_agents_say_is_averaged_over_those_that_say_it() -> None:
    names = {f"n{number:03}": 1.0 for number in range(MOST_OUTCOME_METRICS + 5)}
    figures = describe(
        [trajectory(1, format=1.0), trajectory(1, format=0.0, turns=3.0), trajectory(1)],
        [trajectory(1, reward=None, format=1.0), trajectory(1, **names)],
        sources=["a", "a"],
    )
    assert figures.outcome_metrics["format"] == 0.5
    assert figures.outcome_metrics_counts["format"] == 2
    assert len(figures.outcome_metrics) == MOST_OUTCOME_METRICS
