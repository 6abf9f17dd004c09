"""Explains every token that vLLM sampled by the weights that its label names, with Hugging Face's
forward pass.

A turn across a switch may keep key-value cache that older weights computed (KEEP). So may a turn
that was admitted before the switch and found its beginning in the prefix cache. There it finds what
its own trajectory sampled, or what an attempt computed that was stopped before its first token.
Otherwise the cache has been computed again.

The scorer replays all of these. At the start of each run of one version, a token's cache is either
the old one, if no switch dropped it, or entirely that version's. The log-probabilities show which.
Weights of another version, or of a mixture, fit neither.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from tests.faults.trajectories import Seen

TOLERANCE = 1e-3
"""In nats; the same as in tests/server/vllm/test_engine.py."""
BLOCK = 16
"""In tokens. vLLM shares cache between requests in blocks of this size, or of a multiple of it."""

Tensors = Mapping[str, NDArray[np.float32]]


@dataclass(eq=False)
class _Candidate:
    """One possible origin of a trajectory's cache."""

    cache: DynamicCache
    computed_by: tuple[int, ...] = ()
    """The version that computed each token's entry."""

    @property
    def cached(self) -> int:
        return len(self.computed_by)


class Scorer:
    """A model as Hugging Face computes it, with the weights of any version."""

    def __init__(self, folder: Path, tensors: Callable[[int], Tensors]) -> None:
        self._model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).eval()

        @lru_cache(64)
        def weights(version: int) -> dict[str, torch.Tensor]:
            return {name: torch.from_numpy(array) for name, array in tensors(version).items()}

        self._weights = weights
        self.dropped_cache: set[int] = set()
        """Versions whose switch dropped the cache of every turn."""

    @torch.no_grad()
    def logprobs(
        self, version: int, tokens: list[int], candidate: _Candidate
    ) -> NDArray[np.float32]:
        """Run `tokens` from the end of the candidate's cache, except the last one, and extend the
        cache.

        Returns the log-probability of each token that follows one that was run.
        """
        begin = candidate.cached
        logits = torch.func.functional_call(
            self._model,
            self._weights(version),
            (),
            {
                "input_ids": torch.tensor([tokens[begin:-1]]),
                "past_key_values": candidate.cache,
                "use_cache": True,
            },
        ).logits[0]
        candidate.computed_by += (version,) * (len(tokens) - 1 - begin)
        wanted = torch.tensor(tokens[begin + 1 :])[:, None]
        return torch.log_softmax(logits.float(), -1).gather(1, wanted)[:, 0].numpy()

    def fresh(self) -> _Candidate:
        return _Candidate(DynamicCache(config=self._model.config))

    def check(self, seen: Seen) -> None:
        """Check that every token has the log-probability that its version's weights give it."""
        with one_thread():
            self._check(seen)

    def _check(self, seen: Seen) -> None:
        candidates: list[_Candidate] = []
        before = 0
        for begin, end, version in runs(seen):
            sampled = np.asarray(seen.logprobs[begin:end], np.float32)
            tokens = seen.tokens[:end]
            renewed = self.fresh()
            off_renewed = np.abs(self.logprobs(version, tokens, renewed)[begin - 1 :] - sampled)
            survivors: dict[tuple[int, ...], _Candidate] = {}
            if off_renewed.max() <= TOLERANCE:
                survivors[renewed.computed_by] = renewed
            closest = float(off_renewed.max())
            found = self._found(candidates, tokens[:begin], before, version)
            for kept in found:
                off = np.abs(self.logprobs(version, tokens, kept)[-len(sampled) :] - sampled)
                closest = min(closest, float(off.max()))
                wrong = np.flatnonzero(off > TOLERANCE)
                if not len(wrong):
                    survivors[kept.computed_by] = kept
                elif off_renewed[wrong[0] :].max() <= TOLERANCE:
                    # A failed switch dropped the cache in the middle of the run.
                    survivors[renewed.computed_by] = renewed
            if not survivors:
                raise AssertionError(
                    f"tokens {begin} to {end} are labelled {version}, whose weights give them other "
                    f"log-probabilities, by {closest:.4f} nats at best; fits "
                    f"{self._fits(candidates, tokens, sampled, version)}; runs {runs(seen)}"
                )
            candidates = list(survivors.values())
            before = version

    def _keeps(self, before: int, version: int) -> bool:
        """Whether no switch between these versions dropped the cache."""
        return not any(between in self.dropped_cache for between in range(before + 1, version + 1))

    def _found(
        self, candidates: list[_Candidate], tokens: list[int], before: int, version: int
    ) -> Iterator[_Candidate]:
        """Copies of the caches that a request may have had for `tokens` when `version` became active."""
        if not self._keeps(before, version):
            candidates = []
        yield from self._kept(candidates)
        # An attempt that sampled nothing may already have computed the context added since.
        for other in range(before, version) if before else ():
            if not self._keeps(other, version):
                continue
            for kept in (self.fresh(), *self._kept(candidates)):
                for length in range(BLOCK, len(tokens), BLOCK):
                    if length > kept.cached:
                        self.logprobs(other, tokens[: length + 1], kept)
                        yield copy.deepcopy(kept)

    def _kept(self, candidates: list[_Candidate]) -> Iterator[_Candidate]:
        """Copies of the possible caches: whole, or the blocks that another request found again."""
        for candidate in candidates:
            yield copy.deepcopy(candidate)
        shorter: set[tuple[int, ...]] = set()
        for candidate in candidates:
            for length in range(BLOCK, candidate.cached, BLOCK):
                if candidate.computed_by[:length] in shorter:
                    continue
                cropped = copy.deepcopy(candidate)
                cropped.cache.crop(length - candidate.cached)
                cropped.computed_by = candidate.computed_by[:length]
                shorter.add(cropped.computed_by)
                yield cropped

    def _fits(
        self,
        candidates: list[_Candidate],
        tokens: list[int],
        sampled: NDArray[np.float32],
        version: int,
    ) -> list[tuple[int, int]]:
        """Nearby versions that explain the first tokens of a run, and how many of them."""
        found: list[tuple[int, int]] = []
        for other in range(max(0, version - 5), version + 3):
            for candidate in (self.fresh(), *self._kept(candidates)):
                scored = self.logprobs(other, tokens, candidate)[-len(sampled) :]
                off = np.flatnonzero(np.abs(scored - sampled) > TOLERANCE)
                found.append((other, int(off[0]) if len(off) else len(sampled)))
        return sorted({fit for fit in found if fit[1]})


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread, because with a model this small more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def runs(seen: Seen) -> list[tuple[int, int, int]]:
    """(begin, end, version) of each longest run of tokens that one version sampled."""
    found: list[tuple[int, int, int]] = []
    for index, version in enumerate(seen.versions):
        if version is None:
            continue
        if found and found[-1][1] == index and found[-1][2] == version:
            found[-1] = (found[-1][0], index + 1, version)
        else:
            found.append((index, index + 1, version))
    return found
