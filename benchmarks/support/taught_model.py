"""A model of 0.8 million parameters that has learned the demo's sums but rarely answers them correctly.

    python -m benchmarks.support.taught_model FOLDER

It makes benchmarks with many runs affordable. The model has the Llama architecture, random initial weights
and the demo's tiny tokenizer.

1. It is taught "What is a + b?" by supervised training, until it gives the right answer with probability
   0.8.
2. Then it is trained on a few batches of wrong answers, until that probability is about 0.1 again. That is
   about where SmolLM2-135M-Instruct starts.

The knowledge is still in the weights, so reinforcement learning can find it, as in a pretrained model. A
model that stops at 0.1 on the way up learns nothing in one pass over the sums.

With this model a step of the demo takes a second or less, on cores that take 17 s for SmolLM2. So three
seeds of eight settings take an hour. Teaching takes two minutes.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import torch
from benchmarks.support.demo_runs import Model
from torch import Tensor, nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from penstock.demo import tiny
from penstock.demo.settings import SMALL_MODEL
from penstock.demo.tasks import sums

SCALE = replace(
    SMALL_MODEL,
    steps=120,
    max_tokens=8,
    max_model_len=128,
    dtype="float32",
    learning_rate=1e-4,
)
"""The demo's settings, adapted to this model."""

HIDDEN = 128
LAYERS = 3
HEADS = 4
KNOWN = 0.8
"""Mean probability of the right answer at which teaching ends."""
LEFT = 0.12
"""Probability at which training on wrong answers ends."""
PRECISION = 0.002
SHARE_RIGHT = 0.1
"""Share of right answers in the batches of wrong ones."""
BATCH = 128
LEARNING_RATE = 1e-3
CHECK_EVERY = 25
MOST_UPDATES = 4_000


def taught_in(folder: Path) -> Model:
    """Returns the model in `folder`, and teaches it first if necessary."""
    place = folder / "taught"
    if not (place / "taught.json").exists():
        shutil.rmtree(place, ignore_errors=True)
        teach(place)
    return Model(str(place.resolve()), SCALE)


def teach(folder: Path, seed: int = 0) -> None:
    """Writes a Hugging Face folder, and `taught.json` with the probability of the right answer.

    Raises RuntimeError if teaching does not reach the wanted probability.
    """
    tiny.write_model(folder, seed)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    config = LlamaConfig(
        **{
            **json.loads((folder / "config.json").read_text()),
            "hidden_size": HIDDEN,
            "intermediate_size": 4 * HIDDEN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": HEADS,
        }
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    lines = sums()
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": line["prompt"]}], add_generation_prompt=True, tokenize=True
        )["input_ids"]
        for line in lines
    ]
    right = [int(str(line["answer"])) for line in lines]
    answers = {
        number: [*tokenizer.encode(str(number), add_special_tokens=False), tiny.END_OF_TURN_ID]
        for number in range(min(right), max(right) + 1)
    }
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    numbers = sorted(answers)

    def measure() -> float:
        with torch.no_grad():
            found = _log_probabilities(model, *_batch(prompts, [answers[n] for n in right]))
        return float(found.exp().mean())

    update, probability, known = 0, 0.0, False
    before = _copy(model)
    while not known or probability > LEFT:
        if update == MOST_UPDATES:
            raise RuntimeError(
                f"after {update} updates the right answer has probability {probability:.3f}"
            )
        chosen = torch.randint(len(lines), (BATCH,), generator=generator).tolist()
        kept = torch.rand(BATCH, generator=generator) < (SHARE_RIGHT if known else 1.0)
        others = torch.randint(len(numbers), (BATCH,), generator=generator).tolist()
        shown = [
            answers[right[line] if keep else numbers[other]]
            for line, keep, other in zip(chosen, kept.tolist(), others, strict=True)
        ]
        loss = -_log_probabilities(model, *_batch([prompts[line] for line in chosen], shown)).mean()
        before = _copy(model) if known else before
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        update += 1
        if update % CHECK_EVERY == 0 or known:
            probability = measure()
            known = known or probability >= KNOWN
    # One such update removes more than half of the remaining probability. Whole updates would stop at a
    # random value, and runs that start lower learn later.
    after, low, high = _copy(model), 0.0, 1.0
    while abs(probability - LEFT) > PRECISION:
        middle = (low + high) / 2
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(torch.lerp(before[name], after[name], middle))
        probability = measure()
        low, high = (middle, high) if probability > LEFT else (low, middle)
    model.generation_config = GenerationConfig.from_pretrained(folder)
    model.save_pretrained(folder)
    # Written last, so that a folder without it is known to be incomplete.
    tiny.write_json(folder / "taught.json", {"updates": update, "probability": probability})


def _copy(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _batch(prompts: list[list[int]], answers: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Returns token ids [sequences, longest], padded on the right, and the mask of answer tokens."""
    rows = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    longest = max(map(len, rows))
    ids = torch.full((len(rows), longest), tiny.END_OF_TURN_ID)
    mask = torch.zeros(len(rows), longest, dtype=torch.bool)
    for index, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        ids[index, : len(row)] = torch.tensor(row)
        mask[index, len(prompt) : len(row)] = True
    return ids, mask


def _log_probabilities(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    """Log-probability of each sequence's answer [sequences], in nats."""
    logits = model(input_ids=ids).logits[:, :-1]
    each = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0]
    return (each * mask[:, 1:]).sum(-1)


if __name__ == "__main__":
    teach(Path(sys.argv[1]))
