"""textarena's games and reasoning-gym's problems as multi-turn tasks."""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest

from penstock.client import Task
from penstock.client.environments import EnvironmentInvalid, Step, TaskUnusable
from penstock.client.environments.environment import read_episode
from penstock.client.environments.reasoning import ReasoningGym
from penstock.client.environments.text_arena import NoMoveFound, random_move
from penstock.trainer.config.data import ReasoningGymConfig
from penstock.trainer.data.sources.procedural import ReasoningGymSource
from tests.support.scripted_server import Script, ScriptedServer

pytest.importorskip("textarena")

from penstock.client.environments.text_arena import TextArena


def play(
    game: TextArena, policy: Callable[[str], str], seed: int = 0, **options: Any
) -> tuple[list[str], list[Step]]:
    """Return what the policy was shown, and the steps that its actions led to."""
    shown, steps = [game.reset(seed=seed, options=options)], list[Step]()
    while not steps or not steps[-1].done:
        steps.append(game.step(policy("\n".join(shown))))
        if not steps[-1].done:
            shown.append(str(steps[-1].observation))
    return shown, steps


class Bisecting:
    """Plays by bisection, using the hints so far."""

    def __init__(self, highest: int = 20) -> None:
        self.low, self.high, self.guess = 1, highest, 0

    def __call__(self, shown: str) -> str:
        hints = re.findall(r"target number is (higher|lower)", shown)
        if hints:
            self.low, self.high = (
                (self.guess + 1, self.high) if hints[-1] == "higher" else (self.low, self.guess - 1)
            )
        self.guess = (self.low + self.high) // 2
        return f"My guess is [{self.guess}]"


def test_a_number_is_guessed_from_the_hints():
    shown, steps = play(TextArena("GuessTheNumber-v0"), Bisecting(), seed=3)
    assert steps[-1].reward == 1.0 and sum(step.reward for step in steps) == 1.0
    assert "between 1 and 20" in shown[0]
    # Only the new text, without the policy's own words.
    assert all(text.startswith("The target number is") for text in shown[1:])


def test_options_of_a_task_are_the_games_own():
    shown, _ = play(TextArena("GuessTheNumber-v0"), Bisecting(5), max_number=5)
    assert "between 1 and 5" in shown[0]
    with pytest.raises(TaskUnusable, match="no_such"):
        TextArena("GuessTheNumber-v0").reset(seed=0, options={"no_such": 1})


def test_the_same_seed_is_the_same_episode_whatever_is_played_beside_it():
    def lake(game: TextArena, seed: int) -> str:
        return game.reset(seed=seed, options={})

    alone = [lake(TextArena("FrozenLake-v0"), seed) for seed in range(6)]
    assert len(set(alone)) > 1
    first, second = TextArena("FrozenLake-v0"), TextArena("FrozenLake-v0")
    before = random.getstate()
    for seed in range(6):
        assert lake(first, seed) == alone[seed]
        lake(second, seed + 10)
        first.step("[down]")
    assert random.getstate() == before


def test_the_opponent_draws_the_same_moves_whatever_is_played_beside_it():
    def moves(disturb: bool) -> list[str]:
        game = TextArena("TicTacToe-v0", errors_in_a_row=20)
        shown = [game.reset(seed=4, options={})]
        for action in ("[0]", "[1]"):
            if disturb:
                TextArena("TicTacToe-v0").reset(seed=9, options={})
                random.random()
            shown.append(str(game.step(action).observation))
        return shown

    assert moves(False) == moves(True)


def test_an_invalid_action_is_said_and_the_second_in_a_row_ends_the_game():
    game = TextArena("TowerOfHanoi-v0")
    game.reset(seed=0, options={})
    first = game.step("nothing of the kind")
    assert first.invalid and not first.done and "invalid move" in str(first.observation)
    assert "nothing of the kind" not in str(first.observation)
    moved = game.step("[A C]")
    assert not moved.invalid and "You moved disk 1 from A to C" in str(moved.observation)
    assert game.step("[B A]").invalid
    last = game.step("[B A]")
    assert last.invalid and last.done and last.reward == 0.0


def test_the_rule_for_invalid_actions_can_be_replaced():
    game = TextArena("TowerOfHanoi-v0", errors_in_a_row=4)
    game.reset(seed=0, options={})
    steps = [game.step("?") for _ in range(5)]
    assert [step.done for step in steps] == [False] * 4 + [True]


def hanoi(disks: int, source: str = "A", target: str = "C", spare: str = "B") -> list[str]:
    if not disks:
        return []
    before, after = hanoi(disks - 1, source, spare, target), hanoi(disks - 1, spare, target, source)
    return [*before, f"[{source} {target}]", *after]


def test_a_tower_is_moved():
    moves = iter(hanoi(3))
    _, steps = play(TextArena("TowerOfHanoi-v0"), lambda _: next(moves))
    assert len(steps) == 7 and steps[-1].reward == 1.0


def first_open(shown: str) -> str:
    return re.findall(r"'(\[\d\])'", shown.rpartition("Available")[2])[0]


@pytest.mark.parametrize("seat", [0, 1])
def test_a_random_opponent_plays_legal_moves_only(seat: int):
    firsts: list[str] = []
    for seed in range(12):
        shown, steps = play(TextArena("TicTacToe-v0", seat=seat), first_open, seed)
        assert not any(step.invalid for step in steps)
        assert f"You are Player {seat}" in shown[0]
        assert steps[-1].reward in (-1.0, 0.0, 1.0)
        placed = rf"Player {1 - seat} placed their symbol \(.\) in cell (\d)"
        opponents = re.findall(placed, "\n".join(shown))
        assert len(opponents) >= len(shown) - 1
        firsts.append(opponents[0])
    assert len(set(firsts)) > 3


def lowest_open(observation: str, rng: random.Random) -> str:
    return first_open(observation)


def test_a_scripted_opponent_plays_its_part():
    game = TextArena("TicTacToe-v0", opponent=f"{__name__}:lowest_open", seat=0)
    shown = [game.reset(seed=0, options={})]
    shown.append(str(game.step("[8]").observation))
    assert "Player 1 placed their symbol (X) in cell 0" in shown[1]
    game.step("[7]")
    last = game.step("[6]")
    assert (last.done, last.reward) == (True, 1.0)


def test_the_policys_seat_can_alternate():
    game = TextArena("TicTacToe-v0", seat=-1)
    starts = [game.reset(seed=seed, options={}) for seed in (0, 1)]
    assert "You are Player 0" in starts[0] and "You are Player 1" in starts[1]
    with pytest.raises(EnvironmentInvalid, match="no seat 2 among 2 players"):
        TextArena("TicTacToe-v0", seat=2).reset(seed=0, options={})
    with pytest.raises(EnvironmentInvalid, match="cannot start TicTacToe-v0"):
        TextArena("TicTacToe-v0", players=3).reset(seed=0, options={})


def test_a_game_of_three_seats_has_two_opponents():
    game = TextArena("ThreePlayerTicTacToe-v0")
    shown = [game.reset(seed=0, options={})]
    open_cell = re.search(r"\[\d+\]", shown[0].rpartition("vailable")[2] or shown[0])
    assert open_cell is not None
    text = str(game.step(open_cell[0]).observation)
    assert "Player 1" in text and "Player 2" in text


def test_a_random_move_is_one_of_the_legal_ones():
    text = "For example [9]. Available Moves: [1], [2], [3]"
    drawn = {random_move(text, random.Random(n), lambda move: move != "[2]") for n in range(40)}
    assert drawn == {"[1]", "[3]"}
    assert random_move(text, random.Random(0), lambda move: move == "[9]") == "[9]"
    with pytest.raises(NoMoveFound, match="no move in brackets is legal"):
        random_move(text, random.Random(0), lambda move: False)


def test_a_wrong_answer_gets_another_try_worth_less():
    gym = ReasoningGym("chain_sum", tries=3, discount=0.5)
    question = str(gym.reset(seed=5, options={"min_digits": 1, "max_digits": 1}))
    terms = question.rpartition(":")[2].rstrip(" =").replace("- ", "-").split()
    answer = sum(int(term) for term in terms if term != "+")
    assert gym.reset(seed=5, options={"min_digits": 1, "max_digits": 1}) == question
    wrong = gym.step(f"It is {answer + 1}")
    assert not wrong.done and wrong.reward == 0.0 and "Try again" in str(wrong.observation)
    right = gym.step(f"Then it is {answer}")
    assert right.done and right.reward == 0.5
    assert right.metrics == {"solved": 1.0, "solved_at_once": 0.0}
    gym.reset(seed=5, options={"min_digits": 1, "max_digits": 1})
    at_once = gym.step(str(answer))
    assert (at_once.reward, at_once.metrics["solved_at_once"]) == (1.0, 1.0)


def test_the_last_try_ends_it_and_a_part_of_the_answer_counts():
    gym = ReasoningGym("chain_sum", tries=2, discount=0.5)
    gym.reset(seed=1, options={})
    # reasoning-gym's own scorer gives partial credit to an answer with text around it.
    entry = gym._entry
    steps = [gym.step("no idea"), gym.step(f"<answer>{entry['answer']} or so</answer>")]
    score = gym._data_set.score_answer(f"{entry['answer']} or so", entry)
    assert [step.done for step in steps] == [False, True] and 0 < score < 1
    assert steps[1].reward == score * 0.5 and steps[1].metrics["solved"] == 0.0


def test_a_problem_that_came_with_the_task_is_taken():
    source = ReasoningGymSource(ReasoningGymConfig(name="basic_arithmetic"))
    problem = source.problem(3)
    gym = ReasoningGym()
    episode = read_episode(Task("t", metadata=problem.metadata))
    assert gym.reset(seed=episode.seed, options=episode.options) is None
    answer = json.loads(str(problem.metadata["entry_json"]))["answer"]
    assert gym.step(f"<answer>{answer}</answer>").reward == 1.0
    for options, words in (
        ({"dataset": "spell_backward", "entry_json": "{}"}, "plays 'basic_arithmetic'"),
        ({"dataset": "basic_arithmetic", "entry_json": "{"}, "cannot read the entry of"),
        ({"no_such": 1}, "no_such"),
    ):
        with pytest.raises(TaskUnusable, match=words):
            ReasoningGym("basic_arithmetic").reset(seed=0, options=options)
    with pytest.raises(TaskUnusable, match="names no reasoning-gym data set"):
        gym.reset(seed=0, options={})


def test_an_answer_that_a_data_set_cannot_read_is_wrong_and_counted():
    gym = ReasoningGym("prime_factorization", tries=2)
    gym.reset(seed=0, options={})
    step = gym.step("no number at all")
    assert step.invalid and not step.done and step.reward == 0.0


@pytest.mark.parametrize(
    "name", ["spell_backward", "countdown", "mini_sudoku", "maze", "family_relationships"]
)
def test_any_data_set_is_an_environment(name: str):
    gym = ReasoningGym(name, tries=1)
    assert gym.reset(seed=2, options={}) == gym.reset(seed=2, options={})
    assert gym.reset(seed=2, options={}) != gym.reset(seed=3, options={})
    assert gym.step("nonsense").done


async def test_penstock_rollout_plays_the_tasks_episodes():
    async with ScriptedServer(Script()) as server:
        for seed in range(3):
            metadata = {"environment": "textarena:GuessTheNumber-v0", "seed": seed}
            server.add_task(Task(f"game-{seed}", metadata=metadata))
        server.add_task(Task("sum", metadata={"environment": "reasoning_gym:chain_sum"}))
        server.add_task(Task("other", metadata={"environment": "os:system"}))
        server.script.max_attempts = 1
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "penstock.cli", "rollout", "--server", server.address),
            *("--environment", "textarena", "--environment", "reasoning_gym:chain_sum"),
            *("--set", "episode.invalid_actions=9", "--set", "textarena.errors_in_a_row=2"),
            *("--attempts", "5", "--concurrency", "2"),
            stderr=asyncio.subprocess.PIPE,
        )
        _, errors = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 0, errors.decode()
        outcomes = dict(server.outcomes)
        for seed in range(3):
            # The scripted policy writes numbers without brackets, which no game accepts.
            game = outcomes[f"game-{seed}-0-0"]
            assert game.metrics["invalid_actions"] == game.metrics["turns"] == 3
            assert list(game.turn_rewards) == [0.0, 0.0, 0.0]
            assert game.metadata["environment"] == "textarena:GuessTheNumber-v0"
            assert game.metadata["ended"] == "DONE" and game.metadata["seed"] == seed
        assert outcomes["sum-0-0"].metrics["turns"] == 3
        assert outcomes["other-0-0"].failure.reason == "TASK_UNUSABLE"
        assert "os:system" in outcomes["other-0-0"].failure.message
