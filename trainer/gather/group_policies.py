"""Policies for a delivered group: whether to train it, and how its samples count.

    TrainingGroup -> reason_to_drop -> None: kept -> penalize_length -> mask_truncated -> part of the step
                                  +--> a reason: refused, and another group gathered in its place

Reasons depend on the rewards as agents gave them, before any length penalty. `TrainingGroup.rewards` keeps
those: a penalty changes the rewards that samples are trained with, not the reported ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from penstock.client.plugins.group_filter import Delivered, slime_filter
from penstock.common.functions import find_function
from penstock.trainer.algorithms.advantages import LEAST_SPREAD
from penstock.trainer.batching.batching import Sample, TrainingGroup
from penstock.trainer.config.groups import GroupsConfig, OverlongConfig
from penstock.trainer.config.trainer import TrainerConfig
from penstock.trainer.core.errors import ConfigInvalid, blaming
from penstock.v1 import trajectory_pb2
from penstock.wire import codec

SIBLING_FAILED = "SIBLING_FAILED"
NO_SPREAD = "NO_SPREAD"
MEAN_TOO_LOW = "MEAN_TOO_LOW"
MEAN_TOO_HIGH = "MEAN_TOO_HIGH"
# Prefixes of the reasons that a user's function returns and an agent gives.
OWN, AGENT = "FILTER:", "AGENT:"
# The prompt is asked again, under another task id; the second if every trajectory of the group had failed.
ASKED_AGAIN, FAILED_ASKED_AGAIN = "ASKED_AGAIN", "FAILED_ASKED_AGAIN"

Filter = Callable[[TrainingGroup, Delivered], str | None]


def reason_to_drop(group: TrainingGroup, config: GroupsConfig) -> str | None:
    """Returns why a group with samples should be dropped, None to keep it; does not ask the user's
    filter."""
    if group.failures and config.failed_siblings != "keep":
        return SIBLING_FAILED
    if group.unwanted:
        return AGENT + group.unwanted
    rewards = group.attempt_rewards
    if config.drop_without_spread and (not rewards or max(rewards) - min(rewards) < LEAST_SPREAD):
        return NO_SPREAD
    # Branches of failed attempts have no mean.
    mean = math.fsum(rewards) / len(rewards) if rewards else None
    lowest, highest = config.min_mean_reward, config.max_mean_reward
    if mean is not None and lowest is not None and mean < lowest - LEAST_SPREAD:
        return MEAN_TOO_LOW
    if mean is not None and highest is not None and mean > highest + LEAST_SPREAD:
        return MEAN_TOO_HIGH
    return None


def load_filter(config: TrainerConfig) -> Filter | None:
    """Loads the function that `groups.filter` names. Raises ConfigInvalid. A call of the result
    raises it too if the function fails, or returns neither a string nor None."""
    named = config.groups.filter
    if named is None:
        return None
    name, where = named.function, f"groups.filter.function {named.function}"
    with blaming(where):
        if named.style == "slime":
            arguments = _slime_arguments(config)
            function = slime_filter(name, named.options, arguments, model=config.model.path)
        else:
            own = find_function(name, ("group",), named.options)

            def function(group: TrainingGroup, _: Delivered, /) -> object:
                return own(group, **named.options)

    def ask(group: TrainingGroup, delivered: Delivered) -> str | None:
        with blaming(where):
            reason = function(group, delivered)
        if reason is None:
            return None
        if not isinstance(reason, str) or not reason:
            raise ConfigInvalid(f"{where}: it must return a reason or None, got {reason!r}")
        return OWN + reason

    return ask


def _slime_arguments(config: TrainerConfig) -> dict[str, object]:
    """Returns the attributes of slime's `args` that a trainer knows."""
    sampling = config.data.sampling
    return {
        "n_samples_per_prompt": config.data.group_size,
        "rollout_batch_size": config.train.groups_per_step,
        "rollout_temperature": sampling.temperature,
        "rollout_top_p": sampling.top_p,
        "rollout_top_k": sampling.top_k or -1,
        "rollout_max_response_len": sampling.max_tokens,
        "rollout_stop": list(sampling.stop) or None,
    }


def length_penalty(length: int, config: OverlongConfig) -> float:
    """Returns the penalty for an answer with `length` policy tokens: zero up to max_tokens -
    buffer_tokens, full from max_tokens on, and linear between. DAPO (arXiv 2503.14476), equation 13."""
    beyond = length - (config.max_tokens - config.buffer_tokens)
    return config.penalty * min(max(beyond / config.buffer_tokens, 0.0), 1.0)


def penalize_length(
    group: TrainingGroup, delivery: trajectory_pb2.TrajectoryGroup, config: OverlongConfig
) -> TrainingGroup:
    sent = {trajectory.trajectory_id: trajectory for trajectory in delivery.trajectories}
    lengths = {name: int(_by_policy(trajectory, sent).sum()) for name, trajectory in sent.items()}
    samples = tuple(
        replace(s, reward=s.reward - length_penalty(lengths[s.trajectory_id], config))
        for s in group.samples
    )
    return replace(group, samples=samples)


def _by_policy(
    trajectory: trajectory_pb2.Trajectory, sent: Mapping[str, trajectory_pb2.Trajectory]
) -> NDArray[np.bool_]:
    """Marks the tokens of a trajectory that the policy sampled. Tokens that a branch shares with its
    parent are included, because they are part of its answer."""
    before = np.zeros(0, np.bool_)
    if shared := trajectory.parent_token_count:
        before = _by_policy(sent[trajectory.parent_trajectory_id], sent)[:shared]
    own = [
        np.full(_count(segment), segment.author == trajectory_pb2.AUTHOR_POLICY)
        for segment in trajectory.segments
    ]
    return np.concatenate([before, *own])


def mask_truncated(
    group: TrainingGroup, delivery: trajectory_pb2.TrajectoryGroup
) -> tuple[TrainingGroup, int]:
    """Masks last turns that the token budget cut off. Returns the group and the number of tokens masked.

    Their rewards stay in the baseline. Earlier turns stay, because the reason they ended is not delivered.
    """
    truncated = {
        trajectory.trajectory_id: _outside_last_turn(trajectory)
        for trajectory in delivery.trajectories
        if trajectory.finish_reason == trajectory_pb2.FINISH_REASON_LENGTH
    }
    samples: list[Sample] = []
    masked = 0
    for sample in group.samples:
        outside = truncated.get(sample.trajectory_id)
        if outside is not None:
            masked += int((sample.trained & ~outside).sum())
            sample = replace(sample, trained=sample.trained & outside)
        samples.append(sample)
    return replace(group, samples=tuple(samples)), masked


def _outside_last_turn(trajectory: trajectory_pb2.Trajectory) -> NDArray[np.bool_]:
    """Returns True for each token that is not in the policy's last turn."""
    turns = [
        segment.turn_index if segment.author == trajectory_pb2.AUTHOR_POLICY else -1
        for segment in trajectory.segments
    ]
    last = max(turns, default=-1)
    pieces = [
        np.full(_count(segment), turn != last or turn < 0, np.bool_)
        for segment, turn in zip(trajectory.segments, turns, strict=True)
    ]
    # Tokens shared with the parent are not part of a branch's own turn.
    return np.concatenate([np.ones(trajectory.parent_token_count, np.bool_), *pieces])


def _count(segment: trajectory_pb2.Segment) -> int:
    return len(codec.token_ids(segment))
