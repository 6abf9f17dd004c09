"""Three tokenizers with merges, of three kinds, with the chat templates of `chat_templates`.

A policy samples tokens, not text. It may write "the" as one, two or three tokens, but its tokenizer
encodes the text in only one of these ways. Decoding and re-encoding a turn therefore changes its
tokens, although the text is the same. A tokenizer without merges could not reveal that.

They differ as those of the model families do:

- Llama 3's splits words by a pattern and encodes whole words first.
- Qwen's normalizes the text and encodes digits one by one.
- ChatML's is of SentencePiece's kind: its tokens are made of characters, with bytes as a fallback.

They are trained on demand, on a text that never changes. Tokens 0 to 255 are bytes. The control
tokens follow, the end of a turn first, and then the merged tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from tests.support.chat_templates import FAMILIES

SPACE = "\u2581"
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CALLS = (
    '\n{"name": "add", "arguments": {"a": 1}}\n',
    '{"name": "add", "parameters": {"a": 1}}',
    "Hm, so I add. Grüße, naïve café.",
)


@dataclass(frozen=True)
class Kind:
    """How one tokenizer differs from the others."""

    merges: int
    digits: str = ""
    """How many digits form one word, as part of the splitting pattern. Empty for a tokenizer of
    characters, which has no pattern."""
    normalizer: normalizers.Normalizer | None = None
    words_first: bool = False
    control: tuple[str, ...] = ()
    """Control tokens in addition to the family's."""


KINDS = {
    "chatml": Kind(500),
    "llama3": Kind(900, digits="{1,3}", words_first=True, control=("<|python_tag|>",)),
    "qwen3": Kind(700, digits="{1}", normalizer=normalizers.NFC()),
}


def make_merging_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """A new tokenizer of the family on each call."""
    control, template = _control_of(family), FAMILIES[family][1]
    tokenizer = Tokenizer.from_str(_trained(family))
    tokenizer.add_tokens(
        [AddedToken(text, special=text.startswith("<|"), normalized=False) for text in control]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=control[0],
        pad_token="<|pad|>",
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def control_tokens(family: str) -> range:
    """The ids of a family's control tokens, the end of a turn first."""
    return range(256, 256 + len(_control_of(family)))


def _control_of(family: str) -> tuple[str, ...]:
    return (*FAMILIES[family][0], *KINDS[family].control)


@cache
def _trained(family: str) -> str:
    """A serialized tokenizer without its control tokens; their ids are reserved."""
    kind = KINDS[family]
    tokenizer = Tokenizer(models.BPE())
    _set_up(tokenizer, kind)
    of_bytes = sorted(pre_tokenizers.ByteLevel.alphabet())
    alphabet = of_bytes if kind.digits else []
    trainer = trainers.BpeTrainer(
        vocab_size=256 + kind.merges, initial_alphabet=alphabet, show_progress=False
    )
    text = (Path(__file__).resolve().parents[2] / "LICENSE").read_text()
    tokenizer.train_from_iterator([text, *CALLS * 20], trainer)
    learned = json.loads(tokenizer.to_str())["model"]
    merges: list[tuple[str, str]] = [(left, right) for left, right in learned["merges"]]
    single = of_bytes if kind.digits else [f"<0x{byte:02X}>" for byte in range(256)]
    characters = sorted(text for text in learned["vocab"] if len(text) == 1 and text not in single)
    merged = [left + right for left, right in merges]
    vocab = _numbered([*single, *_control_of(family), *characters, *merged])
    tokenizer.model = models.BPE(
        vocab=vocab,
        merges=merges,
        byte_fallback=not kind.digits,
        ignore_merges=kind.words_first,
    )
    return tokenizer.to_str()


def _set_up(tokenizer: Tokenizer, kind: Kind) -> None:
    """Set everything except the model."""
    if not kind.digits:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="never")
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        return
    if kind.normalizer is not None:
        tokenizer.normalizer = kind.normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS % kind.digits), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()


def _numbered(texts: Sequence[str]) -> dict[str, int]:
    """Number each text once, because two merges may produce the same text."""
    return {text: index for index, text in enumerate(dict.fromkeys(texts))}
