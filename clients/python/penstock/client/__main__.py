"""`python -m penstock.client`: an older name of `python -m penstock.cli`, which launch scripts use."""

from __future__ import annotations

import runpy

if __name__ == "__main__":
    runpy.run_module("penstock.cli", run_name="__main__", alter_sys=True)
