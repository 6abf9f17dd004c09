"""An agent with a tool: `penstock rollout --generate penstock.recipes.agents:calculate --reward ...`.

The server needs a parser of tool calls, such as `[serve.conversation] tool_parser = "hermes"`.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

from penstock.client import FinishReason, Message, Task, Tool, ToolCall, Trajectory, Turn

MOST_TURNS = 6
LONGEST = 200
"""Characters of an expression. It bounds the time, because there are no powers."""
CALCULATOR = Tool(
    "calculator",
    "Computes an expression of numbers, + - * / and parentheses.",
    {
        "type": "object",
        "properties": {"expression": {"type": "string"}},
        "required": ["expression"],
    },
)
_OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda left, right: left / right,  # The stubs have no types for truediv.
}


async def calculate(task: Task, trajectory: Trajectory) -> None:
    """Ends with the first turn that calls no tool, or after `MOST_TURNS`. The reward is --reward's."""
    turn = await trajectory.turn(tools=[CALCULATOR])
    for _ in range(MOST_TURNS - 1):
        results = _results(turn)
        if not results or turn.finish_reason is FinishReason.LENGTH:
            return
        turn = await trajectory.turn(results)


def _results(turn: Turn) -> list[Message]:
    """The answer to each call of a turn; a message about the one that cannot be read."""
    if turn.tool_call_error:
        return [Message("user", f"Error: {turn.tool_call_error}")]
    calls = turn.message.tool_calls if turn.message is not None else ()
    return [Message("tool", _answer(call), tool_call_id=call.tool_call_id) for call in calls]


def _answer(call: ToolCall) -> str:
    if call.name != CALCULATOR.name:
        return f"Error: there is no tool {call.name}; there is {CALCULATOR.name}"
    try:
        return f"{compute(str(call.arguments.get('expression', ''))):.12g}"
    except (ValueError, ArithmeticError) as error:
        # Wrong input is the policy's, which reads this and may try again.
        return f"Error: {error}"


def compute(expression: str) -> float:
    """Raises ValueError for anything but numbers, + - * / and parentheses; ArithmeticError as Python."""
    if len(expression) > LONGEST:
        raise ValueError(f"the expression is longer than {LONGEST} characters")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError as error:
        raise ValueError(f"cannot read {expression!r}") from error


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(op=op, left=left, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left), _value(right))
        case _:
            raise ValueError(f"only numbers, + - * / and parentheses: {ast.unparse(node)!r}")
