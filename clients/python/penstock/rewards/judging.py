"""Judges code by tests, without ever running it in this process.

The tests are the data set's, and they run here. The function that they call is in another process
(`candidate.py`), which gets arguments and returns values. So code can pass a test only by returning the
right value. It has no access to the tests' source or the result. Each `assert` is one check and counts
separately.
"""

from __future__ import annotations

import ast
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# More than any value that a test expects.
_MOST_BYTES = 1 << 20


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
class Candidate:
    """Calls the function in its process, like an ordinary function."""

    path: Path
    function: str
    deadline: float
    """In the time of `time.monotonic`; applies to all calls together."""
    prefix: Sequence[str] = ()
    """The beginning of the command line, such as a sandbox's."""
    last: str = ""
    """The last call and its result, in words."""
    _buffer: bytes = field(default=b"", init=False)

    def __post_init__(self) -> None:
        program = Path(__file__).with_name("candidate.py")
        self._process = subprocess.Popen(
            [*self.prefix, sys.executable, "-I", "-S", str(program), str(self.path), self.function],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=self.path.parent,
            env={"PATH": os.defpath},
            start_new_session=True,
        )

    def start(self) -> None:
        """Waits until the code is loaded. Raises CandidateError."""
        said = self._read()
        if said != "ready":
            raise CandidateError(said.removeprefix("raised "))

    def __call__(self, *arguments: object) -> object:
        """Calls the function. Raises CandidateError."""
        call = f"{self.function}({', '.join(map(repr, arguments))})"
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{arguments!r}\n".encode())
            self._process.stdin.flush()
            said = self._read()
        except OSError:
            said = "raised the process has ended"
        except CandidateError as error:
            said = f"raised {error}"
        kind, _, what = said.partition(" ")
        self.last = f"{call} returned {what}" if kind == "ok" else f"{call} failed: {what}"
        if kind != "ok":
            raise CandidateError(self.last)
        return ast.literal_eval(what)

    def end(self) -> None:
        """Kills the process and its process group."""
        # It leads its group, which may outlive it. Its id is not reused until it has been waited for.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                # Unread input is discarded.
                with suppress(BrokenPipeError):
                    stream.close()
        self._process.wait()

    def _read(self) -> str:
        """The next line of output. Raises CandidateError at the deadline, or if the process ends."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            left = self.deadline - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                self.deadline = 0.0
                raise CandidateError("it takes too long")
            data = os.read(descriptor, 65536)
            if not data or len(self._buffer) > _MOST_BYTES:
                raise CandidateError("the process has ended")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode(errors="replace")


def run_checks(tests: str, candidate: Candidate, preamble: str = "") -> list[Check]:
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
