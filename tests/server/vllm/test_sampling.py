"""Sampling on a CPU follows the probabilities exactly, and never draws a
token with probability zero."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.sample.sampler import Sampler

from penstock.server.vllm.worker.sampling import BLOCK, draw

ALMOST_ONE = float(np.nextafter(1.0, 0.0))


def logprobs_of(logits: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1, dtype=torch.float32)


def uniform(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("vocabulary", [1, 7, BLOCK, BLOCK + 1, 3 * BLOCK - 5, 4 * BLOCK])
def test_shares_of_evenly_spaced_numbers_are_the_probabilities(vocabulary: int) -> None:
    torch.manual_seed(vocabulary)
    logprobs = logprobs_of(torch.randn(vocabulary) * 2)
    count = 40_000
    numbers = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    found = torch.cat(
        [draw(logprobs.expand(len(part), -1), part) for part in numbers.split(20_000)]
    )
    shares = torch.bincount(found, minlength=vocabulary).to(torch.float64) / count
    # For evenly spaced numbers an interval's share is its length, up to one number at each end.
    probabilities = logprobs.to(torch.float64).exp()
    assert (shares - probabilities).abs().max() <= 2.0 / count
    assert (found.diff() >= 0).all()


@settings(deadline=None, max_examples=200)
@given(
    vocabulary=st.integers(1, 3 * BLOCK),
    scale=st.sampled_from([0.1, 1.0, 10.0, 80.0]),
    kept=st.floats(0.0, 1.0),
    numbers=st.lists(st.floats(0.0, 1.0, exclude_max=True), min_size=1, max_size=8),
    seed=st.integers(0, 1 << 30),
)
def test_what_was_masked_is_never_drawn(
    vocabulary: int, scale: float, kept: float, numbers: list[float], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn((len(numbers) + 2, vocabulary), generator=generator) * scale
    mask = torch.rand(logits.shape, generator=generator) >= kept
    always = torch.randint(vocabulary, (len(logits),), generator=generator)
    mask[torch.arange(len(logits)), always] = False
    logprobs = logprobs_of(logits.masked_fill(mask, float("-inf")))
    found = draw(logprobs, uniform(*numbers, 0.0, ALMOST_ONE))
    assert ((found >= 0) & (found < vocabulary)).all()
    assert (logprobs.gather(-1, found.unsqueeze(-1)).exp() > 0).all()


def test_the_ends_of_the_numbers_are_the_first_and_the_last_token_left() -> None:
    logits = torch.full((2, 3 * BLOCK), float("-inf"))
    logits[:, BLOCK + 3] = logits[:, 2 * BLOCK - 1] = 0.0
    found = draw(logprobs_of(logits), uniform(0.0, ALMOST_ONE))
    assert found.tolist() == [BLOCK + 3, 2 * BLOCK - 1]


def test_one_certain_token_is_drawn_whatever_the_number() -> None:
    logits = torch.full((3, 1_000), float("-inf"))
    logits[:, 999] = 5.0
    assert draw(logprobs_of(logits), uniform(0.0, 0.5, ALMOST_ONE)).tolist() == [999] * 3


def sampler() -> TopKTopPSampler:
    return TopKTopPSampler("processed_logprobs")


def test_the_worker_draws_so_and_reports_what_it_drew_from() -> None:
    """Uses vLLM's actual sampler with top-k, which computes its own
    log-probabilities in its own order."""
    logits = torch.randn((64, 5_000))
    k = torch.full((64,), 3)
    found, reported = sampler().forward(logits.clone(), {}, k, None)
    assert reported is not None
    best = logits.topk(3, -1).indices
    assert (found.unsqueeze(-1) == best).any(-1).all()
    expected = logits.gather(-1, best).log_softmax(-1)
    assert torch.allclose(reported.gather(-1, best), expected, atol=1e-5)


def test_a_seed_is_a_row_of_its_own() -> None:
    """A seeded row draws the same tokens in any batch, at any row, and from step to step."""

    def tokens(rows: int, at: int) -> list[int]:
        generator = torch.Generator().manual_seed(7)
        torch.manual_seed(rows)
        found: list[int] = []
        for step in range(20):
            torch_logits = torch.randn(2_000, generator=torch.Generator().manual_seed(step)).repeat(
                rows, 1
            )
            drawn, _ = sampler().forward(torch_logits, {at: generator}, None, None)
            found.append(int(drawn[at]))
        return found

    alone = tokens(1, 0)
    assert tokens(5, 3) == alone
    assert len(set(alone)) > 10


def test_other_modes_are_left_to_vllm() -> None:
    found, reported = TopKTopPSampler("raw_logprobs").forward(torch.eye(4) * 200, {}, None, None)
    assert reported is None
    assert found.tolist() == [0, 1, 2, 3]


def test_the_sampled_token_alone_has_no_rank_and_others_have() -> None:
    logprobs = logprobs_of(torch.tensor([[3.0, 1.0, 2.0]]))
    chosen = torch.tensor([2])
    alone = Sampler.gather_logprobs(logprobs, 0, chosen)
    more = Sampler.gather_logprobs(logprobs, 2, chosen)
    assert alone.logprob_token_ids.tolist() == [[2]]
    assert alone.selected_token_ranks.tolist() == [0]
    assert more.logprob_token_ids.tolist() == [[2, 0, 2]]
    assert more.selected_token_ranks.tolist() == [2]
    assert torch.equal(alone.logprobs, more.logprobs[:, :1])
