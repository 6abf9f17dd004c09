"""The reward for code: the share of the tests that it passes, or whether it passes all."""

from __future__ import annotations

import ast
import builtins
import logging
import re
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.client.external.sandbox import SandboxMissing, find_sandbox
from penstock.client.external.settings import SandboxUse
from penstock.rewards.attempt import Answered, PlainReward
from penstock.rewards.judging import CandidateError
from penstock.rewards.processes import Candidate, judge

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.client.external.sandbox import Sandbox
    from penstock.client.tasks import Task

logger = logging.getLogger("penstock.rollout")

SECONDS = 10.0
GRACE_SECONDS = 2.0
"""For tests to end after a function that took all the time."""
_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


def unit_tests(
    *, field: str = "tests", partial: bool = False, seconds: float = SECONDS, sandbox: str = "auto"
) -> PlainReward:
    """The answer's last ```python block passes the tests in the field: 1 if all, else 0.

    The field has Python code, or a list of it, whose every `assert` is a test. It calls one function,
    named by the metadata's `entry_point`, or else the first one that it does not define. HumanEval's
    `check(candidate)` is called too. With `partial`, the reward is the share of the tests that pass.
    `seconds` limits all tests of an answer together.

    The tests and the answer's function run in two processes, each in bubblewrap's sandbox: if it works
    here ("auto"), always ("require", which raises SandboxMissing otherwise) or never ("off").
    """
    box = _find(SandboxUse(sandbox))

    def score(task: Task, trajectory: Answered) -> float:
        tests = _tests(task, field)
        blocks: list[str] = _FENCED.findall(trajectory.text)
        if not blocks:
            return 0.0
        function = str(task.metadata.get("entry_point") or called_function(tests))
        passed = _run(blocks[-1], function, tests, seconds, box)
        return sum(passed) / max(len(passed), 1) if partial else float(bool(passed) and all(passed))

    return score


def called_function(tests: str) -> str:
    """The first name that the tests call and do not define. Raises ValueError without one."""
    nodes = list(ast.walk(ast.parse(tests)))
    stored = {n.id for n in nodes if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
    stored |= {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    stored |= {n.arg for n in nodes if isinstance(n, ast.arg)}
    for n in nodes:
        if isinstance(n, ast.Import | ast.ImportFrom):
            stored |= {(alias.asname or alias.name).partition(".")[0] for alias in n.names}
    calls = [n.func for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    for name in sorted(calls, key=lambda name: (name.lineno, name.col_offset)):
        if name.id not in stored and not hasattr(builtins, name.id):
            return name.id
    raise ValueError("the tests call no function, and the metadata has no entry_point")


def _find(use: SandboxUse) -> Sandbox | None:
    if use is SandboxUse.OFF:
        return None
    try:
        return find_sandbox(Path(tempfile.gettempdir()), share_network=False, read=(), hidden=())
    except SandboxMissing as error:
        if use is SandboxUse.REQUIRE:
            raise
        logger.warning("unit_tests: %s; the policy's code runs without a sandbox", error)
        return None


def _tests(task: Task, field: str) -> str:
    tests = task.metadata[field]
    if isinstance(tests, list) and tests and all(isinstance(each, str) for each in tests):  # pyright: ignore[reportUnknownVariableType]
        return "\n".join(tests)  # pyright: ignore[reportUnknownArgumentType]
    if not isinstance(tests, str):
        raise TypeError(f"metadata[{field!r}] must be Python code, or a list of it, got {tests!r}")
    return tests


def _run(
    code: str, function: str, tests: str, seconds: float, sandbox: Sandbox | None
) -> Sequence[bool]:
    """Whether each test passes; empty if the code cannot be loaded, or the tests do not end."""
    deadline = time.monotonic() + seconds
    # A folder for each, because a sandbox shows its own, and code that reads the tests could pass them.
    with (
        tempfile.TemporaryDirectory(prefix="penstock-answer-") as answer,
        tempfile.TemporaryDirectory(prefix="penstock-tests-") as judging,
    ):
        path = Path(answer) / "solution.py"
        # A Python string may contain a lone surrogate, which UTF-8 cannot encode.
        path.write_text(code, encoding="utf-8", errors="replace")
        folder = Path(judging)
        candidate = Candidate(
            function, path, deadline, sandbox.command(path.parent) if sandbox else ()
        )
        try:
            candidate.start()
            prefix = sandbox.command(folder) if sandbox else ()
            return judge(tests, candidate, folder, deadline + GRACE_SECONDS, prefix)
        except CandidateError:
            return ()
        finally:
            candidate.process.end()
