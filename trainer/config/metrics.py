"""The section `[metrics]`: how often figures are told, and whom."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from penstock.common.section import Section


class WandbConfig(Section):
    """Weights & Biases; takes the extra `wandb`."""

    kind: Literal["wandb"]
    """Weights & Biases."""
    project: str = Field(default="penstock", min_length=1)
    """Project the run appears in."""
    entity: str = ""
    """Team or user it belongs to; empty takes the account's own."""
    name: str = ""
    """Name of the run there; empty takes `run.id`."""
    mode: Literal["online", "offline"] = "online"
    """Whether points are sent, or kept in the run's folder for `wandb sync`."""


class MlflowConfig(Section):
    """MLflow; takes the extra `mlflow`."""

    kind: Literal["mlflow"]
    """MLflow."""
    tracking_uri: str = ""
    """Where its server is; empty takes MLflow's own setting, such as MLFLOW_TRACKING_URI."""
    experiment: str = Field(default="penstock", min_length=1)
    """Experiment the run belongs to, made where there is none."""
    name: str = ""
    """Name of the run there; empty takes `run.id`."""


class CustomTrackerConfig(Section):
    """A tracker of your own."""

    kind: Literal["custom"]
    """A tracker of your own."""
    function: str = Field(pattern=r"^[\w.]+:[\w.]+$")
    """Class or function that makes it, as pkg.module:function: see `tracker.Tracker`."""
    options: dict[str, bool | int | float | str] = Field(
        default_factory=dict[str, bool | int | float | str]
    )
    """Keyword arguments of the call."""


TrackerConfig = Annotated[
    WandbConfig | MlflowConfig | CustomTrackerConfig, Field(discriminator="kind")
]


class MetricsConfig(Section):
    """What is told of the run while it goes on."""

    every_steps: int = Field(default=1, ge=1)
    """Steps that are told together, each figure by its rule: on the terminal, to TensorBoard, to trackers.
    `metrics.jsonl` has every step."""
    load_every_seconds: float = Field(default=1.0, ge=0)
    """How often the server is asked what its engine is busy with; zero for never."""
    trackers: tuple[TrackerConfig, ...] = ()
    """Who is told beside TensorBoard."""

    @field_validator("trackers")
    @classmethod
    def _one_of_a_kind(cls, trackers: tuple[TrackerConfig, ...]) -> tuple[TrackerConfig, ...]:
        kinds = [tracker.kind for tracker in trackers]
        if twice := next((kind for kind in kinds if kinds.count(kind) > 1), None):
            raise ValueError(f"{twice!r} is there more than once")
        return trackers
