"""The section `[data]`: where prompts come from, and how they are asked; docs/data.md has an example of
each source."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, field_validator, model_validator

from penstock.common.section import Section

Scalar = bool | int | float | str


class SamplingConfig(Section):
    """How the policy is sampled."""

    temperature: float = Field(default=1.0, ge=0)
    """Temperature; zero is greedy, which leaves nothing to learn from: for evaluations alone."""
    max_tokens: int = Field(default=256, ge=1)
    """Upper bound on policy tokens in one turn."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus; one keeps every token. For training less goes only with algorithms that do not read the
    log-probabilities that tokens were sampled with; docs/algorithms.md."""
    top_k: int = Field(default=0, ge=0)
    """Tokens to choose from; zero means no limit. For training a limit goes only where `top_p` below one
    does."""
    stop: tuple[str, ...] = ()
    """Texts that end a turn."""


class ReasoningGymConfig(Section):
    """A procedural data set of reasoning-gym."""

    name: str = Field(min_length=1)
    """Name of the data set, such as "basic_arithmetic"."""
    size: int = Field(default=10_000, ge=1)
    """Problems before they repeat."""
    seed: int = Field(default=0, ge=0)
    """Seed of the problems; sets of different seeds are drawn independently."""
    config: dict[str, Scalar | list[Scalar]] = Field(
        default_factory=dict[str, Scalar | list[Scalar]]
    )
    """Settings of the data set itself, such as min_digits."""


class RowsConfig(Section):
    """What is read of each row; the fields that are not the prompt are metadata."""

    prompt_field: str = "prompt"
    """Field with the text of the user's message; used where `messages_field` is absent."""
    messages_field: str = "messages"
    """Field with a list of {"role", "content"} objects."""
    shuffle: bool = True
    """Whether each pass over the rows has an order of its own, drawn from the run's seed."""


class JsonlConfig(RowsConfig):
    """A file with one JSON object per line."""

    path: Path
    """The file."""


class ParquetConfig(RowsConfig):
    """Tables in Parquet."""

    path: Path
    """The file, or a folder whose files named *.parquet are read one after another, in the order of their
    names."""


class HuggingFaceConfig(RowsConfig):
    """A data set of Hugging Face's hub, or a folder that `datasets` reads; takes the extra `datasets`."""

    path: str = Field(min_length=1)
    """Name on the hub, or folder; also one that `save_to_disk` wrote."""
    name: str = ""
    """Configuration of the data set; empty for its only one."""
    split: str = "train"
    """Which part of it; slices such as "train[:80%]" count."""
    revision: str = ""
    """Commit on the hub, so that it stays the same; empty takes the newest."""


class PythonConfig(RowsConfig):
    """What a function of your own returns."""

    function: str = Field(pattern=r"^[\w.]+:[\w.]+$")
    """Where it is, as pkg.module:function; modules of the working directory are found too. It returns a
    sequence, or anything that can be gone through, whose order is its own: `shuffle` is of sequences."""
    options: dict[str, Scalar | list[Scalar]] = Field(
        default_factory=dict[str, Scalar | list[Scalar]]
    )
    """Keyword arguments of the call."""


class LevelConfig(Section):
    """One difficulty of an environment."""

    name: str = ""
    """What its episodes are counted under, after the environment's name; empty for its place among the
    levels."""
    options: dict[str, Scalar | list[Scalar]] = Field(
        default_factory=dict[str, Scalar | list[Scalar]]
    )
    """What the environment is begun with, such as max_number of GuessTheNumber."""


class EnvironmentConfig(Section):
    """Episodes of an environment that workers have (`penstock rollout --environment`), by seed."""

    name: str = Field(min_length=1)
    """As workers name it, such as "textarena:GuessTheNumber-v0"."""
    seed: int = Field(default=0, ge=0)
    """The first episode's."""
    size: int = Field(default=1_000_000, ge=1)
    """Seeds of each level before they repeat."""
    levels: tuple[LevelConfig, ...] = ()
    """Difficulties, which take turns; none is the environment as it is."""
    prompts_per_level: int = Field(default=0, ge=0)
    """Prompts after which the next level joins those before it; zero: all from the beginning."""


SOURCES = ("reasoning_gym", "jsonl", "parquet", "huggingface", "python", "environment")


class SourceConfig(Section):
    """One source; the others are unset."""

    reasoning_gym: ReasoningGymConfig | None = None
    """A procedural data set."""
    jsonl: JsonlConfig | None = None
    """A file of JSON objects."""
    parquet: ParquetConfig | None = None
    """A table, or a folder of them."""
    huggingface: HuggingFaceConfig | None = None
    """A data set of the hub, or one that `datasets` reads."""
    python: PythonConfig | None = None
    """A function of your own."""
    environment: EnvironmentConfig | None = None
    """Episodes of an environment."""

    def given(self) -> list[str]:
        """Names of those that are set."""
        return [name for name in SOURCES if getattr(self, name) is not None]


class PartConfig(SourceConfig):
    """One source of a mixture."""

    name: str = ""
    """What its problems are counted under; empty takes the source's own name."""
    weight: float = Field(default=1.0, gt=0)
    """Its share, as a part of the sum of all weights."""

    @model_validator(mode="after")
    def _one_source(self) -> PartConfig:
        if len(self.given()) != 1:
            raise ValueError(f"exactly one of {', '.join(SOURCES)} is needed, got {self.given()}")
        return self


class MixableConfig(SourceConfig):
    """Exactly one source, or a mixture of them."""

    mixture: tuple[PartConfig, ...] = ()
    """Several sources, each with its share."""

    @model_validator(mode="after")
    def _one_source(self) -> MixableConfig:
        given = [*self.given(), *(["mixture"] if self.mixture else [])]
        if len(given) != 1:
            raise ValueError(f"exactly one of {', '.join(SOURCES)}, mixture is needed, got {given}")
        return self


class DataConfig(MixableConfig):
    """What is asked of the policy."""

    group_size: int = Field(default=8, ge=1)
    """Trajectories sampled for one prompt; one only where nothing compares them with each other."""
    system_prompt: str = ""
    """Text of a system message before each prompt; empty for none."""
    sampling: SamplingConfig = SamplingConfig()
    """How to sample where the agent leaves it unset."""

    @field_validator("sampling")
    @classmethod
    def _something_to_learn_from(cls, sampling: SamplingConfig) -> SamplingConfig:
        if sampling.temperature == 0:
            raise ValueError(
                "temperature = 0 leaves nothing to learn from: the answers to a prompt are all alike, and "
                "none was drawn from the policy. Give one above 0, such as 1; an [[evaluation]] may have "
                "it in its own sampling"
            )
        if sampling.top_k == 1:
            raise ValueError(
                "top_k = 1 leaves nothing to learn from: the answers to a prompt are all alike"
            )
        return sampling
