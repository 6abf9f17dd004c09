"""The page of the command line, from click's own objects."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import click

from penstock.cli.__main__ import main
from penstock.demo.command import demo
from penstock.server.__main__ import serve
from penstock.trainer.commands.evaluate import evaluate
from tests.support.reference import markdown
from tests.support.reference.markdown import NOTHING, choice, code, link, prose

OPENING = """After reading this page you can call every command of `penstock`. `penstock COMMAND --help`
prints the same text."""
PARSERS: Mapping[str, click.Command] = {
    "penstock serve": serve,
    "penstock eval": evaluate,
    "penstock demo": demo,
}
"""Commands that `penstock` passes their arguments to unread, by the name they are called by."""
CONNECTION = "Connection options"
SERVE_REST = """Every other option is one of vLLM's engine, such as `--dtype` or `--max-model-len`. Penstock
passes them on; `vllm serve --help=all` describes them."""


def page() -> str:
    found = dict(commands())
    index = [
        (link(name, name), prose(_summary(command)))
        for name, command in found.items()
        if not isinstance(command, click.Group)
    ]
    blocks = [markdown.table(("command", "purpose"), index)]
    shared: dict[str, list[str]] = {}
    for name, command in found.items():
        blocks.append(f"## {name}")
        blocks += _section(name, command)
        rows = [_row(option) for option in _options(command) if _is_shared(option)]
        shared |= {row[0]: row for row in rows}
    blocks += [
        f"## {CONNECTION}",
        "Commands that call a server take these.",
        _table(shared.values()),
    ]
    return markdown.page("The command line", OPENING, *blocks)


def commands() -> Iterator[tuple[str, click.Command]]:
    """Every command, and every group before its commands, with the parser that reads its options."""
    yield from _below("penstock", main)


def _below(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    yield name, PARSERS.get(name, command)
    if isinstance(command, click.Group):
        for sub in command.commands:
            yield from _below(f"{name} {sub}", command.commands[sub])


def context_of(name: str, command: click.Command) -> click.Context:
    """As the command line makes it: a command keeps the help option of its first context."""
    return click.Context(command, info_name=name, help_option_names=["-h", "--help"])


def _section(name: str, command: click.Command) -> Iterator[str]:
    yield f"```\n{' '.join((name, *command.collect_usage_pieces(context_of(name, command))))}\n```"
    yield markdown.paragraphs(command.help or "")
    options = _options(command)
    if own := [_row(option) for option in options if not _is_shared(option)]:
        yield _table(own)
    if any(map(_is_shared, options)):
        yield f"Also takes the {link(CONNECTION.lower(), CONNECTION)}."
    if command is serve:
        yield markdown.wrapped(SERVE_REST)
    if command.epilog:
        yield markdown.paragraphs(command.epilog)


def _summary(command: click.Command) -> str:
    """The first sentence of the help, of which click would cut off the end."""
    first = inspect.cleandoc(command.help or "").split("\n\n")[0]
    return " ".join(first.split()).partition(". ")[0].rstrip(".") + "."


def _options(command: click.Command) -> list[click.Option]:
    return [each for each in command.params if isinstance(each, click.Option)]


def _is_shared(option: click.Option) -> bool:
    return (option.name or "").startswith("security_")


def _table(rows: Any) -> str:
    return markdown.table(("option", "value", "default", "description"), rows)


def _row(option: click.Option) -> list[str]:
    info = option.to_info_dict()
    names = ", ".join((*option.opts, *option.secondary_opts))
    if option.metavar and not option.is_flag:
        names += f" {option.metavar}"
    description = prose(option.help or "")
    if option.envvar:
        description += f" Environment variable: {code(option.envvar)}."
    return [code(names), _value(option, info["type"]), _default(option, info), description]


def _value(option: click.Option, kind: Mapping[str, Any]) -> str:
    """What the option takes, in words."""
    if option.is_flag:
        return "flag"
    if "choices" in kind:
        words = choice([code(each) for each in kind["choices"]])
    elif "min" in kind:
        number = "integer" if isinstance(option.type, click.types.IntParamType) else "number"
        words = markdown.bounded(
            number,
            **{">" if kind["min_open"] else "≥": kind["min"]},
            **{"<" if kind["max_open"] else "≤": kind["max"]},
        )
    elif isinstance(option.type, click.Path):
        words = "path"
    elif kind["name"] == "integer":
        words = "integer"
    else:
        words = "text" if option.metavar or kind["name"] == "text" else code(kind["name"])
    return f"{words}; repeatable" if option.multiple else words


def _default(option: click.Option, info: Mapping[str, Any]) -> str:
    if option.required:
        return "required"
    if isinstance(option.show_default, str):
        return prose(option.show_default)
    if option.is_flag:
        return "off"
    return NOTHING if info["default"] in (None, "") or option.multiple else code(info["default"])
