"""The reward for mathematics: math-verify compares what is in \\boxed{} with the right answer.

What a policy writes can take math-verify hours, or all memory: \\boxed{9^{9^{9^9}}}. So it runs in a
separate process (`verifier.py`), one for each worker, which the kernel ends after a time limit.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.common.distribution import pip_install
from penstock.rewards.attempt import Answered, PlainReward, expected

if TYPE_CHECKING:
    from penstock.client.tasks import Task

SECONDS = 5.0
_BOX = "\\boxed{"


def boxed(*, field: str = "answer", seconds: float = SECONDS) -> PlainReward:
    """The last \\boxed{} of the answer equals the field, as mathematics: \\frac{1}{2} is 0.5.

    The field may be a whole solution that contains a \\boxed{}. An answer that takes longer than
    `seconds` to compare is wrong. Needs the extra `rewards`; raises ValueError without it.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise ValueError(f"boxed needs math-verify: {pip_install('rewards')}")
    verifier = Verifier()

    def score(task: Task, trajectory: Answered) -> float:
        right = expected(task, field)
        right = last_boxed(right) or right
        given = last_boxed(trajectory.text)
        if given is None:
            return 0.0
        return float(given.strip() == right or verifier.equal(right, given, seconds))

    return score


def last_boxed(text: str) -> str | None:
    """What is in the last \\boxed{} that is closed; None without one."""
    at = text.rfind(_BOX)
    while at >= 0:
        begin = at + len(_BOX)
        depth = 1
        for end in range(begin, len(text)):
            depth += (text[end] == "{") - (text[end] == "}")
            if not depth:
                return text[begin:end]
        at = text.rfind(_BOX, 0, at)
    return None


class Verifier:
    """Compares expressions in another process, one comparison at a time. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._end: Callable[[], object] = bool

    def equal(self, right: str, given: str, seconds: float) -> bool:
        """Whether both are the same mathematics. False if that is not known within `seconds`."""
        with self._lock:
            process = self._process
            if process is None or process.poll() is not None:
                self._end()
                process = self._process = self._start()
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps([right, given, seconds]) + "\n")
            process.stdin.flush()
            # At the limit the process ends, and so does its output.
            if not (answer := process.stdout.readline()):
                process.wait()
            return answer == "true\n"

    def _start(self) -> subprocess.Popen[str]:
        program = Path(__file__).with_name("verifier.py")
        process = subprocess.Popen(
            [sys.executable, "-P", str(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        # With this object, or when Python exits.
        self._end = weakref.finalize(self, _end, process)
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise RuntimeError("math-verify did not start; its error is in the worker's log")
        return process


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()
