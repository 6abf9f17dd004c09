"""Functions named on the command line: `pkg.module:function`."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from penstock.client.scoring import Agent


class BadFunction(Exception):
    """A name on the command line that leads to no function of (task, trajectory)."""


def load_function(name: str, option: str) -> Agent:
    """The function that `name` leads to; modules of the working directory are found too.

    Raises BadFunction, with the option and the name it got.
    """
    module_name, _, path = name.partition(":")
    if not module_name or not path:
        raise BadFunction(f"{option} {name}: write it as pkg.module:function")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: object = importlib.import_module(module_name)
    except Exception as error:
        # Whatever the module raises while it is imported is the user's to read.
        kind = type(error).__name__
        raise BadFunction(
            f"{option} {name}: cannot import {module_name}: {kind}: {error}"
        ) from error
    for part in path.split("."):
        if not hasattr(found, part):
            raise BadFunction(f"{option} {name}: {module_name} has no {path}")
        found = getattr(found, part)
    if not callable(found):
        raise BadFunction(f"{option} {name}: a {type(found).__name__} is not callable")
    function = cast("Agent", found)
    _check_parameters(function, f"{option} {name}")
    return function


def _check_parameters(function: Agent, where: str) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:
        # Some functions written in C have none to check.
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise BadFunction(f"{where}: it is called with (task, trajectory): {error}") from error
