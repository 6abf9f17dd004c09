"""Environments: tasks of many turns, in which an environment answers each action of the policy.

    reset ─► observation ─► turn ─► action ─► step ─► observation ─► turn ...  ─► done, or a limit
              (environment)  (policy)                  reward of this turn

`penstock rollout --environment NAME` plays one episode per attempt; see docs/guides/environments.md.
Uses `client`, `wire` and `common`. Begin with `episode.py`.
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
