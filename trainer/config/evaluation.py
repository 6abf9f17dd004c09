"""The tables `[[evaluation]]`: what is measured while training runs, when, and on which weights;
docs/evaluation.md."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from penstock.common.section import Section
from penstock.trainer.config.data import DataConfig, MixableConfig, SamplingConfig


class PinnedConfig(Section):
    """All of it measures one version: the switch to the next waits."""

    kind: Literal["pinned"] = "pinned"
    """Which mode this is."""
    max_other_version: int = Field(default=3, ge=0)
    """How often a prompt is asked again whose answers are of another version all the same, because the
    server was lost; after it they count as failed."""


class OnTheFlyConfig(Section):
    """Nothing waits: answers are of whatever is sampled, and how many groups mix versions is reported."""

    kind: Literal["on_the_fly"]
    """Which mode this is."""


Mode = Annotated[PinnedConfig | OnTheFlyConfig, Field(discriminator="kind")]


class SamplingOverrides(Section):
    """How evaluations are sampled; what is not given is as in `[data.sampling]`."""

    temperature: float | None = Field(default=None, ge=0)
    """Temperature; zero is greedy."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Upper bound on policy tokens in one turn."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Nucleus; one keeps every token."""
    top_k: int | None = Field(default=None, ge=0)
    """Tokens to choose from; zero means no limit."""
    stop: tuple[str, ...] | None = None
    """Texts that end a turn."""


class EvaluationConfig(MixableConfig):
    """One set of prompts that is measured again and again: exactly one source, or a mixture of them."""

    name: str = Field(pattern=r"^[\w.-]{1,40}$")
    """What its figures are called; each set has its own."""
    every_versions: int = Field(default=10, ge=0)
    """Versions from one evaluation to the next; zero for none between start and end."""
    at_start: bool = True
    """Whether the weights that the run starts from are measured."""
    at_end: bool = True
    """Whether those that it ends with are."""
    mode: Mode = PinnedConfig()
    """Whether the switch to the next version waits."""
    prompts: int = Field(default=256, ge=1)
    """Prompts of one evaluation: the first so many of the source, or all where it has fewer."""
    samples_per_prompt: int = Field(default=1, ge=1, le=4096)
    """Trajectories sampled for one prompt; from two on pass@k is reported."""
    concurrency: int = Field(default=16, ge=1)
    """Prompts at the server at a time. It bounds what an evaluation takes from training."""
    sampling: SamplingOverrides = SamplingOverrides()
    """How to sample, where that is not as for training."""
    system_prompt: str | None = None
    """Text of a system message before each prompt; unset takes that of `[data]`."""
    passes_from: float = 1.0
    """Reward from which on an answer counts as right, for pass@k."""
    patience_seconds: float = Field(default=900.0, gt=0)
    """Longest time without a result, or that a server which is full is asked for room, while the server is
    there; after it the evaluation ends with what it has, and says so. A pinned one would hold training up
    for ever where no worker takes evaluations."""

    @model_validator(mode="after")
    def _is_due_at_some_time(self) -> EvaluationConfig:
        if not (self.every_versions or self.at_start or self.at_end):
            raise ValueError(
                "it is never due: with every_versions = 0 one of at_start and at_end must be on"
            )
        return self

    @property
    def pinned(self) -> bool:
        """Whether the switch to the next version waits."""
        return self.mode.kind == "pinned"

    def sampling_over(self, data: DataConfig) -> SamplingConfig:
        """How to sample."""
        given = self.sampling.model_dump(exclude_none=True)
        return SamplingConfig.model_validate({**data.sampling.model_dump(), **given})

    def system_prompt_over(self, data: DataConfig) -> str:
        """The system message; empty for none."""
        return data.system_prompt if self.system_prompt is None else self.system_prompt
