"""The section `[groups]`: which delivered groups a step is made of, and what it makes of long answers;
docs/data.md says when to choose what."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from penstock.common.section import Section

Scalar = bool | int | float | str


class FilterConfig(Section):
    """A function of your own that says which groups are of no use."""

    function: str = Field(pattern=r"^[\w.]+:[\w.]+$")
    """Where it is, as pkg.module:function; modules of the working directory are found too. It takes a
    group and returns why it is to be dropped, or None."""
    options: dict[str, Scalar | list[Scalar]] = Field(
        default_factory=dict[str, Scalar | list[Scalar]]
    )
    """Keyword arguments of each call; with style "slime" the attributes of `args`."""
    style: Literal["penstock", "slime"] = "penstock"
    """Whose signature it has: `filter(group)`, or slime's dynamic sampling filter
    `filter(args, samples)`."""


class OverlongConfig(Section):
    """DAPO's soft punishment: what an answer loses for its length."""

    max_tokens: int = Field(ge=1)
    """Policy tokens of a trajectory, over all its turns, from which on it loses the whole penalty."""
    buffer_tokens: int = Field(ge=1)
    """So many tokens before that the penalty begins, and grows linearly."""
    penalty: float = Field(default=1.0, gt=0)
    """The whole penalty, which is taken off the reward."""

    @model_validator(mode="after")
    def _buffer_fits(self) -> OverlongConfig:
        if self.buffer_tokens > self.max_tokens:
            raise ValueError(
                f"buffer_tokens must be max_tokens = {self.max_tokens} at most, "
                f"got {self.buffer_tokens}"
            )
        return self


class GroupsConfig(Section):
    """What becomes of a group that was delivered."""

    attempts: int | None = Field(default=None, ge=2)
    """Attempts begun for each group, of which the first `data.group_size` to end with a reward make it;
    the others are stopped. None: as many as make it."""
    failed_siblings: Literal["keep", "drop", "replace"] = "keep"
    """A group in which some trajectories failed, though the server tried them again: it is trained on the
    rest; or dropped with its prompt; or dropped, and its prompt asked again."""
    max_replacements: int = Field(default=3, ge=1)
    """How often "replace" asks a prompt again before it is dropped."""
    drop_without_spread: bool = False
    """Whether a group is dropped in which the rewards of all attempts are equal, whatever those of branches
    are: dynamic sampling."""
    min_mean_reward: float | None = None
    """A group in which the mean reward of the attempts, without their branches, is below it is dropped."""
    max_mean_reward: float | None = None
    """A group in which it is above this is dropped."""
    filter: FilterConfig | None = None
    """A function of your own that drops groups, asked last."""
    max_dropped_per_step: int = Field(default=64, ge=1)
    """So many groups are dropped for one step at most, those that agents declare to be of no use
    included, which needs no setting here."""
    then: Literal["train", "stop"] = "train"
    """What happens after that: the step is made of what comes, as it is, with a warning; or the run
    stops."""
    overlong: OverlongConfig | None = None
    """Takes something off the reward of long answers."""
    mask_truncated: bool = False
    """Whether the last turn of a trajectory carries no gradient where the token budget ended it."""

    @model_validator(mode="after")
    def _some_mean_is_left(self) -> GroupsConfig:
        low, high = self.min_mean_reward, self.max_mean_reward
        if low is not None and high is not None and low > high:
            raise ValueError(f"min_mean_reward = {low} is above max_mean_reward = {high}")
        return self

    @model_validator(mode="after")
    def _something_is_replaced(self) -> GroupsConfig:
        # The default may be written: a rendered configuration has it.
        default = type(self).model_fields["max_replacements"].default
        if self.failed_siblings != "replace" and self.max_replacements != default:
            raise ValueError(
                f'max_replacements means nothing with failed_siblings = "{self.failed_siblings}": only '
                '"replace" asks a prompt again'
            )
        return self
