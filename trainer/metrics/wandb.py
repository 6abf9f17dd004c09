"""Weights & Biases.

Its own count of steps only grows, and a point at an earlier one is refused. So points carry `step` as a
figure of theirs, which every other is drawn over; one that comes again after a resume is drawn over the
one of before, and both are in the history. Without a network its own process keeps points and tries
again.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping

import wandb

from penstock.trainer.config.metrics import WandbConfig
from penstock.trainer.core.errors import ConfigInvalid
from penstock.trainer.metrics.tracker import RunStart

# It is tried again with the next point; and a process that ends waits for the attempt under way.
OPEN_TIMEOUT_SECONDS = 20.0


class WandbTracker:
    """A run there; see `tracker.Tracker`."""

    def __init__(self, config: WandbConfig, section: str) -> None:
        """Raises ConfigInvalid where points are to be sent and nobody is logged in."""
        self._config = config
        self._run: wandb.Run | None = None
        # Never asks: there may be nobody to answer.
        try:
            may_send = config.mode != "online" or wandb.login(prompt=False, verify=False)
        except wandb.Error as error:
            # A key that cannot be one.
            raise ConfigInvalid(f"{section}: {error}") from error
        if not may_send:
            raise ConfigInvalid(
                f"{section}: wandb knows no API key: run `wandb login`, set WANDB_API_KEY, or "
                'take mode = "offline"'
            )

    def open(self, start: RunStart) -> None:
        """Begins the run, or goes on with it."""
        if not start.tracked_id:
            start.keep(uuid.uuid4().hex)
        self._run = wandb.init(
            project=self._config.project,
            entity=self._config.entity or None,
            name=self._config.name or start.run_id,
            id=start.tracked_id,
            resume="allow",
            mode=self._config.mode,
            dir=start.folder,
            config=dict(start.config),
            # What the run prints is its own.
            settings=wandb.Settings(console="off", silent=True, init_timeout=OPEN_TIMEOUT_SECONDS),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, point: Mapping[str, float]) -> None:
        """One point."""
        if self._run is not None:
            self._run.log({"step": step, **point})

    def close(self, complete: bool) -> None:
        """Sends what is left."""
        if self._run is not None:
            self._run.finish(exit_code=0 if complete else 1)
