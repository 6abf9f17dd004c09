"""Writes every generated page: `python -m tests.support.reference`."""

from __future__ import annotations

from tests.support.reference.pages import FOLDER, PAGES

for name, write in PAGES.items():
    (FOLDER / name).write_text(write())
