"""examples/train.ipynb runs from its first cell to its last, in a loop that runs, as a notebook has one.
Its server with vLLM ends without a word."""

from __future__ import annotations

import ast
import inspect
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.launch import python
from penstock.up import placement
from penstock.up.cast import Programs, penstock
from penstock.up.processes import Process
from tests.support.tiny_model import make_tiny_model
from tests.support.up_with_fakes import programs

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "train.ipynb"
# To clear the gigabytes that are the default takes five seconds.
SMALL = Programs(serve=penstock("serve", "--kv-cache-memory-bytes", str(1 << 25)))
OWN_WORDS = re.compile(r"penstock (serving|endpoints) |[\d-]+ [\d:,]+ (INFO|WARNING) penstock\.")


@pytest.mark.timeout(600)
async def test_every_cell_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny_model(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["source"]]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    changed = sources[0].replace("Qwen/Qwen3-0.6B", str(model)).replace("STEPS = 50", "STEPS = 2")
    assert changed != sources[0]
    names: dict[str, Any] = {"__name__": "__main__"}
    started: list[Process] = []

    class Noted(Process):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            started.append(self)

    monkeypatch.setattr(placement, "Process", Noted)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for source in (changed, *sources[1:]):
        # Only the run by steps has vLLM: that of one call is as in test_one_command, which has it too.
        whole = "penstock.train(" in source
        monkeypatch.setattr(
            python, "PROGRAMS", replace(SMALL, serve=programs().serve) if whole else SMALL
        )
        code = compile(source, str(NOTEBOOK), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        result = eval(code, names)
        if inspect.isawaitable(result):
            await result
    for name in ("run", "stepped"):
        assert [line["step"] for line in names[name].metrics] == [1, 2]
        assert (names[name].model / "model.safetensors").exists()
    assert names["figures"]["trajectories"] == 16
    assert [process.command.name for process in started] == ["server", "trainer", "server"]
    assert await started[-1].wait() == 0
    said = (names["stepped"].folder / "server.log").read_text().splitlines()
    assert len(said) > 2
    assert [line for line in said if not OWN_WORDS.match(line)] == []
    assert all("outputs" not in cell or not cell["outputs"] for cell in cells)
