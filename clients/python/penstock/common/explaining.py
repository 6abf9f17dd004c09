"""Reads a section of a configuration, and says in one line each what is wrong with it.

    arithmetic.toml:12: train.lerning_rate: unknown setting; did you mean train.learning_rate?
    --set train.lr: unknown setting; did you mean train.learning_rate?

This is the only place that words pydantic's errors, for the server, the trainer and `penstock up` alike.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from penstock.common.secrets import without_passwords
from penstock.common.section import NotBoolean, Section
from penstock.common.settings import Origins, Place, SettingInvalid, Table, read_with_origins
from penstock.common.suggestions import did_you_mean, listed, nearest
from penstock.common.token_file import redact

S = TypeVar("S", bound=BaseModel)

_EXPECTED = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing_size": "a smaller whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "a text in quotes",
    "path_type": "a path in quotes",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
    "model_attributes_type": "a table",
}
_BOUNDS = {
    "greater_than": ("above", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("below", "lt"),
    "less_than_equal": ("at most", "le"),
}
_VERY_CLOSE = 0.85
_LISTS = ("tuple_type", "list_type")
_TABLES = ("model_type", "model_attributes_type", "dict_type")


def read_config(
    section: type[S],
    path: Path | None,
    settings: Iterable[str],
    options: Mapping[str, tuple[str, str]] | None = None,
) -> S:
    """Reads a file with settings and options over it; see `read_with_origins`. Raises SettingInvalid."""
    return check(section, *read_with_origins(path, settings, options))


def check(section: type[S], table: Table, origins: Origins, *above: str) -> S:
    """Checks a table that was read from `above` of its file. Raises SettingInvalid."""
    try:
        return section.model_validate(table)
    except ValidationError as error:
        lines = _explain(error, section, table, origins, above)
    # The refused values may be secrets.
    raise SettingInvalid(without_passwords(redact("\n".join(lines))))


def in_short(error: ValidationError) -> str:
    """What is wrong with a single value whose name the caller says."""
    problem = error.errors(include_url=False)[0]
    return f"{_Problem(problem, (), [], None, None).said()}{_got(problem['input'])}"


def messages(error: ValidationError) -> str:
    """Only the words of an error of somebody else's section."""
    problems = error.errors(include_url=False, include_input=False)
    return "; ".join(str(problem["msg"]).removeprefix("Value error, ") for problem in problems)


class _Problem:
    """One error of pydantic."""

    def __init__(
        self,
        error: ErrorDetails,
        place: Place,
        labels: list[str],
        owner: type[BaseModel] | None,
        root: type[BaseModel] | None,
    ) -> None:
        """`owner` is the section that has the field at `place`, `root` the whole configuration."""
        self.kind: str = error["type"]
        self.place = place
        self.labels = labels
        """If it is an error of one member of a union: what pydantic calls the member."""
        self._error, self._owner, self._root = error, owner, root
        self._context: Mapping[str, Any] = error.get("ctx", {})

    @property
    def key(self) -> str:
        return ".".join(map(str, self.place))

    def said(self) -> str:
        """What is wrong, and what to do, without the key and the value."""
        message = str(self._error["msg"])
        match self.kind:
            case "extra_forbidden":
                return self._unknown()
            case "missing":
                return self._missing()
            case "value_error":
                return message.removeprefix("Value error, ")
            case "union_tag_not_found":
                named = self._context.get("discriminator", "kind")
                return f"{named} is missing: it selects which other fields this table may have"
            case "union_tag_invalid":
                tag = str(self._context["tag"])
                kinds = [
                    kind.strip("' ") for kind in str(self._context["expected_tags"]).split(",")
                ]
                meant = [k for s in self._sections() for k in _kinds(s) if tag in _other_names(s)]
                return f"there is no kind {tag!r}{_one_of(tag, kinds, meant)}"
            case "literal_error" | "enum":
                return f"expected one of {self._context['expected']}{self._meant()}"
            case "string_too_short" if self._context.get("min_length") == 1:
                return "must not be empty"
            case "string_pattern_mismatch":
                return f"does not have the form it needs: {self._described()}"
            case kind if kind in _BOUNDS:
                word, name = _BOUNDS[kind]
                return f"must be {word} {self._context[name]:g}"
            case _:
                return f"expected {self.expected()}"

    def expected(self) -> str:
        """The type that the value should have."""
        if self.kind in (*_LISTS, *_TABLES):
            return self._table_or_list()
        rest = str(self._error["msg"]).removeprefix("Input should be ")
        return _EXPECTED.get(self.kind, rest[:1].lower() + rest[1:])

    def got(self) -> str:
        """`, got VALUE`, unless the value is a table, or the value is not what is wrong."""
        given = self._error["input"]
        if self.kind in ("extra_forbidden", "missing") or isinstance(given, Mapping):
            return ""
        return _got(given)

    def _unknown(self) -> str:
        *above, name = map(str, self.place)
        what = "unknown table" if isinstance(self._error["input"], Mapping) else "unknown setting"
        if self._owner is None or self._root is None:
            return what
        if self.labels:
            what += f" of {'.'.join(self.labels)}"
            if having := [kind for kind in _members(self._root, self.place) if kind[1] >= {name}]:
                return f"{what}; {having[0][0]} has it"
        known = set(_settings(self._root))
        found = nearest(name, self._owner.model_fields)
        here = set[tuple[str, ...]]() if found is None else {(*above, found)}
        close = nearest(name, {path[-1] for path in known}, _VERY_CLOSE)
        same = {path for path in known if path[-1] == name}
        for paths in (same, here, {path for path in known if path[-1] == close}):
            if 0 < len(paths) <= 2:
                meant = " or ".join(sorted(".".join(path) for path in paths))
                return f"{what}; did you mean {meant}?"
        where = f"[{'.'.join(above)}]" if above else "the file"
        return f"{what}; {where} has {listed(self._owner.model_fields)}"

    def _missing(self) -> str:
        described = self._described()
        said = f"is required{f': {described}' if described else ''}"
        hints = [s.hint for s in self._sections() if issubclass(s, Section) and s.hint]
        return f"{said}; {hints[0]}" if hints else said

    def _described(self) -> str:
        field = self._owner and self._owner.model_fields.get(str(self.place[-1]))
        text = " ".join(((field and field.description) or "").split()).partition(". ")[0]
        return (text[:1].lower() + text[1:]).rstrip(".")

    def _sections(self) -> list[type[BaseModel]]:
        field = self._owner and self._owner.model_fields.get(str(self.place[-1]))
        return list(_sections_of(field.annotation)) if field else []

    def _table_or_list(self) -> str:
        sections = self._sections()
        kinds = [kind for section in sections for kind in _kinds(section)]
        given, is_list = self._error["input"], self.kind in _LISTS
        if not sections:
            return "a list, in brackets" if is_list else f"a table, [{self.key}]"
        name = f"[[{self.key}]]" if is_list else f"[{self.key}]"
        if kinds:
            kind = given if given in kinds else kinds[0]
            return f'{"a list of tables" if is_list else "a table"}: {name} with kind = "{kind}"'
        required = [n for n, f in sections[0].model_fields.items() if f.is_required()]
        with_what = f" with {' and '.join(required)}" if required else ""
        return f"{'a list of tables' if is_list else 'a table'}: {name}{with_what}"

    def _meant(self) -> str:
        names = [
            name.strip(" '")
            for name in str(self._context["expected"]).replace(" or ", ",").split(",")
        ]
        return did_you_mean(str(self._error["input"]), names).removesuffix("?")


def _explain(
    error: ValidationError,
    section: type[BaseModel],
    table: Table,
    origins: Origins,
    above: tuple[str, ...],
) -> Iterator[str]:
    problems: dict[Place, list[_Problem]] = {}
    for one in error.errors(include_url=False):
        place, labels = _place(one, table)
        owner = _owner(section, place, table, labels)
        problem = _Problem(one, place, labels, owner, section)
        problems.setdefault(place, []).append(problem)
    for place, found in problems.items():
        deeper = any(other[: len(place)] == place != other for other in problems)
        if deeper and all(problem.labels for problem in found):
            # The value is meant as the member of the union that the deeper error is about.
            continue
        yield _line(found, origins, above)


def _line(problems: list[_Problem], origins: Origins, above: tuple[str, ...]) -> str:
    """One line about one place; several problems are those of a union's members."""
    first = problems[0]
    said = first.said()
    if len(problems) > 1 and all(p.labels for p in problems):
        values = [p for p in problems if p.kind == "value_error"]
        expected = dict.fromkeys(p.expected() for p in problems)
        said = values[0].said() if values else f"expected {' or '.join(expected)}"
    # Messages of our own may name the value themselves.
    got = "" if ", got " in said else first.got()
    named = origins.named((*above, *first.place), said, missing=first.kind == "missing")
    return f"{named}{': ' if named else ''}{said}{got}"


def _place(error: ErrorDetails, table: Table) -> tuple[Place, list[str]]:
    """Where in the table the error is, and apart from that pydantic's names for members of unions."""
    value: object = table
    parts = error["loc"]
    place: list[str | int] = []
    labels: list[str] = []
    for number, part in enumerate(parts, 1):
        last_is_missing = number == len(parts) and error["type"] == "missing"
        if isinstance(value, Mapping) and (part in value or last_is_missing):
            value = cast("Mapping[object, object]", value).get(part)
        elif isinstance(value, list) and isinstance(part, int):
            # pydantic reports errors of the items that there are.
            value = cast("list[object]", value)[part]
        else:
            labels.append(str(part))
            continue
        place.append(part)
    return tuple(place), labels


def _owner(
    section: type[BaseModel], place: Place, table: Table, labels: list[str]
) -> type[BaseModel] | None:
    """The section whose field is at `place`; None if that is no section's."""
    current: type[BaseModel] | None = section
    value: object = table
    for part in place[:-1]:
        inner = cast("Any", value)[part]
        if isinstance(part, int):
            value = inner
            continue
        field = current.model_fields.get(part) if current else None
        current, value = None, inner
        if field is not None:
            sections = list(_sections_of(field.annotation))
            current = sections[0] if len(sections) == 1 else _chosen(sections, labels)
    return current


def _chosen(sections: list[type[BaseModel]], labels: list[str]) -> type[BaseModel] | None:
    """The member of a union of sections that pydantic chose. Its labels are the member's own literals."""

    def known(section: type[BaseModel]) -> int:
        literals = (_literals(field.annotation) for field in section.model_fields.values())
        return len(set(labels) & {value for values in literals for value in values})

    best = max(sections, key=known, default=None)
    return best if best is not None and known(best) else None


def _members(root: type[BaseModel], place: Place) -> Iterator[tuple[str, set[str]]]:
    """The kinds of section that the table around `place` can be, and the settings of each."""
    sections = [root]
    for part in place[:-1]:
        fields = [s.model_fields[part] for s in sections if part in s.model_fields]
        if not isinstance(part, int):
            sections = [inner for field in fields for inner in _sections_of(field.annotation)]
    for section in sections:
        literals = [_literals(field.annotation) for field in section.model_fields.values()]
        yield ".".join(tags[0] for tags in literals if len(tags) == 1), set(section.model_fields)


def _kinds(section: type[BaseModel]) -> tuple[str, ...]:
    """The values of `kind` that select the section among the members of a union."""
    field = section.model_fields.get("kind")
    return () if field is None else _literals(field.annotation)


def _literals(annotation: object) -> tuple[str, ...]:
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def _sections_of(annotation: object) -> Iterator[type[BaseModel]]:
    """The sections in a type, such as that of `X | None` and of `tuple[X, ...]`."""
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        if issubclass(annotation, BaseModel):
            yield annotation
        return
    for part in get_args(annotation):
        yield from _sections_of(part)


def _settings(section: type[BaseModel], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every setting that is in no list."""
    for name, field in section.model_fields.items():
        yield (*above, name)
        inner = list(_sections_of(field.annotation))
        if get_origin(field.annotation) is not tuple and len(inner) == 1:
            yield from _settings(inner[0], (*above, name))


def _other_names(section: type[BaseModel]) -> tuple[str, ...]:
    return section.also_called if issubclass(section, Section) else ()


def _one_of(word: str, names: list[str], same: list[str]) -> str:
    meant = f"; did you mean {same[0]}?" if same else did_you_mean(word, names)
    return f"{f'{meant} It' if meant else '; it'} is one of {', '.join(names)}"


def _got(value: object) -> str:
    shown = repr(NotBoolean(value)) if isinstance(value, bool) else repr(value)
    return f", got {shown}"
