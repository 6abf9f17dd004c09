"""The one function that computes lag, used by the server's gate and by the trainer's mask."""

from __future__ import annotations


def lag(trainer_version: int, token_version: int) -> int:
    """Versions a token is behind the trainer at the moment its group is taken; never negative.

    `trainer_version` is the version the trainer holds while it gathers the batch that makes the next
    one; `token_version` is the version that sampled the token. A token can be ahead of a trainer that
    was restarted from an older checkpoint; it is then not late.
    """
    return max(0, trainer_version - token_version)
