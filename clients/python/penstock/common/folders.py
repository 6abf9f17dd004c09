"""Folders that are there after the loss of power."""

from __future__ import annotations

import os
from pathlib import Path


def make_folder(folder: Path, mode: int = 0o777) -> None:
    """A folder, where there is none, and its parents; each is durable in the one it is in. `mode` is the
    folder's own. Raises OSError."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True, mode=mode)
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Makes durable which files a folder holds. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
