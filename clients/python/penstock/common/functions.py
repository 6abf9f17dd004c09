"""Resolves functions named on a command line or in a configuration file: `pkg.module:function`, or
`folder/file.py:function`.

A name may end in a call with literals, `my.py:close_to(tolerance=0.1)`, which returns the function. Without
parentheses, a function that takes nothing but arguments by name is called too.

Never pass it a name received over the wire: only the person who starts a process may choose its code.
"""

from __future__ import annotations

import ast
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
    bare, call = _split_call(name)
    module_name, _, path = bare.partition(":")
    if not module_name or not path:
        module, dot, function = bare.rstrip(":").rpartition(".")
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
            names = [n for n in dir(found) if not n.startswith("_")]
            hint = did_you_mean(part, names)
            raise FunctionInvalid(f"{module_name} has no {path}{hint}{_of_file(found)}")
        found = cast("object", getattr(found, part))
    if not callable(found):
        raise FunctionInvalid(f"a {type(found).__name__} is not callable")
    if call is not None or (positional and _makes_functions(found)):
        found = _made(found, call)
    return found if positional is None else accepting(found, positional, options or {}, name)


def accepting(
    found: Callable[..., object],
    positional: tuple[str, ...],
    options: Mapping[str, object],
    name: str,
) -> Callable[..., object]:
    """The function, if it can be called so. Raises FunctionInvalid."""
    try:
        signature = inspect.signature(found)
    except ValueError:
        # Some functions written in C have no signature.
        return found
    try:
        signature.bind(*positional, **options)
    except TypeError as error:
        taken = ", ".join((*positional, *options))
        hint = f"; it is written as {name}({', '.join(signature.parameters)})"
        raise FunctionInvalid(f"it is called with ({taken}): {error}{hint}") from error
    return found


def _split_call(name: str) -> tuple[str, ast.Call | None]:
    """A name without the call at its end, and the call. Raises FunctionInvalid."""
    bare, parenthesis, arguments = name.partition("(")
    if not parenthesis:
        return name, None
    try:
        call = ast.parse(f"f({arguments}", mode="eval").body
    except SyntaxError as error:
        raise FunctionInvalid(f"({arguments}: {error.msg}") from error
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise FunctionInvalid(f"({arguments}: expected one call, at the end of the name")
    return bare, call


def _makes_functions(found: Callable[..., object]) -> bool:
    """Whether it takes nothing but arguments by name."""
    try:
        kinds = {each.kind for each in inspect.signature(found).parameters.values()}
    except ValueError:
        return False
    return bool(kinds) and kinds <= {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD}


def _made(found: Callable[..., object], call: ast.Call | None) -> Callable[..., object]:
    """What a function returns for the call's literals. Raises FunctionInvalid."""
    try:
        given = [_literal(each) for each in call.args] if call else []
        named = {str(k.arg): _literal(k.value) for k in call.keywords} if call else {}
        _check_names(found, named)
        made = found(*given, **named)
    except FunctionInvalid:
        raise
    except Exception as error:
        # The function may raise anything; the message is for the author of the call.
        raise FunctionInvalid(f"{type(error).__name__}: {error}") from error
    if not callable(made):
        raise FunctionInvalid(f"it returned {made!r}, which is not a function")
    return made


def _check_names(found: Callable[..., object], named: Mapping[str, object]) -> None:
    """Raises FunctionInvalid for an argument that the function does not have."""
    try:
        parameters = inspect.signature(found).parameters.values()
    except ValueError:
        # Some functions written in C have no signature.
        return
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return
    known = [one.name for one in parameters if one.kind is not one.VAR_POSITIONAL]
    for name in named:
        if name not in known:
            hint = did_you_mean(name, known) or f"; it has {', '.join(known) or 'none'}"
            raise FunctionInvalid(f"it has no argument {name}{hint}")


def _literal(value: ast.expr) -> object:
    try:
        return ast.literal_eval(value)
    except ValueError as error:
        raise FunctionInvalid(
            f"{ast.unparse(value)}: expected a literal, in quotes if a text"
        ) from error


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
