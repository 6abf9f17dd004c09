"""`python -m penstock.client`: an older name of `python -m penstock.cli`, which launch scripts use."""

from __future__ import annotations

import importlib

if __name__ == "__main__":
    importlib.import_module("penstock.cli.__main__").main()
