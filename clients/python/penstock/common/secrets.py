"""Masks secrets in a configuration before it is printed."""

from __future__ import annotations

import re
from typing import cast

SECRET_WORDS = frozenset({"token", "key", "secret", "password", "passphrase", "credential"})
MASK = "***"
_USER = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def without_secrets(value: object, name: str = "") -> object:
    """Masks secrets in foreign options, at any depth: strings whose names mark them as secret.

    `name` is the name of `value` itself. Passwords in URLs are masked too.
    """
    if isinstance(value, dict):
        table = cast("dict[object, object]", value)
        return {key: without_secrets(item, str(key)) for key, item in table.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(item, name) for item in cast("list[object]", value)]
    if not isinstance(value, str):
        return value
    # Whole words only: "tokenizer" and "max_tokens" are not secrets.
    secret = SECRET_WORDS & set(re.split(r"[^a-z]+", name.lower()))
    return MASK if secret else without_passwords(value)


def without_passwords(text: str) -> str:
    """Masks the user information of URLs: the part before the host."""
    return _USER.sub(MASK, text)
