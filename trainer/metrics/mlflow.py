"""The MLflow tracker.

MLflow keeps several points at the same step. After a resume, repeated steps have two points, and
the one with the greater timestamp is the later one. Each setting is logged once, with its value at
the start of the run, because MLflow does not allow a parameter to change.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from typing import cast

import xxhash
from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from penstock.trainer.config.metrics import MlflowConfig
from penstock.trainer.metrics.tracker import RunStart

# Characters that MLflow refuses in a metric's name; a data source can have any name.
REFUSED = re.compile(r"[^\w\-. :/]", re.ASCII)
# MLflow also refuses paths that are not normalized. A name may not be a folder of another name either, as
# with the data sources "sums" and "sums/hard". The trainer's own names have two levels above a key.
LEVELS = 3
LONGEST_NAME = 250
NO_PARTS = frozenset({"", ".", ".."})
METRICS_PER_CALL = 1000
PARAMETERS_PER_CALL = 100


class MlflowTracker:
    """Logs to a run in MLflow; see `tracker.Tracker`."""

    def __init__(self, config: MlflowConfig) -> None:
        self._config = config
        self._client: MlflowClient
        self._run_id = ""

    def open(self, start: RunStart) -> None:
        """Create the MLflow run, or reopen it; log the settings that it does not have yet."""
        client = self._client = MlflowClient(tracking_uri=self._config.tracking_uri or None)
        if start.tracked_id:
            self._run_id = start.tracked_id
            client.update_run(self._run_id, status="RUNNING")
        else:
            name = self._config.experiment
            found = client.get_experiment_by_name(name)
            experiment = client.create_experiment(name) if found is None else found.experiment_id
            run = client.create_run(experiment, run_name=self._config.name or start.run_id)
            self._run_id = run.info.run_id
            start.keep(self._run_id)
        # An earlier attempt may have failed before it logged all parameters.
        noted = client.get_run(self._run_id).data.params
        parameters = [
            Param(name, value) for name, value in _flat(start.config) if name not in noted
        ]
        for begin in range(0, len(parameters), PARAMETERS_PER_CALL):
            some = parameters[begin : begin + PARAMETERS_PER_CALL]
            client.log_batch(self._run_id, params=some)

    def log(self, step: int, point: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [Metric(_metric_name(name), value, now, step) for name, value in point.items()]
        for begin in range(0, len(metrics), METRICS_PER_CALL):
            some = metrics[begin : begin + METRICS_PER_CALL]
            self._client.log_batch(self._run_id, metrics=some)

    def close(self, complete: bool) -> None:
        self._client.set_terminated(self._run_id, "FINISHED" if complete else "KILLED")


def _metric_name(name: str) -> str:
    parts = REFUSED.sub("_", name).split("/", LEVELS - 1)
    taken = "/".join("_" if part in NO_PARTS else part.replace("/", "_") for part in parts)
    if len(taken) <= LONGEST_NAME:
        return taken
    # The hash keeps names apart that differ only in the part cut off.
    digest = xxhash.xxh64_hexdigest(name.encode())
    return f"{taken[: LONGEST_NAME - len(digest) - 1]}_{digest}"


def _flat(config: Mapping[str, object], before: str = "") -> Iterator[tuple[str, str]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(cast("Mapping[str, object]", value), f"{before}{name}.")
        else:
            yield f"{before}{name}", str(value)
