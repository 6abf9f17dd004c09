"""Judges code by a problem's own tests, without ever running it in this process.

The tests are the data set's, and they run here. The function that they call is in another process
(`candidate.py`), which gets arguments and returns values. So code can pass a test only by returning the
right value. It has no access to the tests' source or the result. It could, however, read the installed
data set. Each `assert` is one check and counts separately.

    no code ──► 0     it parses ──► PARSES     it defines the function ──► + DEFINES
    checks ──► + CHECKS x share passed     all of them ──► + SOLVED
"""

from __future__ import annotations

import ast
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PARSES = 0.05
DEFINES = 0.05
CHECKS = 0.4
SOLVED = 0.5

SECONDS = 10.0
"""Time limit for all checks of one solution together."""
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


@dataclass(frozen=True)
class Verdict:
    """The result of judging one solution."""

    parses: bool = False
    defines: bool = False
    checks: tuple[Check, ...] = ()
    error: str = ""
    """Why nothing could be checked; empty if it could."""

    @property
    def share(self) -> float:
        """Share of the checks that passed, from 0 to 1."""
        return sum(check.passed for check in self.checks) / max(len(self.checks), 1)

    @property
    def solved(self) -> bool:
        """Whether all checks passed."""
        return bool(self.checks) and all(check.passed for check in self.checks)

    @property
    def reward(self) -> float:
        """The reward, from 0 to 1."""
        parts = PARSES * self.parses + DEFINES * self.defines
        return parts + CHECKS * self.share + SOLVED * self.solved

    def feedback(self, function: str) -> str:
        """Feedback for the policy: the first failure among the first half of the checks. Of the other
        checks it reveals only that some fail."""
        if self.error:
            return self.error
        shown = self.checks[: (len(self.checks) + 1) // 2]
        for check in shown:
            if not check.passed:
                return (
                    f"This test fails: {check.source.replace('candidate', function)}\n{check.why}"
                )
        return "The tests you can see pass, and others do not. Look at the description again."


@dataclass
class Candidate:
    """Calls the function in its process, like an ordinary function."""

    path: Path
    function: str
    deadline: float
    """In the time of `time.monotonic`; applies to all calls together."""
    last: str = ""
    """The last call and its result, in words."""
    _buffer: bytes = field(default=b"", init=False)

    def __post_init__(self) -> None:
        program = Path(__file__).with_name("candidate.py")
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(program), str(self.path), self.function],
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


def judge(problem: Mapping[str, Any], code: str, folder: Path, seconds: float = SECONDS) -> Verdict:
    """Writes `solution.py` into a new folder inside `folder` and checks it there.

    Never raises an exception, whatever the code is.
    """
    function = str(problem["entry_point"])
    if not code.strip():
        return Verdict(error="There is no code in your answer. Write it between ```python and ```.")
    try:
        ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return Verdict(error=f"Your code does not parse: {error}")
    path = Path(tempfile.mkdtemp(prefix="solution-", dir=folder)) / "solution.py"
    # A Python string may contain a lone surrogate, which UTF-8 cannot encode.
    path.write_text(preamble(problem) + "\n" + code, encoding="utf-8", errors="replace")
    candidate = Candidate(path, function, time.monotonic() + seconds)
    try:
        candidate.start()
        return Verdict(parses=True, defines=True, checks=tuple(run_checks(problem, candidate)))
    except CandidateError as error:
        return Verdict(parses=True, error=f"Your code does not run: {error}")
    finally:
        candidate.end()


def preamble(problem: Mapping[str, Any]) -> str:
    """The part of the prompt before the function: imports and helper functions."""
    before, _, _ = str(problem["prompt"]).partition(f"def {problem['entry_point']}(")
    return before


def run_checks(problem: Mapping[str, Any], candidate: Candidate) -> list[Check]:
    """Runs the problem's tests and records each assertion separately."""
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
    # This code is the data set's, not the policy's. Some tests use the prompt's helper functions, and one
    # calls the function by name.
    exec(preamble(problem), names)
    names[str(problem["entry_point"])] = candidate
    exec(compile(noted(str(problem["test"])), "test", "exec"), names)
    try:
        names["check"](candidate)
    except CandidateError as error:
        checks.append(Check("check(candidate)", False, str(error)))
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
