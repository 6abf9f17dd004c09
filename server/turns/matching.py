"""Finds the trajectory that a request's messages continue, among those of one attempt:

    NEW         nothing is held yet
    CONTINUED   the held messages are an exact prefix: the rest is the next observation
    REALIGNED   the same except for form: whitespace at the ends, order of keys, spacing and numbers of
                JSON arguments, missing reasoning, ids of tool calls. The held tokens remain
    BRANCHED    history was rewritten: a new trajectory keeps the tokens up to the end of the last message
                of the policy that is still present, and the rest is encoded

A branch starts from the trajectory that shares most, counted first in kept tokens and then in messages.
Another sample of a context without a reply keeps no tokens, but its prompt is still stored only once. A
request also branches if the trajectory that it could continue holds less of the policy's output than
another one, which happens if one of two equal samples has continued.

A request that repeats an interrupted turn resumes that turn: CONTINUED, with no new message. A request
that repeats a finished turn becomes a branch, because it wants another sample. A trajectory with a turn in
flight is never continued, only branched from. Different tools make a different context from the beginning.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from penstock.server.text.messages import Message, Tool
from penstock.server.turns.history import HeldMessage, hold, tools_digest
from penstock.server.turns.trajectory import TrajectoryRecord, Turn


class MatchKind(Enum):
    """The values are those of the metric's label."""

    NEW = "new"
    CONTINUED = "continued"
    REALIGNED = "realigned"
    BRANCHED = "branched"


@dataclass(frozen=True, slots=True)
class Match:
    kind: MatchKind
    record: TrajectoryRecord | None
    """The trajectory to continue or branch from; None if nothing is held."""
    token_count: int
    """Tokens to keep: all, or up to the end of one of the policy's messages. 0 if the context is new."""
    message_count: int
    """Messages of the request that the kept tokens represent."""
    new_messages: tuple[Message, ...]
    """Empty if an interrupted turn resumes."""


def kept_prefix(
    record: TrajectoryRecord, messages: Sequence[Message], tools: Sequence[Tool]
) -> tuple[int, int]:
    """Returns how many tokens and messages of the trajectory a branch with these messages keeps."""
    wanted = [hold(message, 0) for message in messages]
    common = _common(record, wanted, tools_digest(tools))
    return _cut(record, common, messages)


def match_after(
    record: TrajectoryRecord, turn_index: int, messages: Sequence[Message]
) -> Match | None:
    """Matches a request that names the turn it follows and sends only the new messages. Returns None if
    the trajectory does not hold that turn as a complete message: it is in flight, interrupted, or
    unknown."""
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
    """`records` are the open trajectories of one attempt: its own first, and each before its branches. The
    first of equal matches wins. `messages` are all of the request's, oldest first; at least one."""
    wanted = [hold(message, 0) for message in messages]
    digest = tools_digest(tools)
    preference = (MatchKind.BRANCHED, MatchKind.REALIGNED, MatchKind.CONTINUED)
    best: Match | None = None
    best_rank: tuple[int, ...] = ()
    for record in records:
        common = _common(record, wanted, digest)
        found = _match_one(record, messages, wanted, common)
        # The policy's output must not be encoded from text if a trajectory holds its tokens. So one
        # that holds more of it is preferred over one that could be continued.
        encoded = sum(message.role == "assistant" for message in found.new_messages)
        kept = (found.message_count, found.token_count, common)
        rank = (-encoded, preference.index(found.kind), *kept)
        if rank > best_rank:
            best, best_rank = found, rank
    return best or Match(MatchKind.NEW, None, 0, 0, tuple(messages))


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
    """Whether more of the turn can be sampled. A turn whose context was full has nothing to resume."""
    return turn.resumable and turn.budget > 0


def _common(record: TrajectoryRecord, wanted: Sequence[HeldMessage], tools: bytes) -> int:
    """Counts the trajectory's first messages that match the wanted ones."""
    history = record.history
    common = 0
    if history is not None and history.digest == tools:
        for mine, theirs in zip(history.messages, wanted, strict=False):
            if not mine.is_meant_by(theirs.meaning, theirs.reasoning):
                break
            common += 1
    return common


def _cut(record: TrajectoryRecord, common: int, messages: Sequence[Message]) -> tuple[int, int]:
    """Keeps everything up to the last common message that the policy wrote and that the request replies
    to."""
    held = [] if record.history is None else record.history.messages
    for count in range(common, 0, -1):
        if not held[count - 1].written or count == len(messages):
            continue
        if messages[count].role != "assistant":
            return held[count - 1].token_end, count
    return 0, 0
