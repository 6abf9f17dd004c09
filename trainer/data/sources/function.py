"""A function of the user's own, which returns a sequence or something to go through.

States of an iterator: at n, the next entry it gives. Asked for an index from n on, it is gone through up
to there; asked for one before, which happens where tasks are submitted again, it looks among the last
entries it gave, and begins at zero where it has to. An iterator that ends is followed by another one, which
the function returns when it is called again. So each call has to return the same entries, in the same
order, from their beginning.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Protocol, cast, overload

import xxhash

from penstock.common.functions import FunctionInvalid, find_function
from penstock.trainer.config.data import PythonConfig
from penstock.trainer.core.errors import ConfigInvalid
from penstock.trainer.data.sources.problem import Problem, Source
from penstock.trainer.data.sources.rows import RowSource, as_json, read_problem

# What an iterator is known by: it need not end.
ENTRIES_COMPARED = 64
# More than a trainer has outstanding; beyond it going back means going through it again.
ENTRIES_REMEMBERED = 4096


class _Countable(Protocol):
    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> object: ...


class _Rows(Sequence[object]):
    """By length and index alone: a sequence of one's own need not raise IndexError at its end. Raises
    ConfigInvalid for whatever it raises."""

    def __init__(self, rows: _Countable, function: str) -> None:
        self._rows, self._function = rows, function

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> object: ...
    @overload
    def __getitem__(self, index: slice) -> list[object]: ...
    def __getitem__(self, index: int | slice) -> object | list[object]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        try:
            return self._rows[index]
        except Exception as error:
            # Its author's to read.
            where, kind = f"{self._function}, entry {index + 1}", type(error).__name__
            raise ConfigInvalid(f"{where}: {kind}: {error}") from error

    def __iter__(self) -> Iterator[object]:
        return (self[index] for index in range(len(self)))


class IteratorSource:
    """Entries that can only be gone through."""

    def __init__(self, begin: Callable[[], Iterator[object]], config: PythonConfig) -> None:
        """`begin` gives the next pass. Raises ConfigInvalid where the first entries cannot be had."""
        self.name = config.function
        self._begin, self._config = begin, config
        self._passes = self._entries()
        self._next = 0
        self._recent: dict[int, Problem] = {}
        content = xxhash.xxh3_128()
        self._first: list[str] = []
        for index, entry in enumerate(islice(self._entries(), ENTRIES_COMPARED)):
            text = as_json(entry, self._place(index))
            self._first.append(text)
            content.update(text.encode() + b"\n")
            read_problem(entry, config, self.name, self._place(index))
        options = json.dumps(config.options, sort_keys=True)
        fields = f"{config.messages_field} or {config.prompt_field}"
        self.identity = (
            f"iterator {config.function} {options}, begins {content.hexdigest()}, {fields}"
        )

    def problem(self, index: int) -> Problem:
        """One problem; what was not given lately before it is gone through first."""
        if index < self._next and index not in self._recent:
            self._passes, self._next = self._entries(), 0
        while self._next <= index:
            entry = next(self._passes)
            self._check_same(entry)
            problem = read_problem(entry, self._config, self.name, self._place(self._next))
            self._recent[self._next] = problem
            self._recent.pop(self._next - ENTRIES_REMEMBERED, None)
            self._next += 1
        return self._recent[index]

    def _check_same(self, entry: object) -> None:
        """Raises ConfigInvalid where a call returned other entries than the first one did, as calls do that
        share a file or a counter: prompts would be skipped."""
        index = self._next
        if index < len(self._first) and as_json(entry, self._place(index)) != self._first[index]:
            raise ConfigInvalid(
                f"{self._place(index)}: it is another one than before; each call of the function has to "
                "return the same entries from their beginning"
            )

    def _entries(self) -> Iterator[object]:
        """Pass after pass."""
        index = 0
        while True:
            begun = index
            try:
                for entry in self._begin():
                    yield entry
                    index += 1
            except ConfigInvalid:
                raise
            except Exception as error:
                # Whatever the function raises is its author's to read.
                kind = type(error).__name__
                raise ConfigInvalid(f"{self._place(index)}: {kind}: {error}") from error
            if index == begun:
                raise ConfigInvalid(f"{self._place(index)}: there is no entry")

    def _place(self, index: int) -> str:
        return f"{self._config.function}, entry {index + 1}"


def open_own(config: PythonConfig, seed: int, section: str = "data.python") -> Source:
    """What the function returns, as a source. Raises ConfigInvalid."""
    try:
        function = find_function(config.function, (), config.options)
    except FunctionInvalid as error:
        raise ConfigInvalid(f"{section}.function {config.function}: {error}") from error

    def call() -> object:
        try:
            return function(**config.options)
        except Exception as error:
            # Whatever the function raises is its author's to read.
            kind = type(error).__name__
            raise ConfigInvalid(f"{section}.function {config.function}: {kind}: {error}") from error

    found = call()
    kind = type(found).__name__
    # A DataFrame's index is of columns. Data sets of Hugging Face have `to_dict` too, and are sequences.
    is_frame = hasattr(found, "to_dict") and not hasattr(found, "features")
    if isinstance(found, str | bytes | Mapping) or is_frame:
        raise ConfigInvalid(
            f"{section}.function {config.function}: it returns a {kind}: return a list of rows, such as "
            'to_dict("records") of a DataFrame'
        )
    if hasattr(found, "__len__") and hasattr(found, "__getitem__"):
        return RowSource(
            _Rows(cast("_Countable", found), config.function),
            config,
            kind=f"python {config.function}",
            name=config.function,
            seed=seed,
            place=lambda row: f"{config.function}, entry {row + 1}",
        )
    if not isinstance(found, Iterable):
        raise ConfigInvalid(
            f"{section}.function {config.function}: it returns a {kind}, not a sequence or iterator"
        )
    if isinstance(found, Iterator) and call() is found:
        raise ConfigInvalid(
            f"{section}.function {config.function}: it returns the same iterator each time; each call has "
            "to return one that begins at the beginning"
        )
    return IteratorSource(lambda: iter(cast("Iterable[object]", call())), config)
