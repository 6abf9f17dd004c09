"""A custom tracker that writes one JSON line per point. At step `fails_at` it fails, slowly."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

from penstock.trainer.metrics.tracker import RunStart


class FileTracker:
    def __init__(self, path: str, fails_at: int = 0) -> None:
        self.path, self.fails_at = Path(path), fails_at

    def open(self, start: RunStart) -> None:
        if not start.tracked_id:
            start.keep(str(time.time_ns()))
        self._write({"open": start.tracked_id, "config": dict(start.config)})

    def log(self, step: int, point: Mapping[str, float]) -> None:
        if step == self.fails_at:
            time.sleep(0.5)
            raise ConnectionError("the network is away")
        self._write({"step": step, **point})

    def close(self, complete: bool) -> None:
        self._write({"complete": complete})

    def _write(self, line: dict[str, object]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
