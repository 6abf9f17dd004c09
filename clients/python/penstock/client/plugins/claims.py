"""What samples claim to be, against what the engine sampled. Pure.

A sample is tokens that its function put together, and a mask of those it wants trained. The server has the
trajectories of the attempt: every token, who wrote it, and for the policy's the log-probability and the
version. Training takes the server's word, so each sample has to be found in it:

    sample -> claim: tokens up to the last one trained -> a trajectory that begins with exactly these,
    each trained one written by the policy -> that trajectory's trained tokens

What follows the last trained token has no influence on it and no gradient, so the sample may end before the
trajectory does, or after it. Several samples may be of one trajectory, as where each turn is returned as a
sample of its own with the turns before it as its prompt: their trained tokens are put together. What no
sample claims of what the policy wrote carries no gradient.

    | what does not fit | |
    |---|---|
    | the mask is not as long as the response, or is neither 0 nor 1 | LossMaskInvalid |
    | no trajectory has these tokens | TokensDiffer |
    | one has, and the policy did not write what is to be trained | TokensNotSampled |
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
    """A trajectory: its tokens, shape [n], and which of them the policy wrote."""

    token_ids: NDArray[np.int32]
    from_policy: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """What becomes of a trajectory."""

    untrained: NDArray[np.bool_]
    """What the policy wrote and no sample claims, shape [n]."""
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
    options = {
        index: [places[found] for found in _find(claim, written)]
        for index, claim in enumerate(claims)
        if claim.end
    }
    # Those with the least choice first.
    order = sorted(options, key=lambda index: (len(options[index]), -claims[index].end))
    if not _put(order, claims, options, [_MOST_TRIES]):
        raise SamplesShareTokens(
            f"{len(order)} samples want tokens of {len(written)} trajectories: some the same ones, which "
            f"the policy wrote once, or parts of one trajectory for different rewards"
        )
    return [Trained(p.written.from_policy & ~p.trained, tuple(sorted(p.owners))) for p in places]


def _put(
    order: Sequence[int],
    claims: Sequence[Claim],
    options: Mapping[int, Sequence[_Place]],
    tries: list[int],
) -> bool:
    """Puts claims in their places, one after another; whether all found one. `tries` bounds the search."""
    if not order:
        return True
    index, rest = order[0], order[1:]
    claim = claims[index]
    wanted = claim.trained[: claim.end]
    for place in sorted(options[index], key=lambda p: (_strangeness(claim, p), len(p.owners))):
        free = not (place.trained[: claim.end] & wanted).any()
        if not free or any(claims[other].reward != claim.reward for other in place.owners):
            continue
        tries[0] -= 1
        place.trained[: claim.end] |= wanted
        place.owners.append(index)
        if _put(rest, claims, options, tries):
            return True
        place.trained[: claim.end] &= ~wanted
        place.owners.pop()
        if tries[0] <= 0:
            return False
    return False


def _strangeness(claim: Claim, place: _Place) -> int:
    """How often a claim begins or ends within what the policy wrote in one go."""
    wanted = claim.trained[: claim.end].astype(np.int8)
    policy = place.written.from_policy[: claim.end].astype(np.int8)
    return int(np.count_nonzero(np.diff(wanted, prepend=0) != np.diff(policy, prepend=0)))


def _find(claim: Claim, written: Sequence[Written]) -> list[int]:
    """The trajectories that have what is claimed."""
    end, wanted = claim.end, claim.trained[: claim.end]
    common = [_common(claim.token_ids[:end], w.token_ids) for w in written]
    # One that ends earlier may be what was meant, with tokens after it that nobody sampled.
    meant = [i for i, w in enumerate(written) if common[i] == min(end, len(w.token_ids))]
    if not meant:
        raise TokensDiffer(_difference(end, max(common, default=0)))
    unsampled = {i: wanted & ~_padded(written[i].from_policy, end) for i in meant}
    found = [i for i in meant if not unsampled[i].any()]
    if not found:
        other = min(unsampled.values(), key=np.count_nonzero)
        raise TokensNotSampled(
            f"{int(other.sum())} of the {int(wanted.sum())} tokens to be trained are not the policy's, "
            f"the first at position {int(other.argmax())}: loss_mask must be 0 there"
        )
    return found


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
