"""Games of textarena: the policy has one seat, opponents have the others.

textarena uses the global `random` module, and episodes run concurrently in one process. So each
episode has its own random state, which is installed for the duration of a call. Only one call runs
at a time. The same seed thus gives the same episode whatever else is played.

The policy sees what is new since its last turn, without its own words, which its conversation
already contains. Rewards are textarena's, given at the end of the game.
"""

from __future__ import annotations

import contextlib
import random
import re
import threading
from collections.abc import Callable, Generator, Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any, Protocol, cast

from penstock.client.environments.environment import EnvironmentInvalid, Step, TaskUnusable
from penstock.common.functions import FunctionInvalid, find_function

if TYPE_CHECKING:
    from collections.abc import Sequence

Opponent = Callable[[str, random.Random], str]
"""`opponent(observation, rng) -> action`. The observation is what the opponent was shown since its
last move. Each opponent has its own generator, so that episodes are reproducible."""

RANDOM = "random"

# All of textarena's games write moves in brackets. They write player names in brackets too.
_BRACKETED = re.compile(r"\[([^\[\]\n]{1,40})\]")

LARGEST_TABLE = 15
# Opponents' moves between two of the policy's. A game that never ends is a defect.
_MOST_OPPONENT_MOVES = 1000

# Shared by all episodes, because it guards the global state of `random`.
_RANDOM_LOCK = threading.Lock()


class NoMoveFound(Exception):
    """A random opponent found no legal move among those the game lists."""


class _State(Protocol):
    current_player_id: int
    num_players: int
    error_count: int
    error_allowance: int
    game_info: dict[int, dict[str, Any]]
    role_mapping: dict[int, str]


class _Game(Protocol):
    """The methods of a game that are used here; the library has no type hints."""

    state: _State

    def reset(self, num_players: int, seed: int | None = None) -> None: ...
    def step(self, action: str) -> tuple[bool, object]: ...
    def get_observation(self) -> tuple[int, Sequence[tuple[int, str, object]]]: ...
    def close(self) -> tuple[Mapping[int, float] | None, object]: ...


class TextArena:
    """`textarena:GAME`. A task's options are the game's own, such as `max_number` of GuessTheNumber."""

    def __init__(
        self,
        game: str,
        *,
        opponent: str = RANDOM,
        seat: int | None = 0,
        players: int = 0,
        errors_in_a_row: int | None = None,
    ) -> None:
        """Looks up the game. Raises EnvironmentInvalid.

        - `opponent`: "random", or `pkg.module:function`. The function receives the observation and
          a random.Random.
        - `seat`: the policy's seat; -1 alternates it from seed to seed.
        - `players`: number of players; zero means the fewest that the game takes.
        - `errors_in_a_row`: replaces the game's own limit of invalid moves.
        """
        import textarena

        self._library = cast("Any", textarena)
        registered = self._library.envs.registration.ENV_REGISTRY
        if game not in registered:
            raise EnvironmentInvalid(
                f"textarena has no game {game!r}; a valid name is GuessTheNumber-v0"
            )
        self._game_name, self._opponent = game, load_opponent(opponent)
        self._seat_wanted, self._players = seat, players
        self._errors_in_a_row = errors_in_a_row
        self._random_state: object = None

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> str:
        """Starts a game. Raises TaskUnusable for options that the game does not have."""
        with self._own_random(seed):
            try:
                wrapped = cast("_Game", self._library.make(self._game_name, **options))
            except TypeError as error:
                raise TaskUnusable(f"options of {self._game_name}: {error}") from error
            self._wrapped = wrapped
            # Read observations from the innermost game: textarena's wrappers repeat the whole game
            # each time.
            self._game = wrapped
            while isinstance(self._game, self._library.Wrapper):
                self._game = cast("_Game", cast("Any", self._game).env)
            self._seat_players(seed)
            if self._errors_in_a_row is not None:
                self._state.error_allowance = self._errors_in_a_row
            self._rng = random.Random(f"{seed} opponents")
            if self._let_others_move(False):
                raise EnvironmentInvalid(
                    f"{self._game_name}, seed {seed}: the game ended before the policy's first turn"
                )
            return self._observe("")

    def step(self, action: str) -> Step:
        with self._own_random():
            before = self._is_marked(self._seat)
            done, _ = self._wrapped.step(action)
            invalid = self._was_invalid(self._game, self._seat, done, before)
            if not self._let_others_move(done):
                return Step(self._observe(action), invalid=invalid)
            rewards, _ = self._game.close()
            return Step(
                reward=float((rewards or {}).get(self._seat, 0.0)), done=True, invalid=invalid
            )

    @property
    def _state(self) -> _State:
        return self._game.state

    def _seat_players(self, seed: int) -> None:
        """Starts with the wanted number of players, or the fewest possible."""
        counts = [self._players] if self._players else range(1, LARGEST_TABLE + 1)
        refusal: Exception | None = None
        for count in counts:
            try:
                self._wrapped.reset(num_players=count, seed=seed)
            except (AssertionError, ValueError) as error:
                # Games raise these errors if they need another number of players.
                refusal = error
                continue
            if count > 1 or not isinstance(self._state, self._library.TwoPlayerState):
                seat = self._seat_wanted
                self._seat = seed % count if seat is None or seat < 0 else seat
                if self._seat >= count:
                    raise EnvironmentInvalid(
                        f"{self._game_name}: no seat {seat} among {count} players"
                    )
                return
        raise EnvironmentInvalid(f"cannot start {self._game_name}: {refusal}") from refusal

    def _let_others_move(self, done: bool) -> bool:
        """Plays until it is the policy's turn or the game is over. Returns whether it is over."""
        for _ in range(_MOST_OPPONENT_MOVES):
            if done or self._state.current_player_id == self._seat:
                return done
            done, _ = self._wrapped.step(self._opponents_move())
        raise EnvironmentInvalid(
            f"{self._game_name}: {_MOST_OPPONENT_MOVES} opponents' moves without a turn of the policy"
        )

    def _opponents_move(self) -> str:
        player, messages = self._game.get_observation()
        shown = "\n".join(text for _, text, _ in messages)
        if self._opponent is None:
            return random_move(shown, self._rng, lambda move: self._is_legal(move, player))
        return self._opponent(shown, self._rng)

    def _is_legal(self, move: str, player: int) -> bool:
        """Tries the move on a copy, with the random numbers that the move itself will see."""
        state = random.getstate()
        copy = deepcopy(self._wrapped)
        done, _ = copy.step(move)
        random.setstate(state)
        return not self._was_invalid(copy, player, done, self._is_marked(player))

    def _is_marked(self, player: int) -> bool:
        return bool(self._state.game_info[player].get("invalid_move"))

    def _was_invalid(self, game: _Game, player: int, done: bool, before: bool) -> bool:
        """After a refusal, the game waits for another move, or the player lost and stays marked."""
        state = game.state
        if state.game_info[player].get("invalid_move") and not before:
            return True
        return not done and state.current_player_id == player and state.error_count > 0

    def _observe(self, action: str) -> str:
        _, messages = self._game.get_observation()
        own = self._library.ObservationType.PLAYER_ACTION
        lines: list[str] = []
        for sender, text, kind in messages:
            said_by_policy = sender == self._seat or (
                sender < 0 and text in (action, f"[{action}]")
            )
            if kind == own and said_by_policy:
                continue
            name = self._state.role_mapping.get(sender, f"Player {sender}")
            lines.append(text if sender < 0 else f"[{name}] {text}")
        return "\n".join(lines).strip()

    @contextlib.contextmanager
    def _own_random(self, seed: int | None = None) -> Generator[None]:
        with _RANDOM_LOCK:
            others = random.getstate()
            if seed is None:
                random.setstate(cast("Any", self._random_state))
            else:
                random.seed(seed)
            try:
                yield
            finally:
                self._random_state = random.getstate()
                random.setstate(others)


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
