"""Functions named on the command line: `pkg.module:function`."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from penstock.common.functions import FunctionInvalid, find_function

if TYPE_CHECKING:
    from penstock.client.scoring import Agent


class BadFunction(Exception):
    """A name on the command line does not lead to a function of (task, trajectory)."""


def load_function(name: str, option: str) -> Agent:
    """Loads the function `name`. Modules in the working directory are importable.

    Raises BadFunction with the option and the name.
    """
    try:
        return cast("Agent", find_function(name, ("task", "trajectory")))
    except FunctionInvalid as error:
        raise BadFunction(f"{option} {name}: {error}") from error
