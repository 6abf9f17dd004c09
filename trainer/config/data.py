"""The section `[data]`: where prompts come from, and how they are sampled (docs/guides/data.md)."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, field_validator, model_validator

from penstock.common.section import FunctionName, Section

Scalar = bool | int | float | str
Options = dict[str, Scalar | list[Scalar]]


class SamplingConfig(Section):
    """How the policy is sampled."""

    temperature: float = Field(default=1.0, ge=0)
    """Temperature. Zero is greedy, which leaves nothing to learn from and is only for evaluations."""
    max_tokens: int = Field(default=256, ge=1)
    """Upper bound on policy tokens in one turn."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling. One keeps every token. In training, a lower value requires an algorithm that does
    not read the log-probabilities that tokens were sampled with; see docs/concepts/algorithms.md."""
    top_k: int = Field(default=0, ge=0)
    """Number of most likely tokens to sample from. Zero means no limit. In training, a limit has
    the same requirement as a `top_p` below one."""
    stop: tuple[str, ...] = ()
    """Texts that end a turn."""


class ReasoningGymConfig(Section):
    """A procedural data set from reasoning-gym."""

    name: str = Field(min_length=1)
    """Name of the data set, such as "basic_arithmetic"."""
    size: int = Field(default=10_000, ge=1)
    """Number of problems before they repeat."""
    seed: int = Field(default=0, ge=0)
    """Seed of the problems. Sets with different seeds are drawn independently."""
    config: Options = Field(default_factory=Options)
    """Settings of the data set itself, such as min_digits."""


class ColumnsConfig(Section):
    """Columns that have other names than those in docs/guides/data.md. A dot leads into a column."""

    prompt: str = ""
    """Column with the prompt: a text, or a list of messages. Empty finds the usual names."""
    answer: str = ""
    """Column with the right answer, which becomes `answer` in the metadata. Empty finds the usual
    names."""


class RowsConfig(Section):
    """Which columns of each row are read. Columns that are not the prompt become metadata."""

    columns: ColumnsConfig = ColumnsConfig()
    """The columns with the prompt and the right answer."""
    shuffle: bool = True
    """Whether each pass over the rows has a new order, drawn from the run's seed."""


COMPRESSED_ENDINGS = (".gz", ".zst", ".bz2", ".xz")


class JsonlConfig(RowsConfig):
    """A file with one JSON object per line."""

    path: Path
    """Path of the file. If its name ends in .gz, .zst, .bz2 or .xz, it is decompressed."""


class ParquetConfig(RowsConfig):
    """One or more Parquet tables."""

    path: Path
    """A file, or a folder, whose *.parquet files are read in the order of their names."""


class HuggingFaceConfig(RowsConfig):
    """A data set on the Hugging Face hub or in a folder. Needs the extra `datasets`."""

    path: str = Field(min_length=1)
    """Name on the hub, or a folder, including one that `save_to_disk` wrote."""
    name: str = ""
    """Configuration of the data set. Empty if it has only one."""
    split: str = "train"
    """Split of the data set. Slices such as "train[:80%]" are supported."""
    revision: str = ""
    """Commit on the hub, which pins the data. Empty uses the newest."""


class PythonConfig(RowsConfig):
    """The return value of a function you provide."""

    function: FunctionName
    """Where to find the function, as pkg.module:function or file.py:function. Modules of the working
    directory are found too. It returns a sequence or any other iterable. `shuffle` applies to
    sequences only; an iterable keeps its order."""
    options: Options = Field(default_factory=Options)
    """Keyword arguments of the call."""


class LevelConfig(Section):
    """One difficulty level of an environment."""

    name: str = ""
    """Name under which its episodes count, after the environment's. Empty uses the level's index."""
    options: Options = Field(default_factory=Options)
    """Options with which the environment is created, such as max_number of GuessTheNumber."""


class EnvironmentConfig(Section):
    """Episodes of an environment that workers provide (`penstock rollout --environment`), by seed."""

    name: str = Field(min_length=1)
    """Name by which workers know it, such as "textarena:GuessTheNumber-v0"."""
    seed: int = Field(default=0, ge=0)
    """Seed of the first episode."""
    size: int = Field(default=1_000_000, ge=1)
    """Number of seeds of each level before they repeat."""
    levels: tuple[LevelConfig, ...] = ()
    """Difficulty levels, which take turns. Empty uses the environment's defaults."""
    prompts_per_level: int = Field(default=0, ge=0)
    """Number of prompts after which the next level joins the others. Zero uses all from the start."""


SOURCES = ("reasoning_gym", "jsonl", "parquet", "huggingface", "python", "environment")


class SourceConfig(Section):
    """One source; the others are unset."""

    reasoning_gym: ReasoningGymConfig | None = None
    """A procedural data set."""
    jsonl: JsonlConfig | None = None
    """A file of JSON objects."""
    parquet: ParquetConfig | None = None
    """A table, or a folder of tables."""
    huggingface: HuggingFaceConfig | None = None
    """A data set on the hub, or one that `datasets` reads."""
    python: PythonConfig | None = None
    """A function you provide."""
    environment: EnvironmentConfig | None = None
    """Episodes of an environment."""

    @model_validator(mode="after")
    def _one_source(self) -> SourceConfig:
        names = [name for name in (*SOURCES, "mixture") if name in type(self).model_fields]
        given = [name for name in names if getattr(self, name)]
        if len(given) != 1:
            raise ValueError(f"exactly one of {', '.join(names)} is needed, got {given}")
        return self


class PartConfig(SourceConfig):
    """One source of a mixture."""

    name: str = ""
    """Name under which its problems are counted. Empty uses the source's own name."""
    weight: float = Field(default=1.0, gt=0)
    """Weight of this source; its share is the weight divided by the sum of all weights."""


class MixableConfig(SourceConfig):
    """Exactly one source, or a mixture of several."""

    mixture: tuple[PartConfig, ...] = ()
    """Several sources, each with its weight."""


class DataConfig(MixableConfig):
    """Where prompts come from, and how they are sampled."""

    hint = f"it holds one of {', '.join(f'[data.{name}]' for name in SOURCES)} or [[data.mixture]]"

    group_size: int = Field(default=8, ge=1)
    """Trajectories sampled for one prompt. One is allowed only if the algorithm does not compare them."""
    system_prompt: str = ""
    """Text of a system message before each prompt. Empty for none."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling parameters that apply when the agent does not set its own."""

    @field_validator("sampling")
    @classmethod
    def _something_to_learn_from(cls, sampling: SamplingConfig) -> SamplingConfig:
        if sampling.temperature == 0:
            raise ValueError(
                "temperature = 0 leaves nothing to learn from: greedy answers to a prompt are all "
                "alike and are not drawn from the policy. Use a value above 0, such as 1; an "
                "[[evaluation]] may set it in its own sampling"
            )
        if sampling.top_k == 1:
            raise ValueError(
                "top_k = 1 leaves nothing to learn from: the answers to a prompt are all alike"
            )
        return sampling
