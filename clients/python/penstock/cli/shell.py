"""The commands `help` and `completion`, and the classes of all commands."""

from __future__ import annotations

import importlib
import sys
from typing import Any, cast

import click
from click.shell_completion import CompletionItem, get_completion_class

from penstock.common.answers import Exit, answering_programs, complain, json_option, wants_json
from penstock.common.garbage import quicken
from penstock.common.suggestions import did_you_mean

VARIABLE = "_PENSTOCK_COMPLETE"
"""The environment variable in which a shell's script asks for completions."""


class Commands(click.Group):
    """Commands that all take --json, and whose errors are JSON then."""

    group_class = type

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        reads_options = not isinstance(cmd, click.Group | PassThrough)
        # Not left to the group: click asks the first context of a command for these, and keeps the answer.
        cmd.context_settings.setdefault("help_option_names", ["-h", "--help"])
        if reads_options and not any("--json" in param.opts for param in cmd.params):
            json_option(cmd)
        super().add_command(cmd, name)

    def main(self, *given: Any, standalone_mode: bool = True, **named: Any) -> Any:
        quicken()
        arguments = given[0] if given else named.get("args")
        if not standalone_mode or not wants_json(sys.argv[1:] if arguments is None else arguments):
            return super().main(*given, standalone_mode=standalone_mode, **named)
        with answering_programs():
            try:
                status = super().main(*given, standalone_mode=False, **named)
            except click.ClickException as error:
                status = complain("penstock", error, error.exit_code)
            except click.Abort:
                status = complain("penstock", "interrupted", Exit.FAILED)
        sys.exit(status)


class PassThrough(click.Command):
    """Hands its arguments, --help included, to a parser that it imports when it runs."""

    def __init__(self, name: str, *, parser: str, **attributes: Any) -> None:
        """`parser` is the click command that reads the arguments, as `package.module:command`."""
        settings: dict[str, Any] = {
            "ignore_unknown_options": True,
            "allow_interspersed_args": False,
            "help_option_names": [],
        }
        super().__init__(name, context_settings=settings, add_help_option=False, **attributes)
        self._parser = parser

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The options of the parser. None if its extra is not installed."""
        module, _, command = self._parser.partition(":")
        try:
            parser = cast("click.Command", getattr(importlib.import_module(module), command))
        except ModuleNotFoundError:
            return []
        context = click.Context(parser, info_name=self.name, **parser.context_settings)
        return parser.shell_complete(context, incomplete)


@click.command("help", epilog="Exit status: 0; 2 if there is no such command.")
@click.argument("words", metavar="[COMMAND]...", nargs=-1)
@click.pass_context
def help_command(context: click.Context, words: tuple[str, ...]) -> None:
    """Show the help of a command, as COMMAND --help does."""
    group = context.find_root().command
    assert isinstance(group, click.Group)
    command: click.Command = group
    for word in words:
        names = command.list_commands(context) if isinstance(command, click.Group) else []
        if not isinstance(command, click.Group) or word not in names:
            raise click.UsageError(f"there is no command {word!r}{did_you_mean(word, names)}")
        command = command.commands[word]
    group.main([*words, "--help"], prog_name=context.find_root().info_name)


@click.command("completion", epilog="Exit status: 0; 2 for an unknown shell.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print a script that completes commands and options in a shell.

    \b
    $ penstock completion bash > ~/.local/share/bash-completion/completions/penstock
    $ penstock completion zsh > "${fpath[1]}/_penstock"
    $ penstock completion fish > ~/.config/fish/completions/penstock.fish
    """
    found = get_completion_class(shell)
    assert found is not None, "click completes for each of these shells"
    click.echo(found(context.find_root().command, {}, "penstock", VARIABLE).source())
