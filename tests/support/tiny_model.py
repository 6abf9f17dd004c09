"""Creates a small language model: real architecture, random weights, one token per byte.

A token id below 256 is that byte, so `list(text.encode())` is the tokenization of plain text. The
added tokens of `SPECIAL_TOKENS` follow in that order and end the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<|pad|>",
)
EOS = "<|im_end|>"
EOS_ID = 256 + SPECIAL_TOKENS.index(EOS)
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
HEAD_DIM = 32  # The CPU's attention kernel refuses 16.

CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}"
    "<tool_call>{{ (call.function or call) | tojson }}</tool_call>"
    "{% endfor %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_model(
    path: Path,
    *,
    tied: bool = False,
    seed: int = 0,
    layers: int = 2,
    hidden: int = 64,
    architecture: Literal["qwen3", "llama"] = "qwen3",
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a Hugging Face model folder to `path`; return that path."""
    shape = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // HEAD_DIM,
        "num_key_value_heads": max(1, hidden // HEAD_DIM // 2),
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": EOS_ID,
        "pad_token_id": VOCAB_SIZE - 1,
        # Wide enough that greedy text does not immediately fall into a loop.
        "initializer_range": 0.1,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = (
            Qwen3ForCausalLM(Qwen3Config(**shape))
            if architecture == "qwen3"
            else LlamaForCausalLM(LlamaConfig(**shape))
        )
    path.mkdir(parents=True, exist_ok=True)
    model.to(dtype).save_pretrained(path)
    make_byte_tokenizer().save_pretrained(path)
    return path


def make_byte_tokenizer(
    special_tokens: Sequence[str] = SPECIAL_TOKENS,
    chat_template: str = CHAT_TEMPLATE,
    eos_token: str = EOS,
) -> PreTrainedTokenizerFast:
    """One token per byte, plus added tokens; ChatML is the default chat template.

    Tokens that start with "<|" are special to the tokenizer. As with Qwen's, the other tokens of a
    template are only added tokens.
    """
    tokenizer = Tokenizer(
        models.BPE(vocab={char: byte for byte, char in enumerate(_byte_characters())}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [
            AddedToken(token, special=token.startswith("<|"), normalized=False)
            for token in special_tokens
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=eos_token,
        pad_token=special_tokens[-1],
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    stands_for = {byte: byte for byte in printable}
    stands_for |= {byte: 256 + index for index, byte in enumerate(others)}
    return [chr(stands_for[byte]) for byte in range(256)]
