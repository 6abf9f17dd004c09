"""Reinforcement learning for language models: `penstock.train` in a script or a notebook.

    run = penstock.train(model="Qwen/Qwen3-0.6B", data="train.jsonl", reward=score)

Uses `launch` and `client`, but imports each only when one of its names is first used: an agent needs
neither torch nor the other extras.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.client import Trajectory, connect, group_reward
    from penstock.launch.errors import RunFailed, RunInvalid
    from penstock.launch.python import open_run, resume, train
    from penstock.launch.run import Run, SteppedRun

    __version__: str

__all__ = [
    "Run",
    "RunFailed",
    "RunInvalid",
    "SteppedRun",
    "Trajectory",
    "__version__",
    "connect",
    "group_reward",
    "open_run",
    "resume",
    "train",
]

_MODULES = {
    "Run": "launch.run",
    "RunFailed": "launch.errors",
    "RunInvalid": "launch.errors",
    "SteppedRun": "launch.run",
    "Trajectory": "client",
    "connect": "client",
    "group_reward": "client",
    "open_run": "launch.python",
    "resume": "launch.python",
    "train": "launch.python",
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        from penstock.common.distribution import installed_version

        return installed_version()
    if name not in _MODULES:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"penstock.{_MODULES[name]}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("penstock"):
            raise
        from penstock.common.distribution import pip_install

        raise ModuleNotFoundError(
            f"penstock.{name} needs {error.name}: {pip_install('cpu')}",
            name=error.name,
        ) from error


def __dir__() -> list[str]:
    return sorted(__all__)
