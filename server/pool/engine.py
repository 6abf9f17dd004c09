"""Many engine servers as one engine; docs/operations/many-engines.md describes the design.

`Serving` takes `PoolEngine` in place of vLLM's engine. It connects these parts:

    roster   which engines are listed, answer, and are in rotation
    placing  which engine takes a request
    turns    the requests themselves
    weights  which version is sampled, and how each engine gets it
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence

from penstock.server.config.pool import PoolSection
from penstock.server.engine.protocol import Delta, EngineDescription, EngineRequest, EngineStats
from penstock.server.pool.member import Member
from penstock.server.pool.placing import Placing
from penstock.server.pool.roster import Roster
from penstock.server.pool.turns import PoolTurns
from penstock.server.pool.weights import OpenVersion, PoolWeights
from penstock.server.turns.runner import TurnRunner
from penstock.server.weights.switch import WeightSwitch
from penstock.wire.security import Security


class PoolEngine:
    """See `penstock.server.engine.protocol.Engine` for what each method promises."""

    def __init__(
        self,
        addresses: Sequence[str],
        security: Security | None = None,
        rules: PoolSection | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin to look at the engines. Raises CredentialsUnusable."""
        self._rules = rules = rules or PoolSection()
        self.placing = Placing(lambda: self.roster.rotation, rules)
        self.roster = Roster(security or Security(), rules, clock, self.placing, self._bring_up)
        self.turns = PoolTurns(self.roster, self.placing, rules, clock)
        self._weights: PoolWeights | None = None
        self._begun = asyncio.Event()
        self.roster.set_addresses(addresses)

    def make_weights(
        self, state: WeightSwitch, turns: TurnRunner, open_version: OpenVersion
    ) -> PoolWeights:
        """A hub can have weights only once the pool has a description."""
        assert self._weights is None, "a pool has one switcher"
        self._weights = PoolWeights(
            self.roster, self._rules, self.turns, state, turns, open_version
        )
        return self._weights

    @property
    def weights(self) -> PoolWeights:
        assert self._weights is not None, "the pool has no switcher yet"
        return self._weights

    def begin(self) -> None:
        """Begin to bring engines into rotation, once the hub knows whether it waits for a trainer."""
        self._begun.set()

    async def _bring_up(self, member: Member, trusted: bool) -> None:
        await self._begun.wait()
        await self.weights.bring_up(member, trusted)

    @property
    def description(self) -> EngineDescription:
        return self.roster.description

    async def generate(self, request: EngineRequest) -> AsyncGenerator[Delta]:
        return self.turns.generate(request)

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self.turns.abort(request_ids)

    def stats(self) -> EngineStats:
        members = [member for member in self.roster.members if member.answers]
        return EngineStats(
            running=len(self.turns.placed),
            waiting=self.placing.waiting_count,
            kv_cache_usage=max((m.load.kv_cache_usage for m in members), default=0.0),
            preemptions=sum(m.load.preemption_count for m in members),
        )

    async def lost(self) -> str:
        """Never return: a pool without engines waits for one."""
        return await asyncio.get_running_loop().create_future()

    async def close(self) -> None:
        if self._weights is not None:
            await self._weights.close()
        await self.roster.close()
