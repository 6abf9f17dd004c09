"""The commands `train`, with a file or with a model, and `init`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from penstock.cli.loading import exit_with
from penstock.cli.options import data_options, overrides_option

_EXTRAS = "cpu (or cuda)"
_NEEDED = ("model", "data", "reward")
_OPTIONS = (
    click.option("--model", metavar="MODEL", help="A model's folder, or its name on the hub."),
    data_options(required=False),
    click.option(
        "--reward",
        metavar="FILE.py:FUNCTION",
        help="reward(task, trajectory) returns a number. PKG.MODULE:FUNCTION works too.",
    ),
    click.option(
        "--style",
        type=click.Choice(["penstock", "slime", "verl", "trl"]),
        show_default="penstock",
        help="With --reward: the system that the function was written for.",
    ),
    click.option(
        "--out",
        type=click.Path(path_type=Path),
        metavar="FOLDER",
        show_default="runs/DATA-TIME",
        help="With --model: folder of the run.",
    ),
    click.option(
        "--steps",
        type=click.IntRange(min=1),
        show_default="100",
        help="With --model: number of optimizer steps.",
    ),
    click.option(
        "--group-size",
        type=click.IntRange(min=2),
        show_default="8",
        help="With --model: answers to each prompt.",
    ),
    click.option(
        "--max-tokens",
        type=click.IntRange(min=1),
        show_default="256, or 1024 on a GPU",
        help="With --model: most tokens of an answer.",
    ),
    click.option(
        "--learning-rate",
        type=click.FloatRange(min=0, min_open=True),
        show_default="by the model's size",
        help="With --model: learning rate.",
    ),
    click.option(
        "--lora",
        is_flag=True,
        default=None,
        show_default="if all weights need more memory than there is",
        help="With --model: train an adapter.",
    ),
)


def _launch_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds what `penstock train` takes in place of CONFIG."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def _check_way(config: Path | None, resume: bool, launched: Mapping[str, Any]) -> None:
    """Checks that either CONFIG is given, or a model, data and a reward, and nothing of the other way.

    Raises UsageError.
    """
    given = [name for name, value in launched.items() if value is not None]
    if config is not None and given:
        option = f"--{given[0].replace('_', '-')}"
        raise click.UsageError(
            f"{option} and CONFIG are two ways to train: with --model, --data and --reward everything "
            f"starts on this machine; with CONFIG, the trainer alone. Leave {option} or {config} out"
        )
    if config is not None:
        return
    missing = [f"--{name}" for name in _NEEDED if name not in given]
    if len(missing) == len(_NEEDED):
        raise click.UsageError("give --model, --data and --reward, or CONFIG, a TOML file")
    if missing:
        raise click.UsageError(f"give {' and '.join(missing)} too: training needs all three")
    if resume:
        raise click.UsageError(
            "--resume requires CONFIG; a run of --model resumes from the file in its folder: "
            "penstock up FOLDER/run.toml --resume"
        )


@click.command(
    epilog="Exit status: 0 if training is done; 1 if an error stopped it; 2 if CONFIG or an option is "
    "invalid; 3 if it was stopped on request. With --model, it is that of `penstock up`."
)
@click.argument("config", required=False, type=click.Path(dir_okay=False, path_type=Path))
@_launch_options
@click.option("--resume", is_flag=True, help="With CONFIG: resume from the run's last checkpoint.")
@click.option("--dry-run", is_flag=True, help="Print the resolved configuration and exit.")
@click.option(
    "--ranks",
    type=click.IntRange(min=1),
    show_default="1; with --model, half of the GPUs",
    help="Number of processes to train with on this host. Use torchrun for several hosts.",
)
@overrides_option
def train(
    config: Path | None,
    resume: bool,
    dry_run: bool,
    ranks: int | None,
    overrides: tuple[str, ...],
    **launched: object,
) -> None:
    """Train a policy: with --model, --data and --reward on this machine, or as configured in CONFIG.

    With --model, it chooses what suits the machine, the model and the data, prints the choices,
    writes them to run.toml in the run's folder, and runs server, worker and trainer as `penstock
    up` does. --set changes a setting of that file, such as train.run.steps=5.

    CONFIG is a TOML file that names one or several running servers, the model and the source of the
    tasks. Settings it omits have defaults, which --dry-run prints. Reward, lag and times are
    printed for every step and written to the run's folder.

    \b
    $ penstock train --model Qwen/Qwen3-0.6B --data train.jsonl --reward my.py:score
    """
    _check_way(config, resume, launched)
    if config is None:
        options = {**launched, "ranks": ranks, "overrides": overrides}
        exit_with("penstock.launch.command", "launch", _EXTRAS, options, dry_run)
    exit_with(
        "penstock.trainer.__main__",
        "train",
        "trainer",
        config,
        list(overrides),
        resume,
        dry_run,
        ranks or 1,
    )


@click.command(epilog="Exit status: 0; 2 if the file is there already, or there is no such recipe.")
@click.argument("file", type=click.Path(path_type=Path), default="run.toml")
@click.option(
    "--recipe", default="default", show_default=True, metavar="NAME", help="What to begin with."
)
@click.option("--model", metavar="MODEL", help="A model's folder, or its name on the hub.")
@click.option("--data", metavar="FILE", help="The prompts: a *.jsonl or *.parquet file.")
@click.option("--reward", metavar="FILE.py:FUNCTION", help="The function that scores answers.")
def init(file: Path, recipe: str, model: str | None, data: str | None, reward: str | None) -> None:
    """Write FILE, a commented configuration of `penstock up`; run.toml by default.

    \b
    $ penstock init --model Qwen/Qwen3-0.6B --data train.jsonl --reward my.py:score
    $ penstock up run.toml
    """
    exit_with("penstock.launch.init", "init", _EXTRAS, file, recipe, model, data, reward)
