"""A run that Python code started: what it left, and its steps if the caller makes them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.trainer.session import Batch, Session


@dataclass(frozen=True)
class Run:
    """A run that has ended, or that the caller makes step by step."""

    folder: Path
    """Logs, figures, checkpoints and the trained model."""

    @property
    def model(self) -> Path:
        """The trained model, or its adapter, as transformers or PEFT load it; written when the run ends."""
        return self.folder / "model"

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The figures of each step that is done."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]


@dataclass(frozen=True)
class SteppedRun(Run):
    """A run whose steps the caller makes."""

    session: Session

    def batches(self) -> AsyncIterator[Batch]:
        """Each step's batch, to be passed to `train` before the next, until the run is done.

        To end it earlier, leave the loop: it saves a checkpoint and the model.
        """
        return self.session.batches()

    async def train(self, batch: Batch) -> Mapping[str, object]:
        """Makes an optimizer step, and sends its weights to the server. Returns the step's figures.

        Raises ValueError if nothing is left to train, or a reward is no finite number.
        """
        return await self.session.train(batch)
