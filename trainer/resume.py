"""Starts or resumes a run: loads its policy, its position in the data, and its ledger."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.trainer.config.trainer import TrainerConfig
from penstock.trainer.core.errors import CheckpointUnusable, ConfigInvalid
from penstock.trainer.data.sources.factory import open_source
from penstock.trainer.data.sources.problem import Source
from penstock.trainer.evaluation.sets import EvaluationSet
from penstock.trainer.evaluation.writer import last_steps
from penstock.trainer.metrics.metrics import keep_until
from penstock.trainer.policy.ranked import LeadingPolicy, RankPolicy
from penstock.trainer.policy.ranks import Leader
from penstock.trainer.state.checkpoint import Checkpoint, TrainerState, checkpoints_in, restore
from penstock.trainer.state.ledger import Ledger
from penstock.trainer.state.run_id import new_start_id, read_start_id, remove_start_id

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Start:
    """The state from which a run begins."""

    policy: RankPolicy
    state: TrainerState
    source: Source
    evaluations: tuple[EvaluationSet, ...]
    ledger: Ledger
    resumes: bool
    """Whether the run continues what is in its folder; false for a new start."""
    share_prefixes: bool
    passed_over: int
    """Step of a newer checkpoint that is broken; zero if none is."""
    written_step: int
    """The last step whose figures are in `metrics.jsonl`. If it is before the state's own step, the
    state contains the figures to write."""


def make_policy(config: TrainerConfig) -> RankPolicy:
    """Create this rank's part of the policy. Raises ConfigInvalid."""
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
    """Load the policy and the state, from the newest complete checkpoint if `resume`.

    Runs in the compute thread. Raises ConfigInvalid and CheckpointUnusable.
    """
    run, folder = config.run, config.run.out / "checkpoints"
    checkpoint = _find_checkpoint(config, folder, resume)
    start_id = read_start_id(run.out) if resume and config.checkpoint.every_steps else ""
    resumes = checkpoint is not None or bool(start_id)
    if not resumes:
        # First of all, so that a failed start never leaves the previous start's id in use.
        remove_start_id(run.out)
    source = open_source(config.data, run.seed)
    data = source.identity
    state = TrainerState(run.id, 0, 0, next_index=0, outstanding=(), data=data, start_id=start_id)
    policy = make_policy(config)
    if leader is not None:
        policy = LeadingPolicy(policy, leader)
    if checkpoint is not None:
        state, where = checkpoint.state, checkpoint.folder
        if state.run_id != run.id:
            raise CheckpointUnusable(f"{where}: run {state.run_id!r}, not {run.id!r}")
        if state.data != data:
            raise CheckpointUnusable(
                f"{where}: its data is {state.data!r}, but the configuration names {data!r}"
            )
        policy.load(checkpoint.folder)
        ledger.resume(state.step, state.ledger_bytes)
        log.info("resuming after step %d from %s", state.step, checkpoint.folder)
    elif start_id:
        # Nothing is final before the first checkpoint: the server still has all trained groups.
        ledger.resume(0)
        log.warning("no checkpoint in %s yet; starting at step 1 with the same groups", folder)
    else:
        ledger.begin()
        start_id = new_start_id(run.out if config.checkpoint.every_steps else None)
        state = replace(state, start_id=start_id)
        if resume:
            log.warning("nothing to resume from in %s; starting at step 1 as a new run", folder)
    share_prefixes = config.train.share_prefixes and policy.supports_trees()
    if config.train.share_prefixes and not share_prefixes:
        log.warning(
            "this model cannot share prefixes: its layers do not follow the mask of a prefix tree"
        )
    # Before the file is read or appended to.
    ahead = max(ledger.ahead, default=state.step) if resumes else None
    written_step = keep_until(run.out, state.step, ahead)
    measured = last_steps(run.out)
    return Start(
        policy,
        state,
        source,
        tuple(EvaluationSet(e, config.data, measured.get(e.name)) for e in config.evaluation),
        ledger,
        resumes,
        share_prefixes,
        checkpoint.passed_over if checkpoint is not None else 0,
        written_step,
    )


def _find_checkpoint(config: TrainerConfig, folder: Path, resume: bool) -> Checkpoint | None:
    """Find the checkpoint to resume from, if any. Raises ConfigInvalid if the folder's checkpoints
    and the configuration do not fit."""
    if not resume and checkpoints_in(folder):
        raise ConfigInvalid(
            f"run.out: {folder} holds checkpoints of an earlier start: "
            "resume from them with --resume, or choose another folder"
        )
    checkpoint = restore(folder) if resume else None
    if checkpoint is not None and not config.checkpoint.every_steps:
        raise ConfigInvalid(
            f"checkpoint.every_steps: 0 keeps no checkpoints, but this run resumes from "
            f"{checkpoint.folder}, and its further steps could not be repeated after a crash. Set any "
            "positive number: the last step is always saved"
        )
    return checkpoint
