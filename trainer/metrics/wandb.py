"""The Weights & Biases tracker.

Its own step count only grows, and it refuses a point at an earlier step. So each point carries
`step` as a figure, which is the x axis of all others. A step that is repeated after a resume is
drawn over the previous one, and both stay in the history. Without a network, the process of Weights
& Biases stores points and tries again.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping

import wandb

from penstock.trainer.config.metrics import WandbConfig
from penstock.trainer.core.errors import ConfigInvalid
from penstock.trainer.metrics.tracker import RunStart

# A failed attempt is repeated with the next point. At its end, the process waits for a running attempt.
OPEN_TIMEOUT_SECONDS = 20.0


class WandbTracker:
    """Logs to a run in Weights & Biases; see `tracker.Tracker`."""

    def __init__(self, config: WandbConfig, section: str) -> None:
        """Raises ConfigInvalid if points are to be sent and there is no valid API key."""
        self._config = config
        self._run: wandb.Run
        # Without a prompt: the process may have no terminal.
        try:
            may_send = config.mode != "online" or wandb.login(prompt=False, verify=False)
        except wandb.Error as error:
            # The key is malformed.
            raise ConfigInvalid(f"{section}: {error}") from error
        if not may_send:
            raise ConfigInvalid(
                f"{section}: wandb has no API key: run `wandb login`, set WANDB_API_KEY, or "
                'set mode = "offline"'
            )

    def open(self, start: RunStart) -> None:
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
            # Leave the terminal output to the trainer.
            settings=wandb.Settings(console="off", silent=True, init_timeout=OPEN_TIMEOUT_SECONDS),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, point: Mapping[str, float]) -> None:
        self._run.log({"step": step, **point})

    def close(self, complete: bool) -> None:
        self._run.finish(exit_code=0 if complete else 1)
