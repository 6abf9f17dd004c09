"""The base class of all sections of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, TypeAlias, cast, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

FunctionName: TypeAlias = Annotated[str, Field(pattern=r"^[^:]+:[\w.]+$")]
"""A function as `common.functions` finds it: pkg.module:function, or folder/file.py:function."""


class NotBoolean:
    """A boolean where no boolean is allowed. No type accepts it."""

    def __init__(self, value: bool) -> None:
        self._value = value

    def __repr__(self) -> str:
        return "true" if self._value else "false"


class Section(BaseModel):
    """A section of a configuration: immutable, and strict about its keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )
    hint: ClassVar[str] = ""
    """What to write, for a message that the section is missing."""
    also_called: ClassVar[tuple[str, ...]] = ()
    """Other names for its `kind`, which are refused with this one as the suggestion."""

    @model_validator(mode="before")
    @classmethod
    def _true_is_no_number(cls, given: object) -> object:
        """Rejects booleans for numbers, for which pydantic would accept true as 1."""
        if not isinstance(given, Mapping):
            return given
        table = dict(cast("Mapping[str, object]", given))
        for name, value in table.items():
            field = cls.model_fields.get(name)
            if field is None or not isinstance(value, bool):
                continue
            if bool not in (field.annotation, *get_args(field.annotation)):
                table[name] = NotBoolean(value)
        return table
