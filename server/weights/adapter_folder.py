"""Adapters as files, in the form that vLLM takes: one folder for each, in PEFT's format, in memory.

All of them are in one folder, which this server keeps locked. If the server is killed, the lock is
released, and the next server that starts removes the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from penstock.common.checkpoint import DTYPES
from penstock.server.engine.protocol import Adapter, StagedWeights
from penstock.server.weights.adapter_manifest import AdapterShape
from penstock.server.weights.staging.manifest import WeightRefused
from penstock.wire.reasons import Reason

# torch's name -> safetensors' name
DTYPE_NAMES = {torch_name: name for name, (torch_name, _) in DTYPES.items()}
NAME = "penstock-adapters-"


@dataclass(eq=False)
class AdapterFolders:
    parent: Path
    model: str
    """The base model of the adapters."""
    _folder: Path | None = None
    _lock: int = -1

    def write(self, staged: StagedWeights, shape: AdapterShape) -> Adapter:
        """Blocks on the disk. Raises WeightRefused."""
        lora = shape.lora
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.model,
            "r": lora.rank,
            "lora_alpha": lora.alpha,
            "target_modules": list(lora.target_modules),
            "use_rslora": lora.rank_stabilized,
            "lora_dropout": 0.0,
            "bias": "none",
            "inference_mode": True,
        }
        data = safetensors_file(staged)
        version = staged.weight_version
        try:
            adapter = Adapter(version, self._own() / f"v{version}")
            adapter.folder.mkdir()
            try:
                (adapter.folder / "adapter_config.json").write_text(json.dumps(config))
                (adapter.folder / "adapter_model.safetensors").write_bytes(data)
            except BaseException:
                self.remove(adapter)
                raise
            return adapter
        except OSError as error:
            raise WeightRefused(
                Reason.DISK_FULL,
                f"no room for the adapter of {len(data)} bytes ({self.parent}: {error.strerror})",
                length_bytes=len(data),
            ) from error

    def remove(self, adapter: Adapter) -> None:
        shutil.rmtree(adapter.folder, ignore_errors=True)

    def close(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._lock)
            self._folder = None

    def _own(self) -> Path:
        if self._folder is None:
            _remove_abandoned(self.parent)
            self._folder, self._lock = _locked_folder(self.parent)
        return self._folder


def safetensors_file(staged: StagedWeights) -> bytes:
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
    # Pad the table so that tensors are aligned when the file is mapped.
    text += b" " * (-len(text) % 8)
    return b"".join((len(text).to_bytes(8, "little"), text, *parts))


def _locked_folder(parent: Path) -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=NAME, dir=parent))
        # Until the folder is locked, another server that starts can mistake it for an abandoned one.
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if folder.exists():
                return folder, descriptor
            os.close(descriptor)


def _remove_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"{NAME}*"):
        # Skip folders that another server has locked, or that belong to another user.
        with contextlib.suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(descriptor)
