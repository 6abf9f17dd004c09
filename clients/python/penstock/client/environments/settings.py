"""The options of `penstock rollout --environment`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps

import click


@dataclass(frozen=True)
class EnvironmentSettings:
    """What the command line says of environments."""

    names: tuple[str, ...]
    """`textarena:GAME`, `reasoning_gym:DATA_SET` or `pkg.module:Class`; at least one."""
    settings: tuple[str, ...] = ()
    """`episode.turns=8`, `textarena.opponent=pkg.module:function`, and `environment.KEY=VALUE` for what a
    class of one's own is made with."""


def environment_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options to a command, which is given `environments`: None without --environment."""

    @wraps(command)
    def run(names: tuple[str, ...], settings: tuple[str, ...], **others: object) -> None:
        if settings and not names:
            raise click.UsageError("--set goes with an --environment")
        command(environments=EnvironmentSettings(names, settings) if names else None, **others)

    for option in reversed(_OPTIONS):
        run = option(run)
    return run


_OPTIONS = (
    click.option(
        "--environment",
        "names",
        multiple=True,
        metavar="NAME",
        help="Play an episode of many turns: textarena:GAME, reasoning_gym:DATA_SET or "
        "PKG.MODULE:CLASS. Given several times, each task says which; docs/environments.md.",
    ),
    click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="SECTION.KEY=VALUE",
        help="With an --environment, such as episode.turns=8; may be repeated.",
    ),
)
