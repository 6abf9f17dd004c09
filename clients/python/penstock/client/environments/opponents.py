"""Who plays the other seats of a game: at random, or a function of your own."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import cast

from penstock.client.environments.environment import EnvironmentInvalid
from penstock.common.functions import FunctionInvalid, find_function

Opponent = Callable[[str, random.Random], str]
"""`opponent(observation, rng) -> action`: what it was shown since its last move, and a generator of its
own, so that the same episode is the same."""

RANDOM = "random"

# Moves are written in brackets in all of textarena's games; names of players are too.
_BRACKETED = re.compile(r"\[([^\[\]\n]{1,40})\]")


class NoMoveFound(Exception):
    """A random opponent found no legal move among those the game lists."""


def load_opponent(name: str) -> Opponent | None:
    """The function that `name` leads to; None for a random opponent. Raises EnvironmentInvalid."""
    if name == RANDOM:
        return None
    try:
        return cast("Opponent", find_function(name, ("observation", "rng")))
    except FunctionInvalid as error:
        raise EnvironmentInvalid(f"opponent {name}: {error}") from error


def random_move(observation: str, rng: random.Random, is_legal: Callable[[str], bool]) -> str:
    """One of the legal moves that the observation names in brackets, each as likely as any other.

    Where it names the moves that are available, after a word that says so, only those are looked at first.
    Raises NoMoveFound.
    """
    _, _, listed = observation.rpartition("vailable")
    for text in (listed, observation):
        # In an order that does not depend on hashes.
        moves = sorted(set(_BRACKETED.findall(text)))
        rng.shuffle(moves)
        for move in moves:
            if is_legal(f"[{move}]"):
                return f"[{move}]"
    raise NoMoveFound(
        f"no move in brackets is legal; name an opponent of your own. Shown: {observation[-300:]!r}"
    )
