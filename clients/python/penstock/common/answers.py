"""How a command answers: its exit status, and errors and results for people or, with --json, programs."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sys
import tomllib
from collections.abc import Generator, Sequence
from contextvars import ContextVar
from enum import IntEnum

import click


class Exit(IntEnum):
    """The exit statuses of `penstock`."""

    DONE = 0
    """Done, or stopped on request with nothing left to do. `train` returns it only if training is done."""
    FAILED = 1
    """Something failed while it ran: an unreachable server, a process that ended, a port in use, a
    corrupt record, no run to show, something missing on the machine."""
    MISUSED = 2
    """Refused before anything ran: the command line, the configuration, a name of a function, a file."""
    STOPPED = 3
    """Stopped on request before training was done."""
    INTERRUPTED = 130
    """Interrupted by Ctrl-C."""


_for_programs = ContextVar("for_programs", default=False)
_PLACE = re.compile(
    r"(?:stopped: )?(?!corrupt: )(?P<where>(?:--\S+ \S+: |\S+ with --\S+ \S+: |\S+: )*)(?P<error>.+)",
    re.DOTALL,
)
"""A message of one of our commands: places such as FILE:LINE, KEY, ADDRESS or --OPTION, then the error."""

json_option = click.option(
    "--json", is_flag=True, expose_value=False, help="Print errors, and any result, as JSON."
)


def ending(status: int) -> str:
    """How a process ended, by its exit status, which is negative after a signal: "was ended by SIGKILL"."""
    if status >= 0:
        return f"exited {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"


def wants_json(arguments: Sequence[str]) -> bool:
    """Whether a command line has --json. It has to be known before click reads the line, which may fail."""
    words = list(arguments)
    return "--json" in (words[: words.index("--")] if "--" in words else words)


@contextlib.contextmanager
def answering_programs() -> Generator[None]:
    """Within it, errors and results are JSON."""
    token = _for_programs.set(True)
    try:
        yield
    finally:
        _for_programs.reset(token)


def as_json() -> bool:
    return _for_programs.get()


def show(text: str, result: object) -> None:
    """Prints a result: `text` for a person, or `result` as JSON for a program."""
    click.echo(json.dumps(result, indent=2) if as_json() else text)


def show_toml(text: str) -> None:
    """Prints a TOML document as it is, or as JSON."""
    sys.stdout.write(json.dumps(tomllib.loads(text), indent=2) + "\n" if as_json() else text)


def complain(program: str, error: object, status: int = Exit.MISUSED, where: str = "") -> int:
    """Writes an error to stderr and returns the status.

    A person reads each of its lines after the program's name and `where`. A program reads one object.
    """
    if not as_json() and isinstance(error, click.ClickException):
        error.show()
        return status
    lines = str(error).splitlines() or [type(error).__name__]
    if as_json():
        first, *others = (
            [_of_click(error)]
            if isinstance(error, click.ClickException)
            else [_parts(line, where) for line in lines]
        )
        found: dict[str, object] = {**first, "status": int(status)}
        if others:
            found["others"] = others
        sys.stderr.write(json.dumps(found) + "\n")
    else:
        place = f"{program}: {where}: " if where else f"{program}: "
        sys.stderr.write("".join(f"{place}{line}\n" for line in lines))
    return status


def _parts(line: str, where: str) -> dict[str, str]:
    """What is wrong, where, and what to do, which follows a semicolon."""
    found = _PLACE.fullmatch(line)
    place, said = (found["where"].removesuffix(": "), found["error"]) if found else ("", line)
    error, _, hint = said.partition("; ")
    return {"error": error, "where": ": ".join(filter(None, (where, place))), "hint": hint}


def _of_click(error: click.ClickException) -> dict[str, str]:
    if isinstance(error, click.NoSuchOption):
        meant = " or ".join(sorted(error.possibilities or ()))
        found = {"error": "no such option", "where": error.option_name}
        found["hint"] = f"did you mean {meant}?" if meant else ""
    elif isinstance(error, click.BadParameter) and error.param is not None:
        names = [*error.param.opts, error.param.human_readable_name]
        message = error.message or f"the {error.param.param_type_name} is missing"
        found = {**_parts(message, ""), "where": max(names[:-1] or names, key=len)}
    else:
        found = _parts(error.format_message(), "")
    if not found["hint"] and isinstance(error, click.UsageError) and error.ctx is not None:
        found["hint"] = f"see {error.ctx.command_path} --help"
    return found
