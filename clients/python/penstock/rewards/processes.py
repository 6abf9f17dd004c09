"""Processes that run the policy's code and the tests of it, and answer line by line."""

from __future__ import annotations

import ast
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import InitVar, dataclass, field
from pathlib import Path

from penstock.rewards.judging import Called, CandidateError

# More than any value that a test expects.
_MOST_BYTES = 1 << 20


class LineProcess:
    """A program of this folder, which reads and writes lines."""

    def __init__(
        self,
        program: str,
        arguments: Sequence[str],
        folder: Path,
        deadline: float,
        prefix: Sequence[str] = (),
        *flags: str,
    ) -> None:
        """`deadline` is in the time of `time.monotonic`; `prefix` is the beginning of the command line,
        such as a sandbox's; `flags` are Python's."""
        self._deadline = deadline
        self._unread = b""
        path = str(Path(__file__).with_name(program))
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-I", *flags, path, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PATH": os.defpath},
            start_new_session=True,
        )

    def write(self, line: str) -> None:
        """Raises CandidateError if the process has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()
        except OSError as error:
            raise CandidateError("the process has ended") from error

    def read(self) -> str:
        """The next line of output. Raises CandidateError at the deadline, or if the process ends."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._unread:
            left = self._deadline - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                self._deadline = 0.0
                raise CandidateError("it takes too long")
            data = os.read(descriptor, 65536)
            if not data or len(self._unread) > _MOST_BYTES:
                raise CandidateError("the process has ended")
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode(errors="replace")

    @property
    def late(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() >= self._deadline

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


@dataclass
class Candidate(Called):
    """The policy's function, in a separate process."""

    path: InitVar[Path]
    """Of the code."""
    deadline: InitVar[float]
    """In the time of `time.monotonic`; applies to all calls together."""
    prefix: InitVar[Sequence[str]] = ()
    """The beginning of the command line, such as a sandbox's."""
    process: LineProcess = field(init=False)

    def __post_init__(self, path: Path, deadline: float, prefix: Sequence[str]) -> None:
        arguments = (str(path), self.function)
        self.process = LineProcess("candidate.py", arguments, path.parent, deadline, prefix, "-S")

    def start(self) -> None:
        """Waits until the code is loaded. Raises CandidateError."""
        said = self.process.read()
        if said != "ready":
            raise CandidateError(said.removeprefix("raised "))

    def ask(self, arguments: str) -> str:
        try:
            self.process.write(arguments)
            return self.process.read()
        except CandidateError as error:
            return f"raised {error}"


def judge(
    tests: str, candidate: Candidate, folder: Path, deadline: float, prefix: Sequence[str] = ()
) -> tuple[bool, ...]:
    """Runs the tests in a separate process; returns for each check whether it passed, and nothing if
    they have not ended at the deadline. Raises ValueError if the tests are broken."""
    path = folder / "tests.py"
    path.write_text(tests, encoding="utf-8", errors="replace")
    process = LineProcess("judging.py", (str(path), candidate.function), folder, deadline, prefix)
    try:
        while True:
            kind, _, what = process.read().partition(" ")
            if kind == "call":
                process.write(candidate.ask(what))
            elif kind == "checks":
                return tuple(map(bool, ast.literal_eval(what)))
            else:
                raise ValueError(f"the tests raise {what}")
    except CandidateError as error:
        if process.late:
            return ()
        raise ValueError("the tests end their process") from error
    finally:
        process.end()
