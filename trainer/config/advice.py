"""Warnings about valid but probably unintended configurations. They are logged when the run starts.

Configurations that cannot be intended are rejected when read (`trainer`, `algorithm`).
"""

from __future__ import annotations

from penstock.trainer.config.algorithm import Gspo, LossConfig, TokenMean, ratio_is_to_proximal
from penstock.trainer.config.data import MixableConfig
from penstock.trainer.config.trainer import TrainerConfig


def advise(config: TrainerConfig) -> list[str]:
    """A warning for each such choice, naming the fields. docs/concepts/algorithms.md has the reasons."""
    algorithm, max_lag = config.algorithm, config.staleness.max_lag
    said: list[str] = []
    if max_lag > 0 and not algorithm.corrects_for_age:
        said.append(
            f"staleness.max_lag = {max_lag}, but nothing corrects for it: tokens of older versions are "
            "trained as if this policy had sampled them. Give algorithm.correction a level and a mode that "
            "weighs, or use a loss whose ratio is to the behaviour policy"
        )
    if isinstance(algorithm.loss, Gspo) and isinstance(algorithm.aggregation, TokenMean):
        said.append(
            'algorithm.loss.kind = "gspo" with algorithm.aggregation.kind = "token_mean": this weights a '
            'sequence by its length. GSPO\'s objective uses "sequence_mean"'
        )
    if (
        config.train.updates_per_step == 1
        and not (config.model.lora and config.model.lora.dropout)
        and _bounds_another_ratio(algorithm.loss)
        and ratio_is_to_proximal(algorithm.correction)
    ):
        said.append(
            "the bounds of algorithm.loss have no effect, because its ratio is to the proximal policy and "
            "train.updates_per_step = 1: that ratio is 1 in the first update of a step, so nothing is ever "
            "clipped. Make more updates per step, or leave the bounds out"
        )
    if config.train.warmup_steps >= config.run.steps:
        said.append(
            f"train.warmup_steps = {config.train.warmup_steps} and run.steps = {config.run.steps}: the run "
            "ends before the learning rate reaches train.learning_rate"
        )
    trained = set(_described(config.data))
    said.extend(
        f"evaluation {one.name!r} asks the same problems that are trained: they come from the same "
        "reasoning-gym data set, with the same seed and settings. Give it another seed"
        for one in config.evaluation
        if trained & set(_described(one))
    )
    return said


def _bounds_another_ratio(loss: LossConfig) -> bool:
    """Returns whether one of its bounds was set to something other than the default."""
    return any(
        getattr(loss, name) != type(loss).model_fields[name].default
        for name in ("clip_low", "clip_high", "dual_clip")
        if name in loss.model_fields_set
    )


def _described(config: MixableConfig) -> list[str]:
    """Describes the reasoning-gym data sets it uses, each by everything that determines its problems."""
    every = (part.reasoning_gym for part in (config, *config.mixture))
    return [one.model_dump_json(exclude={"size"}) for one in every if one is not None]
