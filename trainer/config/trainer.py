"""Configuration of `penstock train`: one TOML file. Sections are frozen and allow no unknown keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, cast

import tomli_w
from pydantic import Field, field_validator, model_validator

from penstock.common.explaining import read_config
from penstock.common.secrets import without_secrets
from penstock.common.section import Section
from penstock.common.settings import SettingInvalid
from penstock.trainer.config.algorithm import GROUP_RELATIVE, AlgorithmConfig, Reinforce
from penstock.trainer.config.data import DataConfig
from penstock.trainer.config.evaluation import EvaluationConfig
from penstock.trainer.config.groups import GroupsConfig
from penstock.trainer.config.metrics import MetricsConfig
from penstock.trainer.config.server import ServerConfig
from penstock.trainer.config.weights import ALWAYS_WHOLE, WeightsConfig
from penstock.trainer.core.errors import ConfigInvalid

LayerNames = Literal["all-linear"] | tuple[str, ...]
Beta = Annotated[float, Field(ge=0, lt=1)]
# Characters of a run's id plus an evaluation's name; task ids begin with both.
LONGEST_NAMES = 200


class TargetConfig(Section):
    """The reward at which a run ends before its last step. The last checkpoint, the last evaluation and the
    final model are written as usual."""

    reward: float = Field(allow_inf_nan=False)
    """Mean reward that must be reached. Groups that are not trained count too."""
    attempts: int = Field(default=256, ge=1)
    """Attempts over which the mean is taken: the fewest latest steps that have at least this many."""
    patience: int = Field(default=1, ge=1)
    """Consecutive steps after which the mean must be at the target."""


class RunConfig(Section):
    """The training run itself."""

    id: str = Field(default="run", min_length=1, max_length=200)
    """Name of the run. It stays the same across restarts, and task ids begin with it."""
    out: Path = Path("out")
    """Folder for metrics, checkpoints and the final model."""
    steps: int = Field(default=100, ge=1)
    """Number of optimizer steps, each of which makes one weight version."""
    target: TargetConfig | None = None
    """Ends the run once its reward is high enough. Without this table, all steps run."""
    seed: int = Field(default=0, ge=0)
    """Seed of torch and of the order of the data."""
    save_model: bool = True
    """Whether to write the final model to `out/model`."""


class LoraConfig(Section):
    """A low-rank adapter, trained in place of the weights it is added to."""

    rank: int = Field(ge=1)
    """Rank of the adapter's matrices. The server's --max-lora-rank bounds it."""
    alpha: float = Field(gt=0)
    """Numerator of the adapter's scale."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of the adapter's inputs that training drops."""
    target_modules: LayerNames = "all-linear"
    """Names of the linear layers that get an adapter, such as "q_proj". "all-linear" selects every
    linear layer except the output layer."""
    rank_stabilized: bool = False
    """Whether the scale is alpha / sqrt(rank) instead of alpha / rank."""

    @field_validator("target_modules")
    @classmethod
    def _inner_layers(cls, names: LayerNames) -> LayerNames:
        if isinstance(names, str):
            return names
        if not all(names) or not names:
            raise ValueError('must name at least one layer, or be "all-linear"')
        if outside := [n for n in names if n.rpartition(".")[2] in ("lm_head", "embed_tokens")]:
            raise ValueError(f"{outside[0]} is an embedding; an adapter changes linear layers")
        return names


class FsdpBackend(Section):
    """A Hugging Face model, computed by transformers."""

    kind: Literal["fsdp"] = "fsdp"
    """Supports any architecture."""


class MegatronBackend(Section):
    """megatron-core, for Llama, Qwen2 and Qwen3 models that are too large for one device. The
    number of ranks must be divisible by the product of the two sizes. The quotient is the number of
    model copies, which share the micro-batches."""

    kind: Literal["megatron"]
    """Tensor, pipeline and data parallelism."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Ranks that share each tensor. It must divide the model's number of key-value heads."""
    pipeline_parallel: int = Field(default=1, ge=1)
    """Ranks that share the layers. It must divide the number of layers."""


BackendConfig = Annotated[FsdpBackend | MegatronBackend, Field(discriminator="kind")]
LatePolicyName = Literal["mask", "wait", "requeue", "drop"]


class ModelConfig(Section):
    """The policy model and how it is trained."""

    path: str = Field(min_length=1)
    """Folder or hub name of a Hugging Face causal language model. The server must serve the same model."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Data type of the forward pass. "bfloat16" is autocast over float32 master weights. "auto" picks
    bfloat16 if the device has instructions for it, and otherwise float32, which is then faster."""
    gradient_checkpointing: bool = False
    """Whether to recompute activations in the backward pass. Saves memory; about a third slower."""
    cpu_offload: bool = False
    """Whether weights, gradients and optimizer moments stay in host memory and visit the device
    layer by layer. Slower; for a model that is too large for the device."""
    threads: int = Field(default=0, ge=0)
    """CPU threads that torch uses on each rank. Zero leaves the choice to torch."""
    lora: LoraConfig | None = None
    """Trains an adapter and uploads only that. The server must be started with --enable-lora.
    Without this table, all weights are trained."""
    backend: BackendConfig = FsdpBackend()
    """Backend that computes and trains the model: a table with its kind, or just the kind."""

    @field_validator("backend", mode="before")
    @classmethod
    def _kind_alone(cls, value: object) -> object:
        return {"kind": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _some_is_of_transformers_alone(self) -> ModelConfig:
        megatron = self.backend.kind == "megatron"
        if megatron and self.lora is not None:
            raise ValueError(
                'lora cannot be combined with backend = "megatron": adapters require PEFT, which '
                "needs a model computed by transformers"
            )
        if megatron and self.cpu_offload:
            raise ValueError(
                'cpu_offload cannot be combined with backend = "megatron": divide a model that is '
                "too large for one device over more devices"
            )
        return self


class TrainConfig(Section):
    """How one optimizer step is made."""

    groups_per_step: int = Field(default=8, ge=1)
    """Groups in one step. Each step makes one weight version."""
    updates_per_step: int = Field(default=1, ge=1)
    """Optimizer updates in one step. Each uses an equal share of its groups."""
    micro_batch_tokens: int = Field(default=4096, ge=1)
    """Tokens, including padding, in one forward and backward pass. Bounds memory; changes no results."""
    reduce_each_micro_batch: bool = False
    """Whether several ranks reduce their gradients after each micro-batch instead of once per update. Each
    rank then holds a share of the gradients instead of all of them, at the cost of more communication."""
    share_prefixes: bool = True
    """Whether tokens that siblings share are computed once. Never applied if the model's layers
    attend within a window or chunk of fewer than 4096 tokens."""
    learning_rate: float = Field(default=1e-6, gt=0)
    """Learning rate after warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises linearly. Skipped updates do not count."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Learning rate after warm-up: constant, or a cosine that reaches zero after the updates of all
    steps. Skipped updates do not count, so a run with skipped updates ends above zero."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of matrices. Vectors have none."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """AdamW's averaging factors."""
    epsilon: float = Field(default=1e-8, gt=0)
    """AdamW's epsilon."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradient norm above which gradients are clipped."""

    @model_validator(mode="after")
    def _no_update_is_empty(self) -> TrainConfig:
        if self.updates_per_step > self.groups_per_step:
            raise ValueError(
                f"updates_per_step must be at most groups_per_step = {self.groups_per_step}, got "
                f"{self.updates_per_step}: each update needs whole groups"
            )
        return self


class StalenessConfig(Section):
    """How stale a trained token may be."""

    max_lag: int = Field(default=4, ge=0, le=1_000)
    """Largest lag of a trained token, in versions. Zero is the synchronous loop."""
    late_policy: LatePolicyName = "mask"
    """What happens to a group with older tokens."""

    @property
    def applied_policy(self) -> LatePolicyName:
        """The late policy that applies. The synchronous loop schedules nothing, and `mask` replaces
        `wait` there. Under `wait`, a resumed run would get only one batch of the groups the servers
        hold beyond its checkpoint."""
        return "mask" if self.late_policy == "wait" and not self.max_lag else self.late_policy


class CheckpointConfig(Section):
    """When checkpoints are written and how many are kept."""

    every_steps: int = Field(default=0, ge=0)
    """Steps between checkpoints. Zero writes none."""
    keep: int = Field(default=2, ge=1)
    """Number of newest checkpoints to keep."""


class FailureConfig(Section):
    """When to stop instead of waiting."""

    max_failed_groups: int = Field(default=8, ge=1)
    """Consecutive groups in which every trajectory failed, after which the trainer stops."""


class TrainerConfig(Section):
    """The whole configuration of `penstock train`."""

    server: ServerConfig = ServerConfig()
    """One or more rollout servers."""
    run: RunConfig = RunConfig()
    """The training run itself."""
    model: ModelConfig
    """The policy model and how it is trained."""
    data: DataConfig
    """Where prompts come from, and how they are sampled."""
    groups: GroupsConfig = GroupsConfig()
    """Which delivered groups are trained, and how."""
    train: TrainConfig = TrainConfig()
    """How one optimizer step is made."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """How rewards become updates."""
    staleness: StalenessConfig = StalenessConfig()
    """How stale a trained token may be."""
    weights: WeightsConfig = WeightsConfig()
    """How new weights reach the server."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When checkpoints are written and how many are kept."""
    failure: FailureConfig = FailureConfig()
    """When to stop instead of waiting."""
    evaluation: tuple[EvaluationConfig, ...] = ()
    """Sets of prompts that are measured during training."""
    metrics: MetricsConfig = MetricsConfig()
    """Which metrics are reported during the run, and where."""

    @model_validator(mode="after")
    def _can_be_divided(self) -> TrainerConfig:
        servers, groups = len(self.server.addresses), self.train.groups_per_step
        if groups < servers:
            raise ValueError(
                f"train.groups_per_step must be at least {servers}, one for each server in "
                f"server.address, got {groups}"
            )
        if servers > 1 and self.weights.transport == "collective":
            raise ValueError(
                'weights.transport = "collective" supports only one server: server.address has '
                f"{servers}"
            )
        return self

    @model_validator(mode="after")
    def _evaluations_have_names_and_are_due(self) -> TrainerConfig:
        names = [one.name for one in self.evaluation]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"two evaluations are named {twice!r}; give each a unique name")
        if (longest := max(map(len, names), default=0)) + len(self.run.id) > LONGEST_NAMES:
            raise ValueError(
                f"run.id and the name of an evaluation have {longest + len(self.run.id)} "
                f"characters together; task ids have room for {LONGEST_NAMES}"
            )
        for one in self.evaluation:
            if one.every_versions > self.run.steps and not (one.at_start or one.at_end):
                raise ValueError(
                    f"evaluation {one.name!r} is never due: every_versions = {one.every_versions} "
                    f"exceeds the {self.run.steps} steps, so enable at_start or at_end"
                )
        return self

    @model_validator(mode="after")
    def _answers_are_enough(self) -> TrainerConfig:
        attempts, size = self.groups.attempts, self.data.group_size
        if attempts is not None and attempts < size:
            raise ValueError(
                f"groups.attempts must be at least data.group_size = {size}, got {attempts}"
            )
        kind = self.algorithm.advantage.kind
        if size > 1:
            return self
        if kind in GROUP_RELATIVE:
            raise ValueError(
                f'data.group_size = 1 cannot be combined with algorithm.advantage.kind = "{kind}", '
                "which compares the answers to a prompt with each other and needs at least 2. "
                '"reinforce_plus_plus" and "gae" compare none'
            )
        if kind == "reinforce_plus_plus" and self.train.groups_per_step == 1:
            raise ValueError(
                'algorithm.advantage.kind = "reinforce_plus_plus" compares the answers of a step '
                "with each other: data.group_size = 1 needs train.groups_per_step of at least 2"
            )
        if self.groups.drop_without_spread:
            raise ValueError(
                "groups.drop_without_spread cannot be combined with data.group_size = 1: a single "
                "answer has no spread"
            )
        return self

    @model_validator(mode="after")
    def _algorithm_has_its_probabilities(self) -> TrainerConfig:
        if isinstance(self.algorithm.loss, Reinforce) and self.train.updates_per_step > 1:
            raise ValueError(
                f"train.updates_per_step = {self.train.updates_per_step} cannot be combined with "
                'algorithm.loss.kind = "reinforce": from the second update of a step on, the '
                "policy differs from the one the step began with, and without a ratio nothing "
                'corrects for that. Use "ppo_clip" or "cispo", or updates_per_step = 1'
            )
        sampling = self.data.sampling
        truncated = [f"top_p = {sampling.top_p}"] if sampling.top_p < 1 else []
        truncated += [f"top_k = {sampling.top_k}"] if sampling.top_k > 0 else []
        if truncated and self.algorithm.reads_behaviour:
            raise ValueError(
                f"data.sampling.{' and '.join(truncated)} cannot be combined with this algorithm: it makes "
                "the engine report log-probabilities of a truncated distribution, each above the policy's "
                "own, and the ratio, the correction or the KL in the reward uses them. Leave it out (an "
                "[[evaluation]] may have it), or choose an algorithm that does not use them: "
                'algorithm.correction.level = "off" with ratio_to = "proximal", or with '
                'algorithm.loss.kind = "reinforce"; and no algorithm.kl.kind = "reward"'
            )
        return self

    @model_validator(mode="after")
    def _model_allows_the_rest(self) -> TrainerConfig:
        lora, transport = self.model.lora is not None, self.weights.transport
        if lora and transport in ALWAYS_WHOLE:
            raise ValueError(
                f'model.lora cannot be combined with weights.transport = "{transport}"'
            )
        if lora and self.weights.delta == "on":
            raise ValueError('model.lora cannot be combined with weights.delta = "on"')
        if self.model.backend.kind == "megatron" and self.train.reduce_each_micro_batch:
            raise ValueError(
                'train.reduce_each_micro_batch cannot be combined with model.backend = "megatron": '
                "each copy of the model holds its whole gradients"
            )
        return self


def load_config(path: Path, overrides: Sequence[str] = ()) -> TrainerConfig:
    """Reads a TOML file and applies overrides such as `train.learning_rate=1e-5`. The last override wins.

    Raises ConfigInvalid with a line per mistake, which names the place, the field and the value it got.
    """
    try:
        return read_config(TrainerConfig, path, overrides)
    except SettingInvalid as error:
        raise ConfigInvalid(str(error)) from error


def render_config(config: TrainerConfig) -> str:
    """Renders the whole configuration, defaults included, as TOML that `load_config` reads back. For
    people: options of user-supplied functions and of trackers may hold secrets, which are left out."""
    return tomli_w.dumps(as_shown(config.model_dump(mode="json", exclude_none=True)))


def as_shown(table: Mapping[str, object]) -> dict[str, object]:
    """Returns a configuration as shown to people and trackers: without anything that may be a secret."""
    hidden = ("options", "trackers")
    return {n: without_secrets(v) if n in hidden else _as_shown(v) for n, v in table.items()}


def _as_shown(value: object) -> object:
    if isinstance(value, Mapping):
        return as_shown(cast("Mapping[str, object]", value))
    if isinstance(value, list):
        return [_as_shown(item) for item in cast("list[object]", value)]
    return value
