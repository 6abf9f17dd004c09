"""The section `[algorithm]`: unions of kinds, each with the fields that mean something for it.

What cannot be meant cannot be written; docs/algorithms.md has the formulas and when to choose which.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, assert_never, cast

from pydantic import Field, field_validator, model_validator

from penstock.common.section import Section

Option = bool | int | float | str
Level = Literal["token", "sequence"]
KlEstimator = Literal["k1", "k2", "k3"]

# Of a table that does not name its own.
DEFAULT_KINDS = {
    "advantage": "grpo",
    "loss": "ppo_clip",
    "aggregation": "token_mean",
    "kl": "none",
}


class CustomFunction(Section):
    """A function of your own; docs/algorithms.md says what it takes and returns."""

    kind: Literal["custom"]
    """A function of your own."""
    function: str = Field(pattern=r"^[\w.]+:[\w.]+$")
    """Where it is, as pkg.module:function; modules of the working directory are found too."""
    options: dict[str, Option] = Field(default_factory=dict[str, Option])
    """Keyword arguments of each call."""


# Advantages


class Grpo(Section):
    """The reward's distance to its group's mean, in standard deviations."""

    kind: Literal["grpo"] = "grpo"
    """Group-relative, normalized."""


class DrGrpo(Section):
    """The reward's distance to its group's mean."""

    kind: Literal["dr_grpo"]
    """Group-relative, not normalized."""


class Rloo(Section):
    """The reward's distance to the mean of its siblings."""

    kind: Literal["rloo"]
    """Leave one out."""


class ReinforcePlusPlus(Section):
    """The reward, whitened over the step."""

    kind: Literal["reinforce_plus_plus"]
    """Without groups."""


class ReinforcePlusPlusBaseline(Section):
    """The reward's distance to its group's mean, whitened over the step."""

    kind: Literal["reinforce_plus_plus_baseline"]
    """With the group's mean as baseline."""


class CriticConfig(Section):
    """A second model, as large as the policy's, which learns what answers will be worth."""

    learning_rate: float = Field(default=1e-5, gt=0)
    """Its learning rate, the same at every step; the rest of its optimizer is the policy's."""
    clip: Annotated[float, Field(gt=0)] | Literal["none"] = 0.2
    """How far an update moves a value with its whole gradient; "none" for no such bound."""


class Gae(Section):
    """Generalized advantage estimation, token by token."""

    kind: Literal["gae"]
    """With a critic."""
    discount: float = Field(default=1.0, gt=0, le=1)
    """What the next token's worth counts for now: the paper's gamma."""
    trace: float = Field(default=0.95, ge=0, le=1)
    """How far surprises reach back: the paper's lambda; one believes rewards alone, zero the critic."""
    whiten: bool = True
    """Whether advantages are whitened over the step."""
    critic: CriticConfig = CriticConfig()
    """What learns the values."""


AdvantageConfig = Annotated[
    Grpo | DrGrpo | Rloo | ReinforcePlusPlus | ReinforcePlusPlusBaseline | Gae | CustomFunction,
    Field(discriminator="kind"),
]
GROUP_RELATIVE = ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline")
"""Those that compare the answers to a prompt with each other."""

# Losses


class _Clipped(Section):
    """A ratio that counts within bounds around 1."""

    clip_low: float
    """How far below."""
    clip_high: float
    """How far above."""

    @model_validator(mode="after")
    def _some_way_to_go(self) -> _Clipped:
        if self.clip_low == self.clip_high == 0:
            raise ValueError(
                "clip_low and clip_high are both 0: the ratio may then be nothing but 1, which it is "
                "before the policy has moved at all. Give one of them above 0; what has no ratio is "
                'kind = "reinforce"'
            )
        return self


class PpoClip(_Clipped):
    """The clipped surrogate of each token."""

    kind: Literal["ppo_clip"] = "ppo_clip"
    """PPO."""
    clip_low: float = Field(default=0.2, ge=0, le=1)
    """The ratio counts down to 1 - clip_low."""
    clip_high: float = Field(default=0.28, ge=0)
    """The ratio counts up to 1 + clip_high."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Where the advantage is negative the ratio counts up to this at most; unset for no such bound."""


class Gspo(_Clipped):
    """The clipped surrogate of the sequence's ratio."""

    kind: Literal["gspo"]
    """Sequence-level."""
    clip_low: float = Field(default=3e-4, ge=0, le=1)
    """The sequence's ratio counts down to 1 - clip_low."""
    clip_high: float = Field(default=4e-4, ge=0)
    """The sequence's ratio counts up to 1 + clip_high."""


class Cispo(_Clipped):
    """REINFORCE weighted with the clipped ratio."""

    kind: Literal["cispo"]
    """The weight is clipped, the gradient is not."""
    clip_low: float = Field(default=1.0, ge=0, le=1)
    """The weight is at least 1 - clip_low; one is no bound."""
    clip_high: float = Field(default=4.0, ge=0)
    """The weight is at most 1 + clip_high."""


class Reinforce(Section):
    """The plain policy gradient."""

    kind: Literal["reinforce"]
    """Without a ratio."""


LossConfig = Annotated[
    PpoClip | Gspo | Cispo | Reinforce | CustomFunction, Field(discriminator="kind")
]

# Aggregation


class TokenMean(Section):
    """Every token weighs the same."""

    kind: Literal["token_mean"] = "token_mean"
    """Sum over the tokens of the update."""


class SequenceMean(Section):
    """Every sequence weighs the same."""

    kind: Literal["sequence_mean"]
    """Mean over sequences of the mean over tokens."""


class FixedLength(Section):
    """Every token weighs the same, however many there are."""

    kind: Literal["fixed_length"]
    """Sum over sequences times a constant."""
    length: int = Field(ge=1)
    """The constant, such as the most tokens that a trajectory may have."""


AggregationConfig = Annotated[TokenMean | SequenceMean | FixedLength, Field(discriminator="kind")]

# KL to a reference


class NoKl(Section):
    """No reference."""

    kind: Literal["none"] = "none"
    """No reference."""


class KlInLoss(Section):
    """A term of the loss; its gradient pulls the policy back."""

    kind: Literal["loss"]
    """In the loss."""
    coefficient: float = Field(gt=0)
    """What it is multiplied with."""
    estimator: KlEstimator = "k3"
    """How it is estimated from the token sampled."""


class KlInReward(Section):
    """A penalty on each token, before advantages are made."""

    kind: Literal["reward"]
    """In the reward."""
    coefficient: float = Field(gt=0)
    """What it is multiplied with."""
    estimator: KlEstimator = "k1"
    """How it is estimated from the token sampled."""


KlConfig = Annotated[NoKl | KlInLoss | KlInReward, Field(discriminator="kind")]

# Off-policy correction


class Uncorrected(Section):
    """No weights."""

    level: Literal["off"] = "off"
    """No weights."""
    ratio_to: Literal["behaviour", "proximal"] = "behaviour"
    """Whose probability the loss's ratio is to: that of the policy that sampled the token, or that of the
    policy at the beginning of the step."""


class ClippedWeight(Section):
    """Truncated importance sampling."""

    level: Level
    """Weight of a token, or of its sequence."""
    mode: Literal["clip"]
    """A large weight is cut."""
    quantity: Literal["ratio"] = "ratio"
    """The proximal policy's probability over the behaviour policy's."""
    threshold: float
    """The largest weight, 1 at least."""

    @field_validator("threshold")
    @classmethod
    def _leaves_what_is_on_policy(cls, threshold: float) -> float:
        if threshold < 1:
            raise ValueError(
                "it must be 1 at least: the weight of every token that the policy itself sampled is 1, and "
                "all of them would be weighted with less, as by a smaller learning rate. Begin with 2"
            )
        return threshold


class RatioMask(Section):
    """Leaves out what the two policies disagree about, measured by their ratio."""

    level: Level
    """By the token's ratio, or by the geometric mean of its sequence."""
    mode: Literal["mask"]
    """What is outside has no gradient."""
    quantity: Literal["ratio"]
    """The proximal policy's probability over the behaviour policy's."""
    threshold: tuple[Annotated[float, Field(ge=0)], Annotated[float, Field(gt=0)]]
    """Least and largest ratio that is kept."""
    weighted: bool = True
    """Whether what is kept is weighted with the token's ratio."""

    @field_validator("threshold")
    @classmethod
    def _ordered(cls, threshold: tuple[float, float]) -> tuple[float, float]:
        if threshold[0] >= threshold[1]:
            raise ValueError("the least ratio must be below the largest")
        if not threshold[0] <= 1 <= threshold[1]:
            raise ValueError(
                "1 must be between the least ratio and the largest: it is that of every token the policy "
                "itself sampled, none of which would be trained"
            )
        return threshold


class KlMask(Section):
    """Leaves out what the two policies disagree about, measured by an estimate of their KL."""

    level: Level
    """By the token's estimate, or by the mean of its sequence."""
    mode: Literal["mask"]
    """What is above has no gradient."""
    quantity: Literal["kl"]
    """KL of the behaviour policy to the proximal one."""
    threshold: float = Field(gt=0)
    """The largest estimate that is kept."""
    estimator: Literal["k2", "k3"] = "k3"
    """Those that are never negative."""


_MaskConfig = Annotated[RatioMask | KlMask, Field(discriminator="quantity")]
_ModeConfig = Annotated[ClippedWeight | _MaskConfig, Field(discriminator="mode")]
CorrectionConfig = Annotated[Uncorrected | _ModeConfig, Field(discriminator="level")]


def ratio_is_to_proximal(config: CorrectionConfig) -> bool:
    """Whether the loss's ratio is to the proximal policy: where weights carry the rest of the way to the
    behaviour policy, or nothing is to."""
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
    """What a step makes of its rewards."""

    advantage: AdvantageConfig = Grpo()
    """How good each token was."""
    loss: LossConfig = PpoClip()
    """What moves the policy there."""
    aggregation: AggregationConfig = TokenMean()
    """How much each token weighs."""
    kl: KlConfig = NoKl()
    """What holds the policy near the one the run began from."""
    correction: CorrectionConfig = Uncorrected()
    """What makes up for data of another policy."""
    entropy_coefficient: float = Field(default=0.0, ge=0)
    """How much of the entropy is taken from the loss."""

    @property
    def reads_behaviour(self) -> bool:
        """Whether anything but a figure is made of the log-probabilities that tokens were sampled with."""
        correction = self.correction
        if not isinstance(correction, Uncorrected) or isinstance(self.kl, KlInReward):
            return True
        return correction.ratio_to == "behaviour" and not isinstance(self.loss, Reinforce)

    @property
    def corrects_for_age(self) -> bool:
        """Whether what another policy sampled weighs otherwise than what this one would have."""
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
                # A choice that there is at one level only.
                tables["correction"] = {"level": "off", **fields}
        return {
            name: {"kind": DEFAULT_KINDS[name], **cast("Mapping[str, object]", table)}
            if name in DEFAULT_KINDS and isinstance(table, Mapping)
            else table
            for name, table in tables.items()
        }

    @model_validator(mode="after")
    def _a_ratio_to_choose(self) -> AlgorithmConfig:
        correction = self.correction
        if (
            isinstance(self.loss, Reinforce)
            and isinstance(correction, Uncorrected)
            and correction.ratio_to == "proximal"
        ):
            raise ValueError(
                'correction.ratio_to = "proximal" means nothing with loss.kind = "reinforce", '
                "which has no ratio"
            )
        return self
