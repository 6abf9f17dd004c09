"""Trajectories that run while weights change, each recorded so that every token can be explained."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from penstock.v1 import trajectory_pb2
from penstock.wire import codec
from tests.support.harness import (
    AbortRequest,
    CompleteTrajectoryRequest,
    ContinueRequest,
    GenerateRequest,
    GetTrajectoryRequest,
    Outcome,
    Turn,
    collect,
    sampling,
    sequence,
)

ABORTED = trajectory_pb2.FINISH_REASON_ABORTED
LENGTH = trajectory_pb2.FINISH_REASON_LENGTH
POLICY = trajectory_pb2.AUTHOR_POLICY


@dataclass
class Seen:
    """A trajectory as its caller saw it, token by token."""

    tokens: list[int] = field(default_factory=list[int])
    versions: list[int | None] = field(default_factory=list["int | None"])
    """The version that sampled each token; None for context tokens."""
    logprobs: list[float] = field(default_factory=list[float])
    attempts: int = 0

    def give(self, tokens: list[int]) -> None:
        self.tokens += tokens
        self.versions += [None] * len(tokens)
        self.logprobs += [0.0] * len(tokens)

    def take(self, turn: Turn) -> None:
        self.tokens += turn.tokens
        self.versions += turn.versions
        self.logprobs += turn.logprobs
        self.attempts += 1

    @property
    def sampled(self) -> list[int]:
        """Versions of the sampled tokens."""
        return [version for version in self.versions if version is not None]


class Trajectories:
    """Runs trajectories under distinct names."""

    def __init__(self, wire: Any) -> None:
        self._wire = wire
        self._count = 0
        self.started = 0
        self.ended = 0

    async def turn(self, prompt: list[int], max_tokens: int, **fields: Any) -> Turn:
        """Run one trajectory of one turn."""
        name = self._name()
        turn = await collect(
            self._wire.Generate(
                GenerateRequest(
                    trajectory_id=name,
                    tokens=sequence(prompt),
                    sampling_params=sampling(max_tokens, **fields),
                )
            )
        )
        await self._complete(name)
        return turn

    async def run(self, rng: random.Random, longest: int = 40, *, aborts: bool = True) -> Seen:
        """Run one trajectory of one to three turns of random length, aborting and continuing some
        of them.
        """
        name, seen = self._name(), Seen()
        self.started += 1
        lengths = [rng.randint(4, longest) for _ in range(rng.choice((1, 1, 2, 3)))]
        for index, length in enumerate(lengths):
            given = [rng.randrange(256) for _ in range(rng.randint(1, 12))]
            seen.give(given)
            fields = {
                "trajectory_id": name,
                "tokens": sequence(given),
                "sampling_params": sampling(length, temperature=1.0),
            }
            stopping = self._stop_soon(rng, name) if aborts and rng.random() < 0.3 else None
            first = self._wire.Continue if index else self._wire.Generate
            request = ContinueRequest(**fields) if index else GenerateRequest(**fields)
            await self._to_its_end(name, lambda: collect(first(request)), length, seen)  # noqa: B023
            if stopping is not None:
                await stopping
        await self._check_stored(name, seen)
        await self._complete(name)
        self.ended += 1
        return seen

    async def _to_its_end(
        self, name: str, begin: Callable[[], Awaitable[Turn]], length: int, seen: Seen
    ) -> None:
        turn, written = await begin(), 0
        while True:
            seen.take(turn)
            written += len(turn.tokens)
            if turn.finished.finish_reason != ABORTED:
                break
            turn = await collect(self._wire.Continue(ContinueRequest(trajectory_id=name)))
        assert turn.finished.finish_reason == LENGTH
        assert written == turn.finished.policy_token_count == length

    def _stop_soon(self, rng: random.Random, name: str) -> asyncio.Task[None]:
        seconds = rng.uniform(0.0, 0.05)

        async def stop() -> None:
            await asyncio.sleep(seconds)
            await self._wire.Abort(AbortRequest(trajectories={"trajectory_ids": [name]}))

        return asyncio.create_task(stop())

    async def _check_stored(self, name: str, seen: Seen) -> None:
        """Check that the server's record matches what its caller saw."""
        answer = await self._wire.GetTrajectory(GetTrajectoryRequest(trajectory_id=name))
        stored = Seen()
        for segment in answer.trajectory.segments:
            tokens = [int(token) for token in codec.token_ids(segment)]
            if segment.author == POLICY:
                stored.take(Turn(segments=[segment]))
            else:
                stored.give(tokens)
        assert stored.tokens == seen.tokens
        assert stored.versions == seen.versions
        assert stored.logprobs == seen.logprobs

    async def _complete(self, name: str) -> None:
        await self._wire.CompleteTrajectory(
            CompleteTrajectoryRequest(trajectory_id=name, outcome=Outcome(reward=1.0))
        )

    def _name(self) -> str:
        self._count += 1
        return f"trajectory-{self._count}"
