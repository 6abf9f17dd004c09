"""Whether a model's files are whole: in a folder, in the hub's cache, or still on the hub."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.common.checkpoint import CheckpointUnreadable, stored_tensors, weight_files
from penstock.common.models import missing_folder, without_weights
from penstock.common.suggestions import did_you_mean, listed
from penstock.machine.findings import Finding, State

PREFIX = "models--"
MOST_SHOWN = 20
HUB_SECONDS = 5.0
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
"""Names without an owner are few, and may be folders that another process makes."""
TRAINED_BYTES = 16
"""Of each parameter that is trained: weights, gradients and two moments in float32."""
FROZEN_BYTES = 4
"""Of each parameter below an adapter."""


class ModelUnusable(Exception):
    """The model cannot be loaded; the message says why."""


class ModelIncomplete(ModelUnusable):
    """Files are missing, which a download would bring."""


@dataclass(frozen=True)
class Weights:
    """The size of a model. Zero if it is not known."""

    elements: int = 0
    length_bytes: int = 0


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
    """Each model by its newest snapshot. Data sets are left out."""
    for folder in sorted(cache.glob(f"{PREFIX}*")):
        name = folder.name.removeprefix(PREFIX).replace("--", "/")
        yield CachedModel(name, folder, _what_is_broken(folder))


def _what_is_broken(folder: Path) -> str:
    snapshots = _snapshots(folder)
    if not snapshots:
        return "its download has not begun"
    try:
        read_weights(snapshots[-1])
    except ModelUnusable as error:
        return str(error)
    unfinished = any((folder / "blobs").glob("*.incomplete"))
    return "its download was interrupted" if unfinished else ""


def find_model(name: str) -> Weights:
    """A model's size, by its folder or its name. Raises ModelUnusable."""
    if (missing := missing_folder(name)) is not None:
        raise ModelUnusable(missing)
    return read_weights(Path(name)) if Path(name).is_dir() else look_up(name)


def read_weights(folder: Path) -> Weights:
    """The size of the model in a folder, by the headers of its weights. Zero for another format than
    safetensors. Raises ModelUnusable."""
    if (what := without_weights(str(folder))) is not None:
        raise ModelIncomplete(what)
    elements = length = 0
    try:
        files = weight_files(folder)
        if missing := [path.name for path in files if not path.exists()]:
            raise ModelIncomplete(f"{folder} lacks {listed(missing, 4)}")
        for path in files:
            with path.open("rb") as file:
                for tensor in stored_tensors(path, file.fileno()):
                    elements += math.prod(tensor.shape)
                    length += tensor.length_bytes
    except (CheckpointUnreadable, OSError) as error:
        raise ModelUnusable(f"{error}; the file is cut off or broken: copy it again") from error
    return Weights(elements, length)


def look_up(name: str) -> Weights:
    """The size of a model of the hub, in the cache or else by the hub. Zero if it is no hub's name.

    Asks the hub once; the libraries that load models would repeat their requests for up to a minute.
    Raises ModelUnusable if neither has it.
    """
    cache = cache_folder()
    if not HUB_NAME.fullmatch(name) or Path(name).exists() or "VLLM_USE_MODELSCOPE" in os.environ:
        return Weights()
    if snapshots := _snapshots(cache / (PREFIX + name.replace("/", "--"))):
        with contextlib.suppress(ModelIncomplete):
            return read_weights(snapshots[-1])
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    meant = did_you_mean(name, [model.name for model in cached_models(cache) if model.name != name])
    try:
        found = HfApi().model_info(name, timeout=HUB_SECONDS)
    except RepositoryNotFoundError as error:
        hint = meant or "; if it is private, log in with `hf auth login`"
        raise ModelUnusable(f"the hub has no model {name}{hint}") from error
    except Exception as error:
        # The client raises errors of whichever HTTP library it uses.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        hint = meant or "; give the path of a folder, or connect this machine"
        raise ModelUnusable(
            f"{name} is not in {cache}, and the hub cannot be asked: {reason}{hint}"
        ) from error
    return Weights(found.safetensors.total if found.safetensors else 0)


def _snapshots(folder: Path) -> list[Path]:
    """The newest last."""
    return sorted((folder / "snapshots").glob("*"), key=lambda path: path.stat().st_mtime)


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
