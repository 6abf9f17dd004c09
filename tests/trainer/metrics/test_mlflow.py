"""The real MLflow, with files and without a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.trainer.config.metrics import MetricsConfig
from penstock.trainer.metrics.reporting import Trackers, make_trackers


def begin(
    monkeypatch: pytest.MonkeyPatch, out: Path, uri: str, *, resumes: bool = False
) -> Trackers:
    # Allow for a slow machine.
    monkeypatch.setattr("penstock.trainer.metrics.reporting.CLOSE_SECONDS", 200.0)
    tracker = {"kind": "mlflow", "tracking_uri": uri, "experiment": "e"}
    config = MetricsConfig.model_validate({"trackers": [tracker]})
    trackers = make_trackers(config.trackers, 4)
    settings = {f"s{n}": n for n in range(150)}
    trackers.begin(out, "r", {"run": {"steps": 4}, "many": settings}, resumes=resumes)
    return trackers


def test_a_run_has_points_and_configuration_and_goes_on_under_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "store").as_uri()
    client = mlflow.MlflowClient(tracking_uri=uri)
    statuses: list[str] = []
    for resumes, steps in ((False, (1, 2, 3)), (True, (3, 4))):
        trackers = begin(monkeypatch, tmp_path, uri, resumes=resumes)
        for step in steps:
            odd = {
                f"train/reward_by_source/{name}": 0.5
                for name in ("a%c", "", "a", "a/b", "s://y/..", "l" * 300 + "1", "l" * 300 + "2")
            }
            trackers.send(step, {"train/reward_mean": step / 4, **odd})
        trackers.close()
        assert trackers.take_lost() == {}
        (run,) = client.search_runs([client.get_experiment_by_name("e").experiment_id])
        statuses.append(run.info.status)
    assert statuses == ["KILLED", "FINISHED"]
    assert run.info.run_id == (tmp_path / "trackers" / "mlflow" / "id").read_text()
    assert (run.info.run_name, run.data.params["run.steps"], len(run.data.params)) == (
        "r",
        "4",
        151,
    )
    points = client.get_metric_history(run.info.run_id, "train/reward_mean")
    assert [(p.step, p.value) for p in points] == [
        (1, 0.25), (2, 0.5), (3, 0.75), (3, 0.75), (4, 1.0),
    ]  # fmt: skip
    # MLflow allows few characters in a name.
    for name in ("a_c", "_", "a", "a_b", "s:__y_.."):
        history = client.get_metric_history(run.info.run_id, f"train/reward_by_source/{name}")
        assert len(history) == 5, name
    # It also limits the length. These two names differ only in the part that is cut.
    long = [name for name in run.data.metrics if name.startswith("train/reward_by_source/ll")]
    assert [len(name) for name in long] == [250, 250]


def test_a_configuration_that_could_not_be_noted_is_noted_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "store").as_uri()
    noted, log_batch = 0, mlflow.MlflowClient.log_batch

    def log(self: Any, run_id: str, *rest: Any, params: Any = (), **others: Any) -> Any:
        nonlocal noted
        noted += bool(params)
        # The second hundred fails once.
        if params and noted == 2:
            raise OSError("it is being restarted")
        return log_batch(self, run_id, *rest, params=params, **others)

    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", log)
    trackers = begin(monkeypatch, tmp_path, uri)
    for step in (1, 2):
        trackers.send(step, {"train/loss": 1.0})
    trackers.close()
    client = mlflow.MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("e").experiment_id])
    assert len(run.data.params) == 151 and noted == 3


def test_points_that_no_server_takes_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    trackers = begin(monkeypatch, tmp_path, "http://127.0.0.1:9")
    for step in (1, 2):
        trackers.send(step, {"train/loss": 1.0})
    trackers.close()
    assert "mlflow: 2 points were not delivered" in caplog.text
    assert caplog.text.count("cannot deliver points") == 1
