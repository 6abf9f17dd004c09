"""The options `--style` and `--args`: how the functions of a command line are called."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click


def style_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options to a command, which is given `style` and `arguments`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


_OPTIONS = (
    click.option(
        "--style",
        type=click.Choice(["penstock", "slime", "verl", "trl"]),
        default="penstock",
        show_default=True,
        help="How the functions are called: as here, or as the system they were written for calls them; "
        "docs/moving.md.",
    ),
    click.option(
        "--args",
        "arguments",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        metavar="FILE",
        help="With a --style: TOML of what such functions are given as args.",
    ),
)
