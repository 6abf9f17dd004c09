"""The model's tokenizer, for functions that work with tokens; transformers is loaded when one does."""

from __future__ import annotations

import functools
import importlib
from typing import Any, cast


@functools.cache
def load_tokenizer(name: str, **options: Any) -> Any:
    """The tokenizer of a model's folder or name. Raises ImportError where transformers is missing."""
    transformers = cast("Any", importlib.import_module("transformers"))
    return transformers.AutoTokenizer.from_pretrained(name, **options)


@functools.cache
def find_tokenizer(name: str) -> Any:
    """The same; None where there is none, which only a request with `input_ids` minds."""
    try:
        return load_tokenizer(name)
    except (ImportError, OSError, ValueError):
        return None
