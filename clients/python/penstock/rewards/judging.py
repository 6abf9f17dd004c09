"""Runs a data set's tests of a function that runs elsewhere.

    python judging.py TESTS

The tests run in this process, the function that they call in another one (`candidate.py`), which gets
arguments and returns values. So code can pass a test only by returning the right value. It has no access to
the source of the tests or to the result. Each `assert` is one check and counts separately.

As a program, it writes a line `call ARGUMENTS` for each call, and reads its reply as a line from stdin. At
the end it writes `checks` with a tuple of those that passed, or `raised WHAT` if the tests are broken. What
the tests print is discarded.
"""

from __future__ import annotations

import ast
import os
import resource
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TextIO

MEMORY_BYTES = 4 << 30
"""Address space of the tests, which may import numpy."""


class CandidateError(Exception):
    """The function raised or did not answer; the message says which."""


@dataclass(frozen=True)
class Check:
    """One assertion of a test."""

    source: str
    passed: bool
    why: str = ""
    """What the function did, if the check failed."""


@dataclass
class Called(ABC):
    """Calls the function in its process, like an ordinary function."""

    function: str
    last: str = field(default="", init=False)
    """The last call and its result, in words."""

    @abstractmethod
    def ask(self, arguments: str) -> str:
        """The reply to a call: `ok VALUE` or `raised WHAT`."""

    def __call__(self, *arguments: object) -> object:
        """Raises CandidateError."""
        call = f"{self.function}({', '.join(map(repr, arguments))})"
        kind, _, what = self.ask(repr(arguments)).partition(" ")
        self.last = f"{call} returned {what}" if kind == "ok" else f"{call} failed: {what}"
        if kind != "ok":
            raise CandidateError(self.last)
        return ast.literal_eval(what)


@dataclass
class _Relayed(Called):
    """The function, of which the process that started this one asks."""

    calls: TextIO
    replies: TextIO

    def ask(self, arguments: str) -> str:
        say(self.calls, f"call {arguments}")
        return self.replies.readline().rstrip("\n")


def main(path: str, function: str) -> None:
    """Runs the tests of a file."""
    calls = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace")
    replies = os.fdopen(os.dup(0), encoding="utf-8")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    with open(path, encoding="utf-8") as file:  # noqa: PTH123 - pathlib takes longer to import.
        tests = file.read()
    try:
        checks = run_checks(tests, _Relayed(function, calls, replies))
    except Exception as error:
        say(calls, f"raised {type(error).__name__}: {error}")
    else:
        say(calls, f"checks {tuple(check.passed for check in checks)!r}")


def say(stream: TextIO, line: str) -> None:
    """Writes one line, whatever is in it."""
    stream.write(line.replace("\n", " ") + "\n")
    stream.flush()


def run_checks(tests: str, candidate: Called, preamble: str = "") -> list[Check]:
    """Runs the tests after `preamble`, and their `check(candidate)` if they define it. Records each
    assertion separately. Raises whatever the tests raise before they call the function."""
    checks: list[Check] = []

    def note(test: Callable[[], object], source: str) -> None:
        candidate.last = ""
        try:
            checks.append(Check(source, bool(test()), candidate.last))
        except Exception as error:
            # Raised by the function, or by a comparison with its result, such as abs(None).
            why = candidate.last or f"{type(error).__name__}: {error}"
            checks.append(Check(source, False, why))

    names: dict[str, Any] = {"__note__": note}
    # This code is the data set's, not the policy's.
    exec(preamble, names)
    names[candidate.function] = candidate
    try:
        exec(compile(noted(tests), "test", "exec"), names)
        if "check" in names:
            names["check"](candidate)
    except Exception as error:
        if not candidate.last:
            raise
        checks.append(Check(candidate.function, False, f"{type(error).__name__}: {error}"))
    return checks


def noted(test: str) -> ast.Module:
    """The tests, changed to record assertions instead of raising; assertions of constants are removed."""
    return ast.fix_missing_locations(_Noting().visit(ast.parse(test)))


class _Noting(ast.NodeTransformer):
    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        if isinstance(node.test, ast.Constant):
            return ast.copy_location(ast.Pass(), node)
        test = ast.Lambda(
            ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[]),
            node.test,
        )
        source = ast.Constant(ast.unparse(node.test))
        call = ast.Call(ast.Name("__note__", ast.Load()), [test, source], [])
        return ast.copy_location(ast.Expr(call), node)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
