"""The work of ranks in tests. Every rank runs the function in its own process."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import distributed

from penstock.trainer.algorithms.objective import Objective
from penstock.trainer.batching.batching import TrainingGroup
from penstock.trainer.batching.planning import StepPlan, plan_step
from penstock.trainer.config.algorithm import AlgorithmConfig
from penstock.trainer.config.trainer import ModelConfig, TrainConfig
from penstock.trainer.policy.fsdp import FsdpPolicy
from penstock.trainer.policy.process_group import end_with_parent, find_place, join_group
from penstock.trainer.policy.ranked import LeadingPolicy, RankPolicy, obey
from penstock.trainer.policy.ranks import Leader, follow, lead
from penstock.trainer.policy.sharding import Sharding
from tests.support.policy_rollouts import roll_out
from tests.trainer.batching.test_batching import context, group, read, trajectory, written

STEPS, FEW_STEPS = 10, 3


def train(config: str, resume: bool) -> int:
    from penstock.trainer.__main__ import train

    return train(Path(config), [], resume, False)


def steps(
    model: str,
    out: str,
    variants: dict[str, dict[str, Any]],
    long: list[str],
) -> int:
    """Train the steps of each variant; variants named in `long` get more steps. Rank 0 writes each
    variant's figures and weights."""
    place = find_place(os.environ)
    torch.set_num_threads(1)
    leader = None
    if place.size > 1:
        join_group(place, None)
        if not place.leads:
            follower = follow(place.rank)
            with follower.reporting():
                for name in variants:
                    obey_until_done(follower, make(model, **variants[name]))
            return 0
        leader = lead(place.size)
    for name, variant in variants.items():
        policy = make(model, **variant)
        if leader is not None:
            policy = LeadingPolicy(policy, leader)
        rollouts = Path(out) / f"{name}-rollouts" if variant.get("rolled_out") else None
        found = walk(policy, STEPS if name in long else FEW_STEPS, rollouts, **variant)
        save_file(found, Path(out) / f"{name}-{place.size}.safetensors")
        if leader is not None:
            leader.tell_all("done")
    if leader is not None:
        leader.end(0)
    return 0


def obey_until_done(follower: Any, policy: RankPolicy) -> None:
    class Until:
        def commands(self) -> Any:
            for command, payload in follower.commands():
                if command == "done":
                    return
                yield command, payload

    obey(Until(), policy)  # type: ignore[arg-type]


def make(
    model: str,
    algorithm: dict[str, Any] | None = None,
    train: dict[str, Any] | None = None,
    rolled_out: bool = False,
    **fields: Any,
) -> RankPolicy:
    return FsdpPolicy(
        ModelConfig.model_validate({"path": model, "dtype": "float32", **fields}),
        TrainConfig.model_validate({"learning_rate": 1e-3, **(train or {})}),
        total_steps=STEPS,
        seed=0,
        algorithm=AlgorithmConfig.model_validate(algorithm or {}),
    )


def walk(
    policy: RankPolicy,
    steps: int,
    rollouts: Path | None = None,
    algorithm: dict[str, Any] | None = None,
    train: dict[str, Any] | None = None,
    **_: Any,
) -> dict[str, torch.Tensor]:
    """The figures of each step, shape [steps, figures]; a score under the final weights; and those
    weights.

    With `rollouts` the steps train on the policy's own samples. A single process saves them there,
    and several ranks read them from there.
    """
    figures: list[list[float]] = []
    updates = (train or {}).get("updates_per_step", 1)
    sampled: list[list[TrainingGroup]] = []
    if rollouts is not None and not isinstance(policy, FsdpPolicy):
        sampled = torch.load(rollouts, weights_only=False)
    rng = np.random.default_rng(0)
    for step in range(steps):
        if rollouts is None:
            groups = groups_of(step)
        elif isinstance(policy, FsdpPolicy):
            groups = roll_out(policy, rng)
            sampled.append(groups)
        else:
            groups = sampled[step]
        result = policy.step(plan_for(groups, policy.data_ranks, algorithm or {}, updates))
        assert result.applied
        values = (
            result.loss,
            result.grad_norm,
            result.entropy,
            result.kl_reference,
            result.critic_loss,
        )
        figures.append([value or 0.0 for value in values])
    if rollouts is not None:
        torch.save(sampled, rollouts)
    weights = {name: tensor.clone() for name, tensor in policy.weights()}
    found = {"figures": torch.tensor(figures, dtype=torch.float64)}
    if policy.adapter() is None:
        found["score"] = torch.from_numpy(policy.score(weights, list(range(9))))
    return {**found, **weights}


def plan_for(
    groups: list[TrainingGroup], ranks: int, algorithm: dict[str, Any], updates: int
) -> StepPlan:
    objective = Objective(AlgorithmConfig.model_validate(algorithm))
    return plan_step(groups, objective, token_budget=40, ranks=ranks, update_count=updates)


def groups_of(step: int) -> list[TrainingGroup]:
    """Three groups of answers of different lengths that cover many tokens, and one group with a
    single answer, which has no sibling to compare with."""
    generator = torch.Generator().manual_seed(step)
    groups: list[TrainingGroup] = []
    for number in range(3):
        prompt = [30 + number, *torch.randint(0, 256, (5,), generator=generator).tolist()]
        groups.append(
            read(
                group(
                    *(
                        trajectory(
                            [
                                context(prompt),
                                written(
                                    torch.randint(
                                        0, 256, (3 + 4 * s,), generator=generator
                                    ).tolist()
                                ),
                            ],
                            float(s * s),
                        )
                        for s in range(3)
                    )
                )
            )
        )
    single = trajectory([context([40, 41]), written([42, 43, 44])], 1.0)
    return [groups[0], read(group(single)), *groups[1:]]


def write_for_long(folder: str) -> int:
    """Rank 0 reaches the barrier late, later than a collective's timeout."""
    place = find_place(os.environ)
    join_group(place, None)
    leader = lead(place.size) if place.leads else None
    follower = None if place.leads else follow(place.rank)
    distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=1))
    sharding = Sharding()
    if leader is not None:
        time.sleep(2)
    sharding.wait()
    (Path(folder) / f"met-{place.rank}").touch()
    if leader is not None:
        leader.end(0)
    else:
        assert follower is not None
        with follower.reporting():
            for _ in follower.commands():
                pass
    return 0


def stand_still(folder: str, fails: str = "") -> int:
    """Rank 0 waits indefinitely, as it would for a batch. Rank 1
    fails at once if `fails` is set."""
    place = find_place(os.environ)
    if not place.leads:
        end_with_parent()
    join_group(place, None)
    if not place.leads:
        follower = follow(place.rank)
        (Path(folder) / f"joined-{place.rank}").touch()
        with follower.reporting():
            if fails and place.rank == 1:
                raise RuntimeError(fails)
            for _ in follower.commands():
                pass
        return 0
    leader: Leader = lead(place.size)
    (Path(folder) / "joined-0").touch()
    time.sleep(3600)
    leader.end(0)
    return 0
