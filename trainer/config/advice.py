"""What a configuration may say and hardly anybody means: told when the run starts, and done as it was said.

What cannot be meant at all is refused where it is read (`config`, `algorithm_config`).
"""

from __future__ import annotations

from penstock.trainer.config.algorithm import Gspo, LossConfig, TokenMean, ratio_is_to_proximal
from penstock.trainer.config.data import MixableConfig
from penstock.trainer.config.trainer import TrainerConfig


def advise(config: TrainerConfig) -> list[str]:
    """A sentence or two for each such choice, naming the fields; docs/algorithms.md has the reasons."""
    algorithm, max_lag = config.algorithm, config.staleness.max_lag
    said: list[str] = []
    if max_lag > 0 and not algorithm.corrects_for_age:
        said.append(
            f"staleness.max_lag = {max_lag}, and nothing corrects for it: tokens of older versions are "
            "trained as if this policy had sampled them. Give algorithm.correction a level and a mode that "
            "weighs, or a loss whose ratio is to the behaviour policy"
        )
    if isinstance(algorithm.loss, Gspo) and isinstance(algorithm.aggregation, TokenMean):
        said.append(
            'algorithm.loss.kind = "gspo" with algorithm.aggregation.kind = "token_mean": a sequence then '
            'counts by its length. GSPO\'s objective has "sequence_mean"'
        )
    if (
        config.train.updates_per_step == 1
        and not (config.model.lora and config.model.lora.dropout)
        and _bounds_another_ratio(algorithm.loss)
        and ratio_is_to_proximal(algorithm.correction)
    ):
        said.append(
            "the bounds of algorithm.loss, with a ratio to the proximal policy and "
            "train.updates_per_step = 1: that ratio is 1 in the first update of a step, and nothing is "
            "ever clipped. Make more updates of a step, or leave them out"
        )
    if config.train.warmup_steps >= config.run.steps:
        said.append(
            f"train.warmup_steps = {config.train.warmup_steps} and run.steps = {config.run.steps}: the run "
            "ends before the learning rate is what train.learning_rate says"
        )
    trained = set(_described(config.data))
    said.extend(
        f"evaluation {one.name!r} asks the very problems that are trained: those of one data set of "
        "reasoning-gym, one seed and the same settings. Give it another seed"
        for one in config.evaluation
        if trained & set(_described(one))
    )
    return said


def _bounds_another_ratio(loss: LossConfig) -> bool:
    """Whether one of its bounds was given, and is not what it is without."""
    return any(
        getattr(loss, name) != type(loss).model_fields[name].default
        for name in ("clip_low", "clip_high", "dual_clip")
        if name in loss.model_fields_set
    )


def _described(config: MixableConfig) -> list[str]:
    """The data sets of reasoning-gym that it takes, each by what its problems follow from."""
    every = (part.reasoning_gym for part in (config, *config.mixture))
    return [one.model_dump_json(exclude={"size"}) for one in every if one is not None]
