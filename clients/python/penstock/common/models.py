"""Checks the name of a model: a folder, or a name on a hub."""

from __future__ import annotations

from pathlib import Path


def missing_folder(model: str) -> str | None:
    """An error message if a model can only be a folder, and the folder does not exist; else None.

    Libraries would report such a name as an invalid repository.
    """
    is_path = model.startswith(("/", "./", "../", "~"))
    # Names on a hub have at most one slash; URLs are sources to stream weights from.
    is_path |= model.count("/") > 1 and "://" not in model
    return f"there is no folder {model}" if is_path and not Path(model).exists() else None
