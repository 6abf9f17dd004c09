"""Creates folders that survive a power loss."""

from __future__ import annotations

import os
from pathlib import Path


def make_folder(folder: Path, mode: int = 0o777) -> None:
    """Creates a folder and its parents if needed, and makes each entry durable. `mode` applies to the
    folder itself, not its parents. Raises OSError."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True, mode=mode)
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Makes the list of a folder's files durable. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
