"""The options `--style` and `--args`, which select the calling convention of user functions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click


def style_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options to a command, which receives `style` and `arguments`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


_OPTIONS = (
    click.option(
        "--style",
        type=click.Choice(["penstock", "slime", "verl", "trl"]),
        default="penstock",
        show_default=True,
        help="Calling convention of the functions: Penstock's, or that of the system they were written "
        "for. See docs/moving.md.",
    ),
    click.option(
        "--args",
        "arguments",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        metavar="FILE",
        help="With --style: TOML file of the args that such functions receive.",
    ),
)
