"""`penstock.train`, `penstock.resume` and `penstock.open_run`: a run from a script or a notebook.

Order: check the functions -> write the data and `run.toml` into the run's folder, as `command.py` chooses
-> check that nothing stands in the way -> start server and trainer. Functions are called in this process,
so they need no module that another process could import.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TypedDict, Unpack

import tomli_w

from penstock.client.errors import PenstockError
from penstock.client.scoring import Agent, is_group_reward, single_turn
from penstock.client.worker import WorkerMisconfigured
from penstock.common.functions import FunctionInvalid, accepting
from penstock.common.suggestions import did_you_mean
from penstock.launch.choices import Launch
from penstock.launch.command import FILE, REFUSED, check_file, make_file, new_folder
from penstock.launch.errors import RunFailed, RunInvalid
from penstock.launch.processes import Functions, Say, run_in_thread, started
from penstock.launch.run import Run, SteppedRun
from penstock.preflight.data import first_task
from penstock.preflight.report import Report
from penstock.preflight.rewards import call_once
from penstock.trainer.config.trainer import load_config
from penstock.trainer.core.errors import TrainerError, leaves
from penstock.up.cast import Programs
from penstock.up.config import UpConfig, load
from penstock.up.placement import PlacementFailed
from penstock.up.processes import ProcessFailed, write_files
from penstock.up.state import FolderUnusable, holds_run

PROGRAMS = Programs()
_FAILED = (
    ProcessFailed,
    PlacementFailed,
    FolderUnusable,
    TrainerError,
    PenstockError,
    WorkerMisconfigured,
)
_ARGUMENTS = ("task", "trajectory")

Rows = Sequence[Mapping[str, object]]


class Options(TypedDict, total=False):
    """What the machine, the model and the data decide if it is not given."""

    generate: Agent
    """`generate(task, trajectory)` makes the attempt's turns. Without it, an attempt is one answer."""
    columns: Mapping[str, str]
    """The columns `prompt` and `answer`, if they have unusual names: `{"answer": "solution"}`."""
    out: str | Path
    """Folder of the run; `runs/DATA-TIME` by default."""
    steps: int
    group_size: int
    """Answers to each prompt."""
    max_tokens: int
    """Most tokens of an answer."""
    learning_rate: float
    lora: bool
    """Train an adapter."""
    settings: Mapping[str, object]
    """Of run.toml, by dotted key: `{"train.train.groups_per_step": 4}`."""


def train(
    *,
    model: str | Path,
    data: str | Path | Rows,
    reward: Agent,
    ranks: int | None = None,
    **options: Unpack[Options],
) -> Run:
    """Trains a model on this machine, and returns once the run is done.

    `model` is a folder, or a name on the hub. `data` is a file, or its rows. `reward(task, trajectory)`
    returns a number; it runs here, many calls at a time. `ranks` is the number of processes that train.

    Raises RunInvalid for unusable arguments, and RunFailed if a process fails. An interruption saves the
    run, for `resume`.
    """
    with _worded():
        functions = _functions(reward, options.get("generate", single_turn))
        config = _prepare(model, data, functions, ranks, options)
        return _run(config, functions, resume=False)


def resume(
    folder: str | Path,
    *,
    reward: Agent,
    generate: Agent = single_turn,
    steps: int | None = None,
) -> Run:
    """Continues the run in a folder, up to `steps` in all. Raises as `train`."""
    path = Path(folder) / FILE
    with _worded():
        functions = _functions(reward, generate)
        if not path.is_file():
            raise RunInvalid(
                f"folder: there is no {path}; name the folder of a run of penstock.train"
            )
        config = load(path, [] if steps is None else [f"train.run.steps={steps}"])
        return _run(config, functions, resume=True)


@asynccontextmanager
async def open_run(
    *,
    model: str | Path,
    data: str | Path | Rows,
    reward: Agent,
    **options: Unpack[Options],
) -> AsyncGenerator[SteppedRun]:
    """A run whose steps the caller makes: `async for batch in run.batches(): await run.train(batch)`.

    Arguments and errors are those of `train`; it trains in this process, as one rank.
    """
    with _worded():
        functions = _functions(reward, options.get("generate", single_turn))
        config = await asyncio.to_thread(_prepare, model, data, functions, 1, options)
        out = config.up.out
        async with started(
            config, PROGRAMS, functions, _print, resume=False, trains=False
        ) as processes:
            # Both are read when torch is loaded, or first uses a GPU.
            os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
            os.environ.update(processes.trainer_environment)
            from rich.console import Console

            from penstock.trainer.session import open_session

            path = out / "trainer.toml"
            write_files({path: tomli_w.dumps(config.train_at(processes.address))})
            async with open_session(load_config(path, []), Console()) as session:
                yield SteppedRun(out, session)


def _functions(reward: Agent, generate: Agent) -> Functions:
    for name, function in (("reward", reward), ("generate", generate)):
        # Typed, but a notebook is seldom checked.
        if not callable(function):
            raise RunInvalid(f"{name}: give the function itself, not {function!r}")
        try:
            accepting(function, _ARGUMENTS, {}, getattr(function, "__name__", name))
        except FunctionInvalid as error:
            raise RunInvalid(f"{name}: {error}") from error
    return Functions(generate, reward)


def _prepare(
    model: str | Path,
    data: str | Path | Rows,
    functions: Functions,
    ranks: int | None,
    options: Options,
) -> UpConfig:
    """Writes the folder of a run, and checks that it can start."""
    for name in options.keys() - Options.__annotations__.keys():
        raise RunInvalid(f"{name}: no such argument{did_you_mean(name, Options.__annotations__)}")
    rows = None if isinstance(data, str | Path) else data
    out = Path(options.get("out", new_folder("" if rows is not None else str(data)))).resolve()
    if holds_run(out):
        again = f"penstock.resume({str(out)!r}, reward=...)"
        raise RunInvalid(
            f"out: {out} holds a run already; continue it with {again}, or name another"
        )
    if rows is not None:
        data = out / "data.jsonl"
        write_files({data: _lines(rows)})
    columns = options.get("columns")
    launch = Launch(
        str(model),
        str(data),
        None,
        columns=None if columns is None else ",".join(f"{k}={v}" for k, v in columns.items()),
        steps=options.get("steps"),
        group_size=options.get("group_size"),
        max_tokens=options.get("max_tokens"),
        learning_rate=options.get("learning_rate"),
        lora=options.get("lora"),
        ranks=ranks,
        overrides=tuple(
            f"{key}={tomli_w.dumps({'x': value}).strip().removeprefix('x = ')}"
            for key, value in options.get("settings", {}).items()
        ),
    )
    text = make_file(launch, out)
    check_file(text, launch.overrides, PROGRAMS)
    write_files({out / FILE: text})
    config = load(out / FILE, [])
    _call_reward(config, functions.reward)
    return config


def _lines(rows: Rows) -> str:
    try:
        return "".join(json.dumps(row) + "\n" for row in rows)
    except TypeError as error:
        raise RunInvalid(f"data: {error}; give rows that JSON can hold") from error


def _call_reward(config: UpConfig, reward: Agent) -> None:
    report, path = Report(), config.up.out / "trainer.toml"
    write_files({path: tomli_w.dumps(config.train_at("127.0.0.1:0"))})
    task = first_task(load_config(path, []), report)
    if task is not None:
        call_once(reward, "reward", task, report, whole_group=is_group_reward(reward))
    if report.problems:
        raise RunInvalid("\n".join(report.problems))


def _run(config: UpConfig, functions: Functions, *, resume: bool) -> Run:
    async def work(say: Say) -> None:
        async with started(
            config, PROGRAMS, functions, say, resume=resume, trains=True
        ) as processes:
            await processes.trained

    run_in_thread(work)
    return Run(config.up.out)


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


@contextmanager
def _worded() -> Generator[None]:
    """Raises RunInvalid and RunFailed for the errors of the parts, and what the caller raised as it is."""
    try:
        yield
    except (*REFUSED, *_FAILED, BaseExceptionGroup) as raised:
        error = next(leaves(raised))
        if isinstance(error, REFUSED):
            raise RunInvalid(_as_arguments(str(error))) from error
        if isinstance(error, _FAILED):
            raise RunFailed(str(error)) from error
        raise error from error.__cause__


def _as_arguments(said: str) -> str:
    """Names options of the command line as arguments: --max-tokens is max_tokens."""
    said = said.replace("--set ", "settings: ")
    return re.sub(r"--([a-z][a-z-]*)", lambda option: option[1].replace("-", "_"), said)
