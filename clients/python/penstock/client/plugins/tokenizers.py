"""The model's tokenizer, for functions that use tokens. Loads transformers on first use."""

from __future__ import annotations

import functools
import importlib
from typing import Any, cast


@functools.cache
def load_tokenizer(name: str, **options: Any) -> Any:
    """`name` can be a folder. Raises ImportError if transformers is missing."""
    transformers = cast("Any", importlib.import_module("transformers"))
    return transformers.AutoTokenizer.from_pretrained(name, **options)


@functools.cache
def find_tokenizer(name: str) -> Any:
    """Returns None without a tokenizer, so that only requests that need text fail."""
    try:
        return load_tokenizer(name)
    except (ImportError, OSError, ValueError):
        return None
