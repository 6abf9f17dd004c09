"""The id that tells apart the starts of a run.

A run that begins again under the same `run.id`, because its folder was removed or it keeps no checkpoints,
is a different run. A server that is still running would mistake the new tasks for those it knows, and
deliver groups that the first start's weights sampled. So each start has an id, which Hello carries. A
server that knows a different start of the run drops what it holds of it.

    a new start                 the file `start` next to the ledger has the id, before the first Hello
    the first checkpoint        contains the id; the file is removed before the server is told what is
                                final
    resumed from a checkpoint   the id is the checkpoint's
    resumed without one         the id is the file's, and the ledger's steps are repeated. Without a file
                                the run begins again, because the server considers the contents of the
                                lost checkpoints final

Without checkpoints, everything trained is final at once and no trainer can resume from it, so such a start
leaves no file.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from penstock.common.folders import sync_folder
from penstock.trainer.core.errors import storing

FILE = "start"
# Not named like the unfinished folders, which the next checkpoint removes.
UNFINISHED = ".start"


def new_start_id(folder: Path | None) -> str:
    """Create a start id, and store it durably if a folder is given. Raises StorageFailed."""
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
    """Return a folder's start id; empty if it has none. Raises StorageFailed."""
    with storing(folder / FILE):
        try:
            return (folder / FILE).read_text().strip()
        except FileNotFoundError:
            return ""


def remove_start_id(folder: Path) -> None:
    """Remove a folder's start id; durable on return. Raises StorageFailed."""
    with storing(folder / FILE):
        (folder / FILE).unlink(missing_ok=True)
        sync_folder(folder)
