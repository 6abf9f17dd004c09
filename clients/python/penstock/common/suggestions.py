"""Suggests the name that a misspelt one was meant to be."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable
from pathlib import Path

_CLOSE = 0.66


def nearest(word: str, names: Iterable[str], cutoff: float = _CLOSE) -> str | None:
    """The name closest to `word`, or the one it abbreviates (`lr` for `learning_rate`), or None.

    `cutoff` is the least similarity, from 0 to 1. Case, dashes and underscores make no difference.
    """
    given = _plain(word)
    known = {_plain(name): name for name in names}
    if close := difflib.get_close_matches(given, known, n=1, cutoff=cutoff):
        return known[close[0]]
    short = [name for name in known if "".join(part[:1] for part in name.split("_")) == given]
    return known[short[0]] if len(short) == 1 and len(given) > 1 else None


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """`; did you mean X?` to append to a message, or an empty string."""
    found = nearest(word, names)
    return "" if found is None else f"; did you mean {found}?"


def unreadable(path: Path, error: OSError) -> str:
    """Why a file cannot be read; if it does not exist, also where it was looked for, and a similar name."""
    said = f"{path}: {error.strerror or error}"
    if not isinstance(error, FileNotFoundError):
        return said
    where = "" if path.is_absolute() else f" (in {Path.cwd()})"
    with contextlib.suppress(OSError):
        names = [entry.stem for entry in path.parent.iterdir() if entry.suffix == path.suffix]
        if found := nearest(path.stem, names):
            return f"{said}{where}; did you mean {path.with_name(found + path.suffix)}?"
    return f"{said}{where}"


def listed(names: Iterable[str], most: int = 24) -> str:
    """The names separated by commas; those beyond `most` are only counted."""
    given = list(names)
    more = f" and {len(given) - most} more" if len(given) > most else ""
    return ", ".join(given[:most]) + more


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")
