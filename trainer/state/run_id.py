"""Which start of its run a folder is of.

A run that resumes is the run that was begun, and servers still have tasks and groups of it. One that begins
anew under the same `run.id`, because its folder was removed or it keeps no checkpoints, is another one,
though a server that lives would take its tasks for those that it knows, and deliver it what the weights of
the first had sampled. So each start has an id, and Hello says it: a server that knows another one of this
run drops what it has.

    begun                       the file `start` beside the ledger has the id, before the first Hello
    the first checkpoint        has it, and the file goes, before the server is told what is final
    resumed from a checkpoint   the id is the checkpoint's
    resumed without one         the file's, with the ledger's steps to be done again; where there is no file
                                the run begins anew, for what its checkpoints had is final at the server

Without checkpoints what is trained is final at once and nobody can go on from it: such a start leaves no
file. Nor is there one between the removal of the last start's and the writing of the next: a trainer that
dies in between begins anew again.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from penstock.common.folders import sync_folder
from penstock.trainer.core.errors import storing

FILE = "start"
# Not one of the unfinished folders, which whoever writes the next one removes.
UNFINISHED = ".start"


def new_start_id(folder: Path | None) -> str:
    """The id of a start, durable in its folder where there is one. Raises StorageFailed."""
    start_id = uuid.uuid4().hex
    if folder is not None:
        with storing(folder / FILE):
            with (folder / UNFINISHED).open("w") as file:
                file.write(start_id)
                file.flush()
                os.fsync(file.fileno())
            (folder / UNFINISHED).rename(folder / FILE)
            sync_folder(folder)
    return start_id


def read_start_id(folder: Path) -> str:
    """That of a folder; empty where it has none. Raises StorageFailed."""
    with storing(folder / FILE):
        try:
            return (folder / FILE).read_text().strip()
        except FileNotFoundError:
            return ""


def remove_start_id(folder: Path) -> None:
    """Durable on return. Raises StorageFailed."""
    with storing(folder / FILE):
        (folder / FILE).unlink(missing_ok=True)
        sync_folder(folder)
