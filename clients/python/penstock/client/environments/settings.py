"""The options of `penstock rollout --environment`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps

import click


@dataclass(frozen=True)
class EnvironmentSettings:
    names: tuple[str, ...]
    """`textarena:GAME`, `reasoning_gym:DATA_SET` or `pkg.module:Class`; at least one."""
    settings: tuple[str, ...] = ()
    """For example `episode.turns=8` or `textarena.opponent=pkg.module:function`.
    `environment.KEY=VALUE` sets an argument of a `pkg.module:Class`."""


def environment_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command receives `environments`: None without --environment."""

    @wraps(command)
    def run(names: tuple[str, ...], settings: tuple[str, ...], **others: object) -> None:
        if settings and not names:
            raise click.UsageError("--set requires --environment")
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
        help="Environment for episodes of many turns: textarena:GAME, reasoning_gym:DATA_SET or "
        "PKG.MODULE:CLASS. If repeated, each task names the one to use. See docs/guides/environments.md.",
    ),
    click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="SECTION.KEY=VALUE",
        help="With --environment: set a value, such as episode.turns=8. Can be repeated.",
    ),
)
