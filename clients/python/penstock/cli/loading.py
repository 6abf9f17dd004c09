"""Imports a command's implementation when it runs, and reports missing extras."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import cast

import click


def load(module: str, function: str, extras: str) -> Callable[..., int]:
    """Loads a function from a module that needs these extras. Raises UsageError if one is
    missing."""
    try:
        return cast("Callable[..., int]", getattr(importlib.import_module(module), function))
    except ModuleNotFoundError as error:
        raise _missing(error, extras) from error


def exit_with(run: Callable[..., int], extras: str, *arguments: object) -> None:
    """Runs the function and exits the process with its result."""
    try:
        sys.exit(run(*arguments))
    except ModuleNotFoundError as error:
        raise _missing(error, extras) from error


def _missing(error: ModuleNotFoundError, extras: str) -> Exception:
    """Returns an error that names the extra. A missing module of our own is a defect and stays as
    it is."""
    name = error.name or ""
    if name.partition(".")[0] == "penstock":
        return error
    return click.UsageError(
        f"{name} is not installed; install the extra {extras}, for example: "
        f"pip install 'penstock[{extras.partition(' ')[0]}]'"
    )
