"""The section `[algorithm]`: unions of kinds, each with only the fields that apply to it.

Meaningless combinations therefore cannot be written. docs/concepts/algorithms.md has the formulas and
explains when to choose which.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, assert_never, cast

from pydantic import Field, field_validator, model_validator

from penstock.common.section import FunctionName, Section
from penstock.trainer.config.data import Scalar

Level = Literal["token", "sequence"]
KlEstimator = Literal["k1", "k2", "k3"]


class CustomFunction(Section):
    """A function you provide. docs/concepts/algorithms.md describes its arguments and result."""

    kind: Literal["custom"]
    """A function you provide."""
    function: FunctionName
    """Where to find the function, as pkg.module:function; the working directory is searched too."""
    options: dict[str, Scalar] = Field(default_factory=dict[str, Scalar])
    """Keyword arguments of each call."""


# Advantages


class Grpo(Section):
    """The reward minus the mean of its group, in standard deviations."""

    kind: Literal["grpo"] = "grpo"
    """Group-relative and normalized."""


class DrGrpo(Section):
    """The reward minus the mean of its group."""

    kind: Literal["dr_grpo"]
    """Group-relative, not normalized."""


class Rloo(Section):
    """The reward minus the mean of its siblings."""

    kind: Literal["rloo"]
    """Leave-one-out baseline."""


class ReinforcePlusPlus(Section):
    """The reward, whitened over the step."""

    kind: Literal["reinforce_plus_plus"]
    """Does not use groups."""


class ReinforcePlusPlusBaseline(Section):
    """The reward minus the mean of its group, whitened over the step."""

    kind: Literal["reinforce_plus_plus_baseline"]
    """Uses the group's mean as baseline."""


class CriticConfig(Section):
    """A second model of the policy's size, which learns to predict the return."""

    learning_rate: float = Field(default=1e-5, gt=0)
    """Constant learning rate of the critic. Its other optimizer settings are the policy's."""
    clip: Annotated[float, Field(gt=0)] | Literal["none"] = 0.2
    """Largest change of a value in one update that still gets the full gradient. "none" disables it."""


class Gae(Section):
    """Generalized advantage estimation, per token."""

    also_called = ("ppo",)
    kind: Literal["gae"]
    """Uses a critic."""
    discount: float = Field(default=1.0, gt=0, le=1)
    """Weight of the next token's value in the current one; gamma in the paper."""
    trace: float = Field(default=0.95, ge=0, le=1)
    """How far back surprises are credited; the paper's lambda. One uses rewards alone, zero the critic."""
    whiten: bool = True
    """Whether to whiten advantages over the step."""
    critic: CriticConfig = CriticConfig()
    """The model that learns the values."""


AdvantageConfig = Annotated[
    Grpo | DrGrpo | Rloo | ReinforcePlusPlus | ReinforcePlusPlusBaseline | Gae | CustomFunction,
    Field(discriminator="kind"),
]
GROUP_RELATIVE = ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline")
"""Kinds that compare the answers to a prompt with each other."""

# Losses


class _Clipped(Section):
    """A ratio that is clipped to bounds around 1."""

    clip_low: float
    """Distance from 1 to the lower bound."""
    clip_high: float
    """Distance from 1 to the upper bound."""

    @model_validator(mode="after")
    def _some_way_to_go(self) -> _Clipped:
        if self.clip_low == self.clip_high == 0:
            raise ValueError(
                "clip_low and clip_high are both 0: this allows only a ratio of 1, which the ratio is "
                "before the policy has moved at all. Set one of them above 0; for no ratio, use "
                'kind = "reinforce"'
            )
        return self


class PpoClip(_Clipped):
    """The clipped surrogate objective, per token."""

    also_called = ("ppo",)
    kind: Literal["ppo_clip"] = "ppo_clip"
    """Proximal policy optimization."""
    clip_low: float = Field(default=0.2, ge=0, le=1)
    """The ratio is clipped below 1 - clip_low."""
    clip_high: float = Field(default=0.28, ge=0)
    """The ratio is clipped above 1 + clip_high."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Upper bound of the ratio for negative advantages. Unset means no such bound."""


class Gspo(_Clipped):
    """The clipped surrogate objective with the ratio of the whole sequence."""

    kind: Literal["gspo"]
    """Sequence-level policy optimization."""
    clip_low: float = Field(default=3e-4, ge=0, le=1)
    """The sequence's ratio is clipped below 1 - clip_low."""
    clip_high: float = Field(default=4e-4, ge=0)
    """The sequence's ratio is clipped above 1 + clip_high."""


class Cispo(_Clipped):
    """REINFORCE weighted by the clipped ratio."""

    kind: Literal["cispo"]
    """Clips the weight, not the gradient."""
    clip_low: float = Field(default=1.0, ge=0, le=1)
    """The weight is at least 1 - clip_low. One disables the bound."""
    clip_high: float = Field(default=4.0, ge=0)
    """The weight is at most 1 + clip_high."""


class Reinforce(Section):
    """The plain policy gradient."""

    kind: Literal["reinforce"]
    """Uses no ratio."""


LossConfig = Annotated[
    PpoClip | Gspo | Cispo | Reinforce | CustomFunction, Field(discriminator="kind")
]

# Aggregation


class TokenMean(Section):
    """Every token has the same weight."""

    kind: Literal["token_mean"] = "token_mean"
    """Mean over the tokens of the update."""


class SequenceMean(Section):
    """Every sequence has the same weight."""

    kind: Literal["sequence_mean"]
    """Mean over sequences of the mean over their tokens."""


class FixedLength(Section):
    """Every token has the same weight, regardless of the number of tokens."""

    kind: Literal["fixed_length"]
    """Sum over tokens, divided by the number of sequences times a constant."""
    length: int = Field(ge=1)
    """The constant, such as the maximum number of tokens in a trajectory."""


AggregationConfig = Annotated[TokenMean | SequenceMean | FixedLength, Field(discriminator="kind")]

# KL to a reference


class NoKl(Section):
    """No KL to a reference model."""

    kind: Literal["none"] = "none"
    """Uses no reference."""


class KlInLoss(Section):
    """A term of the loss, whose gradient pulls the policy back to the reference."""

    kind: Literal["loss"]
    """Adds the KL to the loss."""
    coefficient: float = Field(gt=0)
    """Factor of the KL."""
    estimator: KlEstimator = "k3"
    """Estimator of the KL, computed from the sampled token."""


class KlInReward(Section):
    """A penalty on each token, applied before advantages are computed."""

    kind: Literal["reward"]
    """Subtracts the KL from the reward."""
    coefficient: float = Field(gt=0)
    """Factor of the KL."""
    estimator: KlEstimator = "k1"
    """Estimator of the KL, computed from the sampled token."""


KlConfig = Annotated[NoKl | KlInLoss | KlInReward, Field(discriminator="kind")]

# Off-policy correction


class Uncorrected(Section):
    """Applies no correction weights."""

    level: Literal["off"] = "off"
    """Applies no correction weights."""
    ratio_to: Literal["behaviour", "proximal"] = "behaviour"
    """Denominator of the loss's ratio: the policy that sampled, or the one at the step's beginning."""


class ClippedWeight(Section):
    """Importance sampling with truncated weights."""

    level: Level
    """Whether to weight each token or its whole sequence."""
    mode: Literal["clip"]
    """Caps large weights."""
    quantity: Literal["ratio"] = "ratio"
    """The proximal policy's probability divided by the behaviour policy's."""
    threshold: float
    """Largest weight, at least 1."""

    @field_validator("threshold")
    @classmethod
    def _leaves_what_is_on_policy(cls, threshold: float) -> float:
        if threshold < 1:
            raise ValueError(
                "it must be at least 1: every token that the policy itself sampled has a weight of 1, so "
                "all of them would be scaled down, as by a smaller learning rate. Begin with 2"
            )
        return threshold


class RatioMask(Section):
    """Leaves out tokens on which the two policies disagree, measured by their ratio."""

    level: Level
    """Whether to use the token's ratio, or the geometric mean of its sequence."""
    mode: Literal["mask"]
    """Removes the gradient outside the bounds."""
    quantity: Literal["ratio"]
    """The proximal policy's probability divided by the behaviour policy's."""
    threshold: tuple[Annotated[float, Field(ge=0)], Annotated[float, Field(gt=0)]]
    """Smallest and largest ratio that is kept."""
    weighted: bool = True
    """Whether to weight kept tokens by their ratio."""

    @field_validator("threshold")
    @classmethod
    def _ordered(cls, threshold: tuple[float, float]) -> tuple[float, float]:
        if threshold[0] >= threshold[1]:
            raise ValueError("the smallest ratio must be below the largest")
        if not threshold[0] <= 1 <= threshold[1]:
            raise ValueError(
                "1 must be between the smallest ratio and the largest: every token that the policy itself "
                "sampled has a ratio of 1, and none of them would be trained"
            )
        return threshold


class KlMask(Section):
    """Leaves out tokens on which the two policies disagree, measured by an estimate of their KL."""

    level: Level
    """Whether to use the token's estimate, or the mean of its sequence."""
    mode: Literal["mask"]
    """Removes the gradient above the threshold."""
    quantity: Literal["kl"]
    """KL of the behaviour policy to the proximal policy."""
    threshold: float = Field(gt=0)
    """Largest estimate that is kept."""
    estimator: Literal["k2", "k3"] = "k3"
    """Estimator of the KL. Only estimators that are never negative are allowed."""


_MaskConfig = Annotated[RatioMask | KlMask, Field(discriminator="quantity")]
_ModeConfig = Annotated[ClippedWeight | _MaskConfig, Field(discriminator="mode")]
CorrectionConfig = Annotated[Uncorrected | _ModeConfig, Field(discriminator="level")]


def ratio_is_to_proximal(config: CorrectionConfig) -> bool:
    """Returns whether the loss's ratio is to the proximal policy. This is so if weights cover the
    rest of the way to the behaviour policy, or if nothing is meant to."""
    match config:
        case Uncorrected():
            return config.ratio_to == "proximal"
        case ClippedWeight():
            return True
        case RatioMask():
            return config.weighted
        case KlMask():
            return False
    assert_never(config)


class AlgorithmConfig(Section):
    """How rewards become updates."""

    advantage: AdvantageConfig = Grpo()
    """How advantages are computed."""
    loss: LossConfig = PpoClip()
    """The policy loss."""
    aggregation: AggregationConfig = TokenMean()
    """How tokens are weighted in the loss."""
    kl: KlConfig = NoKl()
    """What keeps the policy near the one the run started from."""
    correction: CorrectionConfig = Uncorrected()
    """How the update corrects for data that another policy sampled."""
    entropy_coefficient: float = Field(default=0.0, ge=0)
    """Factor of the entropy bonus in the loss."""

    @property
    def reads_behaviour(self) -> bool:
        """Whether the log-probabilities of sampling affect training, and not only a figure."""
        correction = self.correction
        if not isinstance(correction, Uncorrected) or isinstance(self.kl, KlInReward):
            return True
        return correction.ratio_to == "behaviour" and not isinstance(self.loss, Reinforce)

    @property
    def corrects_for_age(self) -> bool:
        """Whether tokens of another policy get a different weight than the policy's own."""
        match self.correction:
            case Uncorrected(ratio_to="proximal"):
                return False
            case ClippedWeight() | RatioMask(weighted=True):
                return True
            case _:
                return not isinstance(self.loss, Reinforce)

    @model_validator(mode="before")
    @classmethod
    def _name_kinds(cls, given: object) -> object:
        if not isinstance(given, Mapping):
            return given
        tables = dict(cast("Mapping[str, object]", given))
        correction = tables.get("correction")
        if isinstance(correction, Mapping):
            fields = cast("Mapping[str, object]", correction)
            if set(fields) == {"ratio_to"}:
                # `ratio_to` exists at only one level.
                tables["correction"] = {"level": "off", **fields}
        for name, field in cls.model_fields.items():
            # A table that names no kind has the default one.
            kind, table = getattr(field.default, "kind", None), tables.get(name)
            if kind is not None and isinstance(table, Mapping):
                tables[name] = {"kind": kind, **cast("Mapping[str, object]", table)}
        return tables

    @model_validator(mode="after")
    def _a_ratio_to_choose(self) -> AlgorithmConfig:
        match self.loss, self.correction:
            case Reinforce(), Uncorrected(ratio_to="proximal"):
                raise ValueError(
                    'correction.ratio_to = "proximal" has no effect with loss.kind = "reinforce", '
                    "which has no ratio"
                )
            case _:
                return self
