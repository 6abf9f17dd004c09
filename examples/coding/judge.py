"""Judges code by a problem's own tests, without ever running it in this process.

The tests are the data set's, and `penstock.rewards.judging` runs them here, and the function that they
call in another process. The code could, however, read the installed data set. Each `assert` is one check
and counts separately.

    no code ──► 0     it parses ──► PARSES     it defines the function ──► + DEFINES
    checks ──► + CHECKS x share passed     all of them ──► + SOLVED
"""

from __future__ import annotations

import ast
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.rewards.judging import CandidateError, Check, run_checks
from penstock.rewards.processes import Candidate

PARSES = 0.05
DEFINES = 0.05
CHECKS = 0.4
SOLVED = 0.5

SECONDS = 10.0
"""Time limit for all checks of one solution together."""


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
    candidate = Candidate(function, path, time.monotonic() + seconds)
    try:
        candidate.start()
        # Some tests use the prompt's helper functions.
        checks = run_checks(str(problem["test"]), candidate, preamble(problem))
        return Verdict(parses=True, defines=True, checks=tuple(checks))
    except CandidateError as error:
        return Verdict(parses=True, error=f"Your code does not run: {error}")
    finally:
        candidate.process.end()


def preamble(problem: Mapping[str, Any]) -> str:
    """The part of the prompt before the function: imports and helper functions."""
    before, _, _ = str(problem["prompt"]).partition(f"def {problem['entry_point']}(")
    return before
