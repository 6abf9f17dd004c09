"""Runs the policy's code in a separate process, and answers calls of its function, one line each.

    python candidate.py SOLUTION FUNCTION

Each line of stdin has the arguments of a call, as a Python tuple. For each call, stdout gets `ok VALUE` or
`raised WHAT`. At the start it gets `ready` or `raised WHAT`. Values must be literals; any other value is
reported as `raised`. Output of the code is discarded. Its memory and file sizes are limited before it is
loaded.
"""

from __future__ import annotations

import ast
import os
import resource
import sys
from collections.abc import Callable

MEMORY_BYTES = 512 << 20
FILE_BYTES = 1 << 20
MOST_CHARACTERS = 100_000


def main(path: str, function: str) -> None:
    """Loads the code, then answers calls until stdin ends."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace")
    nowhere = os.open(os.devnull, os.O_RDWR)
    calls = os.fdopen(os.dup(0), encoding="utf-8")
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))

    def reply(text: str) -> None:
        replies.write(text.replace("\n", " ")[:MOST_CHARACTERS] + "\n")
        replies.flush()

    found = load(path, function)
    if isinstance(found, str):
        reply(f"raised {found}")
        return
    reply("ready")
    for line in calls:
        reply(answer(found, line))


def load(path: str, function: str) -> Callable[..., object] | str:
    """The function, or a message why it cannot be loaded."""
    names: dict[str, object] = {"__name__": "solution"}
    try:
        with open(path, encoding="utf-8") as file:  # noqa: PTH123 - pathlib takes longer to import.
            exec(compile(file.read(), "solution.py", "exec"), names)
    except BaseException as error:
        # Anything that the code raises, including SystemExit, is feedback for the policy.
        return describe(error)
    found = names.get(function)
    return found if callable(found) else f"NameError: there is no function {function}"


def answer(found: Callable[..., object], line: str) -> str:
    """Calls the function with one line's arguments; returns the reply."""
    try:
        value = found(*ast.literal_eval(line))
        text = repr(value)
        ast.literal_eval(text)
    except BaseException as error:
        return f"raised {describe(error)}"
    return f"ok {text}"


def describe(error: BaseException) -> str:
    """The error as in the last line of a traceback, at most 300 characters."""
    return f"{type(error).__name__}: {error}"[:300]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
