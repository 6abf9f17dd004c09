"""Games of textarena: the policy has one seat, opponents the others.

textarena draws from the `random` module itself. Episodes run side by side in one process, so each has a
state of its own, which is put in place for as long as a call takes: one call at a time, and the same seed
is the same episode whatever else is played.

The policy is shown what is new since its last turn, and not its own words again: they are in its
conversation already. Rewards are textarena's, which gives them at the end.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Generator, Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any, Protocol, cast

from penstock.client.environments.environment import EnvironmentInvalid, Step, TaskUnusable
from penstock.client.environments.opponents import RANDOM, load_opponent, random_move

if TYPE_CHECKING:
    from collections.abc import Sequence

LARGEST_TABLE = 15
# Moves of opponents between two of the policy's: a game that comes to no end is a defect.
_MOST_OPPONENT_MOVES = 1000

# One for all episodes of the process: what it guards is the process's.
_RANDOM_LOCK = threading.Lock()


class _State(Protocol):
    current_player_id: int
    num_players: int
    error_count: int
    error_allowance: int
    game_info: dict[int, dict[str, Any]]
    role_mapping: dict[int, str]


class _Game(Protocol):
    """What is used of a game; the library carries no types."""

    state: _State

    def reset(self, num_players: int, seed: int | None = None) -> None: ...
    def step(self, action: str) -> tuple[bool, object]: ...
    def get_observation(self) -> tuple[int, Sequence[tuple[int, str, object]]]: ...
    def close(self) -> tuple[Mapping[int, float] | None, object]: ...


class TextArena:
    """`textarena:GAME`. Options of a task are the game's own, such as `max_number` of GuessTheNumber."""

    def __init__(
        self,
        game: str,
        *,
        opponent: str = RANDOM,
        seat: int | None = 0,
        players: int = 0,
        errors_in_a_row: int | None = None,
    ) -> None:
        """`opponent` is "random", or `pkg.module:function`, which is called with what it is shown and a
        random.Random; `seat` is the policy's, -1 alternates it from seed to seed; `players` is how many
        there are, zero for the fewest the game takes; `errors_in_a_row` replaces the game's own rule of
        how many invalid moves it lets pass.

        Raises EnvironmentInvalid.
        """
        import textarena

        self._library = cast("Any", textarena)
        registered = self._library.envs.registration.ENV_REGISTRY
        if game not in registered:
            raise EnvironmentInvalid(f"textarena has no game {game!r}; such as GuessTheNumber-v0")
        self._game_name, self._opponent = game, load_opponent(opponent)
        self._seat_wanted, self._players = seat, players
        self._errors_in_a_row = errors_in_a_row
        self._random_state: object = None

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> str:
        """Begins a game. Raises TaskUnusable for options that the game does not have."""
        with self._own_random(seed):
            try:
                wrapped = cast("_Game", self._library.make(self._game_name, **options))
            except TypeError as error:
                raise TaskUnusable(f"options of {self._game_name}: {error}") from error
            self._wrapped = wrapped
            # Observations as they come: wrappers of textarena repeat the whole game every time.
            self._game = wrapped
            while isinstance(self._game, self._library.Wrapper):
                self._game = cast("_Game", cast("Any", self._game).env)
            self._seat_players(seed)
            if self._errors_in_a_row is not None:
                self._state.error_allowance = self._errors_in_a_row
            self._rng = random.Random(f"{seed} opponents")
            if self._let_others_move(False):
                raise EnvironmentInvalid(f"{self._game_name}, seed {seed}: over before it begins")
            return self._observe("")

    def step(self, action: str) -> Step:
        """The policy's move, and then the others'."""
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
        """Begins with the number of players wanted, or the fewest."""
        counts = [self._players] if self._players else range(1, LARGEST_TABLE + 1)
        refusal: Exception | None = None
        for count in counts:
            try:
                self._wrapped.reset(num_players=count, seed=seed)
            except (AssertionError, ValueError) as error:
                # How games say that they are played by another number.
                refusal = error
                continue
            if count > 1 or not isinstance(self._state, self._library.TwoPlayerState):
                seat = self._seat_wanted
                self._seat = seed % count if seat is None or seat < 0 else seat
                if self._seat >= count:
                    raise EnvironmentInvalid(f"{self._game_name}: seat {seat} of {count} players")
                return
        raise EnvironmentInvalid(f"{self._game_name} does not begin: {refusal}") from refusal

    def _let_others_move(self, done: bool) -> bool:
        """Until it is the policy's turn, or the game is over; returns whether it is."""
        for _ in range(_MOST_OPPONENT_MOVES):
            if done or self._state.current_player_id == self._seat:
                return done
            done, _ = self._wrapped.step(self._opponents_move())
        raise EnvironmentInvalid(f"{self._game_name}: {_MOST_OPPONENT_MOVES} moves without a turn")

    def _opponents_move(self) -> str:
        player, messages = self._game.get_observation()
        shown = "\n".join(text for _, text, _ in messages)
        if self._opponent is None:
            return random_move(shown, self._rng, lambda move: self._is_legal(move, player))
        return self._opponent(shown, self._rng)

    def _is_legal(self, move: str, player: int) -> bool:
        """Tried on a copy, with the same random numbers as the move itself will have."""
        state = random.getstate()
        copy = deepcopy(self._wrapped)
        done, _ = copy.step(move)
        random.setstate(state)
        return not self._was_invalid(copy, player, done, self._is_marked(player))

    def _is_marked(self, player: int) -> bool:
        return bool(self._state.game_info[player].get("invalid_move"))

    def _was_invalid(self, game: _Game, player: int, done: bool, before: bool) -> bool:
        """Whether the player's last move was refused: the game then waits for another, or the player has
        lost by it, and is marked so from then on."""
        state = game.state
        if state.game_info[player].get("invalid_move") and not before:
            return True
        return not done and state.current_player_id == player and state.error_count > 0

    def _observe(self, action: str) -> str:
        """What the policy has not seen yet."""
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
