"""Parses the policy's turns into actions, and writes the replies: as lines of text, or as tool calls.

    search: words to look up | other words       any number, also on several lines, looked up together
    answer: a few words                          ends the attempt

In a turn that searches, any answer is ignored: the policy has not seen the results yet.
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
    """One search that the policy requested."""

    query: str
    """Empty if the policy's call is malformed."""
    call_id: str = ""
    """Id of a tool call; empty for text, or if the call is too malformed to have one."""
    error: str = ""
    """An error message for the policy, if the call is malformed."""


@dataclass(frozen=True, slots=True)
class Actions:
    """The actions of one turn."""

    calls: tuple[Call, ...] = ()
    answer: str | None = None
    """None if the turn has no answer."""


class Grammar(Protocol):
    """The format in which the policy and the tools communicate."""

    @property
    def tools(self) -> tuple[Tool, ...]:
        """Tools to declare in the chat template."""
        ...

    def opening(self, question: str) -> list[Message]:
        """The messages at the start of an attempt."""
        ...

    def read(self, turn: Turn) -> Actions:
        """Parses a turn into actions."""
        ...

    def reply(self, calls: Sequence[Call], said: Sequence[str]) -> list[Message]:
        """Messages with the result of each call; without calls, a hint what to do."""
        ...


class TextGrammar:
    """Lines of text. One example comes first; not more, because every trained prompt begins with it."""

    tools: tuple[Tool, ...] = ()

    def opening(self, question: str) -> list[Message]:
        return [Message("system", _SYSTEM), *_EXAMPLE, Message("user", f"Question: {question}")]

    def read(self, turn: Turn) -> Actions:
        return read_lines(turn.text)

    def reply(self, calls: Sequence[Call], said: Sequence[str]) -> list[Message]:
        return [Message("user", "\n".join(dict.fromkeys(said)) if calls else NO_ACTION)]


class ToolGrammar:
    """Tool calls, using the model's chat template and the parser that the server is configured with."""

    tools: tuple[Tool, ...] = (SEARCH_TOOL,)

    def opening(self, question: str) -> list[Message]:
        return [Message("system", _TOOL_SYSTEM), Message("user", question)]

    def read(self, turn: Turn) -> Actions:
        """Text without a call is the answer, unless it was meant to be a call."""
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
        if not calls:
            return [Message("user", "Answer, or call the tool search.")]
        # A call that was too malformed has no id, so a tool message cannot answer it.
        return [
            Message("tool", text, tool_call_id=call.call_id)
            if call.call_id
            else Message("user", text)
            for call, text in zip(calls, said, strict=True)
        ]


GrammarName: TypeAlias = Literal["text", "tools"]


def grammar(name: GrammarName) -> Grammar:
    """The grammar of this name."""
    return TextGrammar() if name == "text" else ToolGrammar()


def read_lines(text: str) -> Actions:
    """Parses lines of text into actions. If there are several answers, the first counts."""
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
                pass  # Other lines have no effect.
    return Actions(tuple(calls), None if calls else answer)


def read_query(query: object, call_id: str = "") -> Call:
    """A call with this query, or with an error if the query cannot be searched for."""
    if not isinstance(query, str) or not words(query):
        return Call("", call_id, NO_WORDS)
    if len(query) > LONGEST_QUERY:
        return Call("", call_id, TOO_LONG)
    return Call(query, call_id)


def show(found: Sequence[Found]) -> str:
    """Chunks as shown to the policy, one a line."""
    return "\n".join(f"{each.title}: {each.text}" for each in found) or NOTHING_FOUND
