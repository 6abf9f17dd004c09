"""Checks the name of a model: a folder, or a name on a hub."""

from __future__ import annotations

import contextlib
from pathlib import Path

from penstock.common.suggestions import nearest

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def without_weights(model: str) -> str | None:
    """An error message if a model is a folder that does not exist or holds no model; else None."""
    if (missing := missing_folder(model)) is not None:
        return missing
    folder = Path(model)
    if not model or not folder.is_dir():
        return None
    names = {path.name for path in folder.iterdir()}
    if not names & {"config.json", "params.json"}:
        return f"the folder {model} is not a model: it has no config.json"
    if not any(name.endswith(_WEIGHTS) for name in names):
        return f"the folder {model} has no weights, such as model.safetensors"
    return None


def missing_folder(model: str) -> str | None:
    """An error message if a model can only be a folder, and the folder does not exist; else None.

    Libraries would report such a name as an invalid repository.
    """
    is_path = model.startswith(("/", "./", "../", "~"))
    # Names on a hub have at most one slash; URLs are sources to stream weights from.
    is_path |= model.count("/") > 1 and "://" not in model
    path = Path(model)
    if not is_path or path.exists():
        return None
    with contextlib.suppress(OSError):
        names = [entry.name for entry in path.parent.iterdir() if entry.is_dir()]
        if found := nearest(path.name, names):
            return (
                f"there is no folder {model}; did you mean {model.removesuffix(path.name)}{found}?"
            )
    return f"there is no folder {model}"
