"""What samples claim to be, against what the engine sampled. Pure.

A sample is tokens that its function put together, and a mask of those it wants trained. The server has the
trajectories of the attempt: every token, who wrote it, and for the policy's the log-probability and the
version. Training takes the server's word, so each sample has to be found in it:

    sample -> claim: tokens up to the last one trained -> a trajectory that begins with exactly these,
    each trained one written by the policy -> that trajectory's trained tokens

What follows the last trained token has no influence on it and no gradient, so the sample may end before the
trajectory does, or after it. Several samples may be of one trajectory, as where each turn is returned as a
sample of its own with the turns before it as its prompt: their trained tokens are put together. What is
context in a trajectory, as what a branch shares, may be the policy's in another that begins with the same
tokens: there it was sampled, and there it is trained, so a sample may have a part in each. What no sample
claims of what the policy wrote carries no gradient.

    | what does not fit | |
    |---|---|
    | the mask is not as long as the response, or is neither 0 nor 1 | LossMaskInvalid |
    | no trajectory has these tokens | TokensDiffer |
    | one has, and the policy wrote what is to be trained in none | TokensNotSampled |
    | two train the same token, or parts of one trajectory for different rewards | SamplesShareTokens |

Each raises, which fails the attempt: what it trained would not be what the policy did.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.client.plugins.samples import Sample


# Ways to put claims in their places that are tried before they count as impossible to place.
_MOST_TRIES = 10_000


class LossMaskInvalid(Exception):
    """A sample's loss mask does not fit its response."""


class TokensDiffer(Exception):
    """A sample's tokens are those of no trajectory of its attempt."""


class TokensNotSampled(Exception):
    """A sample wants tokens trained that the policy did not write."""


class SamplesShareTokens(Exception):
    """Samples want the same sampled tokens, or one trajectory, in ways that exclude each other."""


@dataclass(frozen=True, slots=True, eq=False)
class Claim:
    """A sample's tokens, shape [n], and which of them it wants trained."""

    token_ids: NDArray[np.int32]
    trained: NDArray[np.bool_]
    reward: float | None
    """None where its group is scored later."""

    @property
    def end(self) -> int:
        """Tokens up to the last that is trained."""
        positions = np.flatnonzero(self.trained)
        return int(positions[-1]) + 1 if len(positions) else 0


@dataclass(frozen=True, slots=True, eq=False)
class Written:
    """A trajectory: its tokens, shape [n], and which of them the policy wrote in it."""

    token_ids: NDArray[np.int32]
    from_policy: NDArray[np.bool_]
    broke_off: bool = False
    """Whether a turn of it did: tokens of that may be there, and more may come, which its function never
    saw."""


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """What becomes of a trajectory."""

    untrained: NDArray[np.bool_]
    """What the policy wrote and no sample claims, shape [n]."""
    broke_off: bool
    """Whether what may still come of it is not trained either."""
    claims: tuple[int, ...]
    """Samples that claim something of it, by their index."""


def claim_of(sample: Sample, reward: float | None) -> Claim:
    """What a sample claims. Raises LossMaskInvalid."""
    count, length = len(sample.tokens), sample.response_length
    mask = [1] * length if sample.loss_mask is None else list(sample.loss_mask)
    if not 0 <= length <= count:
        raise LossMaskInvalid(f"response_length is {length}, of {count} tokens")
    if len(mask) != length:
        raise LossMaskInvalid(f"loss_mask has {len(mask)} entries for {length} response tokens")
    if any(value not in (0, 1) for value in mask):
        raise LossMaskInvalid("loss_mask holds something beside 0 and 1")
    trained = np.zeros(count, np.bool_)
    if not sample.remove_sample:
        trained[count - length :] = np.asarray(mask, np.bool_)
    return Claim(np.asarray(sample.tokens, np.int32), trained, reward)


@dataclass(slots=True, eq=False)
class _Place:
    """A trajectory while claims are put in their places."""

    written: Written
    trained: NDArray[np.bool_]
    owners: list[int]


def settle(claims: Sequence[Claim], written: Sequence[Written]) -> list[Trained]:
    """Finds each claim's trajectory; returns what becomes of each trajectory, in their order.

    Where trajectories begin alike a claim fits several; then one is chosen such that all find theirs.
    Raises TokensDiffer, TokensNotSampled, SamplesShareTokens.
    """
    places = [_Place(w, np.zeros(len(w.token_ids), np.bool_), []) for w in written]
    options = {i: _find(claim, written) for i, claim in enumerate(claims) if claim.end}
    # Those with the least choice first.
    order = sorted(options, key=lambda i: (len(_of_last(options[i], claims[i])), -claims[i].end))
    wanted = [(index, claims[index].trained[: claims[index].end]) for index in order]
    if not _put(wanted, claims, options, places, [_MOST_TRIES]):
        raise SamplesShareTokens(
            f"{len(order)} samples want tokens of {len(written)} trajectories: some the same ones, which "
            f"the policy wrote once (loss_mask must be 0 there in all samples but one), or parts of one "
            f"trajectory for different rewards"
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
    """Puts claims, and what of each is wanted still, in their places, from the last token of each on;
    whether all found theirs. `tries` bounds the search."""
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
    """How often what is wanted begins or ends within what the policy wrote in one go."""
    policy = _padded(place.written.from_policy, len(wanted)).astype(np.int8)
    edges = np.diff(wanted.astype(np.int8), prepend=0)
    return int(np.count_nonzero(edges != np.diff(policy, prepend=0)))


def _find(claim: Claim, written: Sequence[Written]) -> list[NDArray[np.bool_]]:
    """Which of a claim's tokens, up to its end, the policy wrote in each trajectory after the same ones."""
    end, wanted = claim.end, claim.trained[: claim.end]
    common = [_common(claim.token_ids[:end], w.token_ids) for w in written]
    # One that ends earlier may be what was meant, with tokens after it that nobody sampled.
    if not any(c == min(end, len(w.token_ids)) for c, w in zip(common, written, strict=True)):
        raise TokensDiffer(_difference(end, max(common, default=0)))
    pairs = zip(common, written, strict=True)
    sampled = [_padded(w.from_policy[:count], end) for count, w in pairs]
    unsampled = wanted & ~np.logical_or.reduce(sampled)
    if unsampled.any():
        raise TokensNotSampled(
            f"{int(unsampled.sum())} of the {int(wanted.sum())} tokens to be trained are not the policy's, "
            f"the first at position {int(unsampled.argmax())}: loss_mask must be 0 there"
        )
    return sampled


def _of_last(sampled: Sequence[NDArray[np.bool_]], claim: Claim) -> list[int]:
    """The trajectories, by their index, in which the policy wrote a claim's last token."""
    return [index for index, own in enumerate(sampled) if own[claim.end - 1]]


def _padded(from_policy: NDArray[np.bool_], count: int) -> NDArray[np.bool_]:
    return np.pad(from_policy[:count], (0, max(0, count - len(from_policy))))


def _difference(end: int, common: int) -> str:
    return (
        f"up to its last trained token the sample has {end} tokens; the first {common} are those of a "
        f"trajectory of this attempt, the next is not: tokens were edited, cut, or encoded anew"
    )


def _common(first: NDArray[np.int32], second: NDArray[np.int32]) -> int:
    length = min(len(first), len(second))
    differing = np.flatnonzero(first[:length] != second[:length])
    return int(differing[0]) if len(differing) else length
