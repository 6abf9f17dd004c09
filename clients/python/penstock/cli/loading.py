"""Imports a command's implementation when it runs, and names the extra of a missing module."""

from __future__ import annotations

import importlib
import sys

import click

from penstock.common.distribution import pip_install


def exit_with(module: str, function: str, extras: str, *arguments: object) -> None:
    """Runs a function that needs these extras and exits the process with its result.

    Raises UsageError if an extra is missing.
    """
    try:
        sys.exit(getattr(importlib.import_module(module), function)(*arguments))
    except ModuleNotFoundError as error:
        name = error.name or ""
        if name.partition(".")[0] == "penstock":
            # A missing module of our own is a defect.
            raise
        raise click.UsageError(
            f"{name} is not installed; install the extra {extras}, for example: "
            + pip_install(extras.partition(" ")[0])
        ) from error
