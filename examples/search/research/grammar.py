"""What the policy says, read as actions, and what it is told: in lines of text, or as tool calls.

    search: words to look up | other words       any number, also on several lines, looked up together
    answer: a few words                          ends the attempt

A turn that searches is no answer yet, whatever else is in it: it has not seen what it asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from penstock.client import Message, Tool, Turn
from research.retrieval_client import LONGEST_QUERY, Found
from research.scoring import words

NOTHING_FOUND = "Nothing found."
TOOL_FAILED = "The search engine is not available."
NO_ACTION = 'Write lines that begin with "search:" or "answer:".'
NO_WORDS = "There are no words to search for."
TOO_LONG = "That is too long to search for."

_SYSTEM = (
    'You answer questions with a search engine. Write "search: words" to search, with | between '
    'several searches at once, or "answer: a few words" to answer.'
)
_EXAMPLE = (
    Message("user", "Question: Who wrote the novel Moby-Dick?"),
    Message("assistant", "search: who wrote the novel Moby-Dick"),
    Message(
        "user",
        "Moby-Dick: Moby-Dick; or, The Whale is an 1851 novel by American writer Herman Melville.",
    ),
    Message("assistant", "answer: Herman Melville"),
)
_TOOL_SYSTEM = (
    "You answer questions about facts. Look them up with the tool search, several times at once if that "
    "helps, and then answer in a few words, without a sentence around them."
)
SEARCH_TOOL = Tool(
    "search",
    "Finds passages of an encyclopedia.",
    {
        "type": "object",
        "properties": {"query": {"type": "string", "description": "Words to look for."}},
        "required": ["query"],
    },
)


@dataclass(frozen=True, slots=True)
class Call:
    """One search."""

    query: str
    """Empty where the policy's call could not be read."""
    call_id: str = ""
    """Of a tool call; empty where it was too malformed to be one."""
    error: str = ""
    """What is wrong with it, for the policy to read."""


@dataclass(frozen=True, slots=True)
class Actions:
    """What one turn does."""

    calls: tuple[Call, ...] = ()
    answer: str | None = None
    """None where it does not answer."""


class Grammar(Protocol):
    """How the policy and the tools speak to each other."""

    @property
    def tools(self) -> tuple[Tool, ...]:
        """Tools that the template is given."""
        ...

    def opening(self, question: str) -> list[Message]:
        """What the policy sees first."""
        ...

    def read(self, turn: Turn) -> Actions:
        """What it does."""
        ...

    def reply(self, calls: Sequence[Call], said: Sequence[str]) -> list[Message]:
        """What it is told: of each call what came of it; without calls, what it should do."""
        ...


class TextGrammar:
    """Lines of text, with an example to begin with: one, because all that is trained on begins with it."""

    tools: tuple[Tool, ...] = ()

    def opening(self, question: str) -> list[Message]:
        """See `Grammar`."""
        return [Message("system", _SYSTEM), *_EXAMPLE, Message("user", f"Question: {question}")]

    def read(self, turn: Turn) -> Actions:
        """See `Grammar`."""
        return read_lines(turn.text)

    def reply(self, calls: Sequence[Call], said: Sequence[str]) -> list[Message]:
        """See `Grammar`."""
        return [Message("user", "\n".join(dict.fromkeys(said)) if calls else NO_ACTION)]


class ToolGrammar:
    """Tool calls, by the model's chat template and the parser that the server is configured with."""

    tools: tuple[Tool, ...] = (SEARCH_TOOL,)

    def opening(self, question: str) -> list[Message]:
        """See `Grammar`."""
        return [Message("system", _TOOL_SYSTEM), Message("user", question)]

    def read(self, turn: Turn) -> Actions:
        """See `Grammar`. Text without a call is the answer, unless it was meant to be one."""
        message = turn.message
        if message is None or not message.tool_calls:
            if turn.tool_call_error:
                return Actions((Call("", error=turn.tool_call_error),))
            return Actions(answer=turn.text.strip() or None)
        calls: list[Call] = []
        for call in message.tool_calls:
            if call.name != SEARCH_TOOL.name:
                calls.append(Call("", call.tool_call_id, f"There is no tool {call.name!r}."))
                continue
            try:
                query = call.arguments.get("query")
            except ValueError as error:
                calls.append(Call("", call.tool_call_id, str(error)))
                continue
            calls.append(read_query(query, call.tool_call_id))
        return Actions(tuple(calls))

    def reply(self, calls: Sequence[Call], said: Sequence[str]) -> list[Message]:
        """See `Grammar`."""
        if not calls:
            return [Message("user", "Answer, or call the tool search.")]
        # What was too malformed to be a call has no id that a tool's message could answer.
        return [
            Message("tool", text, tool_call_id=call.call_id)
            if call.call_id
            else Message("user", text)
            for call, text in zip(calls, said, strict=True)
        ]


GrammarName: TypeAlias = Literal["text", "tools"]


def grammar(name: GrammarName) -> Grammar:
    """The one of this name."""
    return TextGrammar() if name == "text" else ToolGrammar()


def read_lines(text: str) -> Actions:
    """The actions of a text. The first answer counts."""
    calls: list[Call] = []
    answer: str | None = None
    for line in text.splitlines():
        verb, colon, rest = line.strip().partition(":")
        match verb.strip().lower() if colon else "":
            case "search":
                calls += [read_query(query.strip()) for query in rest.split("|")]
            case "answer" if answer is None:
                answer = rest.strip()
            case _:
                pass  # Whatever else it says is of no effect.
    return Actions(tuple(calls), None if calls else answer)


def read_query(query: object, call_id: str = "") -> Call:
    """A search for something, if it can be searched for."""
    if not isinstance(query, str) or not words(query):
        return Call("", call_id, NO_WORDS)
    if len(query) > LONGEST_QUERY:
        return Call("", call_id, TOO_LONG)
    return Call(query, call_id)


def show(found: Sequence[Found]) -> str:
    """Chunks as the policy reads them, one a line."""
    return "\n".join(f"{each.title}: {each.text}" for each in found) or NOTHING_FOUND
