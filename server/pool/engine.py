"""Many engine servers behind the interface of one engine; docs/pool.md describes the design.

A hub gives `PoolEngine` to `Serving` instead of vLLM's engine. It connects these parts:

    pool_roster   which engines are listed, answer, and are in rotation
    pool_placing  which engine takes a request
    pool_turns    the requests themselves
    pool_weights  which version is sampled, and how each engine gets it
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from penstock.server.engine.protocol import (
    Adapter,
    CollectiveUpdate,
    Delta,
    EngineDescription,
    EngineRequest,
    EngineStats,
    StagedWeights,
)
from penstock.server.pool.member import Member
from penstock.server.pool.placing import Placing
from penstock.server.pool.roster import Roster
from penstock.server.pool.rules import PoolRules
from penstock.server.pool.turns import PoolTurns
from penstock.server.pool.weights import PoolWeights
from penstock.server.weights.adapter_manifest import AdapterShape
from penstock.server.weights.probe import Probe
from penstock.server.weights.staging.incoming import Staged
from penstock.server.weights.staging.manifest import WeightRefused
from penstock.server.weights.switch import InFlight, PoolUpdate, Switched
from penstock.v1 import rollout_service_pb2
from penstock.wire.reasons import Reason
from penstock.wire.security import Security

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class PoolEngine:
    """See `penstock.server.engine.protocol.Engine` for what each method promises."""

    def __init__(
        self,
        addresses: Sequence[str],
        security: Security | None = None,
        rules: PoolRules | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin to look at the engines. Raises CredentialsUnusable."""
        self._rules = rules = rules or PoolRules()
        self._roster = Roster(security or Security(), rules, clock)
        self.placing = Placing(lambda: self._roster.rotation, rules.routing)
        self.turns = PoolTurns(
            self._roster, self.placing, lambda: self.weights.active, rules, clock
        )
        self.weights = PoolWeights(self._roster, rules, self.turns.expect_aborts)
        self._roster.is_current = self.weights.is_current
        self._roster.bring_up = self.weights.bring_up
        self._roster.on_change = self.placing.wake
        self._roster.on_rotation = self.weights.rotation_changed
        self._roster.on_other_process = self.placing.forget
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.set_addresses(addresses)

    @property
    def members(self) -> list[Member]:
        """All listed engines, in rotation or not."""
        return self._roster.members

    @property
    def serving_count(self) -> int:
        """Number of engines in rotation."""
        return len(self._roster.rotation)

    @property
    def requests_lost(self) -> int:
        """Number of requests that had to continue on another engine."""
        return self.turns.lost_count

    def set_addresses(self, addresses: Sequence[str]) -> None:
        """Replace the list of engines. Raises CredentialsUnusable.

        An engine that is no longer listed gets no new turns; those it has run to their ends.
        """
        self._roster.set_addresses(addresses)

    async def described(self) -> EngineDescription:
        """Wait for the first engine that answers, whose description becomes the pool's."""
        return await self._roster.described()

    @property
    def description(self) -> EngineDescription:
        return self._roster.description

    def replicas(self) -> list[rollout_service_pb2.ReplicaInfo]:
        """Return the engines' entries in GetServerInfo."""
        return [member.message() for member in self.members]

    async def generate(self, request: EngineRequest) -> AsyncGenerator[Delta]:
        return self.turns.generate(request)

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self.turns.abort(request_ids)

    def stats(self) -> EngineStats:
        members = [member for member in self.members if member.answers]
        return EngineStats(
            running=self.turns.placed_count,
            waiting=self.placing.waiting_count,
            kv_cache_usage=max((m.load.kv_cache_usage for m in members), default=0.0),
            preemptions=sum(m.load.preemption_count for m in members),
        )

    @property
    def switches_at_once(self) -> bool:
        return self._rules.switches_at_once

    def stage(self, staged: Staged, probe: Probe | None, adapter: AdapterShape | None) -> None:
        """Begin to stage a version on all engines; a version staged before and not activated is
        dropped."""
        self.weights.stage(staged, probe, adapter)

    async def switch(
        self, update: PoolUpdate, policy: InFlight, begin: Callable[[], Awaitable[None]]
    ) -> Switched:
        return await self.weights.switch(update, policy, begin)

    async def pause(self, *, drop_cache: bool) -> None:
        raise RuntimeError("a pool switches its engines itself; use switch()")

    async def prepare(self, weights: StagedWeights) -> None:
        raise RuntimeError("a pool switches its engines itself; use switch()")

    async def load(self, weights: StagedWeights) -> None:
        raise RuntimeError("a pool switches its engines itself; use switch()")

    async def resume(self) -> None:
        raise RuntimeError("a pool switches its engines itself; use switch()")

    async def score(
        self, token_ids: NDArray[np.int32], adapter_version: int | None = None
    ) -> NDArray[np.float32]:
        raise RuntimeError("a pool's engines score their probes themselves")

    async def add_adapter(self, adapter: Adapter) -> None:
        raise RuntimeError("a pool's engines take adapters themselves")

    async def remove_adapter(self, weight_version: int) -> None:
        raise RuntimeError("a pool's engines free adapters themselves")

    async def join_collective(
        self, backend: str, rendezvous: Mapping[str, object], seconds: float
    ) -> None:
        raise WeightRefused(
            Reason.SOURCE_UNAVAILABLE,
            "a hub has no local engine to join a collective; upload through the stream",
        )

    async def begin_collective(self) -> None:
        raise RuntimeError("no engine has joined a collective")

    async def receive_collective(self, update: CollectiveUpdate, seconds: float) -> None:
        raise RuntimeError("no engine has joined a collective")

    async def finish_collective(self, weight_version: int, seconds: float) -> None:
        raise RuntimeError("no engine has joined a collective")

    async def abandon_collective(self, seconds: float) -> bool:
        return True

    async def lost(self) -> str:
        """Never return: a pool without engines waits for one."""
        return await asyncio.shield(self._lost)

    async def close(self) -> None:
        await self.weights.close()
        await self._roster.close()
