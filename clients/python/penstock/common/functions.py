"""Functions that a person names, on a command line or in a configuration file: `pkg.module:function`, or
`folder/file.py:function`.

Never what came over the wire: a name that leads to code is for whoever starts the process to give.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast


class FunctionInvalid(ValueError):
    """A name that leads to no such function; the message says why."""


def find_function(
    name: str, positional: tuple[str, ...] | None, options: Mapping[str, object] | None = None
) -> Callable[..., object]:
    """The function that `name` leads to; modules of the working directory are found too.

    It has to take the `positional` arguments, and the options by their names; None where only a call can
    tell. Raises FunctionInvalid.
    """
    module_name, _, path = name.partition(":")
    if not module_name or not path:
        raise FunctionInvalid("write it as pkg.module:function")
    here = str(Path.cwd())
    if module_name.endswith(".py"):
        file = Path(module_name)
        here, module_name = str(file.parent.resolve()), file.stem
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: object = importlib.import_module(module_name)
    except Exception as error:
        # Whatever the module raises while it is imported is its author's to read.
        kind = type(error).__name__
        raise FunctionInvalid(f"cannot import {module_name}: {kind}: {error}") from error
    for part in path.split("."):
        if not hasattr(found, part):
            raise FunctionInvalid(f"{module_name} has no {path}")
        found = cast("object", getattr(found, part))
    if not callable(found):
        raise FunctionInvalid(f"a {type(found).__name__} is not callable")
    if positional is None:
        return found
    try:
        signature = inspect.signature(found)
    except ValueError:
        # Some functions written in C have none to check.
        return found
    try:
        signature.bind(*positional, **(options or {}))
    except TypeError as error:
        taken = ", ".join((*positional, *(options or {})))
        raise FunctionInvalid(f"it is called with ({taken}): {error}") from error
    return found
