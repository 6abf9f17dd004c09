from __future__ import annotations

from pathlib import Path

import click

from penstock.cli.loading import exit_with, load

EXTRAS = "server,trainer,cpu"


@click.command()
@click.argument("config", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--resume", is_flag=True, help="Resume the run in the folder that CONFIG names.")
@click.option("--dry-run", is_flag=True, help="Print the resolved configuration and exit.")
@click.option(
    "--status", is_flag=True, help="Show the processes of the run in that folder and exit."
)
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="SECTION.KEY=VALUE",
    help="Override a value of CONFIG. Can be repeated.",
)
def up(config: Path, resume: bool, dry_run: bool, status: bool, overrides: tuple[str, ...]) -> None:
    """Run server, workers and trainer as configured in CONFIG, a TOML file, and keep them running.

    With [engines] in the file, it runs several engine servers behind a hub. With [cluster], it runs
    on the nodes of a Ray cluster. A process that dies is restarted. A restarted server waits for
    the weights of the run before it serves. Exits when the trainer is done.
    """
    if status:
        exit_with(load("penstock.up.up", "status", EXTRAS), EXTRAS, config, list(overrides))
    run = load("penstock.up.up", "up", EXTRAS)
    exit_with(run, EXTRAS, config, list(overrides), resume, dry_run)
