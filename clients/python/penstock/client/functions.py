"""Functions named on the command line: `pkg.module:function`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from penstock.common.functions import FunctionInvalid, find_function

if TYPE_CHECKING:
    from penstock.client.scoring import Agent


class BadFunction(Exception):
    """A name on the command line does not lead to a function of (task, trajectory)."""


def load_function(name: str, option: str) -> Agent:
    """Loads a function of (task, trajectory). Raises BadFunction with the option and the name."""
    return find(name, option, ("task", "trajectory"))


def find(
    name: str,
    option: str,
    positional: tuple[str, ...] | None,
    named: Mapping[str, object] | None = None,
) -> Callable[..., Any]:
    """Modules in the working directory are importable. Raises BadFunction."""
    try:
        return cast("Callable[..., Any]", find_function(name, positional, named))
    except FunctionInvalid as error:
        raise BadFunction(f"{option} {name}: {error}") from error
