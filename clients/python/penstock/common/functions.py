"""Resolves functions named on a command line or in a configuration file: `pkg.module:function`, or
`folder/file.py:function`.

Never pass it a name received over the wire: only the person who starts a process may choose its code.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast


class FunctionInvalid(ValueError):
    """A name does not lead to a suitable function; the message says why."""


def find_function(
    name: str, positional: tuple[str, ...] | None, options: Mapping[str, object] | None = None
) -> Callable[..., object]:
    """The function that `name` leads to; the working directory is searched for modules too.

    The function must accept the `positional` arguments, and the options by name. With None, this is not
    checked, because only a call can tell. Raises FunctionInvalid.
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
        # The module may raise anything on import; its author needs the message.
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
        # Some functions written in C have no signature.
        return found
    try:
        signature.bind(*positional, **(options or {}))
    except TypeError as error:
        taken = ", ".join((*positional, *(options or {})))
        raise FunctionInvalid(f"it is called with ({taken}): {error}") from error
    return found
