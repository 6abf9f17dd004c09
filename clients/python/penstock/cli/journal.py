"""The commands `penstock journal list | verify | export`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from penstock.cli.loading import exit_with
from penstock.cli.shell import Commands


class _JournalFolder(click.Path):
    """A folder. Explains why the address of a NATS server is not accepted."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if str(value).startswith(("nats:", "tls:")):
            self.fail(
                "only its server can read a journal in a NATS stream: see docs/operations/many-hubs.md",
                param,
                ctx,
            )
        return super().convert(value, param, ctx)


_JOURNAL = click.argument(
    "folder", type=_JournalFolder(exists=True, file_okay=False, path_type=Path)
)


_STATUS = (
    "Exit status: 0 if all records are intact; 1 if a record is corrupt; 2 if there is no journal, or the "
    "command line is invalid."
)


@click.group(cls=Commands)
def journal() -> None:
    """Show, check and export the journal of a server; see docs/operations/journal.md.

    These commands lock and change nothing. The server can keep running.
    """


@journal.command("list", epilog=_STATUS)
@_JOURNAL
def list_journal(folder: Path) -> None:
    """List the tasks, groups and open trajectories in the journal in FOLDER."""
    exit_with("penstock.server.journal.tools.command", "list_stored", "server", folder)


@journal.command("verify", epilog=_STATUS)
@_JOURNAL
def verify_journal(folder: Path) -> None:
    """Check every record of the journal in FOLDER.

    A torn end is not corruption: it was never acknowledged.
    """
    exit_with("penstock.server.journal.tools.command", "verify", "server", folder)


@journal.command(
    "export",
    epilog="Exit status: 0 if OUT is written; 1 if a record is corrupt; 2 if there is no journal, OUT "
    "cannot be written, or the command line is invalid.",
)
@_JOURNAL
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--state",
    type=click.Choice(["waiting", "used", "all"]),
    default="all",
    help="Which groups to write. waiting: no step has used them. used: a step has, but no durable "
    "checkpoint contains it yet.",
)
def export_journal(folder: Path, out: Path, state: str) -> None:
    """Write the finished groups of the journal in FOLDER to OUT, a *.jsonl or *.parquet file.

    Writes one row per trajectory. docs/operations/journal.md lists the columns.
    """
    exit_with("penstock.server.journal.tools.command", "export", "server", folder, out, state)
