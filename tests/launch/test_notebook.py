"""examples/train.ipynb runs from its first cell to its last, in a loop that runs, as a notebook has one."""

from __future__ import annotations

import ast
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_model import make_tiny_model

NOTEBOOK = Path(__file__).parents[2] / "examples" / "train.ipynb"


@pytest.mark.timeout(600)
async def test_every_cell_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny_model(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["source"]]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    changed = sources[0].replace("Qwen/Qwen3-0.6B", str(model)).replace("STEPS = 50", "STEPS = 2")
    assert changed != sources[0]
    names: dict[str, Any] = {"__name__": "__main__"}
    for source in (changed, *sources[1:]):
        code = compile(source, str(NOTEBOOK), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        result = eval(code, names)
        if inspect.isawaitable(result):
            await result
    for name in ("run", "stepped"):
        assert [line["step"] for line in names[name].metrics] == [1, 2]
        assert (names[name].model / "model.safetensors").exists()
    assert names["figures"]["trajectories"] == 16
    assert all("outputs" not in cell or not cell["outputs"] for cell in cells)
