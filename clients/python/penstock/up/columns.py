"""Tables as plain lines, for terminals of any width and for pipes."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence

GAP = 2
LEAST = 16
"""Characters that the last column has at least, before other columns are left out for it."""


def terminal_width() -> int | None:
    """The width of the terminal; None if the output goes elsewhere."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def in_columns(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    width: int | None,
    expendable: Sequence[str] = (),
    keep_end: bool = False,
) -> list[str]:
    """The lines of a table whose last column has what the others leave of `width`, or any length if None.

    The columns named by `expendable` are left out, in this order, while the last one has too little room.
    A cell that is too long loses its end, or with `keep_end` its beginning.
    """
    kept = list(range(len(heads)))
    table = [heads, *rows]
    spare = [heads.index(name) for name in expendable]

    def room() -> int | None:
        if width is None:
            return None
        return width - sum(max(len(row[c]) for row in table) + GAP for c in kept[:-1])

    needed = min(LEAST, max(len(row[-1]) for row in table))
    while spare and (left := room()) is not None and left < needed:
        kept.remove(spare.pop(0))
    left = room()
    lines: list[str] = []
    for row in table:
        cells = [row[c].ljust(max(len(r[c]) for r in table)) for c in kept[:-1]]
        last = row[-1] if left is None else _cut(row[-1], max(left, 1), keep_end=keep_end)
        lines.append((" " * GAP).join([*cells, last]).rstrip())
    return lines


def _cut(text: str, length: int, *, keep_end: bool) -> str:
    if len(text) <= length:
        return text
    return f"…{text[len(text) - length + 1 :]}" if keep_end else f"{text[: length - 1]}…"
