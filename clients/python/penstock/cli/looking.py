"""The commands `check`, `runs` and `logs`, which look at a file before a run and at folders of runs."""

from __future__ import annotations

from pathlib import Path

import click

from penstock.cli.loading import exit_with
from penstock.cli.options import overrides_option

_EXTRAS = "cpu (or cuda)"


@click.command(epilog="Exit status: 0; 1 if there is no run; 2 if FOLDER cannot be read.")
@click.argument("folder", default="runs", type=click.Path(path_type=Path))
def runs(folder: Path) -> None:
    """List the runs in FOLDER, by default `runs`, the newest last.

    Shows the state, the last step of all steps, the mean reward of the last five steps, the time
    that is left, and when the run was started.
    """
    exit_with("penstock.up.looking", "runs", _EXTRAS, folder)


@click.command(
    epilog="Exit status: 0; 1 if RUN is no folder of a run; 2 if it has no log of a ROLE."
)
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("roles", metavar="[ROLE]...", nargs=-1)
@click.option("-f", "--follow", is_flag=True, help="Also print new lines, until the run ends.")
@click.option(
    "-n",
    "--lines",
    default=20,
    show_default=True,
    type=click.IntRange(min=0),
    help="How many of the last lines of each log to print first.",
)
def logs(run: Path, roles: tuple[str, ...], follow: bool, lines: int) -> None:
    """Print the logs in the folder RUN: of each ROLE, such as trainer, or of all.

    `events` is the log of `penstock up` itself. With --json, each line is an object.
    """
    exit_with("penstock.up.looking", "logs", _EXTRAS, run, roles, lines, follow)


@click.command(epilog="Exit status: 0 if nothing stands in the way; 2 if something does.")
@click.argument("config", type=click.Path(dir_okay=False, path_type=Path))
@overrides_option
def check(config: Path, overrides: tuple[str, ...]) -> None:
    """Look for what would stop a run: CONFIG is a file of `up`, `train` or `serve`.

    Reads the data, calls the reward once with an empty answer, reads the headers of the model's
    files, and looks at ports, GPUs and memory. Names all problems at once. `up` does the same
    before it starts anything.
    """
    exit_with("penstock.preflight.command", "check", _EXTRAS, config, overrides)
