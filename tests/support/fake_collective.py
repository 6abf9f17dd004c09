"""The fake engine's side of a collective. No bytes move; tests choose how each stage ends."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from penstock.server.engine.protocol import CollectiveUpdate, EngineLoadFailed, EngineLost
from penstock.server.weights.staging.manifest import WeightRefused
from penstock.wire.reasons import Reason

STAGES_FIRST = {"gloo": True, "nccl": False, "sparse_nccl": False}


class FakeCollective:
    """What makes `FakeEngine` a `CollectiveEngine`."""

    version: int
    _computes: int | None
    _paused: bool
    _lost: asyncio.Future[str]

    def __init__(self) -> None:
        self.joined: tuple[str, Mapping[str, object]] | None = None
        self.joins = 0
        self.rounds: list[CollectiveUpdate] = []
        """The rounds of the last update."""
        self.meeting = asyncio.Event()
        """A join waits for this event, as it would wait for the trainer."""
        self.meeting.set()
        self.arriving = asyncio.Event()
        """A round waits for this event, as it would wait for the trainer's bytes."""
        self.arriving.set()
        self.finishing = asyncio.Event()
        """Finishing an update waits for this event."""
        self.finishing.set()
        self.refuse_round: WeightRefused | None = None
        """The error that the next round raises."""
        self.fail_finishes = 0
        self._changed = False
        self._updating = False

    async def join_collective(
        self, backend: str, rendezvous: Mapping[str, object], seconds: float
    ) -> None:
        self.joined = None
        self.joins += 1
        if backend not in STAGES_FIRST:
            raise WeightRefused(Reason.SOURCE_UNAVAILABLE, f"no backend {backend!r}")
        try:
            await asyncio.wait_for(self.meeting.wait(), seconds)
        except TimeoutError:
            raise WeightRefused(Reason.SOURCE_UNAVAILABLE, "nobody came") from None
        self.joined = backend, rendezvous

    async def begin_collective(self) -> None:
        assert self._paused and not self._updating
        self._updating, self._changed, self.rounds = True, False, []

    async def receive_collective(self, update: CollectiveUpdate, seconds: float) -> None:
        assert self._paused and self._updating and self.joined is not None
        self.rounds.append(update)
        stages = STAGES_FIRST[self.joined[0]]
        if not stages:
            self._changed, self._computes = True, None
        try:
            await asyncio.wait_for(self.arriving.wait(), seconds)
        except TimeoutError:
            if not stages:
                self._lost.set_result("it hangs in a collective")
                raise EngineLost("it hangs in a collective") from None
            raise self._ended(WeightRefused(Reason.SOURCE_UNAVAILABLE, "it broke")) from None
        problem, self.refuse_round = self.refuse_round, None
        if problem is not None:
            raise self._ended(problem)

    async def finish_collective(self, weight_version: int, seconds: float) -> None:
        assert self._paused and self._updating
        self._changed = True
        await self.finishing.wait()
        if self.fail_finishes:
            self.fail_finishes -= 1
            self._computes = None
            raise self._ended(WeightRefused(Reason.INTERNAL_ERROR, "told to fail"))
        self._updating = False
        self.version = self._computes = weight_version

    async def abandon_collective(self, seconds: float) -> bool:
        assert self._updating
        self._updating, self.joined = False, None
        return not self._changed

    def _ended(self, problem: WeightRefused) -> Exception:
        self._updating, self.joined = False, None
        return EngineLoadFailed(str(problem)) if self._changed else problem
