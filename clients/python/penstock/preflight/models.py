"""Whether a model's files are whole: a folder, or a name on the Hugging Face hub."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from penstock.common.checkpoint import CheckpointUnreadable, stored_tensors, weight_files
from penstock.common.models import without_weights
from penstock.common.suggestions import listed
from penstock.preflight.report import within

HUB_SECONDS = 1.5


class ModelUnusable(Exception):
    """The model cannot be loaded; the message says why."""


@dataclass(frozen=True)
class Model:
    """The size of a model. Zero if it is not on this machine yet."""

    elements: int = 0
    length_bytes: int = 0


def check_model(name: str) -> Model:
    """Reads the headers of a model's files, or looks for it in the hub's cache and then on the hub.

    Raises ModelUnusable.
    """
    if Path(name).is_dir() or name.startswith(("/", ".", "~")) or name.count("/") > 1:
        if (what := without_weights(name)) is not None:
            raise ModelUnusable(what)
        return _read(Path(name))
    if "://" in name:
        return Model()
    return _of_hub(name)


def _read(folder: Path) -> Model:
    elements = length = 0
    try:
        files = weight_files(folder)
        if missing := [file.name for file in files if not file.exists()]:
            raise ModelUnusable(f"{folder} lacks {listed(missing, 4)}, which its index names")
        for file in files:
            descriptor = os.open(file, os.O_RDONLY)
            try:
                for tensor in stored_tensors(file, descriptor):
                    elements += math.prod(tensor.shape)
                    length += tensor.length_bytes
            finally:
                os.close(descriptor)
    except (CheckpointUnreadable, OSError) as error:
        raise ModelUnusable(f"{error}; the file is cut off or broken: copy it again") from error
    return Model(elements, length)


def _of_hub(name: str) -> Model:
    from huggingface_hub import constants, errors, get_token, try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(name, "config.json")
    except errors.HFValidationError as error:
        raise ModelUnusable(f"{name} is neither a folder nor a name on the hub") from error
    if isinstance(cached, str):
        folder = Path(cached).parent
        return _read(folder) if without_weights(str(folder)) is None else Model()
    cache = constants.HF_HUB_CACHE
    if constants.HF_HUB_OFFLINE:
        raise ModelUnusable(
            f"{name} is not in {cache}, and HF_HUB_OFFLINE=1 forbids to download it"
        )
    request = Request(f"{constants.ENDPOINT}/api/models/{name}")
    if (token := get_token()) is not None:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        about = within(2 * HUB_SECONDS, lambda: _ask(request))
    except HTTPError as error:
        if error.code not in (401, 403, 404):
            return Model()
        raise ModelUnusable(
            f"there is no folder {name}, and the hub has no such model, or needs HF_TOKEN for it"
        ) from error
    except OSError as error:
        raise ModelUnusable(
            f"there is no folder {name}, it is not in {cache}, and {constants.ENDPOINT} does not "
            "answer; give the folder of a copy"
        ) from error
    safetensors = cast("dict[str, int]", about.get("safetensors") or {})
    return Model(safetensors.get("total", 0))


def _ask(request: Request) -> dict[str, Any]:
    with urlopen(request, timeout=HUB_SECONDS) as answer:
        return json.load(answer)
