"""Models in the hub's cache, and whether their files are whole."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.common.checkpoint import CheckpointUnreadable, stored_tensors, weight_files
from penstock.common.models import without_weights
from penstock.common.suggestions import did_you_mean
from penstock.machine.findings import Finding, State

PREFIX = "models--"
MOST_SHOWN = 20
HUB_SECONDS = 5.0
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
"""Names without an owner are few, and may be folders that another process makes."""


@dataclass(frozen=True)
class CachedModel:
    name: str
    folder: Path
    """With all its snapshots, and the files that they link to."""
    problem: str
    """Empty if its files are whole."""


def cache_folder() -> Path:
    """Where huggingface_hub keeps models."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"))
    home = os.environ.get("HF_HOME", str(cache / "huggingface"))
    return Path(os.environ.get("HF_HUB_CACHE", str(Path(home) / "hub"))).expanduser()


def cached_models(cache: Path) -> Iterator[CachedModel]:
    """The newest snapshot of each model that has a configuration or weights. Data sets are left out."""
    for folder in sorted(cache.glob(f"{PREFIX}*")):
        name = folder.name.removeprefix(PREFIX).replace("--", "/")
        snapshots = sorted((folder / "snapshots").glob("*"), key=lambda path: path.stat().st_mtime)
        unfinished = list((folder / "blobs").glob("*.incomplete"))
        if not snapshots:
            yield CachedModel(name, folder, "its download has not begun")
        elif problem := what_is_broken(snapshots[-1]):
            yield CachedModel(name, folder, problem)
        elif unfinished:
            yield CachedModel(name, folder, "its download was interrupted")
        else:
            yield CachedModel(name, folder, "")


def what_is_broken(folder: Path) -> str:
    """Why a model's folder cannot be loaded; empty if its configuration and its weights are whole.

    Reads the headers of the weights only.
    """
    try:
        for path in weight_files(folder):
            with path.open("rb") as file:
                stored_tensors(path, file.fileno())
    except CheckpointUnreadable as error:
        return str(error).replace(f"{folder}/", "")
    except OSError as error:
        return f"{Path(error.filename).name}: {(error.strerror or str(error)).lower()}"
    said = without_weights(str(folder)) or ""
    return said.replace(f"the folder {folder}", "it")


def unobtainable(name: str) -> str:
    """Why a model's name leads to nothing, neither in the cache nor on the hub.

    Empty if it leads to a model, or is no hub's name. Asks the hub once; the libraries that load models
    would repeat their requests for up to a minute.
    """
    cache = cache_folder()
    known = PREFIX + name.replace("/", "--")
    if not HUB_NAME.fullmatch(name) or Path(name).exists() or "VLLM_USE_MODELSCOPE" in os.environ:
        return ""
    if any((cache / known / "snapshots").glob("*")):
        return ""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    meant = did_you_mean(name, [model.name for model in cached_models(cache)])
    try:
        HfApi().model_info(name, timeout=HUB_SECONDS)
    except RepositoryNotFoundError:
        hint = meant or "; if it is private, log in with `hf auth login`"
        return f"the hub has no model {name}{hint}"
    except Exception as error:
        # The client raises errors of whichever HTTP library it uses.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        hint = meant or "; give the path of a folder, or connect this machine"
        return f"{name} is not in {cache}, and the hub cannot be asked: {reason}{hint}"
    return ""


def check_models(cache: Path | None = None) -> list[Finding]:
    cache = cache_folder() if cache is None else cache
    found = list(cached_models(cache))
    whole = [model.name for model in found if not model.problem]
    shown = ", ".join(whole[:MOST_SHOWN]) + (", ..." if len(whole) > MOST_SHOWN else "")
    lines = [Finding("models", State.OK, f"{shown or 'none'} in {cache}")]
    for model in found:
        if model.problem:
            hint = f"remove {model.folder}, and let the next start download it again"
            lines.append(
                Finding(
                    "models", State.WARNING, f"{model.name} cannot be loaded: {model.problem}", hint
                )
            )
    return lines
