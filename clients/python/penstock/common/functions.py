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

from penstock.common.suggestions import did_you_mean, unreadable


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
        module, dot, function = name.rstrip(":").rpartition(".")
        meant = dot and function != "py" and not path
        hint = f"; did you mean {module}:{function}?" if meant else ""
        raise FunctionInvalid(f"write it as pkg.module:function{hint}")
    here, file = str(Path.cwd()), None
    if module_name.endswith(".py"):
        file = Path(module_name)
        try:
            file.stat()
        except OSError as error:
            raise FunctionInvalid(unreadable(file, error)) from error
        here, module_name = str(file.parent.resolve()), file.stem
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: object = importlib.import_module(module_name)
    except Exception as error:
        # The module may raise anything on import; its author needs the message.
        kind = type(error).__name__
        why = _searched(error, module_name, here)
        raise FunctionInvalid(f"cannot import {module_name}: {kind}: {error}{why}") from error
    origin = getattr(found, "__file__", None)
    if file is not None and (origin is None or Path(origin).resolve() != file.resolve()):
        other = origin or "which is built in"
        raise FunctionInvalid(f"{file}: its name is that of another module, {other}; rename it")
    for part in path.split("."):
        if not hasattr(found, part):
            names = [n for n in vars(found) if not n.startswith("_")] if module_name else []
            hint = did_you_mean(part, names)
            raise FunctionInvalid(f"{module_name} has no {path}{hint}{_of_file(found)}")
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
        hint = f"; it is written as {name}({', '.join(signature.parameters)})"
        raise FunctionInvalid(f"it is called with ({taken}): {error}{hint}") from error
    return found


def _searched(error: Exception, module_name: str, folder: str) -> str:
    """Where a module was looked for, or which Python could not read it."""
    if isinstance(error, SyntaxError):
        return f"; this is Python {sys.version_info.major}.{sys.version_info.minor}"
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing is None or not f"{module_name}.".startswith(f"{missing}."):
        # The module itself was found, and it imports another one.
        return ""
    names = [path.stem for path in Path(folder).iterdir() if path.suffix == ".py" or path.is_dir()]
    hint = did_you_mean(missing.partition(".")[0], names) if "." not in missing else ""
    return f"; looked in {folder} and among the installed packages{hint}"


def _of_file(module: object) -> str:
    file = getattr(module, "__file__", None)
    return f" ({file})" if isinstance(file, str) else ""
