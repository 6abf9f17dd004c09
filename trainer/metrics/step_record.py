"""The record of one step: its figures, and what ties it to its traces."""

from __future__ import annotations

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
    """One step, filled in as it goes on. The names of its figures are the keys of `metrics.jsonl`."""

    step: int
    """From one; not a figure, but what figures are over."""
    steps: int = figure(1, SUM, "steps", "Steps the figures are of: in `metrics.jsonl` always one.")
    weight_version: int = figure(0, LAST, "", "Version of the weights the step made.")
    batch: BatchFigures = field(default_factory=BatchFigures)
    tokens_received: int = figure(
        0,
        SUM,
        "tokens",
        "Policy tokens of the groups that were read for the step, those that were refused included.",
    )
    tokens_truncated: int = figure(
        0, SUM, "tokens", "Tokens left out because the token budget ended their turn."
    )
    groups_failed: int = figure(
        0,
        SUM,
        "groups",
        "Groups refused since the step before, because every trajectory had failed.",
    )
    failures: int = figure(
        0, SUM, "trajectories", "Failed trajectories, those of refused groups included."
    )
    groups_dropped: dict[str, int] = field(
        default_factory=dict[str, int],
        metadata=breakdown(
            SUM,
            "groups",
            "Groups refused since the step before, because they were of no use, and groups that a "
            "server dropped because they were too old (`GROUP_DROPPED`) or larger than a message may "
            "be (`GROUP_TOO_LARGE`), by reason. The latter two do not count for "
            "`groups.max_dropped_per_step`.",
        ),
    )
    groups_kept_in_need: int = figure(
        0,
        SUM,
        "groups",
        "Groups in the batch that would have been dropped, had there not been too many of them.",
    )
    result: StepResult = field(default_factory=StepResult)
    seconds: float = figure(
        0.0, MEAN, "s", "From the beginning of a step's gathering to that of the next one's."
    )
    seconds_total: float = figure(0.0, SUM, "s", "The same, added up over several steps.")
    seconds_wait: float = figure(0.0, MEAN, "s", "Waiting for groups.")
    seconds_train: float = figure(
        0.0, MEAN, "s", "Packing, forward and backward passes, optimizer."
    )
    seconds_upload: float = figure(
        0.0, MEAN, "s", "Uploading the weights, until they are staged; generation goes on."
    )
    seconds_held: float = figure(
        0.0, MEAN, "s", "How long the switch waited for pinned evaluations."
    )
    seconds_switch: float = figure(
        0.0,
        MEAN,
        "s",
        "From the request to its receipt; the next step's gathering has begun meanwhile.",
    )
    seconds_checkpoint: float = figure(0.0, MEAN, "s", "Writing the checkpoint, where one was due.")
    idle_ratio: float = figure(
        0.0, PER_SECOND, "share", "Part of the time in which the trainer waited for groups."
    )
    compute_ratio: float = figure(
        0.0,
        PER_SECOND,
        "share",
        "Part of the time in which it computed; the rest is waiting, uploads, switches and checkpoints.",
    )
    tokens_trained_per_second: float = figure(
        0.0, PER_SECOND, "tokens/s", "`tokens_trained`, per second of the whole step."
    )
    tokens_computed_per_second: float = figure(
        0.0,
        PER_SECOND,
        "tokens/s",
        "`tokens_computed`, per second of the whole step: without those that cost nothing.",
    )
    tokens_received_per_second: float = figure(
        0.0, PER_SECOND, "tokens/s", "`tokens_received`, per second of the whole step."
    )
    load: LoadFigures = field(default_factory=LoadFigures)
    pause_seconds: float = figure(0.0, MEAN, "s", "How long generation stood still for the switch.")
    probe_difference: float | None = figure(
        None,
        MEAN,
        "nat",
        "Mean difference between the engine's score of the probe and the trainer's; null without one.",
    )
    upload_bytes: int = figure(
        0,
        SUM,
        "bytes",
        "Bytes of weights that were sent; through the stream those of attempts that failed too.",
    )
    upload_dense_bytes: int = figure(
        0, SUM, "bytes", "Size of the whole version, for every server that it went to."
    )
    delta: bool = figure(False, MEAN, "share", "Whether the version went as a difference.")
    changed_tensors: int | None = figure(
        None,
        MEAN,
        "tensors",
        "Tensors that differ from what the server sampled before, as it says; null where it did not say.",
    )
    changed_elements_ratio: float | None = figure(
        None,
        MEAN,
        "share",
        "Elements that differ from the version before; null where no difference was made.",
    )
    unchanged: bool = figure(False, SUM, "versions", "Whether no tensor changed: an alarm.")
    tracker_points_lost: dict[str, int] = field(
        default_factory=dict[str, int],
        metadata=breakdown(
            SUM,
            "points",
            "Points that did not reach a tracker, of those given up since the step before.",
        ),
    )
    time: float = figure(0.0, LAST, MOMENT, "When the record was made.")
    time_gather_start: float = figure(0.0, MIN, MOMENT, "When the step began.")
    time_gather_end: float = figure(0.0, MAX, MOMENT, "When its batch was there.")
    time_train_start: float = figure(0.0, MIN, MOMENT, "When it began to compute.")
    time_train_end: float = figure(0.0, MAX, MOMENT, "When it was computed.")
    time_upload_start: float = figure(0.0, MIN, MOMENT, "When its upload began.")
    time_upload_end: float = figure(0.0, MAX, MOMENT, "When its weights were staged.")
    time_switch_start: float = figure(0.0, MIN, MOMENT, "When it asked for the switch.")
    time_switch_end: float = figure(0.0, MAX, MOMENT, "When the switch was answered.")
    traceparents: list[str] = field(default_factory=list[str])
    """Trace context of each trajectory in the batch; traced, not written."""

    def finish(self, seconds: float) -> None:
        """The next step has begun: what follows from this one's whole length."""
        self.seconds = self.seconds_total = seconds
        if seconds > 0.0:
            self.idle_ratio = self.seconds_wait / seconds
            self.compute_ratio = self.seconds_train / seconds
            self.tokens_trained_per_second = self.result.tokens_trained / seconds
            self.tokens_computed_per_second = self.result.tokens_computed / seconds
            self.tokens_received_per_second = self.tokens_received / seconds

    def line(self) -> dict[str, Value]:
        """Its figures by name."""
        return line_of(self)


FIGURES = declared(StepRecord)
