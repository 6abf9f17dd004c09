"""Answers of the weights that the server holds, to prompts that are not trained."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.client import Message, Patience, connect

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.client import Client

RECONNECT_SECONDS = 10.0


@dataclass(frozen=True)
class Answers:
    texts: tuple[str, ...]
    weight_version: int
    """The newest version that sampled one of their tokens."""


async def ask(address: str, prompts: Sequence[str], max_tokens: int) -> Answers:
    """Asks each prompt once, without randomness. Raises PenstockError."""
    async with connect(address, patience=Patience(reconnect_seconds=RECONNECT_SECONDS)) as client:
        found = await asyncio.gather(*(_answer(client, prompt, max_tokens) for prompt in prompts))
    return Answers(tuple(text for text, _ in found), max(version for _, version in found))


async def _answer(client: Client, prompt: str, max_tokens: int) -> tuple[str, int]:
    trajectory = client.trajectory(resume_aborted=True)
    # A message, as tasks have it: plain text would not be rendered with the chat template.
    asked = (Message("user", prompt),)
    turn = await trajectory.turn(asked, temperature=0.0, max_tokens=max_tokens)
    # Closed, so that the server does not keep it. It is in no group that a trainer gets.
    await trajectory.complete(0.0)
    return turn.text.strip(), max(turn.weight_versions, default=0)
