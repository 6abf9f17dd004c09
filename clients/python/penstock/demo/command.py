"""The command line of `penstock demo`."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import cast

import click
from rich.console import Console

from penstock.common.answers import Exit, complain, json_option
from penstock.common.suggestions import did_you_mean
from penstock.demo.model import HUB_NAME, ModelUnavailable, prepare_model
from penstock.demo.run import run_plan
from penstock.demo.settings import PRINTABLE, SUMS, Plan, choose_scale
from penstock.demo.summary import read_run, summarize
from penstock.up.processes import ProcessFailed

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
@json_option
def demo(
    model: str | None,
    task: str | None,
    steps: int | None,
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
) -> None:
    """Run server, worker and trainer on this machine: a language model learns over the wire."""
    console = Console(highlight=False)
    if tiny and model is not None:
        raise click.UsageError("--tiny makes its own model; leave --model out")
    if lora and backend == "megatron":
        raise click.UsageError("--backend megatron trains all weights; leave --lora out")
    copy = tensor_parallel * pipeline_parallel
    if copy > 1 and backend != "megatron":
        raise click.UsageError(
            "--tensor-parallel and --pipeline-parallel divide a model for --backend megatron"
        )
    if ranks % copy:
        raise click.UsageError(
            f"--ranks {ranks} cannot be divided into copies of {copy} ranks each"
        )
    task = task or (PRINTABLE if tiny else SUMS)
    check_task(task)
    folder = (out or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")).resolve()
    scale = choose_scale(task, tiny=tiny)
    try:
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
        )
        seconds = asyncio.run(run_plan(plan, console))
    except (ModelUnavailable, ProcessFailed) as error:
        raise click.ClickException(str(error)) from error
    report(plan, seconds, console)


def check_task(task: str) -> None:
    """Rejects a name that is not a data set. Raises click.UsageError."""
    if task in {SUMS, PRINTABLE}:
        return
    from reasoning_gym import factory

    known = sorted(cast("dict[str, object]", factory.DATASETS))  # pyright: ignore[reportUnknownMemberType]
    if task not in known:
        meant = did_you_mean(task, [SUMS, *known]) or f", which has {', '.join(known)}"
        raise click.UsageError(f"--task {task}: no data set of reasoning-gym{meant}")


def model_folder(model: str | None, out: Path, console: Console, *, tiny: bool) -> Path:
    """The folder of the initial model; a tiny one is made in the run's own folder."""
    if not tiny:
        return prepare_model(model, lambda text: console.print(f"[dim]model   [/] {text}"))
    from penstock.demo.tiny import write_model

    folder = out / "tiny-model"
    if not folder.exists():
        write_model(folder)
    return folder


def report(plan: Plan, seconds: float, console: Console) -> None:
    """Writes the run's results and shows them on the console."""
    run = read_run(plan.out)
    if not run.steps:
        raise click.ClickException(f"the trainer ended before its first step; see {plan.out}")
    summary = summarize(run, plan, seconds)
    (plan.out / "summary.json").write_text(json.dumps(asdict(summary), indent=2) + "\n")
    from penstock.demo.picture import draw_picture  # Late, because matplotlib is slow to import.

    picture = plan.out / "demo.png"
    draw_picture(picture, run, plan)
    console.print()
    console.print(summary.as_table())
    console.print(f"[dim]{plan.out}[/]: summary.json, metrics.jsonl, {picture.name}, *.log")


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
