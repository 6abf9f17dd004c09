"""What the policy wrote in a turn of a conversation, as the message that is handed out and held.

It is read when an attempt at the turn ends, before that is recorded, so that the journal has the message
with the turn's last tokens. Reading is a function of the tokens: where a server starts again, the turn that
was cut off is read again and comes out the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from penstock.server.text.renderer import Renderer, Written
from penstock.server.turns.runner import Turn, TurnAttempt
from penstock.server.turns.store import TrajectoryRecord

LONG_TURN = 2_048
"""Tokens from which on a turn is read off the event loop."""


class PolicyMessages:
    """Reads turns of conversations."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer

    async def hold(self, turn: Turn, attempt: TurnAttempt) -> None:
        """Holds what the policy wrote up to the end of an attempt, where it is a conversation's."""
        history = turn.record.history
        if history is None:
            return
        attempt.written = await self.read(turn, turn.policy_token_count)
        # One that found its context full appended nothing that could be answered.
        if turn.budget:
            history.set_written(attempt.written.message, turn.record.token_count)

    async def read(self, turn: Turn, count: int) -> Written:
        """The first `count` tokens that the policy wrote in a turn, as a message."""
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
        """Holds what was written in turns that the server before this one did not see the end of."""
        for record in records:
            turn, history = record.turn, record.history
            if turn is None or history is None or record.closed or not turn.budget:
                continue
            if not history.messages or not history.messages[-1].written:
                await self.hold(turn, turn.attempt)
