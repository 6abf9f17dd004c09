"""Which trajectory a request's messages go on with: the server holds tokens, callers resend text.

A caller of a chat endpoint sends its whole conversation with every request. What the policy wrote must
not be encoded from that text again; so each trajectory of a conversation knows its messages, as digests,
and where those that the policy wrote end among its tokens.

    the request's messages, against those held by the trajectories of one attempt

    NEW         nothing is held yet
    CONTINUED   the held messages are an exact prefix: what follows is the next observation
    REALIGNED   the same but for form: whitespace at the ends, order of keys, spacing and numbers of JSON
                arguments, reasoning left out, ids of tool calls. The held tokens stand
    BRANCHED    history was rewritten: kept are the tokens up to the end of the last message that the
                policy wrote and that is still there; what follows is encoded, in a trajectory that
                branches from the one that shares most, first in what is kept and then in messages: of
                another sample of a context that nobody answered yet nothing is kept, and yet its
                prompt is stored once. Also where a trajectory could be continued that holds less of
                what the policy wrote: of two samples that read the same one may have gone on

A request that asks again for a turn that was cut off goes on with that turn: CONTINUED, with no new
message. One that asks again for a turn that ended by itself is a branch: it wants another sample.
A trajectory whose turn is in flight is never continued, only branched from. Other tools are another
context from its beginning.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from penstock.server.text.renderer import Message, Tool

if TYPE_CHECKING:
    from penstock.server.turns.runner import Turn
    from penstock.server.turns.store import TrajectoryRecord

DIGEST_BYTES = 16
HELD_MESSAGE_BYTES = 320
"""Of one held message in memory."""


class MatchKind(Enum):
    """What a request does to what is held; the values are those of the metric's label."""

    NEW = "new"
    CONTINUED = "continued"
    REALIGNED = "realigned"
    BRANCHED = "branched"


@dataclass(frozen=True, slots=True)
class HeldMessage:
    """One message of a trajectory."""

    exact: bytes
    """Digest of all its fields; empty for tokens that are no message, which nothing matches."""
    meaning: bytes
    """Digest of what does not depend on form, its reasoning left out."""
    reasoning: bytes
    """Digest of its reasoning, empty where it has none."""
    token_end: int
    """Tokens of the trajectory up to its end, or to the end of the context that it came with."""
    written: bool = False
    """Whether the policy wrote it."""

    def is_meant_by(self, meaning: bytes, reasoning: bytes) -> bool:
        """Whether a request's message says the same; it may leave the reasoning out."""
        return self.meaning == meaning != b"" and reasoning in (b"", self.reasoning)


@dataclass(slots=True)
class History:
    """The messages of one trajectory, oldest first, and its tools."""

    tools: tuple[Tool, ...] = ()
    messages: list[HeldMessage] = field(default_factory=list[HeldMessage])
    recorded: int = 0
    """How many of the messages the journal has as they are."""
    digest: bytes = b""
    """Of the tools."""
    tool_bytes: int = 0
    """About what they take of memory."""

    def __post_init__(self) -> None:
        self.digest = tools_digest(self.tools)
        self.tool_bytes = sum(len(json.dumps(dict(tool.parameters))) for tool in self.tools)

    @property
    def byte_count(self) -> int:
        """What it takes of memory."""
        return len(self.messages) * HELD_MESSAGE_BYTES + self.tool_bytes

    def branch(self, message_count: int) -> History:
        """Another that begins with so many of these messages."""
        return History(self.tools, self.messages[:message_count])

    def add_context(self, messages: Iterable[Message], token_end: int) -> None:
        """Messages from outside, which with what the template puts around them end there."""
        self.messages += [hold(message, token_end) for message in messages]

    def add_observation(self, messages: Sequence[Message], token_end: int) -> None:
        """The same; without any it was tokens or text, which are held as what nothing matches."""
        if not messages:
            self.messages.append(HeldMessage(b"", b"", b"", token_end))
        self.add_context(messages, token_end)

    def set_written(self, message: Message, token_end: int) -> None:
        """What the policy wrote in the turn that ended; what it wrote of the same turn before is in it."""
        self.drop_written()
        self.messages.append(hold(message, token_end, written=True))

    def written_after(self, token_count: int) -> list[int]:
        """For each message that the policy wrote past so many tokens, how many there are up to it."""
        return [
            count
            for count, message in enumerate(self.messages, 1)
            if message.written and message.token_end > token_count
        ]

    def drop_written(self) -> None:
        """The last turn goes on: its message is not whole."""
        if self.messages and self.messages[-1].written:
            self.messages.pop()
            self.recorded = min(self.recorded, len(self.messages))


@dataclass(frozen=True, slots=True)
class Match:
    """What a request goes on with."""

    kind: MatchKind
    record: TrajectoryRecord | None
    """What is continued, or branched from; None where nothing is held."""
    token_count: int
    """Tokens of it that are kept: all of them, or up to the end of a message that the policy wrote; 0
    where the context begins anew."""
    message_count: int
    """Messages of the request that those tokens stand for."""
    new_messages: tuple[Message, ...]
    """The others; none where a turn that was cut off goes on."""


def kept_prefix(
    record: TrajectoryRecord, messages: Sequence[Message], tools: Sequence[Tool]
) -> tuple[int, int]:
    """How much of a trajectory a branch with these messages keeps as it is: tokens, and messages."""
    wanted = [hold(message, 0) for message in messages]
    common = _common(record, wanted, tools_digest(tools))
    return _cut(record, common, messages)


def match_after(
    record: TrajectoryRecord, turn_index: int, messages: Sequence[Message]
) -> Match | None:
    """What a request goes on with that names the turn which it answers, and sends only what is new.

    None where the trajectory does not hold that turn as the end of a message: it is in flight, was cut off,
    or never was.
    """
    history, turn = record.history, record.turn
    if history is None or turn is None:
        return None
    own = history.written_after(record.parent_token_count)
    if not 0 <= turn_index < len(own):
        return None
    count = own[turn_index]
    last = count == len(history.messages)
    if last and (turn.in_flight or _cut_off(turn)):
        return None
    kind = MatchKind.CONTINUED if last and not turn.in_flight else MatchKind.BRANCHED
    return Match(kind, record, history.messages[count - 1].token_end, count, tuple(messages))


def match(
    records: Iterable[TrajectoryRecord], messages: Sequence[Message], tools: Sequence[Tool]
) -> Match:
    """Finds what a request with these messages goes on with.

    Args:
        records: The open trajectories of one attempt, its own first, each before those that branch from it:
            of equals the first is taken.
        messages: All of the request's, oldest first; at least one.
        tools: The request's.
    """
    wanted = [hold(message, 0) for message in messages]
    digest = tools_digest(tools)
    best: Match | None = None
    best_rank: tuple[int, ...] = ()
    for record in records:
        common = _common(record, wanted, digest)
        found = _match_one(record, messages, wanted, common)
        # What the policy wrote is not encoded from text where a trajectory holds its tokens: one that holds
        # more of it comes before one that could be continued.
        encoded = sum(message.role == "assistant" for message in found.new_messages)
        kept = (found.message_count, found.token_count, common)
        rank = (-encoded, _PREFERENCE[found.kind], *kept)
        if rank > best_rank:
            best, best_rank = found, rank
    return best or Match(MatchKind.NEW, None, 0, 0, tuple(messages))


_PREFERENCE = {MatchKind.BRANCHED: 0, MatchKind.REALIGNED: 1, MatchKind.CONTINUED: 2}


def _match_one(
    record: TrajectoryRecord,
    messages: Sequence[Message],
    wanted: Sequence[HeldMessage],
    common: int,
) -> Match:
    history, turn = record.history, record.turn
    held = [] if history is None else history.messages
    exact = all(mine.exact == wanted[index].exact for index, mine in enumerate(held[:common]))
    continued = MatchKind.CONTINUED if exact else MatchKind.REALIGNED
    if turn is not None and _cut_off(turn) and common == len(wanted):
        before = len(held) - (held[-1].written if held else 0)
        if common == before:
            return Match(continued, record, record.token_count, common, ())
    token_count, count = _cut(record, common, messages)
    idle = turn is not None and not turn.in_flight
    whole = idle and 0 < count == len(held)
    kind = continued if whole else MatchKind.BRANCHED
    return Match(kind, record, token_count, count, tuple(messages[count:]))


def _cut_off(turn: Turn) -> bool:
    """Whether there is more of it to come; of one that found its context full there never was any."""
    return turn.resumable and turn.budget > 0


def _common(record: TrajectoryRecord, wanted: Sequence[HeldMessage], tools: bytes) -> int:
    """How many of the messages that a trajectory holds are the wanted ones, under these tools."""
    history = record.history
    common = 0
    if history is not None and history.digest == tools:
        for mine, theirs in zip(history.messages, wanted, strict=False):
            if not mine.is_meant_by(theirs.meaning, theirs.reasoning):
                break
            common += 1
    return common


def _cut(record: TrajectoryRecord, common: int, messages: Sequence[Message]) -> tuple[int, int]:
    """What is kept: up to the end of a common message that the policy wrote and another answers. Tokens,
    and messages.
    """
    held = [] if record.history is None else record.history.messages
    for count in range(common, 0, -1):
        if not held[count - 1].written or count == len(messages):
            continue
        if messages[count].role != "assistant":
            return held[count - 1].token_end, count
    return 0, 0


def hold(message: Message, token_end: int, *, written: bool = False) -> HeldMessage:
    """A message as it is held."""
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
    """The same for tools that differ only in the order of keys; empty for none."""
    if not tools:
        return b""
    return _digest([(tool.name, tool.description, dict(tool.parameters)) for tool in tools])


def _canonical(arguments: str) -> str:
    """A call's arguments without what is only form; text that is no JSON as it is, but for its ends."""
    try:
        read = json.loads(arguments, parse_float=_number, parse_int=_number)
        return json.dumps(read, sort_keys=True)
    except (ValueError, RecursionError):
        return arguments.strip()


def _number(written: str) -> float:
    """As a language with one kind of number has it, and writes it back: 1.0 as 1, 1e3 as 1000."""
    value = float(written)
    return int(value) if value.is_integer() else value


def _digest(value: object) -> bytes:
    # Escaped, because half a character is no UTF-8 and may be in a text all the same.
    text = json.dumps(value, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()
