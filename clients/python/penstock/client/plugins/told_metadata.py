"""Sends what a slime function wrote into a sample's metadata as metadata of the attempt's outcome.

A filter of the trainer's groups can read it there.

    sample.metadata before and after -> new and changed entries, as JSON -> Outcome.metadata

If the result is complete, it carries a mark. With the mark, the trainer knows that a missing key was never
set. Without it, the trainer cannot know. A removed key makes the result incomplete. So does a value that
is too large, too deep, or has no exact form in JSON, such as an integer beyond 2^53.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

from penstock.client.values import from_struct, to_struct
from penstock.wire.agent_marks import METADATA, OWN_PREFIX, WHOLE

MOST_BYTES = 64 << 10
"""The journal and the memory hold it until its group is trained. An outcome can have 1 MiB."""
MOST_LEVELS = 16
"""A server refuses an outcome whose metadata is 24 levels deep, which would lose the attempt."""


def told_metadata(before: Mapping[str, Any], after: Any) -> dict[str, Any]:
    """Returns metadata for the outcome. `after` is whatever the function left in the sample."""
    if not isinstance(after, Mapping):
        return {}
    entries = cast("Mapping[Any, Any]", after)
    told: dict[str, Any] = {}
    whole = all(key in entries for key in before)
    room = MOST_BYTES
    for key, value in entries.items():
        if not isinstance(key, str):
            whole = False
            continue
        text = _text(value)
        if text is not None and key in before and _text(before[key]) == text:
            continue
        # A value that does not fit leaves its room to others.
        fits = text is not None and len(key) + len(text) <= room
        sent = _sent(key, text) if text is not None and fits else None
        if text is None or sent is None or key.startswith(OWN_PREFIX):
            whole = False
            continue
        room -= len(key) + len(text)
        told[key] = sent[key]
    return {**told, METADATA: WHOLE} if whole else told


def _text(value: Any) -> str | None:
    """Returns the value as JSON, or None if JSON cannot hold it."""
    try:
        return json.dumps(value, allow_nan=False, default=_plain)
    except (TypeError, ValueError, RecursionError):
        return None


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"JSON has no {type(value).__name__}")


def _sent(key: str, text: str) -> dict[str, Any] | None:
    """Returns an entry as it arrives at the trainer, or None if it would not arrive intact."""
    entry = {key: json.loads(text)}
    if _is_deep(entry):
        return None
    try:
        arrives = from_struct(to_struct(entry))
    except (TypeError, ValueError, OverflowError, RecursionError):
        return None
    return entry if arrives == entry else None


def _is_deep(value: object) -> bool:
    level = [value]
    for _ in range(MOST_LEVELS):
        level = [inner for outer in level for inner in _containers_in(outer)]
    return bool(level)


def _containers_in(value: object) -> list[object]:
    if isinstance(value, dict):
        value = list(cast("dict[str, object]", value).values())
    return [one for one in cast("list[object]", value) if isinstance(one, dict | list)]
