"""A tiny language model of random weights for tests, generated in well under a second.

It has Llama's architecture, with tied embeddings. Its tokenizer knows 256 bytes and three conversation
markers. Written without torch, because every end-to-end test would otherwise import it twice.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import safetensors.numpy
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

UNKNOWN = "<|endoftext|>"
START_OF_TURN = "<|im_start|>"
END_OF_TURN = "<|im_end|>"
MARKS = (UNKNOWN, START_OF_TURN, END_OF_TURN)
END_OF_TURN_ID = MARKS.index(END_OF_TURN)

HIDDEN = 64
LAYERS = 2
HEADS = 2
HEAD_DIM = 32
INTERMEDIATE = 128
LONGEST_CONTEXT = 512

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_model(folder: Path, seed: int = 0) -> None:
    """Writes a Hugging Face model folder; the same seed gives the same bytes."""
    folder.mkdir(parents=True)
    tokenizer = byte_tokenizer()
    vocabulary = tokenizer.get_vocab_size()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    write_json(folder / "tokenizer_config.json", tokenizer_config())
    write_json(folder / "config.json", model_config(vocabulary))
    write_json(
        folder / "generation_config.json",
        {"eos_token_id": END_OF_TURN_ID, "pad_token_id": END_OF_TURN_ID, "bos_token_id": 1},
    )
    tensors = random_weights(vocabulary, np.random.default_rng(seed))
    data = safetensors.numpy.save(tensors, metadata={"format": "pt"})
    (folder / "model.safetensors").write_bytes(data)


def byte_tokenizer() -> Tokenizer:
    """A tokenizer with one token per byte, after the three markers."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate((*MARKS, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    marks: list[str | AddedToken] = [AddedToken(mark, special=True) for mark in MARKS]
    tokenizer.add_special_tokens(marks)  # pyright: ignore[reportUnknownMemberType]
    return tokenizer


def tokenizer_config() -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": START_OF_TURN,
        "eos_token": END_OF_TURN,
        "pad_token": END_OF_TURN,
        "unk_token": UNKNOWN,
        "model_max_length": LONGEST_CONTEXT,
        "clean_up_tokenization_spaces": False,
    }


def model_config(vocabulary: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": vocabulary,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": LONGEST_CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": END_OF_TURN_ID,
        "pad_token_id": END_OF_TURN_ID,
    }


def random_weights(
    vocabulary: int, generator: np.random.Generator
) -> dict[str, NDArray[np.float32]]:
    """Weights under transformers' names; matrices have shape [out, in], as in torch."""

    def matrix(rows: int, columns: int) -> NDArray[np.float32]:
        return generator.normal(0, columns**-0.5, (rows, columns)).astype(np.float32)

    ones = np.ones(HIDDEN, np.float32)
    # The embedding is also the output layer. Rows of unit length keep the first logits near 1.
    weights = {"model.embed_tokens.weight": matrix(vocabulary, HIDDEN), "model.norm.weight": ones}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        weights |= {
            f"{prefix}input_layernorm.weight": ones,
            f"{prefix}post_attention_layernorm.weight": ones,
            f"{prefix}self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}self_attn.k_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}self_attn.v_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
            f"{prefix}mlp.gate_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            f"{prefix}mlp.up_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            f"{prefix}mlp.down_proj.weight": matrix(HIDDEN, INTERMEDIATE),
        }
    return weights


def write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
