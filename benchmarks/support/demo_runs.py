"""A configurable run of the demo's task, which several benchmarks repeat."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import tomli_w
from benchmarks.support.processes import ROOT

from penstock.demo import settings
from penstock.demo.activity import record_activity
from penstock.demo.model import prepare_model
from penstock.demo.settings import SUMS, Plan, Scale
from penstock.demo.summary import read_lines
from penstock.demo.tasks import write_sums
from penstock.up.cast import penstock
from penstock.up.processes import Command, break_off
from penstock.up.supervisor import Cast, Listens, Restarts, Supervisor

CORES = tuple(sorted(os.sched_getaffinity(0)))


@dataclass(frozen=True)
class Model:
    """The model to train, and the sizes that go with it."""

    folder: str
    scale: Scale


SMOLLM2 = Model("", replace(settings.SMALL_MODEL, steps=90, learning_rate=2e-5))
"""An empty folder means the demo's own model. The published figures are of these steps and learning rate.
The demo's own suit a run that ends at its target."""


@dataclass(frozen=True)
class Setup:
    """The settings of one run."""

    scale: Scale
    steps: int
    seed: int
    in_flight: int
    """Concurrent attempts of the worker."""
    reward: str
    generate: str = ""
    """The default is a single turn."""
    engine_cores: tuple[int, ...] = CORES
    """Cores of the engine and of the worker."""
    trainer_cores: tuple[int, ...] = CORES
    model: str = ""
    """Model folder; the default is the demo's model."""
    server_options: tuple[str, ...] = ()
    trainer_sections: Mapping[str, Mapping[str, object]] = field(
        default_factory=dict[str, Mapping[str, object]]
    )
    """Settings that override the demo's."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])


def run_once(folder: Path, setup: Setup) -> None:
    """Calls `run`, unless `folder` already has all of its steps. An incomplete run is started again.

    Raises ValueError for a folder of another setup.
    """
    note = folder / "setup.json"
    text = json.dumps(asdict(setup), indent=1)
    if folder.exists():
        if not note.exists() or note.read_text() != text:
            raise ValueError(f"{folder} has a run with other settings, or is not a run")
        if len(read_lines(folder / "metrics.jsonl")) >= setup.steps:
            return
        shutil.rmtree(folder)
    folder.mkdir()
    note.write_text(text)
    asyncio.run(run(folder, setup))


async def run(folder: Path, setup: Setup) -> None:
    """Runs server, worker and trainer from the start to the last step, on the demo's sums.

    `folder` must exist. Afterwards it has `metrics.jsonl`, `activity.jsonl` and `ledger.jsonl`. Raises
    ProcessFailed if one of the three ends too early.
    """
    model = prepare_model(setup.model or None, lambda _: None)
    scale = setup.scale
    plan = Plan(model, "", folder, SUMS, setup.steps, setup.seed, "127.0.0.1:0", scale)
    write_sums(plan.tasks_file)
    sampling: list[asyncio.Task[None]] = []

    def serving(address: str) -> None:
        plan.trainer_config_file.write_text(_trainer_config(plan, setup, address))
        activity = record_activity(address, folder / "activity.jsonl")
        sampling.append(asyncio.create_task(activity))

    def say(who: str, what: str) -> None:
        if what not in ("starting", "done") and not what.startswith("serves"):
            print(f"{folder.name}: {who} {what}", file=sys.stderr)

    supervisor = Supervisor(
        _cast(plan, setup),
        Restarts(most=0),
        say,
        on_serving=serving,
        on_trainer_line=lambda _: None,
    )
    try:
        await supervisor.run()
    finally:
        for task in sampling:
            task.cancel()
        trainer, workers, server, _ = supervisor.started
        await break_off([*server, *workers, *trainer])


def _trainer_config(plan: Plan, setup: Setup, address: str) -> str:
    document = tomllib.loads(settings.trainer_config(plan, address))
    threads = {"model": {"threads": len(setup.trainer_cores)}}
    for sections in (threads, setup.trainer_sections):
        for name, section in sections.items():
            document[name] = {**document.get(name, {}), **section}
    return tomli_w.dumps(document)


def _cast(plan: Plan, setup: Setup) -> Cast:
    def command(name: str, cores: tuple[int, ...], arguments: tuple[str, ...]) -> Command:
        pinned = ("taskset", "-c", ",".join(map(str, cores)), *arguments)
        environment = {
            **settings.environment(1 if name == "server" else len(cores)),
            "PYTHONPATH": str(ROOT),
            **setup.environment,
        }
        return Command(name, pinned, plan.out / f"{name}.log", environment)

    def server(listens: Listens | None) -> Command:
        arguments = list(settings.serve_command(plan, listens))
        arguments[arguments.index("--max-num-seqs") + 1] = str(setup.in_flight)
        return command("server", setup.engine_cores, (*arguments, *setup.server_options))

    def worker(address: str) -> Command:
        arguments = ["rollout", "--server", address, "--reward", setup.reward]
        arguments += ["--generate", setup.generate] if setup.generate else []
        arguments += ["--concurrency", str(setup.in_flight), "--drain-timeout", "0"]
        return command("worker", setup.engine_cores, penstock(*arguments))

    def trainer(address: str, resume: bool) -> Command:
        return command("trainer", setup.trainer_cores, settings.train_command(plan))

    return Cast(server, {"worker": worker}, trainer)
