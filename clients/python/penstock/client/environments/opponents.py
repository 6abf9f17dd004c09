"""Opponents for the other seats of a game: random moves, or your own function."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import cast

from penstock.client.environments.environment import EnvironmentInvalid
from penstock.common.functions import FunctionInvalid, find_function

Opponent = Callable[[str, random.Random], str]
"""`opponent(observation, rng) -> action`. The observation is what the opponent was shown since its
last move. Each opponent has its own generator, so that episodes are reproducible."""

RANDOM = "random"

# All of textarena's games write moves in brackets. They write player names in brackets too.
_BRACKETED = re.compile(r"\[([^\[\]\n]{1,40})\]")


class NoMoveFound(Exception):
    """A random opponent found no legal move among those the game lists."""


def load_opponent(name: str) -> Opponent | None:
    """Loads the function `name`. Returns None for a random opponent. Raises EnvironmentInvalid."""
    if name == RANDOM:
        return None
    try:
        return cast("Opponent", find_function(name, ("observation", "rng")))
    except FunctionInvalid as error:
        raise EnvironmentInvalid(f"opponent {name}: {error}") from error


def random_move(observation: str, rng: random.Random, is_legal: Callable[[str], bool]) -> str:
    """Picks uniformly one of the legal moves that the observation shows in brackets.

    If the observation lists available moves after the word "available", those are tried first.
    Raises NoMoveFound.
    """
    _, _, listed = observation.rpartition("vailable")
    for text in (listed, observation):
        # Sorted, so that the order does not depend on hashes.
        moves = sorted(set(_BRACKETED.findall(text)))
        rng.shuffle(moves)
        for move in moves:
            if is_legal(f"[{move}]"):
                return f"[{move}]"
    raise NoMoveFound(
        f"no move in brackets is legal; use your own opponent function. Observation: {observation[-300:]!r}"
    )
