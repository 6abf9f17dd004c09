"""Rewards by data source, from the data to the tracker, across a resume."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import tomli_w

from penstock.client import Outcome, Task, Trajectory
from penstock.trainer.batching.batching import TrainingGroup
from penstock.trainer.data.feeder import UNKNOWN_SOURCE, ServerTasks, TaskFeeder
from penstock.trainer.data.indices import DataIndices
from penstock.trainer.data.shards import Division
from penstock.trainer.data.sources.problem import Problem
from tests.trainer.test_end_to_end import configure, records, serving, start_trainer, working
from tests.trainer.test_end_to_end import tiny as tiny  # The fixture.

PATIENCE_SECONDS = 140.0
REWARDS = {"easy": 1.0, "hard": 0.25, "own": 0.5}


async def by_source(task: Task, trajectory: Trajectory) -> Outcome:
    """Reward by the source that the agent sees. One sibling in four gets less."""
    source = str(task.metadata["data_source"])
    first = trajectory.sample_index == 0
    return Outcome(REWARDS[source] - (0.25 if first else 0.0), metrics={"first": float(first)})


def mixture(folder: Path) -> dict[str, object]:
    """Three quarters of the tasks are easy. Of the hard rows, every other one names its own source."""
    parts: list[dict[str, object]] = []
    for name, weight in (("easy", 3), ("hard", 1)):
        path = folder / f"{name}.jsonl"
        rows: list[dict[str, str]] = [{"prompt": f"Say {n}."} for n in range(8)]
        if name == "hard":
            for row in rows[::2]:
                row["data_source"] = "own"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        source = {"path": str(path), "shuffle": False}
        parts.append({"name": name, "weight": weight, "jsonl": source})
    return {"mixture": parts, "group_size": 4, "sampling": {"max_tokens": 4}}


SECRET = "of a judge"


def keep(group: TrainingGroup, api_key: str) -> None:
    assert api_key == SECRET


def settings(folder: Path, tiny: Path, address: str, *, steps: int, fails_at: int = 0) -> Path:
    """A run that reports every two steps."""
    tracker = {
        "kind": "custom",
        "function": "tests.support.file_tracker:FileTracker",
        "options": {"path": str(folder / "tracked.jsonl"), "fails_at": fails_at},
    }
    path = configure(
        folder,
        tiny,
        address,
        run={"steps": steps, "save_model": False},
        train={"groups_per_step": 4},
        groups={"filter": {"function": f"{__name__}:keep", "options": {"api_key": SECRET}}},
        checkpoint={"every_steps": 1},
        metrics={"every_steps": 2, "load_every_seconds": 0.02, "trackers": [tracker]},
    )
    document = tomllib.loads(path.read_text())
    document["data"] = mixture(folder)
    path.write_text(tomli_w.dumps(document))
    return path


def tracked(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "tracked.jsonl").read_text().splitlines()]


async def test_rewards_are_told_apart_by_where_they_are_from(tiny: Path, tmp_path: Path) -> None:
    async with serving(tiny, step_seconds=0.01) as server, working(server.address, by_source):
        first = settings(tmp_path, tiny, server.address, steps=3, fails_at=2)
        code, _, err = await (await start_trainer(first)).end(PATIENCE_SECONDS)
        assert code == 0, err
        assert "custom: cannot deliver points: ConnectionError: the network is away" in err
        second = settings(tmp_path, tiny, server.address, steps=6)
        code, out, err = await (await start_trainer(second, resume=True)).end(PATIENCE_SECONDS)
        assert code == 0, err
    lines = records(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    seen: dict[str, int] = {}
    for line in lines:
        counts = line["attempts_by_source"]
        assert sum(counts.values()) == line["trajectories"] == 16
        for source, reward in line["reward_by_source"].items():
            assert reward == REWARDS[source] - 0.25 / 4
            seen[source] = seen.get(source, 0) + counts[source]
    # Sources are mixed in the order of the data, whichever trainer submitted the tasks.
    assert seen.keys() == REWARDS.keys() and sum(seen.values()) == 96 and seen["easy"] >= 60
    assert all(line["outcome_metrics"] == {"first": 0.25} for line in lines)
    assert any(line["engine_idle_ratio"] is not None for line in lines)
    assert all(line["response_tokens_max"] <= 4 for line in lines)
    # Steps 3 and 4 are from two processes, but one point.
    assert [line.split("/")[0] for line in out.splitlines()] == ["steps 3 to 4", "steps 5 to 6"]
    told = tracked(tmp_path)
    assert [line["step"] for line in told if "step" in line] == [3, 4, 6]
    opened, again = (line for line in told if "open" in line)
    assert opened["open"] == again["open"] and opened["config"]["run"]["steps"] == 3
    assert [line["complete"] for line in told if "complete" in line] == [True, True]
    assert SECRET not in (tmp_path / "tracked.jsonl").read_text()
    (fourth,) = (line for line in told if line.get("step") == 4)
    assert (fourth["train/steps"], fourth["train/outcome_metrics/first"]) == (2, 0.25)
    assert fourth["train/attempts_by_source/easy"] == sum(
        line["attempts_by_source"]["easy"] for line in lines[2:4]
    )


class Rows:
    """The source has one name, and some rows name another."""

    name = identity = "rows"

    def __init__(self) -> None:
        self.asked: list[int] = []

    def problem(self, index: int) -> Problem:
        self.asked.append(index)
        return Problem((("user", "?"),), {"data_source": "own"} if index % 2 else {}, "rows")


def test_of_another_runs_task_nothing_is_known_and_of_its_own_everything() -> None:
    source = Rows()
    feeder = TaskFeeder(
        [ServerTasks(None, 0)],  # type: ignore[arg-type]
        source,
        None,  # type: ignore[arg-type]
        DataIndices(Division(1), 3, (1, 2)),
        run_id="r",
    )
    assert feeder.data_source("another/1") == UNKNOWN_SOURCE
    # Tasks that a previous trainer submitted, including one beyond its checkpoint.
    assert [feeder.data_source(f"r/{n}") for n in (1, 2, 7)] == ["own", "rows", "own"]
    assert feeder.data_source("r/2~1+1") == "rows"
