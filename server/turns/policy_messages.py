"""Parses the tokens of a turn in a conversation into the message that is returned and kept.

A turn is parsed when an attempt at it ends, before that is recorded. So the journal has the message along
with the turn's last tokens. Parsing depends only on the tokens: after a restart, parsing the turn that was
cut off again gives the same message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from penstock.server.text.renderer import Renderer, Written
from penstock.server.turns.trajectory import TrajectoryRecord, Turn
from penstock.server.turns.turn import TurnAttempt

LONG_TURN = 2_048
"""Token count from which a turn is parsed off the event loop."""


class PolicyMessages:
    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer

    async def hold(self, turn: Turn, attempt: TurnAttempt) -> None:
        """Keep the message of a conversation's turn, up to the end of an attempt."""
        history = turn.record.history
        if history is None:
            return
        attempt.written = await self.read(turn, turn.policy_token_count)
        # A turn that found the context full appended no message that the policy could answer.
        if turn.budget:
            history.set_written(attempt.written.message, turn.record.token_count)

    async def read(self, turn: Turn, count: int) -> Written:
        """Parse the first `count` tokens of the policy in this turn."""
        record = turn.record
        tools = record.history.tools if record.history is not None else ()
        tokens = record.token_array()
        start = turn.context_token_count
        name = f"{record.trajectory_id}/{turn.index}"

        def read() -> Written:
            return self._renderer.read_message(
                tokens[start : start + count].tolist(), tokens[:start].tolist(), tools, name
            )

        return read() if count < LONG_TURN else await asyncio.to_thread(read)

    async def restore(self, records: Iterable[TrajectoryRecord]) -> None:
        """Parse and keep the messages of turns that were cut off when the previous server ended."""
        for record in records:
            turn, history = record.turn, record.history
            if turn is None or history is None or record.closed or not turn.budget:
                continue
            if not history.messages or not history.messages[-1].written:
                await self.hold(turn, turn.attempt)
