"""What is left out of a configuration that is printed."""

from __future__ import annotations

import re
from typing import cast

SECRET_WORDS = frozenset({"token", "key", "secret", "password", "passphrase", "credential"})
MASK = "***"
_USER = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def without_secrets(value: object, name: str = "") -> object:
    """Options of somebody else's, at any depth, without the texts of those whose names say that they are
    secrets. `name` is what the value itself is called."""
    if isinstance(value, dict):
        table = cast("dict[object, object]", value)
        return {key: without_secrets(item, str(key)) for key, item in table.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(item, name) for item in cast("list[object]", value)]
    if not isinstance(value, str):
        return value
    # A tokenizer and a number of tokens are none.
    secret = SECRET_WORDS & set(re.split(r"[^a-z]+", name.lower()))
    return MASK if secret else without_passwords(value)


def without_passwords(text: str) -> str:
    """The text without what URLs in it have before their hosts."""
    return _USER.sub(MASK, text)
