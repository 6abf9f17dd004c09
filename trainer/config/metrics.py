"""The section `[metrics]`: how often the run's figures are reported, and where to."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from penstock.common.section import FunctionName, Section
from penstock.trainer.config.data import Scalar


class WandbConfig(Section):
    """Weights & Biases; needs the extra `wandb`."""

    kind: Literal["wandb"]
    """Weights & Biases."""
    project: str = Field(default="penstock", min_length=1)
    """Project in which the run appears."""
    entity: str = ""
    """Team or user that owns the run; empty for the account's default."""
    name: str = ""
    """Name of the run in Weights & Biases; empty for `run.id`."""
    mode: Literal["online", "offline"] = "online"
    """Whether points are sent, or stored in the run's folder for `wandb sync`."""


class MlflowConfig(Section):
    """MLflow; needs the extra `mlflow`."""

    kind: Literal["mlflow"]
    """MLflow."""
    tracking_uri: str = ""
    """URI of the MLflow server; empty for MLflow's own setting, such as MLFLOW_TRACKING_URI."""
    experiment: str = Field(default="penstock", min_length=1)
    """Experiment that the run belongs to; created if it does not exist."""
    name: str = ""
    """Name of the run in MLflow; empty for `run.id`."""


class CustomTrackerConfig(Section):
    """A tracker supplied by you, as a class or function."""

    kind: Literal["custom"]
    """A tracker supplied by you, as a class or function."""
    function: FunctionName
    """Class or function that creates the tracker, as pkg.module:function; see `tracker.Tracker`."""
    options: dict[str, Scalar] = Field(default_factory=dict[str, Scalar])
    """Keyword arguments of that call."""


TrackerConfig = Annotated[
    WandbConfig | MlflowConfig | CustomTrackerConfig, Field(discriminator="kind")
]


class MetricsConfig(Section):
    """How the run's figures are reported while it runs."""

    every_steps: int = Field(default=1, ge=1)
    """Steps per reported point, on the terminal, in TensorBoard and in trackers. Each figure is
    aggregated by its own rule. `metrics.jsonl` has every step."""
    sample_every_steps: int = Field(default=10, ge=0)
    """Steps between two samples on the terminal: a prompt, an answer and its reward. The first step
    has one too. Zero shows none."""
    load_every_seconds: float = Field(default=1.0, ge=0)
    """Interval at which the server is asked for its engine's load; zero disables it."""
    trackers: tuple[TrackerConfig, ...] = ()
    """Trackers that get the points, in addition to TensorBoard."""

    @field_validator("trackers")
    @classmethod
    def _one_of_a_kind(cls, trackers: tuple[TrackerConfig, ...]) -> tuple[TrackerConfig, ...]:
        kinds = [tracker.kind for tracker in trackers]
        if twice := next((kind for kind in kinds if kinds.count(kind) > 1), None):
            raise ValueError(f"{twice!r} is listed more than once")
        return trackers
