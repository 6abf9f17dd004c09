"""Where a run begins: its policy and its place in the data, from the newest whole checkpoint where it
resumes."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.trainer.config.trainer import TrainerConfig
from penstock.trainer.core.errors import CheckpointUnusable, ConfigInvalid
from penstock.trainer.data.sources.factory import open_source
from penstock.trainer.data.sources.problem import Source
from penstock.trainer.evaluation.evaluation import EvaluationSet
from penstock.trainer.evaluation.writer import last_steps
from penstock.trainer.metrics.metrics import keep_until
from penstock.trainer.policy.ranked import LeadingPolicy, RankPolicy
from penstock.trainer.policy.ranks import Leader
from penstock.trainer.state.checkpoint import TrainerState, has_checkpoints, restore
from penstock.trainer.state.ledger import Ledger
from penstock.trainer.state.run_id import new_start_id, read_start_id, remove_start_id

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run begins."""

    policy: RankPolicy
    state: TrainerState
    source: Source
    evaluations: tuple[EvaluationSet, ...]
    ledger: Ledger
    resumes: bool
    """Whether it goes on with what is in the run's folder; false where it begins anew."""
    share_prefixes: bool
    passed_over: int
    """Step of a newer checkpoint that is broken; zero where none is."""
    written_step: int
    """Last step whose figures are written; the state has those of its own step where they are not."""


def make_policy(config: TrainerConfig) -> RankPolicy:
    """This rank's part of the policy. Raises ConfigInvalid."""
    if config.model.backend.kind == "megatron":
        from penstock.trainer.policy.megatron.hook import install

        install()
        from penstock.trainer.policy.megatron.policy import MegatronPolicy as ChosenPolicy
    else:
        from penstock.trainer.policy.fsdp import FsdpPolicy as ChosenPolicy

    return ChosenPolicy(
        config.model,
        config.train,
        algorithm=config.algorithm,
        total_steps=config.run.steps,
        seed=config.run.seed,
    )


def start_run(config: TrainerConfig, resume: bool, leader: Leader | None, ledger: Ledger) -> Start:
    """The policy, from the newest whole checkpoint where the run resumes. In the compute thread."""
    run, folder = config.run, config.run.out / "checkpoints"
    if not resume and has_checkpoints(folder):
        raise ConfigInvalid(
            f"run.out: {folder} holds checkpoints of an earlier start: "
            "go on from them with --resume, or choose another folder"
        )
    checkpoint = restore(folder) if resume else None
    if checkpoint is not None and not config.checkpoint.every_steps:
        raise ConfigInvalid(
            f"checkpoint.every_steps: 0 keeps no checkpoints, and this run goes on from "
            f"{checkpoint.folder}: what it trains then could not be done again. Any number will do: the "
            "last step is saved, too"
        )
    start_id = read_start_id(run.out) if resume and config.checkpoint.every_steps else ""
    resumes = checkpoint is not None or bool(start_id)
    if not resumes:
        # First of all: whatever stops this start, nobody takes the one before for it.
        remove_start_id(run.out)
    source = open_source(config.data, run.seed)
    data = source.identity
    state = TrainerState(run.id, 0, 0, next_index=0, outstanding=(), data=data, start_id=start_id)
    measured: int | None = None
    policy = make_policy(config)
    if leader is not None:
        policy = LeadingPolicy(policy, leader)
    if checkpoint is not None:
        state = checkpoint.state
        _check_same_run(checkpoint.folder, state, run.id, data)
        policy.load(checkpoint.folder)
        ledger.resume(state.step, state.ledger_bytes)
        measured = max(ledger.ahead, default=state.step)
        log.info("resuming after step %d from %s", state.step, checkpoint.folder)
    elif start_id:
        # Nothing is final before the first checkpoint: the server still has what it was trained on.
        ledger.resume(0)
        measured = max(ledger.ahead, default=0)
        log.warning("no checkpoint in %s yet; beginning at step 1, with the same groups", folder)
    else:
        ledger.begin()
        start_id = new_start_id(run.out if config.checkpoint.every_steps else None)
        state = replace(state, start_id=start_id)
        if resume:
            log.warning("nothing to resume from in %s; beginning at step 1, anew", folder)
    share_prefixes = config.train.share_prefixes and policy.supports_trees()
    if config.train.share_prefixes and not share_prefixes:
        log.warning(
            "this model cannot share prefixes: its layers do not attend as the mask of a tree says"
        )
    passed_over = checkpoint.passed_over if checkpoint is not None else 0
    # Before anything reads or adds to it.
    written_step = keep_until(run.out, state.step, measured)
    evaluations = _open_evaluations(config)
    return Start(
        policy,
        state,
        source,
        evaluations,
        ledger,
        resumes,
        share_prefixes,
        passed_over,
        written_step,
    )


def _open_evaluations(config: TrainerConfig) -> tuple[EvaluationSet, ...]:
    """The sets to measure, each with what a run that resumes has measured of it."""
    last = last_steps(config.run.out)
    return tuple(EvaluationSet(e, config.data, last.get(e.name)) for e in config.evaluation)


def _check_same_run(folder: Path, state: TrainerState, run_id: str, data: str) -> None:
    """Raises CheckpointUnusable where the configuration is of another run, or its data are others."""
    if state.run_id != run_id:
        raise CheckpointUnusable(f"{folder}: run {state.run_id!r}, not {run_id!r}")
    if state.data != data:
        raise CheckpointUnusable(
            f"{folder}: its place in the data is one in {state.data!r}; the configuration now "
            f"names {data!r}"
        )
