"""The command `reward try`."""

from __future__ import annotations

from pathlib import Path

import click

from penstock.cli.loading import exit_with
from penstock.cli.options import style_options


@click.group()
def reward() -> None:
    """Try a reward function."""


@reward.command(
    "try",
    epilog="Exit status: 0 if it returned a reward; 1 if it raised, or the attempt would fail; 2 if the "
    "command line or the data is invalid.",
)
@click.argument("reward", metavar="REWARD")
@click.option(
    "--data",
    required=True,
    metavar="DATA",
    help="A *.jsonl or *.parquet file, a folder of *.parquet files, or PKG.MODULE:FUNCTION.",
)
@click.option(
    "--row", type=click.IntRange(min=1), default=1, show_default=True, help="Row of the data."
)
@click.option(
    "--answer",
    metavar="TEXT",
    show_default="the row's own answer",
    help="What the policy is taken to have written.",
)
@click.option("--prompt-field", metavar="NAME", show_default="prompt", help="As in `eval`.")
@click.option("--messages-field", metavar="NAME", show_default="messages", help="As in `eval`.")
@style_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def reward_try(
    reward: str,
    data: str,
    row: int,
    answer: str | None,
    prompt_field: str | None,
    messages_field: str | None,
    style: str,
    arguments: Path | None,
    as_json: bool,
) -> None:
    """Call REWARD on one row of the data, without a server, and show what it returns.

    REWARD is FILE.py:FUNCTION, PKG.MODULE:FUNCTION, or a ready-made one such as
    penstock.rewards:numeric.

    \b
    $ penstock reward try score.py:reward --data train.jsonl --answer "It is 22."
    """

    named = {"prompt_field": prompt_field, "messages_field": messages_field}
    fields = {name: field for name, field in named.items() if field is not None}
    given = (reward, data, row, answer, fields, style, arguments, as_json)
    exit_with("penstock.trainer.commands.try_reward", "try_on_row", "trainer", *given)
