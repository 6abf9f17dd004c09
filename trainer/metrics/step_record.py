"""The record of one step: its figures, and the trace contexts that link it to trajectories."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.trainer.core.figures import (
    LAST,
    MAX,
    MEAN,
    MIN,
    MOMENT,
    SUM,
    Value,
    breakdown,
    declared,
    figure,
    line_of,
    weighted,
)
from penstock.trainer.exchange.server_load import LoadFigures
from penstock.trainer.metrics.batch_figures import BatchFigures
from penstock.trainer.policy.protocol import StepResult

PER_SECOND = weighted("seconds_total")


@dataclass(slots=True)
class StepRecord:
    """One step's record, filled in as the step proceeds. Figure names are keys of `metrics.jsonl`."""

    step: int
    """Counts from one. It is not a figure."""
    steps: int = figure(
        1, SUM, "steps", "Steps that the figures cover; in `metrics.jsonl` always one."
    )
    weight_version: int = figure(0, LAST, "", "Version of the weights that the step produced.")
    batch: BatchFigures = field(default_factory=BatchFigures)
    tokens_received: int = figure(
        0, SUM, "tokens", "Policy tokens of all groups read for the step, including refused groups."
    )
    tokens_truncated: int = figure(
        0, SUM, "tokens", "Tokens left out because the token budget ended their turn."
    )
    groups_failed: int = figure(
        0, SUM, "groups", "Groups refused since the previous step because every trajectory failed."
    )
    failures: int = figure(
        0, SUM, "trajectories", "Failed trajectories, including those of refused groups."
    )
    groups_dropped: Mapping[str, int] = breakdown(
        SUM,
        "groups",
        "Groups lost since the previous step, by reason: groups that the trainer refused as unusable, "
        "and groups that a server dropped because they were too old (`GROUP_DROPPED`) or exceeded the "
        "message size limit (`GROUP_TOO_LARGE`). Dropped groups do not count toward "
        "`groups.max_dropped_per_step`.",
    )
    groups_kept_in_need: int = figure(
        0, SUM, "groups", "Groups kept in the batch only because too many others were dropped."
    )
    reward_target_mean: float | None = figure(
        None,
        LAST,
        "reward",
        "Mean reward that `run.target` looks at: over its latest attempts, including refused groups; null "
        "without a target, and before there are enough attempts.",
    )
    result: StepResult = field(default_factory=StepResult)
    seconds: float = figure(
        0.0, MEAN, "s", "Time from the start of a step's gathering to the start of the next step's."
    )
    seconds_total: float = figure(0.0, SUM, "s", "`seconds`, added up over several steps.")
    seconds_wait: float = figure(0.0, MEAN, "s", "Time spent waiting for groups.")
    seconds_train: float = figure(
        0.0, MEAN, "s", "Time for packing, forward and backward passes and the optimizer."
    )
    seconds_upload: float = figure(
        0.0, MEAN, "s", "Time until the weights are uploaded and staged; generation continues."
    )
    seconds_held: float = figure(
        0.0, MEAN, "s", "Time that the switch waited for pinned evaluations."
    )
    seconds_switch: float = figure(
        0.0, MEAN, "s", "Time from switch request to receipt; the next step gathers meanwhile."
    )
    seconds_checkpoint: float = figure(0.0, MEAN, "s", "Time for the checkpoint, if one was due.")
    idle_ratio: float = figure(
        0.0, PER_SECOND, "share", "Share of the step's time that the trainer waited for groups."
    )
    compute_ratio: float = figure(
        0.0,
        PER_SECOND,
        "share",
        "Share of the step's time that the trainer computed. The rest is waiting, uploads, switches and "
        "checkpoints.",
    )
    tokens_trained_per_second: float = figure(
        0.0, PER_SECOND, "tokens/s", "`tokens_trained` per second of the whole step."
    )
    tokens_computed_per_second: float = figure(
        0.0,
        PER_SECOND,
        "tokens/s",
        "`tokens_computed` per second of the whole step. Skipped sequences are not counted.",
    )
    tokens_received_per_second: float = figure(
        0.0, PER_SECOND, "tokens/s", "`tokens_received` per second of the whole step."
    )
    load: LoadFigures = field(default_factory=LoadFigures)
    pause_seconds: float = figure(0.0, MEAN, "s", "How long the switch paused generation.")
    probe_difference: float | None = figure(
        None,
        MEAN,
        "nat",
        "Mean difference between the engine's and the trainer's score of the probe; null without a probe.",
    )
    upload_bytes: int = figure(
        0, SUM, "bytes", "Bytes of weights sent; through the stream, failed attempts are included."
    )
    upload_dense_bytes: int = figure(
        0, SUM, "bytes", "Size of the whole version, once for every server that received it."
    )
    delta: bool = figure(False, MEAN, "share", "Whether the version was sent as a difference.")
    changed_tensors: int | None = figure(
        None,
        MEAN,
        "tensors",
        "Tensors that differ from what the server sampled before; null if the server did not report it.",
    )
    changed_elements_ratio: float | None = figure(
        None,
        MEAN,
        "share",
        "Share of elements that differ from the previous version; null if no difference was computed.",
    )
    unchanged: bool = figure(
        False, SUM, "versions", "Whether no tensor changed, which is an alarm."
    )
    tracker_points_lost: Mapping[str, int] = breakdown(
        SUM, "points", "Points given up since the previous step that did not reach a tracker."
    )
    time: float = figure(0.0, LAST, MOMENT, "When the record was made.")
    time_gather_start: float = figure(0.0, MIN, MOMENT, "When the step began.")
    time_gather_end: float = figure(0.0, MAX, MOMENT, "When its batch was complete.")
    time_train_start: float = figure(0.0, MIN, MOMENT, "When the computation began.")
    time_train_end: float = figure(0.0, MAX, MOMENT, "When the computation ended.")
    time_upload_start: float = figure(0.0, MIN, MOMENT, "When the upload began.")
    time_upload_end: float = figure(0.0, MAX, MOMENT, "When the weights were staged.")
    time_switch_start: float = figure(0.0, MIN, MOMENT, "When the switch was requested.")
    time_switch_end: float = figure(0.0, MAX, MOMENT, "When the switch was answered.")
    rewards: list[float] = field(default_factory=list[float])
    """Rewards of all attempts read for the step, including refused groups; not written to a line."""
    traceparents: list[str] = field(default_factory=list[str])
    """Trace context of each trajectory in the batch; used for traces, not written to a line."""

    sample: str = ""
    """A sample of the batch, for the terminal; empty if none is due."""

    def finish(self, seconds: float) -> None:
        """Set the figures that depend on the step's whole length in seconds."""
        self.seconds = self.seconds_total = seconds
        if seconds > 0.0:
            self.idle_ratio = self.seconds_wait / seconds
            self.compute_ratio = self.seconds_train / seconds
            self.tokens_trained_per_second = self.result.tokens_trained / seconds
            self.tokens_computed_per_second = self.result.tokens_computed / seconds
            self.tokens_received_per_second = self.tokens_received / seconds

    def line(self) -> dict[str, Value]:
        """Return the record's figures by name."""
        return line_of(self)


FIGURES = declared(StepRecord)
