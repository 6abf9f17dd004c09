"""The agent with a calculator: what it computes, and what the policy reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, cast

import pytest

from penstock.client import FinishReason, Message, Task, ToolCall, Trajectory, Turn
from penstock.recipes.agents import CALCULATOR, LONGEST, MOST_TURNS, calculate, compute


def calling(*expressions: object, name: str = "calculator") -> Turn:
    calls = tuple(
        ToolCall(f"c{at}", name, json.dumps({"expression": expression}))
        for at, expression in enumerate(expressions)
    )
    return Turn(0, (), FinishReason.STOP, message=Message("assistant", tool_calls=calls))


ANSWER = Turn(0, (), FinishReason.STOP, "It is 42.", Message("assistant", "It is 42."))


class Scripted:
    """A trajectory whose policy gives the turns of a script; the last one again and again."""

    def __init__(self, *turns: Turn) -> None:
        self._turns = turns
        self.read: list[Any] = []

    async def turn(self, observation: object = None, *, tools: Sequence[object] = ()) -> Turn:
        assert tools == ([CALCULATOR] if observation is None else ())
        self.read.append(observation)
        return self._turns[min(len(self.read), len(self._turns)) - 1]


async def read(*turns: Turn) -> list[Any]:
    """What the policy reads after each of its turns but the last."""
    trajectory = Scripted(*turns)
    await calculate(Task("t"), cast("Trajectory", trajectory))
    return trajectory.read[1:]


async def test_each_call_is_answered_until_there_is_none() -> None:
    said = await read(calling("6 * 7", "(1 + 2) / 4"), calling("-2 * 3.5"), ANSWER, calling("1"))
    assert said == [
        [Message("tool", "42", tool_call_id="c0"), Message("tool", "0.75", tool_call_id="c1")],
        [Message("tool", "-7", tool_call_id="c0")],
    ]


@pytest.mark.parametrize(
    ("turn", "answer"),
    [
        (calling("1 / 0"), "Error: division by zero"),
        (calling("2 ** 9"), "Error: only numbers, + - * / and parentheses: '2 ** 9'"),
        (calling("open('x')"), "Error: only numbers, + - * / and parentheses: \"open('x')\""),
        (calling("2 +"), "Error: cannot read '2 +'"),
        (calling(None), "Error: only numbers, + - * / and parentheses: 'None'"),
        (
            calling("1" * (LONGEST + 1)),
            f"Error: the expression is longer than {LONGEST} characters",
        ),
        (calling("1", name="search"), "Error: there is no tool search; there is calculator"),
        (
            Turn(0, (), FinishReason.STOP, message=Message("assistant"), tool_call_error="no JSON"),
            "Error: no JSON",
        ),
    ],
)
async def test_a_mistake_is_told_and_the_attempt_continues(turn: Turn, answer: str) -> None:
    ((told,),) = await read(turn, ANSWER)
    assert told.content == answer


async def test_arguments_that_are_no_object_are_a_mistake_too() -> None:
    call = ToolCall("c0", "calculator", "[1]")
    turn = Turn(0, (), FinishReason.STOP, message=Message("assistant", tool_calls=(call,)))
    ((told,),) = await read(turn, ANSWER)
    assert told.content == "Error: the arguments of calculator are not a JSON object"


async def test_a_turn_that_was_cut_off_is_the_last() -> None:
    cut = Turn(0, (), FinishReason.LENGTH, message=calling("1").message)
    assert await read(cut) == []


async def test_the_number_of_turns_is_bounded() -> None:
    assert len(await read(calling("1 + 1"))) == MOST_TURNS - 1


@pytest.mark.parametrize(
    ("expression", "value"), [("1_000 * 2", 2000), (" 7 - -1 ", 8), ("1e3 / 8", 125)]
)
def test_it_computes(expression: str, value: float) -> None:
    assert compute(expression) == value


@pytest.mark.parametrize("expression", ["(" * LONGEST, "-" * LONGEST + "1", "9" * LONGEST + "/3"])
def test_no_expression_takes_long(expression: str) -> None:
    with pytest.raises((ValueError, ArithmeticError)):
        compute(expression)
