"""What is known of a model from its folder, without loading it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from penstock.common.models import missing_folder
from penstock.demo.model import ModelUnavailable, prepare_model
from penstock.machine.models import ModelUnusable, read_weights

TEMPLATE_TOKENS = 64
"""Most tokens that a chat template adds to a conversation: its own system message, and the last header."""
MESSAGE_TOKENS = 8
"""Most tokens that it adds to each message."""
TOKENS_PER_CHARACTER = 0.5
"""Upper estimate for text, if the folder has no fast tokenizer."""
LONGEST_COUNTED = 64

Messages = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Model:
    folder: Path
    parameters: int
    context: int
    """Most tokens of a prompt and its answer together."""


def check_folder(choice: str) -> None:
    """Raises ModelUnavailable if the choice can only be a folder, and the folder does not exist."""
    if (missing := missing_folder(choice)) is not None:
        raise ModelUnavailable(f"--model: {missing}")


def read_model(choice: str, say: Callable[[str], None]) -> Model:
    """Reads a folder, or a model of the hub, which is fetched first. Raises ModelUnavailable."""
    check_folder(choice)
    folder = prepare_model(choice, say)
    try:
        parameters = read_weights(folder).elements
        config: Any = json.loads((folder / "config.json").read_text())
    except ModelUnusable as error:
        raise ModelUnavailable(str(error)) from error
    except ValueError as error:
        raise ModelUnavailable(f"{folder / 'config.json'}: {error}") from error
    if not parameters:
        raise ModelUnavailable(f"{folder} has no *.safetensors; save the model in that format")
    if "quantization_config" in config:
        raise ModelUnavailable(f"{choice} is quantized; use the model that it was quantized from")
    # Models that also take images have the language model's part in a separate table.
    context = config.get("text_config", config).get("max_position_embeddings")
    if not isinstance(context, int):
        raise ModelUnavailable(f"{folder / 'config.json'} has no max_position_embeddings")
    return Model(folder, parameters, context)


def longest_prompt(model: Model, prompts: Sequence[Messages], system: str) -> tuple[int, int]:
    """An upper bound on the tokens of a prompt, and the place of the longest. Each begins with `system`."""
    lengths = [sum(len(text) for _, text in messages) for messages in prompts]
    likely = sorted(range(len(prompts)), key=lengths.__getitem__)[-LONGEST_COUNTED:]
    count = _counter(model.folder)
    asked = [("system", system)] * bool(system)
    return max(
        (
            TEMPLATE_TOKENS
            + sum(count(text) + MESSAGE_TOKENS for _, text in (*asked, *prompts[place])),
            place,
        )
        for place in likely
    )


def _counter(folder: Path) -> Callable[[str], int]:
    if not (folder / "tokenizer.json").is_file():
        return lambda text: math.ceil(len(text) * TOKENS_PER_CHARACTER)
    from tokenizers import Tokenizer

    tokenizer = cast("Any", Tokenizer).from_file(str(folder / "tokenizer.json"))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)
