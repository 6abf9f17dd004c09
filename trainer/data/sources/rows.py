"""Sources of finitely many rows: pass after pass, each in an order of its own."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import numpy as np
import xxhash

from penstock.trainer.config.data import RowsConfig
from penstock.trainer.core.errors import ConfigInvalid
from penstock.trainer.data.sources.problem import ROLES, Problem

# A message of the protocol is nested at most a hundred deep, and each level of metadata is three.
MOST_NESTED = 30


class RowSource:
    """Rows that can be counted and looked up; none is read before it is needed, but for one look at each
    at the beginning."""

    def __init__(
        self,
        rows: Sequence[object],
        config: RowsConfig,
        *,
        kind: str,
        name: str,
        seed: int,
        place: Callable[[int], str],
        digest: str = "",
    ) -> None:
        """`place` says, for a person, where row n is; `digest` is the content's, and made of all rows where
        it is empty.

        Raises ConfigInvalid, naming the row, where one cannot be a task, and where there is none.
        """
        self.name = name
        self._rows, self._config, self._place = rows, config, place
        content = xxhash.xxh3_128()
        for number, row in enumerate(rows):
            read_problem(row, config, name, place(number))
            if not digest:
                content.update(as_json(row, place(number)).encode() + b"\n")
        if not len(rows):
            raise ConfigInvalid(f"{place(0)}: there is no row")
        order = f"order {seed}" if config.shuffle else "as written"
        fields = f"{config.messages_field} or {config.prompt_field}"
        self.identity = f"{kind} {digest or content.hexdigest()}, {fields}, {order}"
        self._seed = seed
        self._pass, self._order = -1, list[int]()

    @property
    def size(self) -> int:
        """Problems in one pass."""
        return len(self._rows)

    def problem(self, index: int) -> Problem:
        """One problem; each pass over the rows has every one of them once."""
        number, place = divmod(index, len(self._rows))
        row = self._ordered(number)[place] if self._config.shuffle else place
        return read_problem(self._rows[row], self._config, self.name, self._place(row))

    def _ordered(self, number: int) -> list[int]:
        if number != self._pass:
            self._pass, self._order = number, list(range(len(self._rows)))
            random.Random(f"{self._seed}/{number}").shuffle(self._order)
        return self._order


def read_problem(row: object, config: RowsConfig, name: str, place: str) -> Problem:
    """What a row asks; what of it is not the prompt is metadata. A text is a prompt and no more.

    Raises ConfigInvalid, also where a task cannot hold what it says.
    """
    if isinstance(row, str):
        _check_sendable(row, place)
        return Problem((("user", row),), {}, name)
    if not isinstance(row, Mapping):
        raise ConfigInvalid(f"{place}: an object is needed, got {repr(row)[:80]}")
    fields = dict(cast("Mapping[str, object]", row))
    # A column of a table that other rows have is there all the same, and empty.
    if (conversation := fields.pop(config.messages_field, None)) is not None:
        messages = _messages(conversation, place)
    elif isinstance(prompt := fields.pop(config.prompt_field, None), str):
        messages = (("user", prompt),)
    else:
        raise ConfigInvalid(
            f"{place}: needs {config.messages_field!r}, or a text in {config.prompt_field!r}"
        )
    metadata = cast("dict[str, object]", _exact(json.loads(as_json(fields, place))))
    for _, content in messages:
        _check_sendable(content, place)
    _check_sendable(metadata, place)
    return Problem(messages, metadata, name)


def as_json(value: object, place: str) -> str:
    """The same text for the same value; what JSON has no form for, such as a date or a NaN, is its text.

    Raises ConfigInvalid.
    """
    try:
        try:
            return json.dumps(value, default=_plain, sort_keys=True, allow_nan=False)
        except ValueError:
            return json.dumps(_finite(value), sort_keys=True, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigInvalid(f"{place}: {error}") from error


def _plain(value: object) -> object:
    """What JSON has no form for: numpy's as what they hold, a date or the like as its text."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return str(value)


def _finite(value: object) -> object:
    """The same value with the text of each number that is none."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {k: _finite(v) for k, v in cast("Mapping[object, object]", value).items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in cast("Sequence[object]", value)]
    if value is None or isinstance(value, str | int):
        return value
    return _finite(_plain(value))


def _exact(value: object) -> object:
    """A value of JSON with the text of each whole number that a double, all that a task can hold, would
    round: an answer of twenty digits, or a row's number of 64 bits."""
    if isinstance(value, dict):
        return {key: _exact(each) for key, each in cast("dict[str, object]", value).items()}
    if isinstance(value, list):
        return [_exact(each) for each in cast("list[object]", value)]
    if isinstance(value, int) and not isinstance(value, bool) and not _is_exact(value):
        return str(value)
    return value


def _is_exact(number: int) -> bool:
    try:
        return int(float(number)) == number
    except OverflowError:
        return False


def _check_sendable(value: object, place: str, depth: int = 0) -> None:
    """Raises ConfigInvalid where a message of the protocol cannot hold a value of JSON."""
    try:
        if isinstance(value, str):
            value.encode()
    except UnicodeEncodeError as error:
        raise ConfigInvalid(f"{place}: {error}") from error
    if isinstance(value, dict | list):
        if depth == MOST_NESTED:
            raise ConfigInvalid(f"{place}: it is nested more than {MOST_NESTED} deep")
        fields = cast("dict[str, object] | list[object]", value)
        for each in (*fields, *fields.values()) if isinstance(fields, dict) else fields:
            _check_sendable(each, place, depth + 1)


def _messages(value: object, place: str) -> tuple[tuple[str, str], ...]:
    items = cast("list[object]", value) if isinstance(value, list | tuple) else []
    messages: list[tuple[str, str]] = []
    for item in items:
        if not isinstance(item, Mapping):
            raise ConfigInvalid(f"{place}: a message is a role and a content, got {item!r}")
        fields = cast("Mapping[str, object]", item)
        role, content = fields.get("role"), fields.get("content")
        if role not in ROLES or not isinstance(content, str):
            raise ConfigInvalid(f"{place}: a message is a role and a content, got {item!r}")
        messages.append((str(role), content))
    if not messages:
        raise ConfigInvalid(f"{place}: a list of messages is needed, got {value!r}")
    return tuple(messages)
