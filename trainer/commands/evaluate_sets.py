"""The sets that `penstock eval` measures: one from its command line, or those of a trainer's file.

Each `[[evaluation]]` table of a file is measured as the trainer would: the same prompts, in the
same order, with the same sampling. Options on the command line override the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pydantic import ValidationError

from penstock.client.sampling import SamplingParams
from penstock.common.explaining import in_short
from penstock.trainer.commands.evaluate_alone import Extent
from penstock.trainer.config.data import (
    MixableConfig,
    PythonConfig,
    ReasoningGymConfig,
)
from penstock.trainer.config.data_options import parse_columns, source_of
from penstock.trainer.config.evaluation import EvaluationConfig
from penstock.trainer.core.errors import ConfigInvalid
from penstock.trainer.data.sources.factory import open_source
from penstock.trainer.data.sources.problem import Finite, Source
from penstock.trainer.evaluation.prompts import SEED

if TYPE_CHECKING:
    from penstock.trainer.config.trainer import TrainerConfig

SUMS = "sums"
# Named by string, because the trainer does not import their package.
SUMS_DATA = "penstock.demo.tasks:sums"
SUMS_REWARD = "penstock.demo.rewards:last_integer_is_answer"
GYM_REWARD = "penstock.demo.rewards:reasoning_gym_score"
TASK_SEED = 1_000_000_000
"""Seed of the problems of `--task`, chosen so that no training run uses them."""
T = TypeVar("T")

MAX_TOKENS = 256


@dataclass(frozen=True)
class Given:
    """Options of the command line; None for those not given."""

    prompts: int | None = None
    samples: int | None = None
    concurrency: int | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: tuple[str, ...] = ()
    system_prompt: str | None = None
    passes_from: float | None = None
    columns: str | None = None


@dataclass(frozen=True)
class MeasuredSet:
    """A set of prompts, and how they are sampled."""

    source: Source
    extent: Extent
    needs_environment: bool = False
    """Whether its tasks name episodes of an environment instead of prompts."""


def open_set(data: str | None, task: str | None, given: Given, attempts: int) -> MeasuredSet:
    """Opens the set that `--data` names, or else `--task`. Raises ConfigInvalid."""
    if data is None:
        source = open_source(_task(task or ""), SEED, "--task")
    else:
        config = source_of(data, parse_columns(given.columns))
        source = open_source(config, SEED, "--data")
    temperature = 0.0 if _first(given.samples, 1) == 1 else 1.0
    sampling = SamplingParams(temperature=temperature, max_tokens=MAX_TOKENS)
    defaults = EvaluationConfig.model_construct(name=task or source.name)
    return MeasuredSet(source, _extent(source, defaults, sampling, "", given, attempts))


def reward_of(task: str) -> str:
    """Returns the name of the reward function that belongs to a `--task`."""
    return SUMS_REWARD if task == SUMS else GYM_REWARD


def open_sets(
    config: TrainerConfig, path: Path, only: Sequence[str], given: Given, attempts: int
) -> list[MeasuredSet]:
    """Opens the evaluations of a trainer's file, or only those named by `only`. Raises ConfigInvalid."""
    known = {one.name: one for one in config.evaluation}
    if not known:
        raise ConfigInvalid(f"{path} has no [[evaluation]]")
    if unknown := [name for name in only if name not in known]:
        raise ConfigInvalid(f"--only {unknown[0]}: {path} has {', '.join(known)}")
    wanted = [one for name, one in known.items() if not only or name in only]
    return [_open_evaluation(one, config, given, attempts) for one in wanted]


def _open_evaluation(
    evaluation: EvaluationConfig, config: TrainerConfig, given: Given, attempts: int
) -> MeasuredSet:
    source = open_source(evaluation, SEED, f"evaluation.{evaluation.name}")
    sampling = SamplingParams(**evaluation.sampling_over(config.data).model_dump())
    prompt = evaluation.system_prompt_over(config.data)
    extent = _extent(source, evaluation, sampling, prompt, given, attempts)
    parts = evaluation.mixture or (evaluation,)
    return MeasuredSet(source, extent, any(part.environment is not None for part in parts))


def _extent(
    source: Source,
    evaluation: EvaluationConfig,
    sampling: SamplingParams,
    system_prompt: str,
    given: Given,
    attempts: int,
) -> Extent:
    prompts = _first(given.prompts, evaluation.prompts)
    return Extent(
        name=evaluation.name,
        prompts=min(prompts, source.size) if isinstance(source, Finite) else prompts,
        samples_per_prompt=_first(given.samples, evaluation.samples_per_prompt),
        concurrency=_first(given.concurrency, evaluation.concurrency),
        attempts=attempts,
        sampling=SamplingParams(
            temperature=_first(given.temperature, sampling.temperature),
            top_p=_first(given.top_p, sampling.top_p),
            top_k=_first(given.top_k, sampling.top_k),
            max_tokens=_first(given.max_tokens, sampling.max_tokens),
            stop=given.stop or sampling.stop,
        ),
        system_prompt=_first(given.system_prompt, system_prompt),
        passes_from=_first(given.passes_from, evaluation.passes_from),
    )


def _task(task: str) -> MixableConfig:
    """Returns the source of a `--task`. Raises ConfigInvalid."""
    if task == SUMS:
        return MixableConfig(python=PythonConfig(function=SUMS_DATA))
    try:
        return MixableConfig(reasoning_gym=ReasoningGymConfig(name=task, seed=TASK_SEED))
    except ValidationError as error:
        raise ConfigInvalid(f"--task {task}: {in_short(error)}") from error


def _first(given: T | None, otherwise: T) -> T:
    return otherwise if given is None else given
