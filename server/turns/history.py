"""The messages of a conversation, as its trajectory keeps them.

A caller of a chat endpoint sends its whole conversation with every request. The policy's output must not
be encoded from that text again. So a trajectory keeps digests of its messages, which `matching` compares
with the request's, and the position among its tokens where each of the policy's messages ends.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from penstock.server.text.messages import Message, Tool

DIGEST_BYTES = 16
HELD_MESSAGE_BYTES = 320


@dataclass(frozen=True, slots=True)
class HeldMessage:
    exact: bytes
    """Digest of all its fields. Empty for tokens that are not a message, which never match."""
    meaning: bytes
    """Independent of form; excludes the reasoning."""
    reasoning: bytes
    """Empty if it has none."""
    token_end: int
    """Number of the trajectory's tokens up to the end of this message, or of the context it came in."""
    written: bool = False

    def is_meant_by(self, meaning: bytes, reasoning: bytes) -> bool:
        """The request may omit the reasoning."""
        return self.meaning == meaning != b"" and reasoning in (b"", self.reasoning)


@dataclass(slots=True)
class History:
    tools: tuple[Tool, ...] = ()
    messages: list[HeldMessage] = field(default_factory=list[HeldMessage])
    """Oldest first."""
    recorded: int = 0
    """Number of messages that the journal has in their current form."""
    digest: bytes = b""
    """Of the tools."""
    tool_bytes: int = 0

    def __post_init__(self) -> None:
        self.digest = tools_digest(self.tools)
        self.tool_bytes = sum(len(json.dumps(dict(tool.parameters))) for tool in self.tools)

    @property
    def byte_count(self) -> int:
        """An approximation, in bytes."""
        return len(self.messages) * HELD_MESSAGE_BYTES + self.tool_bytes

    def branch(self, message_count: int) -> History:
        return History(self.tools, self.messages[:message_count])

    def add_context(self, messages: Iterable[Message], token_end: int) -> None:
        """`token_end` includes the template's text around the messages."""
        self.messages += [hold(message, token_end) for message in messages]

    def add_observation(self, messages: Sequence[Message], token_end: int) -> None:
        """An observation without messages was tokens or text, which never match a message."""
        if not messages:
            self.messages.append(HeldMessage(b"", b"", b"", token_end))
        self.add_context(messages, token_end)

    def set_written(self, message: Message, token_end: int) -> None:
        """Replaces an earlier part of the turn, which was interrupted."""
        self.drop_written()
        self.messages.append(hold(message, token_end, written=True))

    def written_after(self, token_count: int) -> list[int]:
        """The message count up to and including each of the policy's messages that ends after
        `token_count`."""
        return [
            count
            for count, message in enumerate(self.messages, 1)
            if message.written and message.token_end > token_count
        ]

    def drop_written(self) -> None:
        """Called when the last turn resumes."""
        if self.messages and self.messages[-1].written:
            self.messages.pop()
            self.recorded = min(self.recorded, len(self.messages))


def hold(message: Message, token_end: int, *, written: bool = False) -> HeldMessage:
    calls = [(call.tool_call_id, call.name, call.arguments_json) for call in message.tool_calls]
    exact = (message.role, message.content, calls, message.tool_call_id, message.reasoning)
    meant = [(call.name, _canonical(call.arguments_json)) for call in message.tool_calls]
    reasoning = message.reasoning.strip()
    return HeldMessage(
        _digest(exact),
        _digest((message.role, message.content.strip(), meant)),
        _digest(reasoning) if reasoning else b"",
        token_end,
        written,
    )


def tools_digest(tools: Sequence[Tool]) -> bytes:
    """Independent of the order of keys; empty without tools."""
    if not tools:
        return b""
    return _digest([(tool.name, tool.description, dict(tool.parameters)) for tool in tools])


def _canonical(arguments: str) -> str:
    """Text that is not JSON is only stripped."""
    try:
        read = json.loads(arguments, parse_float=_number, parse_int=_number)
        return json.dumps(read, sort_keys=True)
    except (ValueError, RecursionError):
        return arguments.strip()


def _number(written: str) -> float:
    """Reads a number like a language with a single number type: 1.0 becomes 1, 1e3 becomes 1000."""
    value = float(written)
    return int(value) if value.is_integer() else value


def _digest(value: object) -> bytes:
    # Escaped, because the text may contain an unpaired surrogate, which UTF-8 cannot encode.
    text = json.dumps(value, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()
