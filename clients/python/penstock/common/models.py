"""What may stand for a model: a folder, or a name on a hub."""

from __future__ import annotations

from pathlib import Path


def missing_folder(model: str) -> str | None:
    """What to say of a model that can only be a folder, and is not there; where it is given to them all the
    same, libraries speak of names of repositories."""
    is_path = model.startswith(("/", "./", "../", "~"))
    # Names on a hub have one at most; others are where weights are streamed from.
    is_path |= model.count("/") > 1 and "://" not in model
    return f"there is no folder {model}" if is_path and not Path(model).exists() else None
