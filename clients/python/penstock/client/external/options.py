"""The options of `penstock rollout --command`."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click

from penstock.client.external.settings import (
    Api,
    CommandSettings,
    Keep,
    Network,
    SandboxUse,
    read_size,
)

_PATH = click.Path(exists=True, path_type=Path)


class Size(click.ParamType[int]):
    """A size in bytes, such as 512M or 2GiB."""

    name = "SIZE"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        try:
            return read_size(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


def command_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options to a command, which receives `external`, or None without --command."""

    @wraps(command)
    def run(command_line: str | None, **given: Any) -> None:
        own = {name: given.pop(name) for name in _OPTIONS}
        external = None
        if command_line is None:
            _refuse_alone(click.get_current_context())
        else:
            external = CommandSettings(
                command_line,
                given["reward"],
                own["time_limit"],
                own["memory_limit"] or 0,
                SandboxUse(own["sandbox"]),
                Network(own["network"]),
                Api(own["api"]),
                own["env"],
                tuple(path.resolve() for path in own["files"]),
                tuple(path.absolute() for path in own["read"]),
                own["work_folder"],
                Keep(own["keep"]),
                own["command_token_file"],
            )
        command(external=external, **given)

    taking: Callable[..., None] = run
    for option in reversed(_OPTIONS.values()):
        taking = option(taking)
    return _COMMAND(taking)


def _refuse_alone(context: click.Context) -> None:
    """Without --command, none of these options has a meaning."""
    for name in _OPTIONS:
        source = context.get_parameter_source(name)
        if source is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--{name.replace('_', '-')} requires --command")


_COMMAND = click.option(
    "--command",
    "command_line",
    metavar="COMMAND",
    help="Run this command with /bin/sh for each attempt, instead of --generate. --reward is then a "
    "function, exit-status or result-file (the default). See docs/guides/programs.md.",
)
_OPTIONS: dict[str, Callable[[Callable[..., None]], Callable[..., None]]] = {
    "time_limit": click.option(
        "--time-limit",
        type=click.FloatRange(min=0, min_open=True),
        default=600.0,
        metavar="SECONDS",
        help="With --command: end a process and all its descendants after this time.",
    ),
    "memory_limit": click.option(
        "--memory-limit",
        type=Size(),
        metavar="SIZE",
        show_default="no limit",
        help="With --command: memory limit of a process and all its descendants, such as 2GiB.",
    ),
    "sandbox": click.option(
        "--sandbox",
        type=click.Choice([use.value for use in SandboxUse]),
        default=SandboxUse.AUTO.value,
        help="With --command: run processes in a bubblewrap sandbox. auto: if it works here. require: exit "
        "if it does not. off: never.",
    ),
    "network": click.option(
        "--network",
        type=click.Choice([network.value for network in Network]),
        default=Network.ATTEMPT.value,
        help="What a process in a sandbox can reach: only its own attempt, or everything the host can.",
    ),
    "api": click.option(
        "--api",
        type=click.Choice([api.value for api in Api]),
        default=Api.HTTP.value,
        help="With --command: API through which a process takes turns: the OpenAI and Anthropic "
        "endpoints (http), the gRPC services, or both.",
    ),
    "env": click.option(
        "--env",
        multiple=True,
        metavar="NAME[=VALUE]",
        help="With --command: pass on or set an environment variable. Can be repeated.",
    ),
    "files": click.option(
        "--file",
        "files",
        multiple=True,
        type=_PATH,
        help="With --command: file or folder to copy into each attempt's folder. Can be repeated.",
    ),
    "read": click.option(
        "--read",
        multiple=True,
        type=_PATH,
        help="Path that a sandbox shows read-only, in addition to the system's folders and the worker's "
        "start folder. Can be repeated.",
    ),
    "work_folder": click.option(
        "--work-folder",
        type=click.Path(file_okay=False, path_type=Path),
        metavar="FOLDER",
        show_default="the system's temporary folder",
        help="With --command: parent of the attempts' folders.",
    ),
    "keep": click.option(
        "--keep",
        type=click.Choice([keep.value for keep in Keep]),
        default=Keep.NONE.value,
        help="With --command: which attempts' folders to keep, with the end of the output in them.",
    ),
    "command_token_file": click.option(
        "--command-token-file",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        metavar="FILE",
        help="With --command: token for the process's own gRPC calls. The worker's is never passed on.",
    ),
}
