"""Sources with finitely many rows: pass after pass, each in a new order."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
import xxhash

from penstock.common.suggestions import listed
from penstock.trainer.config.data import RowsConfig
from penstock.trainer.core.errors import ConfigInvalid
from penstock.trainer.data.sources.problem import ROLES, Problem

# A protocol message may be nested up to a hundred deep, and each level of metadata takes three.
MOST_NESTED = 30


PROMPT_WORDS = ("prompt", "question", "problem", "instruction", "query", "input", "task")
"""Words in the names of fields that data sets use for the prompt."""


class Rows(Protocol):
    """Rows with a known count and random access."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> object: ...
    def __iter__(self) -> Iterator[object]: ...


@dataclass(eq=False, repr=False)
class RowSource:
    """Each row is read once at the start for checks, and then when needed."""

    rows: Rows
    config: RowsConfig
    kind: str
    name: str
    seed: int
    place: Callable[[int], str]
    """Describes, for error messages, where row n is."""
    digest: str = ""
    """Identifies the content; if empty, it is computed from all rows."""

    def __post_init__(self) -> None:
        """Raises ConfigInvalid, naming the row, if a row cannot become a task, or if there are no rows."""
        content = xxhash.xxh3_128()
        for number, row in enumerate(self.rows):
            read_problem(row, self.config, self.name, self.place(number))
            if not self.digest:
                content.update(as_json(row, self.place(number)).encode() + b"\n")
        if not len(self.rows):
            raise ConfigInvalid(f"{self.place(0)}: there are no rows")
        order = f"order {self.seed}" if self.config.shuffle else "as written"
        fields = f"{self.config.messages_field} or {self.config.prompt_field}"
        digest = self.digest or content.hexdigest()
        self.identity = f"{self.kind} {digest}, {fields}, {order}"
        self._pass, self._order = -1, list[int]()

    @property
    def size(self) -> int:
        """Number of problems in one pass."""
        return len(self.rows)

    def problem(self, index: int) -> Problem:
        """Returns one problem. Each pass contains every row once."""
        number, place = divmod(index, len(self.rows))
        row = self._ordered(number)[place] if self.config.shuffle else place
        return read_problem(self.rows[row], self.config, self.name, self.place(row))

    def _ordered(self, number: int) -> list[int]:
        if number != self._pass:
            self._pass, self._order = number, list(range(len(self.rows)))
            random.Random(f"{self.seed}/{number}").shuffle(self._order)
        return self._order


def read_problem(row: object, config: RowsConfig, name: str, place: str) -> Problem:
    """Reads a row: the prompt, and all other fields as metadata. A string is a prompt without metadata.

    Raises ConfigInvalid if the row has no prompt or a task cannot hold it.
    """
    if isinstance(row, str):
        _check_sendable(row, place)
        return Problem((("user", row),), {}, name)
    if not isinstance(row, Mapping):
        raise ConfigInvalid(f"{place}: expected an object, got {repr(row)[:80]}")
    fields = dict(cast("Mapping[str, object]", row))
    # A table has a column for every row, so it may be present and empty.
    if (conversation := fields.pop(config.messages_field, None)) is not None:
        messages = _messages(conversation, place)
    elif isinstance(prompt := fields.pop(config.prompt_field, None), str):
        messages = (("user", prompt),)
    else:
        raise ConfigInvalid(
            f"{place}: expected {config.messages_field!r}, or a string in {config.prompt_field!r}; "
            f"{_fields_to_name(cast('Mapping[str, object]', row))}"
        )
    metadata = cast("dict[str, object]", json.loads(as_json(fields, place), parse_int=_exact))
    for _, content in messages:
        _check_sendable(content, place)
    _check_sendable(metadata, place)
    return Problem(messages, metadata, name)


def _fields_to_name(row: Mapping[str, object]) -> str:
    """The fields of a row without a prompt, and the settings that would name one of them."""
    chats = [name for name, value in row.items() if _is_chat(value)]
    texts = [name for name, value in row.items() if isinstance(value, str)]
    likely = [name for name in texts if any(word in name.lower() for word in PROMPT_WORDS)]
    has = f"the row has {listed(map(str, row)) or 'no fields'}"
    if chats:
        return f'{has}: set messages_field = "{chats[0]}"'
    if likely or len(texts) == 1:
        return f'{has}: set prompt_field = "{(likely or texts)[0]}"'
    return f"{has}: name one of them with prompt_field or messages_field"


def _is_chat(value: object) -> bool:
    if not isinstance(value, list | tuple) or not value:
        return False
    items = cast("Sequence[Mapping[str, object] | object]", value)
    return all(isinstance(i, Mapping) and "role" in i and "content" in i for i in items)


def as_json(value: object, place: str) -> str:
    """Returns the same text for equal values. What JSON cannot express (dates, NaN) becomes a string.

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
    """Converts values that JSON cannot express: numpy values to plain ones, others to their string."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return str(value)


def _finite(value: object) -> object:
    """Returns the value with each non-finite number replaced by its string."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {k: _finite(v) for k, v in cast("Mapping[object, object]", value).items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in cast("Sequence[object]", value)]
    if value is None or isinstance(value, str | int):
        return value
    return _finite(_plain(value))


def _exact(digits: str) -> int | str:
    """Reads an integer of JSON; returns it as a string if a double, the only number in a task, would round
    it: a twenty-digit answer, or a 64-bit row number."""
    try:
        return int(digits) if int(float(digits)) == int(digits) else digits
    except OverflowError:
        return digits


def _check_sendable(value: object, place: str, depth: int = 0) -> None:
    """Raises ConfigInvalid if a protocol message cannot hold this JSON value."""
    try:
        if isinstance(value, str):
            value.encode()
    except UnicodeEncodeError as error:
        raise ConfigInvalid(f"{place}: {error}") from error
    if isinstance(value, dict | list):
        if depth == MOST_NESTED:
            raise ConfigInvalid(f"{place}: it is nested more than {MOST_NESTED} levels deep")
        fields = cast("dict[str, object] | list[object]", value)
        for each in (*fields, *fields.values()) if isinstance(fields, dict) else fields:
            _check_sendable(each, place, depth + 1)


def _messages(value: object, place: str) -> tuple[tuple[str, str], ...]:
    items = cast("list[object]", value) if isinstance(value, list | tuple) else []
    messages: list[tuple[str, str]] = []
    for item in items:
        fields = cast("Mapping[str, object]", item if isinstance(item, Mapping) else {})
        role, content = fields.get("role"), fields.get("content")
        if role not in ROLES or not isinstance(content, str):
            raise ConfigInvalid(f"{place}: a message needs a role and a content, got {item!r}")
        messages.append((str(role), content))
    if not messages:
        raise ConfigInvalid(f"{place}: expected a list of messages, got {value!r}")
    return tuple(messages)
