"""Groups of answers sampled by a policy in this process."""

from __future__ import annotations

import numpy as np
import torch

from penstock.trainer.batching.batching import Sample, TrainingGroup
from penstock.trainer.policy.fsdp import FsdpPolicy


def roll_out(policy: FsdpPolicy, rng: np.random.Generator) -> list[TrainingGroup]:
    """Groups sampled from the current weights, with a reward for tokens of a kind that the policy
    can learn. The last group has a single answer, so it has no sibling to compare with."""
    groups = []
    for count in (4, 4, 4, 4, 1):
        prompt = rng.integers(0, 256, int(rng.integers(3, 7)))
        length = int(rng.integers(6, 14))
        ids = torch.tensor(np.tile(prompt, (count, 1)))
        logprobs = []
        with torch.no_grad():
            for _ in range(length):
                scores = torch.log_softmax(policy._tokens.model(input_ids=ids).logits[:, -1], -1)
                chosen = torch.multinomial(scores.exp(), 1)
                logprobs.append(scores.gather(1, chosen))
                ids = torch.cat([ids, chosen], 1)
        behaviour = torch.cat([torch.zeros(count, len(prompt)), *logprobs], 1).numpy()
        samples = []
        for row, own in zip(ids.numpy().astype(np.int32), behaviour, strict=True):
            # Answers have different lengths.
            end = len(row) - int(rng.integers(0, 4))
            trained = np.arange(end) >= len(prompt)
            reward = float(np.mean(row[len(prompt) : end] < 128))
            samples.append(
                Sample("t", row[:end], trained, own[:end], np.ones(end, np.float32), reward)
            )
        rewards = tuple(sample.reward for sample in samples)
        tokens = int(sum(sample.trained.sum() for sample in samples))
        groups.append(
            TrainingGroup(tuple(samples), rewards, 0, tokens, 0, np.zeros(tokens, np.int64))
        )
    return groups
