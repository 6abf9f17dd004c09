"""The command `reward try`."""

from __future__ import annotations

from pathlib import Path

import click

from penstock.cli.loading import exit_with
from penstock.cli.options import data_options, style_options
from penstock.cli.shell import Commands


@click.group(cls=Commands)
def reward() -> None:
    """Try a reward function."""


@reward.command(
    "try",
    epilog="Exit status: 0 if it returned a reward; 1 if it raised, or the attempt would fail; 2 if the "
    "command line or the data is invalid.",
)
@click.argument("reward", metavar="REWARD")
@data_options(required=True)
@click.option(
    "--row", type=click.IntRange(min=1), default=1, show_default=True, help="Row of the data."
)
@click.option(
    "--answer",
    metavar="TEXT",
    show_default="the row's own answer",
    help="What the policy is taken to have written.",
)
@style_options
def reward_try(
    reward: str,
    data: str,
    columns: str | None,
    row: int,
    answer: str | None,
    style: str,
    arguments: Path | None,
) -> None:
    """Call REWARD on one row of the data, without a server, and show what it returns.

    REWARD is FILE.py:FUNCTION, PKG.MODULE:FUNCTION, or a ready-made one such as
    penstock.rewards:numeric.

    \b
    $ penstock reward try score.py:reward --data train.jsonl --answer "It is 22."
    """
    given = (reward, data, columns, row, answer, style, arguments)
    exit_with("penstock.trainer.commands.try_reward", "try_on_row", "trainer", *given)
