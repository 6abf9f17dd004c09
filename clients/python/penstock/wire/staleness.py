"""Computes lag, for both the server's staleness gate and the trainer's mask."""

from __future__ import annotations


def lag(trainer_version: int, token_version: int) -> int:
    """Versions by which a token is behind the trainer when its group is taken; never negative.

    `trainer_version` is the version that the trainer holds while it gathers the batch for the next one.
    `token_version` is the version that sampled the token. A token may be ahead of a trainer that was
    restarted from an older checkpoint; such a token is not late.
    """
    return max(0, trainer_version - token_version)
