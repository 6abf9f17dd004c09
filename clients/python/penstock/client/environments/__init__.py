"""Environments: tasks of many turns, in which an environment answers each action of the policy.

    reset ─► observation ─► turn ─► action ─► step ─► observation ─► turn ...  ─► done, or a limit
              (environment)  (policy)                  reward of this turn

`penstock rollout --environment NAME` plays one episode per attempt. NAME is `textarena:GAME`,
`reasoning_gym:DATA_SET`, or `pkg.module:Class` for your own class with `reset` and `step`. See
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
