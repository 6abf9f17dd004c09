"""The options of `penstock rollout --command`."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path

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
    def run(
        command_line: str | None,
        time_limit: float,
        memory_limit: int | None,
        sandbox: str,
        network: str,
        api: str,
        env: tuple[str, ...],
        files: tuple[Path, ...],
        read: tuple[Path, ...],
        work_folder: Path | None,
        keep: str,
        command_token_file: Path | None,
        **others: object,
    ) -> None:
        external = None
        if command_line is not None:
            external = CommandSettings(
                command_line,
                None if others["reward"] is None else str(others["reward"]),
                time_limit,
                memory_limit or 0,
                SandboxUse(sandbox),
                Network(network),
                Api(api),
                env,
                tuple(path.resolve() for path in files),
                tuple(path.absolute() for path in read),
                work_folder,
                Keep(keep),
                command_token_file,
            )
        else:
            _refuse_alone(click.get_current_context())
        command(external=external, **others)

    for option in reversed(_OPTIONS):
        run = option(run)
    return run


def _refuse_alone(context: click.Context) -> None:
    """Without --command, none of these options has a meaning."""
    for name in _NAMES:
        source = context.get_parameter_source(name)
        if source is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--{name.replace('_', '-')} requires --command")


_OPTIONS = (
    click.option(
        "--command",
        "command_line",
        metavar="COMMAND",
        help="Run this command with /bin/sh for each attempt, instead of --generate. --reward is then a "
        "function, exit-status or result-file (the default). See docs/guides/programs.md.",
    ),
    click.option(
        "--time-limit",
        type=click.FloatRange(min=0, min_open=True),
        default=600.0,
        metavar="SECONDS",
        help="With --command: end a process and all its descendants after this time.",
    ),
    click.option(
        "--memory-limit",
        type=Size(),
        metavar="SIZE",
        show_default="no limit",
        help="With --command: memory limit of a process and all its descendants, such as 2GiB.",
    ),
    click.option(
        "--sandbox",
        type=click.Choice([use.value for use in SandboxUse]),
        default=SandboxUse.AUTO.value,
        help="With --command: run processes in a bubblewrap sandbox. auto: if it works here. require: exit "
        "if it does not. off: never.",
    ),
    click.option(
        "--network",
        type=click.Choice([network.value for network in Network]),
        default=Network.ATTEMPT.value,
        help="What a process in a sandbox can reach: only its own attempt, or everything the host can.",
    ),
    click.option(
        "--api",
        type=click.Choice([api.value for api in Api]),
        default=Api.HTTP.value,
        help="With --command: API through which a process takes turns: the OpenAI and Anthropic "
        "endpoints (http), the gRPC services, or both.",
    ),
    click.option(
        "--env",
        multiple=True,
        metavar="NAME[=VALUE]",
        help="With --command: pass on or set an environment variable. Can be repeated.",
    ),
    click.option(
        "--file",
        "files",
        multiple=True,
        type=_PATH,
        help="With --command: file or folder to copy into each attempt's folder. Can be repeated.",
    ),
    click.option(
        "--read",
        multiple=True,
        type=_PATH,
        help="Path that a sandbox shows read-only, in addition to the system's folders and the worker's "
        "start folder. Can be repeated.",
    ),
    click.option(
        "--work-folder",
        type=click.Path(file_okay=False, path_type=Path),
        metavar="FOLDER",
        show_default="the system's temporary folder",
        help="With --command: parent of the attempts' folders.",
    ),
    click.option(
        "--keep",
        type=click.Choice([keep.value for keep in Keep]),
        default=Keep.NONE.value,
        help="With --command: which attempts' folders to keep, with the end of the output in them.",
    ),
    click.option(
        "--command-token-file",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        metavar="FILE",
        help="With --command: token for the process's own gRPC calls. The worker's is never passed on.",
    ),
)
_NAMES = (
    "time_limit",
    "memory_limit",
    "sandbox",
    "network",
    "api",
    "env",
    "files",
    "read",
    "work_folder",
    "keep",
    "command_token_file",
)
