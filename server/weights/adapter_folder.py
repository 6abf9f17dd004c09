"""Adapters as files, the form that vLLM takes them in: a folder for each, as PEFT writes it, in memory.

They lie in one folder of this server's, which it keeps locked. What a killed server left is removed by the
next one that starts: nobody holds its lock any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from pathlib import Path

from penstock.server.engine.protocol import Adapter, StagedWeights
from penstock.server.weights.adapter_manifest import AdapterShape
from penstock.server.weights.upload.checkpoint_tensors import DTYPES
from penstock.server.weights.upload.manifest import WeightRefused
from penstock.wire.reasons import Reason

# torch's name -> safetensors' name
DTYPE_NAMES = {torch_name: name for name, (torch_name, _) in DTYPES.items()}
NAME = "penstock-adapters-"
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"


class AdapterFolders:
    """The folders of one server."""

    def __init__(self, parent: Path, model: str) -> None:
        """`parent` is where they live, and `model` what the adapters are of."""
        self._parent = parent
        self._model = model
        self._folder: Path | None = None
        self._lock = -1

    def write(self, staged: StagedWeights, shape: AdapterShape) -> Adapter:
        """A folder with the bytes of a verified version. Blocks; raises WeightRefused."""
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self._model,
            "r": shape.rank,
            "lora_alpha": shape.alpha,
            "target_modules": list(shape.target_modules),
            "use_rslora": shape.rank_stabilized,
            "lora_dropout": 0.0,
            "bias": "none",
            "inference_mode": True,
        }
        data = safetensors_file(staged)
        version = staged.weight_version
        try:
            with contextlib.ExitStack() as undo:
                adapter = Adapter(version, self._own() / f"v{version}")
                adapter.folder.mkdir()
                undo.callback(self.remove, adapter)
                (adapter.folder / CONFIG_FILE).write_text(json.dumps(config))
                (adapter.folder / WEIGHTS_FILE).write_bytes(data)
                undo.pop_all()
                return adapter
        except OSError as error:
            raise WeightRefused(
                Reason.DISK_FULL,
                f"no room for the adapter of {len(data)} bytes ({self._parent}: {error.strerror})",
                length_bytes=len(data),
            ) from error

    def remove(self, adapter: Adapter) -> None:
        """Gives its memory back."""
        shutil.rmtree(adapter.folder, ignore_errors=True)

    def close(self) -> None:
        """Removes everything."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._lock)
            self._folder = None

    def _own(self) -> Path:
        if self._folder is None:
            _remove_abandoned(self._parent)
            self._folder, self._lock = _locked_folder(self._parent)
        return self._folder


def safetensors_file(staged: StagedWeights) -> bytes:
    """A version as the bytes of a safetensors file: a length, a table, the tensors one after the other."""
    data = staged.path.read_bytes()
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    parts: list[bytes] = []
    end = 0
    for tensor in staged.tensors:
        part = data[tensor.offset_bytes : tensor.offset_bytes + tensor.length_bytes]
        begin, end = end, end + len(part)
        table[tensor.name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": (begin, end),
        }
        parts.append(part)
    text = json.dumps(table).encode()
    # So that tensors are aligned where the file is mapped.
    text += b" " * (-len(text) % 8)
    return b"".join((len(text).to_bytes(8, "little"), text, *parts))


def _locked_folder(parent: Path) -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=NAME, dir=parent))
        # Until it is locked, another server that starts may take it for abandoned.
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if folder.exists():
                return folder, descriptor
            os.close(descriptor)


def _remove_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"{NAME}*"):
        # Another server's, or somebody else's who may not be asked, stays.
        with contextlib.suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(descriptor)
