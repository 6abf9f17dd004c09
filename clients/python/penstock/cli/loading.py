"""Imports what a command runs when it runs, and says which extra is missing."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import cast

import click


def load(module: str, function: str, extras: str) -> Callable[..., int]:
    """A function of a module that needs these extras. Raises UsageError where one is missing."""
    try:
        return cast("Callable[..., int]", getattr(importlib.import_module(module), function))
    except ModuleNotFoundError as error:
        raise _missing(error, extras) from error


def exit_with(run: Callable[..., int], extras: str, *arguments: object) -> None:
    """Runs it; the process exits with what it returns."""
    try:
        sys.exit(run(*arguments))
    except ModuleNotFoundError as error:
        raise _missing(error, extras) from error


def _missing(error: ModuleNotFoundError, extras: str) -> Exception:
    """A message that names the extra, unless a module of ours is what is missing: that is a defect."""
    name = error.name or ""
    if name.partition(".")[0] == "penstock":
        return error
    return click.UsageError(
        f"{name} is not installed; install the extra {extras}, such as: "
        f"pip install 'penstock[{extras.partition(' ')[0]}]'"
    )
