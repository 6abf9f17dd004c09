"""Environments: tasks of many turns, in which something answers each action of the policy.

    reset ─► observation ─► turn ─► action ─► step ─► observation ─► turn ...  ─► done, or a limit
              (environment)  (policy)                  reward of this turn

`penstock rollout --environment NAME` plays one episode per attempt: `textarena:GAME`,
`reasoning_gym:DATA_SET`, or anything of your own with `reset` and `step`, as `pkg.module:Class`;
docs/environments.md.
"""

from penstock.client.environments.environment import (
    Environment,
    EnvironmentInvalid,
    Step,
    TaskUnusable,
)
from penstock.client.environments.episode import EpisodeLimits, play

__all__ = [
    "Environment",
    "EnvironmentInvalid",
    "EpisodeLimits",
    "Step",
    "TaskUnusable",
    "play",
]
