"""Configuration of `penstock train`: one TOML file, each section a frozen model, no unknown
keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, cast

import tomli_w
from pydantic import Field, ValidationError, field_validator, model_validator

from penstock.common.secrets import without_passwords, without_secrets
from penstock.common.section import Section
from penstock.common.settings import SettingInvalid, apply_setting, read_table
from penstock.common.token_file import redact
from penstock.trainer.config.algorithm import GROUP_RELATIVE, AlgorithmConfig, Reinforce
from penstock.trainer.config.data import DataConfig
from penstock.trainer.config.evaluation import EvaluationConfig
from penstock.trainer.config.groups import GroupsConfig
from penstock.trainer.config.metrics import MetricsConfig
from penstock.trainer.config.server import ServerConfig
from penstock.trainer.config.weights import ALWAYS_WHOLE, WeightsConfig
from penstock.trainer.core.errors import ConfigInvalid

# Characters of a run's id and an evaluation's name, which task ids begin with.
LONGEST_NAMES = 200


class RunConfig(Section):
    """This run."""

    id: str = Field(default="run", min_length=1, max_length=200)
    """Name of the run, the same over restarts; task ids begin with it."""
    out: Path = Path("out")
    """Folder for metrics, checkpoints and the final model."""
    steps: int = Field(default=100, ge=1)
    """Optimizer steps."""
    seed: int = Field(default=0, ge=0)
    """Seeds torch and the order of the data."""
    save_model: bool = True
    """Whether the final model is written to `out/model`."""


class LoraConfig(Section):
    """A low-rank adapter, which is trained instead of the weights it is added to."""

    rank: int = Field(ge=1)
    """Rank of its matrices; the server's --max-lora-rank bounds it."""
    alpha: float = Field(gt=0)
    """Numerator of its scale."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Part of its inputs that training leaves out."""
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Names of the linear layers it changes, such as "q_proj"; "all-linear" for every one but the
    output."""
    rank_stabilized: bool = False
    """Whether the scale is alpha / sqrt(rank) instead of alpha / rank."""

    @field_validator("target_modules")
    @classmethod
    def _inner_layers(
        cls, names: Literal["all-linear"] | tuple[str, ...]
    ) -> Literal["all-linear"] | tuple[str, ...]:
        if isinstance(names, str):
            return names
        if not all(names) or not names:
            raise ValueError('must name at least one layer, or be "all-linear"')
        if outside := [n for n in names if n.rpartition(".")[2] in ("lm_head", "embed_tokens")]:
            raise ValueError(f"{outside[0]} is an embedding; an adapter changes linear layers")
        return names


class FsdpBackend(Section):
    """A Hugging Face model as transformers computes it."""

    kind: Literal["fsdp"] = "fsdp"
    """The default; any architecture."""


class MegatronBackend(Section):
    """megatron-core, for models that one device cannot hold: Llama, Qwen2 and Qwen3. The ranks are divided
    by the product of the two sizes; so many copies of the model share the micro-batches."""

    kind: Literal["megatron"]
    """By tensor, pipeline and data parallelism."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Ranks that share each tensor; it must divide the model's heads of keys and values."""
    pipeline_parallel: int = Field(default=1, ge=1)
    """Ranks that share the layers; it must divide their number."""


BackendConfig = Annotated[FsdpBackend | MegatronBackend, Field(discriminator="kind")]
LatePolicyName = Literal["mask", "wait", "requeue", "drop"]


class ModelConfig(Section):
    """The policy."""

    path: str = Field(min_length=1)
    """Folder, or name on a hub, of a Hugging Face causal language model; as the server was given
    it."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Arithmetic of the forward pass. "bfloat16" is autocast over float32 master weights; "auto" is that
    where the device has instructions for it, and float32 where it has none and is faster without."""
    gradient_checkpointing: bool = False
    """Whether activations are recomputed in the backward pass: less memory, about a third
    slower."""
    cpu_offload: bool = False
    """Whether weights, gradients and the optimizer's moments stay in the host's memory and visit the device
    layer by layer: for a model that is too large for it, and slower."""
    threads: int = Field(default=0, ge=0)
    """CPU threads torch computes with, on each rank; zero leaves it to torch."""
    lora: LoraConfig | None = None
    """Trains an adapter and uploads nothing else, to a server that was started with --enable-lora. Without
    it all weights are trained."""
    backend: BackendConfig = FsdpBackend()
    """What computes and trains it: a table with its kind, or the kind alone."""

    @field_validator("backend", mode="before")
    @classmethod
    def _kind_alone(cls, value: object) -> object:
        return {"kind": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _some_is_of_transformers_alone(self) -> ModelConfig:
        if self.backend.kind != "megatron":
            return self
        if self.lora is not None:
            raise ValueError(
                'lora cannot be had with backend = "megatron": an adapter is PEFT\'s, of a model as '
                "transformers computes it"
            )
        if self.cpu_offload:
            raise ValueError(
                'cpu_offload cannot be had with backend = "megatron": what is too large for a device is '
                "divided over more of them"
            )
        return self


class TrainConfig(Section):
    """The optimizer step."""

    groups_per_step: int = Field(default=8, ge=1)
    """Groups in one step, which makes one version of the weights."""
    updates_per_step: int = Field(default=1, ge=1)
    """Optimizer updates in one step, each of an equal share of its groups."""
    micro_batch_tokens: int = Field(default=4096, ge=1)
    """Tokens, padding counted, in one forward and backward pass; bounds memory, changes no
    result."""
    reduce_each_micro_batch: bool = False
    """Whether several ranks add up their gradients after each micro-batch instead of once an update: each
    then holds a share of the gradients instead of all of them, and sends more."""
    share_prefixes: bool = True
    """Whether tokens that siblings have in common are computed once; never in a model whose layers attend
    within a window or a chunk of fewer than 4096 tokens."""
    learning_rate: float = Field(default=1e-6, gt=0)
    """Learning rate after warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises linearly; as in `schedule`, an update that was skipped is
    not one of theirs."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Learning rate after warm-up: constant, or down to zero over the updates that all steps have. It goes
    by those that were made: a run of which some were skipped ends above zero."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of matrices; vectors have none."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (
        0.9,
        0.95,
    )
    """AdamW's averaging factors."""
    epsilon: float = Field(default=1e-8, gt=0)
    """AdamW's epsilon."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Norm that gradients are clipped to."""

    @model_validator(mode="after")
    def _no_update_is_empty(self) -> TrainConfig:
        if self.updates_per_step > self.groups_per_step:
            raise ValueError(
                f"updates_per_step must be groups_per_step = {self.groups_per_step} at most, got "
                f"{self.updates_per_step}: each update is of whole groups"
            )
        return self


class StalenessConfig(Section):
    """How old a trained token may be."""

    max_lag: int = Field(default=4, ge=0, le=1_000)
    """Versions a trained token may be behind the trainer; zero is the synchronous loop."""
    late_policy: LatePolicyName = "mask"
    """What happens to a group with older tokens."""

    @property
    def applied_policy(self) -> LatePolicyName:
        """The late policy that is asked for. In the synchronous loop there is nothing to schedule; under
        `wait` one that resumes would be given only one batch of what the servers are past."""
        return "mask" if self.late_policy == "wait" and not self.max_lag else self.late_policy


class CheckpointConfig(Section):
    """What survives the trainer."""

    every_steps: int = Field(default=0, ge=0)
    """Steps between checkpoints; zero keeps none."""
    keep: int = Field(default=2, ge=1)
    """Newest checkpoints kept."""


class FailureConfig(Section):
    """When to stop instead of waiting."""

    max_failed_groups: int = Field(default=8, ge=1)
    """Groups in a row in which every trajectory failed, after which the trainer stops."""


class TrainerConfig(Section):
    """Everything `penstock train` can be told."""

    server: ServerConfig = ServerConfig()
    """The rollout server, or servers."""
    run: RunConfig = RunConfig()
    """This run."""
    model: ModelConfig
    """The policy."""
    data: DataConfig
    """What is asked of the policy."""
    groups: GroupsConfig = GroupsConfig()
    """What becomes of a group that was delivered."""
    train: TrainConfig = TrainConfig()
    """The optimizer step."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """What a step makes of its rewards."""
    staleness: StalenessConfig = StalenessConfig()
    """How old a trained token may be."""
    weights: WeightsConfig = WeightsConfig()
    """How new weights reach the server."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """What survives the trainer."""
    failure: FailureConfig = FailureConfig()
    """When to stop instead of waiting."""
    evaluation: tuple[EvaluationConfig, ...] = ()
    """Sets that are measured while training runs."""
    metrics: MetricsConfig = MetricsConfig()
    """What is told of the run while it goes on."""

    @model_validator(mode="after")
    def _can_be_divided(self) -> TrainerConfig:
        servers, groups = len(self.server.addresses), self.train.groups_per_step
        if groups < servers:
            raise ValueError(
                f"train.groups_per_step must be {servers} at least, one for each server in server.address, "
                f"got {groups}"
            )
        if servers > 1 and self.weights.transport == "collective":
            raise ValueError(
                'weights.transport = "collective" cannot be had with several servers: '
                f"server.address has {servers}"
            )
        return self

    @model_validator(mode="after")
    def _evaluations_have_names(self) -> TrainerConfig:
        names = [one.name for one in self.evaluation]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"two evaluations are named {twice!r}; give each a name of its own")
        if (longest := max(map(len, names), default=0)) + len(self.run.id) > LONGEST_NAMES:
            raise ValueError(
                f"run.id and the name of an evaluation are {longest + len(self.run.id)} characters "
                f"together; task ids have room for {LONGEST_NAMES}"
            )
        return self

    @model_validator(mode="after")
    def _evaluations_are_due(self) -> TrainerConfig:
        for one in self.evaluation:
            if one.every_versions > self.run.steps and not (one.at_start or one.at_end):
                raise ValueError(
                    f"evaluation {one.name!r} is never due: with every_versions = {one.every_versions} of "
                    f"{self.run.steps} steps one of at_start and at_end must be on"
                )
        return self

    @model_validator(mode="after")
    def _enough_attempts_are_begun(self) -> TrainerConfig:
        attempts, size = self.groups.attempts, self.data.group_size
        if attempts is not None and attempts < size:
            raise ValueError(
                f"groups.attempts must be data.group_size = {size} at least, got {attempts}"
            )
        return self

    @model_validator(mode="after")
    def _one_answer_is_enough(self) -> TrainerConfig:
        kind = self.algorithm.advantage.kind
        if self.data.group_size > 1:
            return self
        if kind in GROUP_RELATIVE:
            raise ValueError(
                f'data.group_size = 1 cannot be had with algorithm.advantage.kind = "{kind}", which '
                "compares the answers to a prompt with each other: 2 at least. "
                '"reinforce_plus_plus" and "gae" compare none'
            )
        if kind == "reinforce_plus_plus" and self.train.groups_per_step == 1:
            raise ValueError(
                'algorithm.advantage.kind = "reinforce_plus_plus" compares the answers of a step with each '
                "other: data.group_size = 1 needs train.groups_per_step = 2 at least"
            )
        if self.groups.drop_without_spread:
            raise ValueError(
                "groups.drop_without_spread cannot be had with data.group_size = 1: one answer has no "
                "spread"
            )
        return self

    @model_validator(mode="after")
    def _updates_are_corrected_for(self) -> TrainerConfig:
        if isinstance(self.algorithm.loss, Reinforce) and self.train.updates_per_step > 1:
            raise ValueError(
                f"train.updates_per_step = {self.train.updates_per_step} cannot be had with "
                'algorithm.loss.kind = "reinforce": from the second update of a step on the policy is '
                "another one than the step began with, and without a ratio nothing corrects for that. Use "
                '"ppo_clip" or "cispo", or updates_per_step = 1'
            )
        return self

    @model_validator(mode="after")
    def _behaviour_is_not_truncated(self) -> TrainerConfig:
        sampling = self.data.sampling
        truncated = [f"top_p = {sampling.top_p}"] if sampling.top_p < 1 else []
        truncated += [f"top_k = {sampling.top_k}"] if sampling.top_k > 0 else []
        if truncated and self.algorithm.reads_behaviour:
            raise ValueError(
                f"data.sampling.{' and '.join(truncated)} cannot be had with this algorithm: tokens then "
                "come with the log-probabilities of a truncated distribution, each above the policy's own, "
                "and the ratio, the correction or the KL in the reward is made of both. Leave it out (an "
                "[[evaluation]] may have it), or have the algorithm make nothing of them: "
                'algorithm.correction.level = "off" with ratio_to = "proximal", or with '
                'algorithm.loss.kind = "reinforce"; and no algorithm.kl.kind = "reward"'
            )
        return self

    @model_validator(mode="after")
    def _an_adapter_travels_whole(self) -> TrainerConfig:
        if self.model.lora is None:
            return self
        if self.weights.transport in ALWAYS_WHOLE:
            transport = self.weights.transport
            raise ValueError(f'model.lora cannot be had with weights.transport = "{transport}"')
        if self.weights.delta == "on":
            raise ValueError('model.lora cannot be had with weights.delta = "on"')
        return self

    @model_validator(mode="after")
    def _some_is_of_fsdp_alone(self) -> TrainerConfig:
        if self.model.backend.kind != "megatron":
            return self
        if self.train.reduce_each_micro_batch:
            raise ValueError(
                'train.reduce_each_micro_batch cannot be had with model.backend = "megatron": each copy of '
                "the model has its gradients whole"
            )
        return self


def load_config(path: Path, overrides: Sequence[str] = ()) -> TrainerConfig:
    """Reads a TOML file and applies overrides such as `train.learning_rate=1e-5`, the last one
    winning.

    Raises ConfigInvalid, naming each field and the value it got.
    """
    try:
        document = read_table(path)
        for override in overrides:
            apply_setting(document, override)
        return TrainerConfig.model_validate(document)
    except SettingInvalid as error:
        raise ConfigInvalid(str(error)) from error
    except ValidationError as error:
        raise ConfigInvalid(_explain(path, error)) from error


def render_config(config: TrainerConfig) -> str:
    """The whole configuration, defaults included, as TOML that `load_config` reads back; for people: what
    functions of one's own and trackers are given may hold secrets, which are left out."""
    return tomli_w.dumps(as_shown(config.model_dump(mode="json", exclude_none=True)))


def as_shown(table: Mapping[str, object]) -> dict[str, object]:
    """A configuration as people and trackers are told it: without what may be a secret."""
    shown: dict[str, object] = {}
    for name, value in table.items():
        if name in ("options", "trackers"):
            shown[name] = without_secrets(value)
        elif isinstance(value, Mapping):
            shown[name] = as_shown(cast("Mapping[str, object]", value))
        elif isinstance(value, list):
            items = cast("list[object]", value)
            shown[name] = [
                as_shown(cast("Mapping[str, object]", item)) if isinstance(item, Mapping) else item
                for item in items
            ]
        else:
            shown[name] = value
    return shown


def _explain(path: Path, error: ValidationError) -> str:
    lines: list[str] = []
    for problem in error.errors(include_url=False):
        # What is wrong between sections names them itself.
        field = "".join(f"{part}." for part in problem["loc"])[:-1]
        got = "" if isinstance(problem["input"], Mapping) else f", got {problem['input']!r}"
        said = str(problem["msg"]).removeprefix("Value error, ")
        if problem["type"] == "union_tag_not_found":
            named = problem.get("ctx", {}).get("discriminator")
            said = f"{named} is missing: it says what else this table may have"
        lines.append(f"{field}: {said}{got}" if field else said)
    return without_passwords(redact(f"{path}: " + "; ".join(lines)))
