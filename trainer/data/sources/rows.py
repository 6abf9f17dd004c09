"""Sources with finitely many rows: pass after pass, each in a new order."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
import xxhash

from penstock.common.suggestions import did_you_mean, listed
from penstock.trainer.config.data import RowsConfig
from penstock.trainer.core.errors import ConfigInvalid
from penstock.trainer.data.sources.problem import ROLES, Problem, ProblemTool

# A protocol message may be nested up to a hundred deep, and each level of metadata takes three.
MOST_NESTED = 30


PROMPTS = ("messages", "prompt", "question", "problem")
"""Columns with the prompt; of several, the first."""
ANSWERS = ("answer", "label", "reward_model.ground_truth", "ground_truth", "solution")
"""Columns with the right answer; of several, the first."""
PROMPT_WORDS = ("prompt", "question", "problem", "instruction", "query", "input", "task")
"""Words in the names of other columns that data sets use for the prompt."""
GSM8K = re.compile(r"(?:^|\n)####[ \t]*(\S.*?)\s*$")
"""How a worked solution of GSM8K ends."""


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
        digest = self.digest or content.hexdigest()
        self.identity = f"{self.kind} {digest}{columns_read(self.config)}, {order}"
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


def columns_read(config: RowsConfig) -> str:
    """The columns that the configuration names, for the identity of a source."""
    named = config.columns.model_dump(exclude_defaults=True)
    return "".join(f", {name} from {column}" for name, column in named.items())


def read_problem(row: object, config: RowsConfig, name: str, place: str) -> Problem:
    """Reads a row: the prompt, and all other columns as metadata. A string is a prompt without metadata.

    The right answer, if there is one, is `answer` in the metadata. Raises ConfigInvalid if the row has no
    prompt or a task cannot hold it.
    """
    if isinstance(row, str):
        _check_sendable(row, place)
        return Problem((("user", row),), {}, name, text_prompt=True)
    if not isinstance(row, Mapping):
        raise ConfigInvalid(f"{place}: expected an object, got {repr(row)[:80]}")
    fields = dict(cast("Mapping[str, object]", row))
    messages, is_text = _prompt(fields, config.columns.prompt, place)
    tools = _tools(fields, place)
    said = None
    if len(messages) > 1 and messages[-1][0] == "assistant":
        # A conversation to imitate: the policy gives this answer itself.
        *messages, (_, said) = messages
    _set_answer(fields, config.columns.answer, said, place)
    metadata = cast("dict[str, object]", json.loads(as_json(fields, place), parse_int=_exact))
    for _, content in messages:
        _check_sendable(content, place)
    _check_sendable(metadata, place)
    return Problem(tuple(messages), metadata, name, tools, is_text)


def _prompt(
    fields: dict[str, object], column: str, place: str
) -> tuple[list[tuple[str, str]], bool]:
    """Reads the prompt, and removes its column. Also returns whether it is a text."""
    names = [column] if column else PROMPTS
    found = next((name for name in names if _at(fields, name) is not None), None)
    if found is None:
        raise ConfigInvalid(f"{place}: {_without(fields, 'prompt', column, PROMPTS)}")
    value = _at(fields, found)
    for name in names[: names.index(found) + 1]:
        # A table has a column for every row, so those before may be present and empty.
        fields.pop(name, None)
    if isinstance(value, str):
        return [("user", value)], True
    if isinstance(value, np.ndarray):
        value = cast("object", value.tolist())
    if not isinstance(value, list | tuple):
        raise ConfigInvalid(
            f"{place}: {found!r} is neither a text nor a list of messages: {repr(value)[:80]}"
        )
    return _messages(cast("Sequence[object]", value), place), False


def _tools(fields: dict[str, object], place: str) -> tuple[ProblemTool, ...]:
    """Reads the column `tools`, and removes it: functions with a JSON Schema, as OpenAI's API and TRL have
    them, or the same as a text of JSON."""
    value = fields.pop("tools", None)
    if isinstance(value, str):
        try:
            value = cast("object", json.loads(value)) if value.strip() else None
        except ValueError as error:
            raise ConfigInvalid(f"{place}: tools: not valid JSON: {error}") from error
    if isinstance(value, np.ndarray):
        value = cast("object", value.tolist())
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise ConfigInvalid(f"{place}: tools: expected a list of functions, got {repr(value)[:80]}")
    return tuple(_tool(one, place) for one in cast("Sequence[object]", value))


def _tool(value: object, place: str) -> ProblemTool:
    function = _at(value, "function") or value
    name, parameters = _at(function, "name"), _at(function, "parameters")
    if not isinstance(name, str) or not name:
        raise ConfigInvalid(f"{place}: tools: a function needs a name, got {repr(value)[:80]}")
    if isinstance(parameters, str):
        # Parquet has one type per column, so tables often keep schemas as text.
        try:
            parameters = cast("object", json.loads(parameters))
        except ValueError as error:
            raise ConfigInvalid(f"{place}: tools: {name}: parameters: {error}") from error
    if parameters is None:
        parameters = {}
    if not isinstance(parameters, Mapping):
        raise ConfigInvalid(f"{place}: tools: {name}: parameters must be a JSON Schema")
    schema = json.loads(
        as_json(_without_nulls(cast("object", parameters)), place), parse_int=_exact
    )
    _check_sendable(schema, place)
    description = _at(function, "description")
    return ProblemTool(name, str(description or ""), schema)


def _without_nulls(value: object) -> object:
    """Drops what a table fills in: a column of structures has every field in every row."""
    if isinstance(value, Mapping):
        fields = cast("Mapping[object, object]", value)
        return {k: _without_nulls(v) for k, v in fields.items() if v is not None}
    if isinstance(value, list | tuple | np.ndarray):
        return [_without_nulls(each) for each in cast("Sequence[object]", value)]
    return value


def _set_answer(fields: dict[str, object], column: str, said: str | None, place: str) -> None:
    """Puts the right answer into `answer`; of a worked solution of GSM8K, only the number."""
    found = [
        a for name in ([column] if column else ANSWERS) if (a := _at(fields, name)) is not None
    ]
    if column and not found:
        raise ConfigInvalid(f"{place}: {_without(fields, 'answer', column, ANSWERS)}")
    answer = next(iter(found), said)
    if isinstance(answer, str) and (last := GSM8K.search(answer)) is not None:
        fields.setdefault("solution", answer)
        answer = re.sub(r"(?<=\d),(?=\d{3})", "", last[1])
    if answer is not None:
        fields["answer"] = answer


def _at(fields: object, name: str) -> object:
    """The value of a column, or the one that a name with dots leads to. None if there is none."""
    if not isinstance(fields, Mapping):
        return None
    table = cast("Mapping[str, object]", fields)
    if name in table:
        return table[name]
    first, dot, rest = name.partition(".")
    return _at(table.get(first), rest) if dot else None


def _without(fields: Mapping[str, object], what: str, column: str, usual: Sequence[str]) -> str:
    """What a row that lacks the prompt or the answer has, and how to name the column to use."""
    has = f"the row has {listed(map(str, fields)) or 'no columns'}"
    if column:
        return f"no {what} in {column!r}; {has}{did_you_mean(column, fields)}"
    chats = [name for name, value in fields.items() if _is_chat(value)]
    texts = [name for name, value in fields.items() if isinstance(value, str)]
    likely = [name for name in texts if any(word in name.lower() for word in PROMPT_WORDS)]
    name = next(iter([*chats, *likely, *texts]), "COLUMN")
    return (
        f"no {what} in {', '.join(usual)}; {has}; "
        f'name it with columns = {{ {what} = "{name}" }}, or --columns {what}={name}'
    )


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


def _messages(items: Sequence[object], place: str) -> list[tuple[str, str]]:
    messages: list[tuple[str, str]] = []
    for item in items:
        fields = cast("Mapping[str, object]", item if isinstance(item, Mapping) else {})
        role, content = fields.get("role"), _text(fields.get("content"))
        if role not in ROLES or content is None:
            raise ConfigInvalid(
                f"{place}: a message needs a role and a text as content, got {item!r}"
            )
        messages.append((str(role), content))
    if not messages:
        raise ConfigInvalid(f"{place}: expected a list of messages, got {items!r}")
    return messages


def _text(content: object) -> str | None:
    """The text of a message, also of one that consists of parts. None if it has anything but text."""
    if isinstance(content, str):
        return content
    parts = (
        [_at(part, "text") for part in cast("list[object]", content)]
        if isinstance(content, list)
        else []
    )
    texts = [part for part in parts if isinstance(part, str)]
    return "".join(texts) if texts and len(texts) == len(parts) else None
