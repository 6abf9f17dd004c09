"""The tables `[[evaluation]]`: what is measured during training, when, and how
(docs/guides/evaluation.md)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from penstock.common.section import Section
from penstock.trainer.config.data import DataConfig, MixableConfig, SamplingConfig


class PinnedConfig(Section):
    """The whole evaluation measures one version. The switch to the next version waits for it."""

    kind: Literal["pinned"] = "pinned"
    """Measures one version."""
    max_other_version: int = Field(default=3, ge=0)
    """How often a prompt is asked again if its answers came from another version because the server
    was lost. After that, they count as failed."""


class OnTheFlyConfig(Section):
    """Nothing waits. Answers come from whichever version is sampled; mixed groups are counted."""

    kind: Literal["on_the_fly"]
    """Measures whichever version is active."""


Mode = Annotated[PinnedConfig | OnTheFlyConfig, Field(discriminator="kind")]


class SamplingOverrides(Section):
    """How evaluations are sampled. Unset fields are taken from `[data.sampling]`."""

    temperature: float | None = Field(default=None, ge=0)
    """Temperature. Zero is greedy."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Upper bound on policy tokens in one turn."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Nucleus sampling. One keeps every token."""
    top_k: int | None = Field(default=None, ge=0)
    """Number of most likely tokens to sample from. Zero means no limit."""
    stop: tuple[str, ...] | None = None
    """Texts that end a turn."""


class EvaluationConfig(MixableConfig):
    """One set of prompts that is measured repeatedly. It has exactly one source, or a mixture."""

    name: str = Field(pattern=r"^[\w.-]{1,40}$")
    """Name of the set in metrics. Each set needs a unique name."""
    every_versions: int = Field(default=10, ge=0)
    """Versions between evaluations. Zero means none between start and end."""
    at_start: bool = True
    """Whether to measure the weights that the run starts from."""
    at_end: bool = True
    """Whether to measure the weights that the run ends with."""
    mode: Mode = PinnedConfig()
    """Whether the switch to the next version waits."""
    prompts: int = Field(default=256, ge=1)
    """Number of prompts in one evaluation, from the start of the source; all of a shorter one."""
    samples_per_prompt: int = Field(default=1, ge=1, le=4096)
    """Trajectories sampled for one prompt. With two or more, pass@k is reported."""
    concurrency: int = Field(default=16, ge=1)
    """Prompts open at the servers at a time. It bounds the capacity taken from training."""
    sampling: SamplingOverrides = SamplingOverrides()
    """Sampling parameters that differ from training."""
    system_prompt: str | None = None
    """Text of a system message before each prompt. Unset uses the one in `[data]`."""
    passes_from: float = 1.0
    """Lowest reward that counts as correct for pass@k."""
    patience_seconds: float = Field(default=900.0, gt=0)
    """Longest time to wait, with the server up, for a result or for room at a full server. After
    that the evaluation ends with what it has, and logs a warning. Otherwise a pinned evaluation
    that no worker takes would stall training forever."""

    @model_validator(mode="after")
    def _is_due_at_some_time(self) -> EvaluationConfig:
        if not (self.every_versions or self.at_start or self.at_end):
            raise ValueError("it is never due: every_versions = 0 requires at_start or at_end")
        return self

    @property
    def pinned(self) -> bool:
        """Whether the switch to the next version waits."""
        return self.mode.kind == "pinned"

    def sampling_over(self, data: DataConfig) -> SamplingConfig:
        """Returns the sampling parameters: the overrides of this set applied to those of `[data]`."""
        given = self.sampling.model_dump(exclude_none=True)
        return SamplingConfig.model_validate({**data.sampling.model_dump(), **given})

    def system_prompt_over(self, data: DataConfig) -> str:
        """Returns the text of the system message; empty for none."""
        return data.system_prompt if self.system_prompt is None else self.system_prompt
