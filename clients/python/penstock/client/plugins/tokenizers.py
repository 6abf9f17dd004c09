"""The model's tokenizer, for functions that use tokens. Loads transformers on first use."""

from __future__ import annotations

import functools
import importlib
from typing import Any, cast


@functools.cache
def load_tokenizer(name: str, **options: Any) -> Any:
    """Loads the tokenizer of a model's folder or name. Raises ImportError if transformers is
    missing."""
    transformers = cast("Any", importlib.import_module("transformers"))
    return transformers.AutoTokenizer.from_pretrained(name, **options)


@functools.cache
def find_tokenizer(name: str) -> Any:
    """Like `load_tokenizer`, but returns None without a tokenizer. Only requests that need text
    fail then."""
    try:
        return load_tokenizer(name)
    except (ImportError, OSError, ValueError):
        return None
