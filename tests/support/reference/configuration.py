"""The pages of the settings, from the pydantic models of the configuration."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from penstock.server.config.settings import ServeConfig
from penstock.trainer.config.trainer import TrainerConfig
from penstock.up.cluster_config import Engines
from penstock.up.config import UpFile, Workers
from tests.support.reference import markdown
from tests.support.reference.markdown import NOTHING, choice, code, link, prose
from tests.support.reference.value_types import default_words, parts, type_words

TOP = "Top level"
READING = "Each key is written with the path of its table, as `--set` takes it."


def server_page() -> str:
    opening = f"""After reading this page you know every setting of `penstock serve`. They are in a TOML
        file, which `--config` names. {READING}"""
    return markdown.page("Settings of the server", opening, *_Tables().of(ServeConfig))


def trainer_page() -> str:
    opening = f"""After reading this page you know every setting of `penstock train`. They are in the TOML
        file that is its argument. {READING}"""
    return markdown.page("Settings of the trainer", opening, *_Tables().of(TrainerConfig))


def up_page() -> str:
    opening = f"""After reading this page you know every setting that `penstock up` reads itself. Its file
        also has [the server's](configuration-server.md), [the trainer's](configuration-trainer.md) and
        [the workers' options](cli.md#penstock-rollout), each in its own table. {READING}"""
    inner = {"rollout": Workers, "engines": Engines}
    return markdown.page("Settings of `penstock up`", opening, *_Tables(inner).of(UpFile))


@dataclass(frozen=True)
class _Table:
    """What a key holds whose value is one table, or a list of tables."""

    path: str
    description: str
    kinds: list[type[BaseModel]]
    """The models that it may be of: one, or those of a union."""
    selectors: list[str]
    """The keys that select one of them."""
    default: object
    is_list: bool

    @property
    def heading(self) -> str:
        if not self.path:
            return TOP
        return f"[[{self.path}]]" if self.is_list else f"[{self.path}]"


class _Tables:
    """Writes the sections of one page. Tables with the same keys have one section."""

    def __init__(self, inner: Mapping[str, type[BaseModel]] | None = None) -> None:
        """`inner` has the models of keys at the top that are declared as tables of any keys."""
        self._inner = inner or {}
        self._written: dict[type[BaseModel], str] = {}
        """The heading under which a model's keys are."""

    def of(self, model: type[BaseModel]) -> Iterator[str]:
        return self._section(_Table("", "", [model], [], None, False))

    def _section(self, table: _Table) -> Iterator[str]:
        later: list[_Table] = []
        yield f"## {markdown.escaped_heading(table.heading)}"
        if len(table.kinds) == 1:
            (model,) = table.kinds
            outermost = "The tables of the file, and its keys outside of tables."
            yield markdown.paragraphs(model.__doc__ or "") if table.path else outermost
            yield self._keys(table, model, later)
        else:
            yield markdown.wrapped(prose(table.description))
            yield _selected(table)
            for kind in table.kinds:
                if _own(kind, table.selectors):
                    selection = _selection(kind, table.selectors)
                    yield f"### {markdown.escaped_heading(table.heading)} with {selection}"
                    yield self._keys(table, kind, later)
        for inner in later:
            yield from self._section(inner)

    def _keys(self, table: _Table, model: type[BaseModel], later: list[_Table]) -> str:
        """Describes a model's keys. Adds the tables among them that need their own section to `later`."""
        rows: list[tuple[str, str, str, str]] = []
        for name, field in _own(model, table.selectors).items():
            path = f"{table.path}.{name}".lstrip(".")
            inner = self._table(path, field)
            if inner is not None:
                rows.append(self._table_row(inner, field, later))
                continue
            default, description = default_words(name, field), prose(field.description or "")
            rows.append((code(path), type_words(field), default, description))
        return markdown.table(("key", "type", "default", "description"), rows)

    def _table_row(
        self, table: _Table, field: FieldInfo, later: list[_Table]
    ) -> tuple[str, str, str, str]:
        """Describes a key that holds a table, with a link to the section of the table's keys."""
        same, description = self._written.get(table.kinds[0]), prose(table.description)
        if same is not None:
            description += f" Same keys as {link(code(same), same)}."
        else:
            later.append(table)
            if len(table.kinds) == 1:
                self._written[table.kinds[0]] = table.heading
        linked = link("list of tables" if table.is_list else "table", same or table.heading)
        if field.is_required() or field.default is None or table.is_list:
            return code(table.path), linked, default_words("", field), description
        return code(table.path), linked, NOTHING, description

    def _table(self, path: str, field: FieldInfo) -> _Table | None:
        """The table that a key holds, or None if its value is no table with declared keys."""
        (annotation, *others) = parts(field.annotation)
        is_list = get_origin(annotation) is tuple
        if is_list:
            (annotation, *_) = get_args(annotation)
        selectors: list[str] = [str(field.discriminator)] if field.discriminator else []
        union = field.annotation if others else annotation
        kinds = [self._inner[path]] if path in self._inner else list(_models(union, selectors))
        if not kinds:
            return None
        description = field.description or inspect.cleandoc(kinds[0].__doc__ or "")
        return _Table(path, description, kinds, selectors, field.default, is_list)


def _models(annotation: Any, selectors: list[str]) -> Iterator[type[BaseModel]]:
    """The models of a union, in order. Adds the keys that select one to `selectors`."""
    if get_origin(annotation) is Annotated:
        inner, *metadata = get_args(annotation)
        found = [each.discriminator for each in metadata if isinstance(each, FieldInfo)]
        selectors += [str(name) for name in found if name]
        yield from _models(inner, selectors)
        return
    found = parts(annotation)
    if len(found) > 1:
        for part in found:
            yield from _models(part, selectors)
    elif isinstance(found[0], type) and issubclass(found[0], BaseModel):
        yield found[0]


def _selected(table: _Table) -> str:
    """The kinds of a table, and what selects each."""
    *first, last = [code(f"{table.path}.{name}") for name in table.selectors]
    by = f"{', '.join(first)} and {last} together select" if first else f"{last} selects"
    default = type(table.default)
    rows = [
        (
            _selection(kind, table.selectors),
            prose(" ".join(_meaning(kind, table.selectors)))
            + (" The default." if kind is default else ""),
        )
        for kind in table.kinds
    ]
    listed = markdown.table(("selected by", "meaning"), rows)
    return f"{markdown.wrapped(f'{by} one of these.')}\n\n{listed}"


def _own(kind: type[BaseModel], selectors: list[str]) -> dict[str, FieldInfo]:
    """A model's fields, without a single selector, whose value and meaning are in the table of kinds."""
    left_out = selectors if len(selectors) == 1 else []
    return {name: field for name, field in kind.model_fields.items() if name not in left_out}


def _selection(kind: type[BaseModel], selectors: list[str]) -> str:
    """`kind = "gae"`: the values that select a model."""
    fields = [(name, kind.model_fields[name]) for name in selectors if name in kind.model_fields]
    values = [
        (name, choice([json.dumps(value) for value in get_args(field.annotation)]))
        for name, field in fields
    ]
    return ", ".join(code(f"{name} = {value}") for name, value in values)


def _meaning(kind: type[BaseModel], selectors: list[str]) -> Iterator[str]:
    """The docstring of a model, then that of its single selector, unless it is a repetition."""
    text = inspect.cleandoc(kind.__doc__ or "")
    yield text
    if len(selectors) == 1:
        of_kind = kind.model_fields[selectors[0]].description or ""
        if of_kind.rstrip(".") not in text:
            yield of_kind
