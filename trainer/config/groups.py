"""The section `[groups]`: which delivered groups a step trains, and how long answers are treated.
docs/guides/data.md explains when to choose what."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from penstock.common.section import FunctionName, Section
from penstock.trainer.config.data import Options


class FilterConfig(Section):
    """A function you provide that decides which groups to drop."""

    function: FunctionName
    """Where to find the function, as pkg.module:function. Modules of the working directory are
    found too. It takes a group and returns a reason to drop it, or None."""
    options: Options = Field(default_factory=Options)
    """Keyword arguments of each call. With style "slime" they are the attributes of `args`."""
    style: Literal["penstock", "slime"] = "penstock"
    """Signature: `filter(group)`, or slime's dynamic sampling filter `filter(args, samples)`."""


class OverlongConfig(Section):
    """DAPO's soft overlong punishment, which lowers the reward of long answers."""

    max_tokens: int = Field(ge=1)
    """Policy tokens of a trajectory, over all its turns, from which the full penalty applies."""
    buffer_tokens: int = Field(ge=1)
    """Number of tokens before `max_tokens` at which the penalty begins. It grows linearly from there."""
    penalty: float = Field(default=1.0, gt=0)
    """Full penalty, subtracted from the reward."""

    @model_validator(mode="after")
    def _buffer_fits(self) -> OverlongConfig:
        if self.buffer_tokens > self.max_tokens:
            raise ValueError(
                f"buffer_tokens must be at most max_tokens = {self.max_tokens}, got "
                f"{self.buffer_tokens}"
            )
        return self


class GroupsConfig(Section):
    """Which delivered groups are trained, and how."""

    attempts: int | None = Field(default=None, ge=2)
    """Attempts started for each group. The first `data.group_size` that end with a reward form the
    group, and the others are stopped. None starts only as many as the group needs."""
    failed_siblings: Literal["keep", "drop", "replace"] = "keep"
    """What happens to a group in which some trajectories failed despite retries by the server. "keep"
    trains on the rest. "drop" drops the group and its prompt. "replace" drops the group and asks its
    prompt again."""
    max_replacements: int = Field(default=3, ge=1)
    """How often "replace" asks a prompt again before dropping it."""
    drop_without_spread: bool = False
    """Whether to drop groups in which all attempts have equal rewards, regardless of the rewards of
    branches. This is dynamic sampling."""
    min_mean_reward: float | None = None
    """Drops a group if the mean reward of its attempts, without their branches, is below this."""
    max_mean_reward: float | None = None
    """Drops a group if the mean reward of its attempts, without their branches, is above this."""
    filter: FilterConfig | None = None
    """A function you provide that drops groups. It is called last."""
    max_dropped_per_step: int = Field(default=64, ge=1)
    """Largest number of groups dropped for one step. It includes groups that agents declare
    unusable, which are dropped without any setting here."""
    then: Literal["train", "stop"] = "train"
    """What happens after that: the step trains groups as they arrive, with a warning, or the run stops."""
    overlong: OverlongConfig | None = None
    """Lowers the reward of long answers."""
    mask_truncated: bool = False
    """Whether the last turn of a trajectory carries no gradient if the token budget cut it off."""

    @model_validator(mode="after")
    def _every_setting_can_act(self) -> GroupsConfig:
        low, high = self.min_mean_reward, self.max_mean_reward
        if low is not None and high is not None and low > high:
            raise ValueError(f"min_mean_reward = {low} is above max_mean_reward = {high}")
        # The default may be present explicitly: a rendered configuration contains it.
        default = type(self).model_fields["max_replacements"].default
        if self.failed_siblings != "replace" and self.max_replacements != default:
            raise ValueError(
                f'max_replacements has no effect with failed_siblings = "{self.failed_siblings}": '
                'only "replace" asks a prompt again'
            )
        return self
