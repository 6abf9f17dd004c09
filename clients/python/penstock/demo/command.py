"""The command line of `penstock demo`."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import sys
import time
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click
from rich.console import Console

from penstock.common.answers import Exit, complain, json_option
from penstock.common.suggestions import did_you_mean
from penstock.demo.model import HUB_NAME, ModelUnavailable, prepare_model
from penstock.demo.run import Ended, near, run_plan
from penstock.demo.settings import (
    PRINTABLE,
    SERVER_THREADS,
    SUMS,
    TARGET,
    TRAINER_THREADS,
    Plan,
    Scale,
    choose_scale,
)
from penstock.demo.summary import Run, Summary, read_run, summarize
from penstock.machine.devices import Machine, look
from penstock.machine.findings import State
from penstock.machine.gpus import check_torch
from penstock.up.processes import ProcessFailed
from penstock.up.telling import say

if TYPE_CHECKING:
    from collections.abc import Mapping

INTERRUPTED = Exit.INTERRUPTED
STEPS = (
    f"{choose_scale(SUMS, tiny=False).steps}; {choose_scale('', tiny=False).steps} with a data set "
    f"of reasoning-gym, {choose_scale(PRINTABLE, tiny=True).steps} with --tiny"
)


@click.command(
    name="demo",
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
    epilog="Exit status: 0 if the run is done; 1 if a process failed; 2 if the command line is invalid; "
    "130 if it was interrupted.",
)
@click.option(
    "--model",
    show_default="SmolLM2-135M-Instruct",
    help="Model folder, or name on the Hugging Face hub.",
)
@click.option(
    "--task", show_default=SUMS, help=f"Data set of reasoning-gym, or {SUMS!r} (What is a + b?)."
)
@click.option(
    "--steps", type=click.IntRange(min=1), show_default=STEPS, help="Number of optimizer steps."
)
@click.option(
    "--target",
    metavar="REWARD|none",
    show_default=f"{TARGET} on {SUMS}, else none",
    help="Mean reward at which the run ends before its last step.",
)
@click.option(
    "--patience",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Consecutive steps for which the reward must be at the target.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    show_default="runs/demo-TIME",
    help="Folder for the results.",
)
@click.option(
    "--port", default=0, show_default=False, help="Port of the server; 0 picks a free one."
)
@click.option("--seed", default=0, help="Seed of the data and the trainer.")
@click.option(
    "--tiny", is_flag=True, help="Use a tiny model of random weights, generated on the spot."
)
@click.option(
    "--lora", is_flag=True, help="Train and upload a LoRA adapter instead of all weights."
)
@click.option(
    "--ranks",
    type=click.IntRange(min=1),
    default=1,
    help="Processes that the trainer runs, each holding a shard of the model.",
)
@click.option(
    "--backend",
    type=click.Choice(["fsdp", "megatron"]),
    default="fsdp",
    help="Training backend.",
)
@click.option(
    "--tensor-parallel",
    type=click.IntRange(min=1),
    default=1,
    help="With megatron: ranks over which each tensor is split.",
)
@click.option(
    "--pipeline-parallel",
    type=click.IntRange(min=1),
    default=1,
    help="With megatron: ranks over which the layers are divided.",
)
@click.option(
    "--durability",
    type=click.Choice(["fsync", "process", "none"]),
    default="fsync",
    help="What the server's journal survives: a crash of the machine, of the process, or nothing.",
)
@click.option(
    "--setup-seconds",
    type=click.FloatRange(min=0),
    help="Seconds that set-up took, for the last line; `make demo` gives it.",
)
@json_option
def demo(
    model: str | None,
    task: str | None,
    steps: int | None,
    target: str | None,
    patience: int,
    out: Path | None,
    port: int,
    seed: int,
    tiny: bool,
    lora: bool,
    ranks: int,
    backend: str,
    tensor_parallel: int,
    pipeline_parallel: int,
    durability: str,
    setup_seconds: float | None,
) -> None:
    """Run server, worker and trainer on this machine: a language model learns over the wire."""
    began = time.time()
    console = Console(highlight=False)
    check_model(model, tiny=tiny)
    check_backend(backend, ranks, tensor_parallel * pipeline_parallel, lora=lora)
    task = task or (PRINTABLE if tiny else SUMS)
    check_task(task)
    reward = read_target(target, task)
    folder = (out or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")).resolve()
    try:
        machine = look_for(ranks)
        scale = choose_scale(task, tiny=tiny)
        scale = replace(scale, dtype=scale.dtype or machine.dtype)
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "summary.json").exists():
            raise click.UsageError(f"{folder} holds the results of another run")
        plan = Plan(
            model=model_folder(model, folder, console, tiny=tiny),
            model_name="a tiny model" if tiny else Path(model or HUB_NAME).name,
            out=folder,
            task=task,
            steps=steps or scale.steps,
            seed=seed,
            listen=f"127.0.0.1:{port}",
            scale=scale,
            lora=lora,
            durability=durability,
            ranks=ranks,
            backend=backend,
            tensor_parallel=tensor_parallel,
            pipeline_parallel=pipeline_parallel,
            target=reward,
            patience=patience,
            gpus=len(machine.gpus),
        )
        introduce(plan, machine, console)
        model_seconds = time.time() - began
        ended = asyncio.run(run_plan(plan, console))
    except (ModelUnavailable, ProcessFailed) as error:
        raise click.ClickException(str(error)) from error
    run, summary = report(plan, ended, console)
    seconds = {"setup": setup_seconds, "model": model_seconds}
    click.echo(last_line(run, summary, began, seconds, machine, scale))


def look_for(ranks: int) -> Machine:
    """The machine. Raises UsageError if it has too few GPUs, and ProcessFailed if torch cannot be used."""
    machine = look()
    check_gpus(machine, ranks)
    torch = check_torch(len(machine.gpus))
    if torch.state is State.MISSING:
        raise ProcessFailed(f"torch: {torch.found}; {torch.hint}")
    return machine


def last_line(
    run: Run,
    summary: Summary,
    began: float,
    known: Mapping[str, float | None],
    machine: Machine,
    scale: Scale,
) -> str:
    """The figures of a run for programs. Seconds count from the demo's beginning; `known` are others."""
    last = run.steps[-1]
    seconds = {
        **known,
        "start": run.steps[0].time_gather_start - began,
        "target": last.time - began if summary.target_reached else None,
        "end": time.time() - began,
    }
    mean = last.reward_target_mean
    return json.dumps(
        {
            **{f"{name}_seconds": value and round(value, 1) for name, value in seconds.items()},
            "reward": round(summary.reward_last if mean is None else mean, 4),
            "steps": summary.steps,
            "dtype": scale.dtype,
            "cpu": machine.processor,
            "gpus": [gpu.name for gpu in machine.gpus],
        }
    )


def read_target(target: str | None, task: str) -> float | None:
    """The mean reward at which the run ends; None if it takes all its steps. Raises click.UsageError."""
    if target is None:
        return TARGET if task == SUMS else None
    if target == "none":
        return None
    try:
        reward = float(target)
    except ValueError:
        reward = math.nan
    if not math.isfinite(reward):
        raise click.UsageError(f"--target {target}: give a reward, such as {TARGET}, or none")
    return reward


def introduce(plan: Plan, machine: Machine, console: Console) -> None:
    """Says which devices, dtype and threads the run uses."""
    threads = f"the server has {SERVER_THREADS} thread, the trainer {TRAINER_THREADS}"
    if plan.gpus:
        threads = "server and trainer share it" if plan.shares_gpu else "the server has the first"
    device = ", ".join(gpu.name for gpu in machine.gpus) or machine.processor
    say(console, "machine", f"{device}: computes in {plan.scale.dtype}; {threads}")


def check_model(model: str | None, *, tiny: bool) -> None:
    """Rejects a model beside the one that --tiny makes. Raises click.UsageError."""
    if tiny and model is not None:
        raise click.UsageError("--tiny makes its own model; leave --model out")


def check_backend(backend: str, ranks: int, copy: int, *, lora: bool) -> None:
    """Rejects what a backend cannot do. `copy` is the ranks of one model. Raises click.UsageError."""
    if lora and backend == "megatron":
        raise click.UsageError("--backend megatron trains all weights; leave --lora out")
    if copy > 1 and backend != "megatron":
        raise click.UsageError(
            "--tensor-parallel and --pipeline-parallel divide a model for --backend megatron"
        )
    if ranks % copy:
        raise click.UsageError(
            f"--ranks {ranks} cannot be divided into copies of {copy} ranks each"
        )


def check_gpus(machine: Machine, ranks: int) -> None:
    """Rejects more ranks than there are GPUs beside the server's. Raises click.UsageError."""
    if ranks > 1 and 0 < len(machine.gpus) <= ranks:
        raise click.UsageError(
            f"--ranks {ranks} needs {ranks + 1} GPUs, one for the server; there are {len(machine.gpus)}"
        )


def check_task(task: str) -> None:
    """Rejects a name that is not a data set. Raises click.UsageError."""
    if task in {SUMS, PRINTABLE}:
        return
    with warnings.catch_warnings():
        # A package that it imports makes Python warn about its source, the first time.
        warnings.simplefilter("ignore", SyntaxWarning)
        from reasoning_gym import factory

    known = sorted(cast("dict[str, object]", factory.DATASETS))  # pyright: ignore[reportUnknownMemberType]
    if task not in known:
        meant = did_you_mean(task, [SUMS, *known]) or f", which has {', '.join(known)}"
        raise click.UsageError(f"--task {task}: no data set of reasoning-gym{meant}")


def model_folder(model: str | None, out: Path, console: Console, *, tiny: bool) -> Path:
    """The folder of the initial model; a tiny one is made in the run's own folder."""
    if not tiny:
        return prepare_model(model, lambda text: say(console, "model", text))
    from penstock.demo.tiny import write_model

    folder = out / "tiny-model"
    if not folder.exists():
        write_model(folder)
    return folder


def report(plan: Plan, ended: Ended, console: Console) -> tuple[Run, Summary]:
    """Writes the run's results and shows them on the console, with what to try next."""
    run = read_run(plan.out)
    if not run.steps:
        raise click.ClickException(f"the trainer ended before its first step; see {plan.out}")
    summary = summarize(run, plan, ended)
    (plan.out / "summary.json").write_text(json.dumps(asdict(summary), indent=2) + "\n")
    from penstock.demo.picture import draw_picture  # Late, because matplotlib is slow to import.

    picture = plan.out / "demo.png"
    draw_picture(picture, run, plan)
    console.print()
    console.print(summary.as_table())
    if summary.answers:
        console.print()
        console.print(summary.answers_as_table())
    console.print()
    say(console, "picture", str(near(picture)))
    say(console, "figures", f"{near(plan.out)}: summary.json, metrics.jsonl, *.log")
    console.print("\nNext:", soft_wrap=True)
    for command, effect in next_commands(plan):
        console.print(f"  {command}  [dim]# {effect}[/]", soft_wrap=True)
    return run, summary


def next_commands(plan: Plan) -> list[tuple[str, str]]:
    """Commands to try after a run, as they are typed here, and what each does."""

    def here(program: str) -> str:
        own = Path(sys.executable).with_name(program)
        return program if shutil.which(program) == str(own) else str(near(own))

    penstock = here("penstock")
    own = f"--model {near(plan.model)} --data {near(plan.tasks_file)} --reward {plan.reward}"
    return [
        (f"{here('tensorboard')} --logdir {near(plan.out)}/tensorboard", "every figure as a curve"),
        (f"{penstock} demo --task chain_sum --steps 20", "another task of reasoning-gym"),
        (f"{penstock} train {own}", "the same with your model, data or reward")
        if plan.has_tasks_file
        else (f"{penstock} demo --lora", "train and upload an adapter of 5 MB"),
    ]


def main(arguments: list[str]) -> int:
    """Runs the demo; returns the exit status."""
    try:
        demo.main(arguments, prog_name="penstock demo", standalone_mode=False)
    except click.ClickException as error:
        return complain("penstock demo", error, error.exit_code)
    except (click.Abort, KeyboardInterrupt, asyncio.CancelledError):
        # CancelledError if a second interruption arrives while the first one is handled.
        click.echo("interrupted; all processes were stopped", err=True)
        return INTERRUPTED
    return 0
