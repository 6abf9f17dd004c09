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
    """Bytes, as 512M or 2GiB."""

    name = "SIZE"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        """Fails where it is no size."""
        try:
            return read_size(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


def command_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options to a command, which is given `external`: None without --command."""

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
    """Without --command none of the others means anything."""
    for name in _NAMES:
        source = context.get_parameter_source(name)
        if source is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--{name.replace('_', '-')} goes with --command")


_OPTIONS = (
    click.option(
        "--command",
        "command_line",
        metavar="COMMAND",
        help="Run this by /bin/sh once for each attempt, in place of --generate; docs/external.md. "
        "--reward is then a function, exit-status or result-file (the default).",
    ),
    click.option(
        "--time-limit",
        type=click.FloatRange(min=0, min_open=True),
        default=600.0,
        show_default=True,
        metavar="SECONDS",
        help="With --command: end a process, and all that came of it, after this long.",
    ),
    click.option(
        "--memory-limit",
        type=Size(),
        metavar="SIZE",
        help="With --command: such as 2GiB; what a process and all that came of it may hold. Default: no "
        "limit.",
    ),
    click.option(
        "--sandbox",
        type=click.Choice([use.value for use in SandboxUse]),
        default=SandboxUse.AUTO.value,
        show_default=True,
        help="With --command: lock processes in by bubblewrap: where it runs, or else not start, or never.",
    ),
    click.option(
        "--network",
        type=click.Choice([network.value for network in Network]),
        default=Network.ATTEMPT.value,
        show_default=True,
        help="What a process in a sandbox reaches: its own attempt alone, or all that the host does.",
    ),
    click.option(
        "--api",
        type=click.Choice([api.value for api in Api]),
        default=Api.HTTP.value,
        show_default=True,
        help="With --command: by what it takes turns: the OpenAI and Anthropic endpoints, the gRPC "
        "services, or both.",
    ),
    click.option(
        "--env",
        multiple=True,
        metavar="NAME[=VALUE]",
        help="With --command: a variable to pass on, or to set; may be repeated.",
    ),
    click.option(
        "--file",
        "files",
        multiple=True,
        type=_PATH,
        help="With --command: a file or folder to copy into each attempt's folder; may be repeated.",
    ),
    click.option(
        "--read",
        multiple=True,
        type=_PATH,
        help="What a sandbox shows, read only, beside the system and the folder the worker was started in; "
        "may be repeated.",
    ),
    click.option(
        "--work-folder",
        type=click.Path(file_okay=False, path_type=Path),
        metavar="FOLDER",
        help="With --command: where the attempts' folders are made. Default: the system's temporary files.",
    ),
    click.option(
        "--keep",
        type=click.Choice([keep.value for keep in Keep]),
        default=Keep.NONE.value,
        show_default=True,
        help="With --command: whose folders stay, with the end of the output in them.",
    ),
    click.option(
        "--command-token-file",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        metavar="FILE",
        help="With --command: a token for the process's own gRPC calls. The worker's is never passed on.",
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
