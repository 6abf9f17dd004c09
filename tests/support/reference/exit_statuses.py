"""The page of the exit statuses, from their enum and from the epilog of each command's help."""

from __future__ import annotations

import ast
import inspect

from penstock.common.answers import Exit
from tests.support.reference import markdown
from tests.support.reference.commands import commands
from tests.support.reference.markdown import code, prose

OPENING = """After reading this page a script knows what an exit status of `penstock` means, and how to
read an error. [Mistakes](../guides/mistakes.md) shows the messages of status 2."""
SIGNALS = """A second SIGTERM or SIGINT ends `penstock train` at once, with status 128 plus the number of
the signal."""
PROGRAMS = """Messages go to stderr, results to stdout. With `--json`, a command prints its result as
JSON, unless it is a text such as help or a script, and writes an error as one line of JSON: the last line
of stderr. `penstock demo` also prints its progress; its last line is the object. The status is the same.
Only a traceback, which is a defect, is not JSON."""
EXAMPLE = """```json
{"error": "unknown setting", "where": "run.toml:8: train.lr", "hint": "did you mean \
train.learning_rate?", "status": 2}
```"""
KEYS = (
    ("error", "What is wrong."),
    ("where", "File and line, setting, option or address; empty if there is none."),
    ("hint", "What to do; empty if nothing is known."),
    ("status", "The exit status."),
    ("others", "Further errors, each with error, where and hint; only if there are any."),
)


def page() -> str:
    statuses = [(code(int(member)), prose(text)) for member, text in status_texts().items()]
    by_command = [
        (code(name), prose(command.epilog.partition("Exit status: ")[2]))
        for name, command in commands()
        if command.epilog
    ]
    return markdown.page(
        "Exit statuses",
        OPENING,
        markdown.table(("status", "meaning"), statuses),
        markdown.wrapped(SIGNALS),
        "## Of each command",
        markdown.table(("command", "statuses"), by_command),
        "## Errors for programs",
        markdown.wrapped(PROGRAMS),
        EXAMPLE,
        markdown.table(("key", "value"), [(code(key), value) for key, value in KEYS]),
    )


def status_texts() -> dict[Exit, str]:
    """The docstring below each status."""
    (enum,) = ast.parse(inspect.getsource(Exit)).body
    assert isinstance(enum, ast.ClassDef)
    return {
        Exit[ast.unparse(member.targets[0])]: ast.literal_eval(below.value)
        for member, below in zip(enum.body, enum.body[1:], strict=False)
        if isinstance(member, ast.Assign) and isinstance(below, ast.Expr)
    }
