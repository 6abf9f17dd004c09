"""The real Weights & Biases, without a network."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.trainer.config.metrics import MetricsConfig
from penstock.trainer.core.errors import ConfigInvalid
from penstock.trainer.metrics.reporting import make_trackers


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Provide no account, and remove the machine's own settings."""
    wandb = pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    # Allow for a slow machine.
    monkeypatch.setattr("penstock.trainer.metrics.wandb.OPEN_TIMEOUT_SECONDS", 100.0)
    monkeypatch.setattr("penstock.trainer.metrics.reporting.CLOSE_SECONDS", 200.0)
    yield
    wandb.teardown()


def run(out: Path, *steps: int, resumes: bool) -> None:
    config = MetricsConfig.model_validate(
        {"trackers": [{"kind": "wandb", "mode": "offline", "project": "p"}]}
    )
    trackers = make_trackers(config.trackers, 4)
    trackers.begin(out, "r", {"run": {"steps": 4}}, resumes=resumes)
    for step in steps:
        trackers.send(step, {"train/reward_mean": step / 4, "train/reward_by_source/a b": 1.0})
    trackers.close()
    assert trackers.take_lost() == {}


BLOCK, FRAME = 32 * 1024, 7


def records(content: bytes) -> Iterator[bytes]:
    """The records of a W&B file: LevelDB's log format, after a header of seven bytes."""
    whole, place = b"", FRAME
    while place + FRAME <= len(content):
        left = BLOCK - place % BLOCK
        if left < FRAME:
            place += left
            continue
        length = int.from_bytes(content[place + 4 : place + 6], "little")
        kind = content[place + 6]
        whole += content[place + FRAME : place + FRAME + length]
        place += FRAME + length
        if kind in (1, 4):  # Whole, or its last part.
            yield whole
            whole = b""


def history(file: Path) -> list[dict[str, str]]:
    """The points of a run, each value as JSON."""
    from wandb.proto import wandb_internal_pb2

    found: list[dict[str, str]] = []
    for data in records(file.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        if record.HasField("history"):
            items = record.history.item
            found.append({item.key or "/".join(item.nested_key): item.value_json for item in items})
    return found


def steps_of(file: Path, count: int) -> list[str]:
    """The steps of the file's points. Waits for `count` of them, because W&B writes in another
    process.
    """
    until = time.monotonic() + 30
    while len(found := [point["step"] for point in history(file)]) < count:
        if time.monotonic() > until:
            break
        time.sleep(0.05)
    return found


def test_an_offline_run_has_the_points_and_goes_on_under_its_id(tmp_path: Path) -> None:
    run(tmp_path, 1, 2, 3, resumes=False)
    run(tmp_path, 3, 4, resumes=True)
    name = (tmp_path / "trackers" / "wandb" / "id").read_text()
    first, second = sorted((tmp_path / "trackers" / "wandb").rglob("*.wandb"))
    assert first.name == second.name == f"run-{name}.wandb"
    # W&B's own step count would refuse step 3 the second time.
    assert steps_of(first, 3) == ["1", "2", "3"]
    assert steps_of(second, 2) == ["3", "4"]
    assert history(second)[-1]["train/reward_mean"] == "1"
    assert history(second)[-1]["train/reward_by_source/a b"] == "1"


def test_without_an_account_an_online_run_does_not_begin() -> None:
    config = MetricsConfig.model_validate({"trackers": [{"kind": "wandb"}]})
    with pytest.raises(ConfigInvalid, match="no API key"):
        make_trackers(config.trackers, 1)


def test_a_key_that_cannot_be_one_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "short")
    config = MetricsConfig.model_validate({"trackers": [{"kind": "wandb"}]})
    with pytest.raises(ConfigInvalid, match=r"metrics\.trackers\.0: .*WANDB_API_KEY invalid"):
        make_trackers(config.trackers, 1)
