"""Functions named on the command line: `pkg.module:function`."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from penstock.common.functions import FunctionInvalid, find_function

if TYPE_CHECKING:
    from penstock.client.scoring import Agent


class BadFunction(Exception):
    """A name on the command line that leads to no function of (task, trajectory)."""


def load_function(name: str, option: str) -> Agent:
    """The function that `name` leads to; modules of the working directory are found too.

    Raises BadFunction, with the option and the name it got.
    """
    try:
        return cast("Agent", find_function(name, ("task", "trajectory")))
    except FunctionInvalid as error:
        raise BadFunction(f"{option} {name}: {error}") from error
