"""A function the user provides, which returns a sequence or another iterable.

An iterator is read up to the index that is requested. An earlier index is requested when tasks are
submitted again. It is answered from the most recent entries if possible; otherwise the iterator starts
again from zero. When an iterator ends, the function is called for the next one. Each call must therefore
return the same entries, in the same order, from the beginning.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import cast

import xxhash

from penstock.common.functions import find_function
from penstock.trainer.config.data import PythonConfig
from penstock.trainer.core.errors import ConfigInvalid, blaming
from penstock.trainer.data.sources.problem import Problem, Source, setting
from penstock.trainer.data.sources.rows import RowSource, as_json, columns_read, read_problem

# An iterator is identified by its first entries, because it need not end.
ENTRIES_COMPARED = 64
# More than a trainer has outstanding. Going back further requires reading the iterator again.
ENTRIES_REMEMBERED = 4096


class _Rows:
    """Accesses rows by length and index only, because a user's sequence need not raise IndexError
    at its end. Converts its exceptions to ConfigInvalid."""

    def __init__(self, rows: Sequence[object], function: str) -> None:
        self._rows, self._function = rows, function

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> object:
        with blaming(f"{self._function}, entry {index + 1}"):
            return self._rows[index]

    def __iter__(self) -> Iterator[object]:
        return (self[index] for index in range(len(self)))


class IteratorSource:
    """A source of entries that can only be read in order."""

    def __init__(self, begin: Callable[[], Iterator[object]], config: PythonConfig) -> None:
        """`begin` starts the next pass. Raises ConfigInvalid if the first entries cannot be read."""
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
        self.identity = (
            f"iterator {config.function} {options}, begins {content.hexdigest()}"
            f"{columns_read(config)}"
        )

    def problem(self, index: int) -> Problem:
        """Returns one problem. Reads all entries before it first, unless it was returned recently."""
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
        """Raises ConfigInvalid if a call returned other entries than the first call. This happens
        if calls share a file or a counter, and would skip prompts."""
        index = self._next
        if index < len(self._first) and as_json(entry, self._place(index)) != self._first[index]:
            raise ConfigInvalid(
                f"{self._place(index)}: it differs from the previous pass; each call of the function must "
                "return the same entries from the beginning"
            )

    def _entries(self) -> Iterator[object]:
        """Yields entries, pass after pass."""
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
                # The author of the function has to see any exception.
                kind = type(error).__name__
                raise ConfigInvalid(f"{self._place(index)}: {kind}: {error}") from error
            if index == begun:
                raise ConfigInvalid(f"{self._place(index)}: there are no entries")

    def _place(self, index: int) -> str:
        return f"{self._config.function}, entry {index + 1}"


def open_own(config: PythonConfig, seed: int, section: str = "data.python") -> Source:
    """Opens the result of the function as a source. Raises ConfigInvalid."""
    where = f"{setting(section, 'function')} {config.function}"
    with blaming(where):
        function = find_function(config.function, (), config.options)

    def call() -> object:
        with blaming(where):
            return function(**config.options)

    found = call()
    kind = type(found).__name__
    # Indexing a DataFrame selects columns. Hugging Face data sets have `to_dict` too, but are sequences.
    is_frame = hasattr(found, "to_dict") and not hasattr(found, "features")
    if isinstance(found, str | bytes | Mapping) or is_frame:
        raise ConfigInvalid(
            f"{where}: it returns a {kind}; return a list of rows instead, "
            'such as to_dict("records") of a DataFrame'
        )
    if hasattr(found, "__len__") and hasattr(found, "__getitem__"):
        return RowSource(
            _Rows(cast("Sequence[object]", found), config.function),
            config,
            kind=f"python {config.function}",
            name=config.function,
            seed=seed,
            place=lambda row: f"{config.function}, entry {row + 1}",
        )
    if not isinstance(found, Iterable):
        raise ConfigInvalid(f"{where}: it returns a {kind}, not a sequence or iterator")
    if isinstance(found, Iterator) and call() is found:
        raise ConfigInvalid(
            f"{where}: it returns the same iterator each time; each call must "
            "return one that starts at the beginning"
        )
    return IteratorSource(lambda: iter(cast("Iterable[object]", call())), config)
