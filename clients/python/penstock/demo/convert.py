"""Converts the demo's GGUF file into a Hugging Face folder: `python -m penstock.demo.convert GGUF FOLDER`.

It runs as a separate process: only this part of the demo needs torch and transformers.
The transformers library reads GGUF, but three things can come out wrong and are fixed here:

1. The model's config keeps its quantization, and `save_pretrained` then refuses. Its weights are
   loaded into a model built from the same config without the quantization.
2. The tokenizer's end of sequence is `<|im_start|>`, so no answer ever ends. It must be
   `<|im_end|>`, in the tokenizer, the config and the generation config.
3. The pre-tokenizer loses the rule that every digit is a separate token, and decoding cleans up
   spaces.

The result is loaded again and checked; a folder that fails the checks is not used.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from tokenizers import pre_tokenizers

END_OF_TURN = "<|im_end|>"
START_OF_TURN = "<|im_start|>"
LONGEST_CONTEXT = 8_192

ROUND_TRIPS = (
    "What is 17 + 5?",
    "0 12 345 6789 1000000",
    "a  b   c , d . e ! it 's",
    "naïve Übergrößenträger, прайс, 漢字, العربية",
    "🙂👩‍🚀🏳️‍🌈",
    "line\n\n\ttab\r\nend ",
)
"""Digits, spaces that a decoder's clean-up would drop, several scripts, and multi-code-point emoji."""

# transformers' types are too incomplete for a strict checker; the casts stay in this one place.
AutoModelForCausalLM = cast("Any", transformers.AutoModelForCausalLM)
AutoTokenizer = cast("Any", transformers.AutoTokenizer)
GenerationConfig = cast("Any", transformers.GenerationConfig)


class ConversionError(Exception):
    """The converted model failed a check."""


def main(gguf: Path, folder: Path) -> None:
    """Writes `folder` from `gguf`. Raises ConversionError if the result fails its checks."""
    folder.mkdir(parents=True)
    tokenizer = read_tokenizer(gguf)
    tokenizer.save_pretrained(folder)
    read_model(gguf, tokenizer).save_pretrained(folder)
    check_tokenizer(folder)
    check_model(folder)


def read_tokenizer(gguf: Path) -> Any:
    """The file's tokenizer, with the right end of sequence, one token a digit and spaces kept."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.bos_token = START_OF_TURN
    tokenizer.eos_token = END_OF_TURN
    tokenizer.pad_token = END_OF_TURN
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.model_max_length = LONGEST_CONTEXT
    return tokenizer


def read_model(gguf: Path, tokenizer: Any) -> Any:
    """The file's model in bfloat16, without any quantization config."""
    quantized = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
    config = quantized.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.bos_token_id = tokenizer.bos_token_id
    config.eos_token_id = tokenizer.eos_token_id
    config.pad_token_id = tokenizer.pad_token_id
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(quantized.state_dict())
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return model


def check_tokenizer(folder: Path) -> None:
    """Checks that texts survive a round trip, digits stand alone, and a turn ends with one known token."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in ROUND_TRIPS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if tokenizer.decode(ids) != text:
            raise ConversionError(f"{text!r} comes back as {tokenizer.decode(ids)!r}")
    digits = "1234567890"
    if len(tokenizer.encode(digits, add_special_tokens=False)) != len(digits):
        raise ConversionError("several digits share a token")
    if tokenizer.eos_token != END_OF_TURN or tokenizer.pad_token != END_OF_TURN:
        raise ConversionError(f"a turn would end with {tokenizer.eos_token!r}")
    turn = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], add_generation_prompt=True, tokenize=False
    )
    if START_OF_TURN not in turn or "hello" not in turn:
        raise ConversionError(f"the chat template renders {turn!r}")


def check_model(folder: Path) -> None:
    """Checks that the saved model loads, ends its turns, and still answers a simple question."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ends = (tokenizer.eos_token_id, model.config.eos_token_id, model.generation_config.eos_token_id)
    if set(ends) != {tokenizer.convert_tokens_to_ids(END_OF_TURN)}:
        raise ConversionError(f"tokenizer, config and generation config end with {ends}")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    length = prompt["input_ids"].shape[1]
    answer = model.generate(**prompt, do_sample=False, max_new_tokens=64)[0, length:]
    text = tokenizer.decode(answer)
    if "Paris" not in text or not text.endswith(END_OF_TURN):
        raise ConversionError(f"asked for the capital of France the model answers {text!r}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
