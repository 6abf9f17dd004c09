"""Checks the claims of samples against what the engine sampled. Pure.

A sample consists of tokens that its function assembled, and a mask of the tokens to train. The
server holds the attempt's trajectories: every token, its author, and for the policy's tokens their
log-probability and weight version. Training relies on the server's record. So each sample must be
found in it:

    sample -> claim: tokens up to the last one trained -> a trajectory that begins with exactly these,
    each trained one written by the policy -> that trajectory's trained tokens

Tokens after the last trained one neither influence it nor have a gradient. So the sample can end
before or after the trajectory does. Several samples can claim one trajectory, for example if each
turn is returned as a sample with the earlier turns as its prompt. Their trained tokens are merged.

Tokens that are context in one trajectory, such as the shared prefix of a branch, can be the
policy's in another that begins with the same tokens. They were sampled there and are trained there,
so a sample can have a part in each. Tokens of the policy that no sample claims carry no gradient.

The errors below fail the attempt, because it would train something that the policy did not do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.client.turns import common_count

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.client.plugins.samples import Sample


# Placements that are tried before the claims count as impossible to place.
_MOST_TRIES = 10_000


class LossMaskInvalid(Exception):
    """A mask is not as long as the response, or holds values other than 0 and 1."""


class TokensDiffer(Exception):
    """No trajectory has the tokens."""


class TokensNotSampled(Exception):
    """A trajectory has the tokens, but the policy wrote the trained ones in none."""


class SamplesShareTokens(Exception):
    """Two samples train the same token, or parts of one trajectory with different rewards."""


@dataclass(frozen=True, slots=True, eq=False)
class Claim:
    """A sample's tokens, shape [n], and a mask of those to train."""

    token_ids: NDArray[np.int32]
    trained: NDArray[np.bool_]
    reward: float | None
    """None if its group is scored later."""

    @property
    def end(self) -> int:
        """Number of tokens up to the last trained one."""
        positions = np.flatnonzero(self.trained)
        return int(positions[-1]) + 1 if len(positions) else 0


@dataclass(frozen=True, slots=True, eq=False)
class Written:
    """A trajectory's tokens, shape [n], and a mask of those that the policy wrote in it."""

    token_ids: NDArray[np.int32]
    from_policy: NDArray[np.bool_]
    broke_off: bool = False
    """Whether one of its turns was cut off. It may hold tokens of that turn, and more may arrive,
    that its function never saw."""


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    untrained: NDArray[np.bool_]
    """Mask of tokens that the policy wrote and no sample claims, shape [n]."""
    broke_off: bool
    """Whether tokens that may still arrive are not trained either."""
    claims: tuple[int, ...]
    """Indices of the samples that claim some of its tokens."""


def claim_of(sample: Sample, reward: float | None) -> Claim:
    """Raises LossMaskInvalid."""
    count, length = len(sample.tokens), sample.response_length
    mask = [1] * length if sample.loss_mask is None else list(sample.loss_mask)
    if not 0 <= length <= count:
        raise LossMaskInvalid(f"response_length is {length}, but the sample has {count} tokens")
    if len(mask) != length:
        raise LossMaskInvalid(f"loss_mask has {len(mask)} entries for {length} response tokens")
    if any(value not in (0, 1) for value in mask):
        raise LossMaskInvalid("loss_mask holds values other than 0 and 1")
    trained = np.zeros(count, np.bool_)
    if not sample.remove_sample:
        trained[count - length :] = np.asarray(mask, np.bool_)
    return Claim(np.asarray(sample.tokens, np.int32), trained, reward)


@dataclass(slots=True, eq=False)
class _Place:
    written: Written
    trained: NDArray[np.bool_]
    owners: list[int]


def settle(claims: Sequence[Claim], written: Sequence[Written]) -> list[Trained]:
    """Finds the trajectory of each claim. Returns the training decision per trajectory, in order.

    If trajectories share a beginning, a claim can fit several. Then one is chosen such that all
    claims find a place. Raises TokensDiffer, TokensNotSampled, SamplesShareTokens.
    """
    places = [_Place(w, np.zeros(len(w.token_ids), np.bool_), []) for w in written]
    options = {i: _find(claim, written) for i, claim in enumerate(claims) if claim.end}
    # Claims with the fewest trajectories whose policy wrote their last token come first.
    ways = {i: sum(bool(own[claims[i].end - 1]) for own in options[i]) for i in options}
    order = sorted(options, key=lambda i: (ways[i], -claims[i].end))
    wanted = [(index, claims[index].trained[: claims[index].end]) for index in order]
    if not _put(wanted, claims, options, places, [_MOST_TRIES]):
        raise SamplesShareTokens(
            f"{len(order)} samples claim tokens of {len(written)} trajectories: some claim the same "
            f"tokens, which the policy wrote once (loss_mask must be 0 there in all samples but one), "
            f"or parts of one trajectory with different rewards"
        )
    return [
        Trained(w.from_policy & ~p.trained, w.broke_off, tuple(sorted(p.owners)))
        for w, p in zip(written, places, strict=True)
    ]


def _put(
    order: Sequence[tuple[int, NDArray[np.bool_]]],
    claims: Sequence[Claim],
    options: Mapping[int, Sequence[NDArray[np.bool_]]],
    places: Sequence[_Place],
    tries: list[int],
) -> bool:
    """Places claims, the last token that each still wants first. `tries` bounds the search."""
    if not order:
        return True
    (index, wanted), rest = order[0], order[1:]
    claim, last = claims[index], np.flatnonzero(wanted)[-1]
    found: list[tuple[tuple[int, int, int], _Place, NDArray[np.bool_]]] = []
    for place, sampled in zip(places, options[index], strict=True):
        part = wanted & sampled
        length = min(len(part), len(place.trained))
        part[:length] &= ~place.trained[:length]
        if part[last] and all(claims[other].reward == claim.reward for other in place.owners):
            left = int(np.count_nonzero(wanted & ~part))
            found.append(((left, _strangeness(wanted, place), len(place.owners)), place, part))
    for (left, *_), place, part in sorted(found, key=lambda one: one[0]):
        tries[0] -= 1
        length = min(len(part), len(place.trained))
        place.trained[:length] |= part[:length]
        place.owners.append(index)
        if _put([(index, wanted & ~part), *rest] if left else rest, claims, options, places, tries):
            return True
        place.trained[:length] &= ~part[:length]
        place.owners.pop()
        if tries[0] <= 0:
            return False
    return False


def _strangeness(wanted: NDArray[np.bool_], place: _Place) -> int:
    """Counts where the wanted tokens begin or end inside a span that the policy wrote at once."""
    policy = _padded(place.written.from_policy, len(wanted)).astype(np.int8)
    edges = np.diff(wanted.astype(np.int8), prepend=0)
    return int(np.count_nonzero(edges != np.diff(policy, prepend=0)))


def _find(claim: Claim, written: Sequence[Written]) -> list[NDArray[np.bool_]]:
    """Masks, per trajectory, the claim's tokens that the policy wrote after the same prefix."""
    end, wanted = claim.end, claim.trained[: claim.end]
    common = [common_count(claim.token_ids[:end], w.token_ids) for w in written]
    # A trajectory that ends earlier also counts: the sample may add tokens that were not sampled.
    if not any(c == min(end, len(w.token_ids)) for c, w in zip(common, written, strict=True)):
        raise TokensDiffer(
            f"up to its last trained token the sample has {end} tokens; the first "
            f"{max(common, default=0)} match a trajectory of this attempt, the next does not: tokens "
            f"were edited, cut, or encoded again"
        )
    pairs = zip(common, written, strict=True)
    sampled = [_padded(w.from_policy[:count], end) for count, w in pairs]
    unsampled = wanted & ~np.logical_or.reduce(sampled)
    if unsampled.any():
        raise TokensNotSampled(
            f"{int(unsampled.sum())} of the {int(wanted.sum())} tokens to train are not the policy's, "
            f"the first at position {int(unsampled.argmax())}: loss_mask must be 0 there"
        )
    return sampled


def _padded(from_policy: NDArray[np.bool_], count: int) -> NDArray[np.bool_]:
    return np.pad(from_policy[:count], (0, max(0, count - len(from_policy))))
