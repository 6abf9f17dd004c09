"""Agents with random conversations over gRPC; those with SDKs are in `random_sdks`.

Each agent continues a conversation, repeats a turn, rewrites or summarizes history, and answers its
tool's calls. Sometimes it is interrupted. It sends the policy's messages back in the form in which
it received them. It records which turn of which trajectory produced each message. From that a test
knows which tokens the engine must have seen before the next turn.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from penstock.v1 import conversation_pb2, trajectory_pb2
from tests.support.harness import (
    ChatMessage,
    Conversation,
    GenerateRequest,
    Harness,
    T,
    Turn,
    collect,
    sampling,
)
from tests.support.writing_engine import TurnName

ToolMessage = T(conversation_pb2.Tool)

# Text from outside that spells control tokens must not become control tokens.
SYSTEM = "Be <|im_end|> brief. ü"
NAME, DESCRIPTION = "add", "adds </tool_call> two"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
MAX_TOKENS = 48
TURNS = 8


class Call(NamedTuple):
    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Line:
    """One message of a conversation."""

    role: str
    native: list[Any]
    """The text as the agent's surface returned it; empty if the agent sends none back."""
    text: str
    calls: tuple[Call, ...] = ()
    turn: TurnName | None = None
    """The reasoning in the policy's message."""
    reasoning: str = ""
    error: str = ""
    """Why a tool call in the message is invalid."""


@dataclass
class Held:
    """A conversation as its agent knows it."""

    trajectory_id: str
    with_tools: bool
    lines: list[Line] = field(default_factory=list[Line])
    parent: str = ""

    @property
    def new(self) -> list[Line]:
        """The lines after the policy's last message."""
        return self.lines[max(self.ends, default=-1) + 1 :]

    @property
    def ends(self) -> list[int]:
        """The indices of the policy's messages."""
        return [index for index, line in enumerate(self.lines) if line.turn is not None]

    @property
    def natives(self) -> list[Any]:
        """All messages, in the surface's form."""
        return [part for line in self.lines for part in line.native]


class Surface(Protocol):
    """How an agent reaches the policy."""

    interrupted: int
    """How often a turn was interrupted and then resumed or repeated."""

    def line(self, role: str, text: str, call_id: str = "") -> Line:
        """A message from outside."""
        ...

    async def answer(self, held: Held) -> Line:
        """The policy's next message. Sets the conversation's trajectory."""
        ...


@dataclass
class Agent:
    """One attempt with random actions."""

    surface: Surface
    draw: random.Random
    asked: list[tuple[list[Line], Line]] = field(default_factory=list[tuple[list[Line], Line]])
    """The conversation before each turn, and the answer."""
    held: list[Held] = field(default_factory=list[Held])

    async def talk(self, trajectory_id: str) -> None:
        """Run a whole attempt, up to its reward."""
        root = Held(trajectory_id, self.draw.random() < 0.8)
        root.lines = [self.surface.line("system", SYSTEM), self._user("Question")]
        await self._ask(root)
        self.held.append(root)
        for _ in range(TURNS):
            await self._act(self.draw.choice(self.held))

    async def _act(self, held: Held) -> None:
        if not held.ends or self.draw.random() < 0.6:
            held.lines += self._next(held)
            await self._ask(held)
            return
        branch = Held("", held.with_tools, parent=held.trajectory_id)
        kind = self.draw.choice(["rewritten", "again", "compacted"])
        if kind == "rewritten":
            branch.lines = [*held.lines[: self.draw.choice(held.ends) + 1], self._user("Rather")]
        elif kind == "again":
            branch.lines = held.lines[: self.draw.choice(held.ends)]
        else:
            branch.lines = [self._user("In short:")]
        await self._ask(branch)
        self.held.append(branch)

    async def _ask(self, held: Held) -> None:
        line = await self.surface.answer(held)
        self.asked.append((list(held.lines), line))
        if line.native:
            held.lines.append(line)

    def _next(self, held: Held) -> list[Line]:
        """Answers to the pending calls, or else a question."""
        calls = held.lines[-1].calls
        results = [
            self.surface.line("tool", f"result {self.draw.random()}", call.call_id)
            for call in calls
        ]
        return results or [self._user("<|eot_id|> and")]

    def _user(self, text: str) -> Line:
        return self.surface.line("user", f"{text} {self.draw.random()}?")


class Grpc:
    """Names its trajectories, sends only new messages, and resumes aborted turns."""

    def __init__(self, server: Harness, draw: random.Random) -> None:
        self._server = server
        self._draw = draw
        self._turns: dict[str, int] = {}
        self.interrupted = 0

    def line(self, role: str, text: str, call_id: str = "") -> Line:
        number = conversation_pb2.Role.Value(f"ROLE_{role.upper()}")
        return Line(role, [ChatMessage(role=number, content=text, tool_call_id=call_id)], text)

    async def answer(self, held: Held) -> Line:
        if held.trajectory_id in self._turns:
            messages = [part for line in held.new for part in line.native]
            conversation = Conversation(messages=messages)
            turn = await self._server.resume(held.trajectory_id, conversation=conversation)
        else:
            held.trajectory_id = held.trajectory_id or f"{held.parent}.{len(self._turns)}"
            turn = await self._open(held)
        while turn.finished.finish_reason == trajectory_pb2.FINISH_REASON_ABORTED:
            self.interrupted += 1
            if self._draw.random() < 0.2:
                # Answer the part that was written.
                break
            turn = await self._server.resume(held.trajectory_id)
        return self._read(held, turn)

    async def _open(self, held: Held) -> Turn:
        tool = ToolMessage(name=NAME, description=DESCRIPTION, parameters=SCHEMA)
        request = GenerateRequest(
            trajectory_id=held.trajectory_id,
            parent_trajectory_id=held.parent,
            conversation=Conversation(
                messages=held.natives, tools=[tool] if held.with_tools else []
            ),
            sampling_params=sampling(MAX_TOKENS, ignore_eos=False),
        )
        return await collect(self._server.wire.Generate(request))

    def _read(self, held: Held, turn: Turn) -> Line:
        index = self._turns.get(held.trajectory_id, 0)
        self._turns[held.trajectory_id] = index + 1
        message = turn.finished.message
        calls = tuple(
            Call(call.tool_call_id, call.name, call.arguments_json) for call in message.tool_calls
        )
        return Line(
            "assistant",
            [ChatMessage.FromString(message.SerializeToString())],
            message.content,
            calls,
            (held.trajectory_id, index),
            message.reasoning,
            turn.finished.tool_call_error,
        )
