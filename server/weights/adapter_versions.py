"""Weight versions that are adapters. The engine holds several, so that a switch needs no pause.

Order of events of a switch to adapter v:

1. Its folder is written, and the engine adds the adapter to those it has.
2. If there is a probe, it is scored under v. Nothing samples under v yet.
3. The gate closes briefly, so that no turn is half admitted. v becomes the active version, turns in
   flight are handled by the policy, and the gate opens.
4. An adapter that is not active is freed when its last turn has ended.

| policy | turns in flight |
|---|---|
| KEEP | finish under the adapter they started with |
| RECOMPUTE | continue under v at the exact token; their cache is computed again |
| DRAIN | finish before step 3, while new turns wait |
| ABORT | end ABORTED |

A turn that requires a version never samples under another. If it would have to continue under v, it
ends ABORTED instead.

The engine samples with a limited number of adapters at the same time. If v exceeds that limit, the turns of
the oldest adapter continue under v, whatever the policy. If there is a probe, they and new turns first wait
for it, because v cannot be scored until they make room.

If v cannot be written or loaded, or its probe fails, v is removed. The previous version remains active.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from opentelemetry import trace

from penstock.server.core.aio import Broadcast, run_to_its_end
from penstock.server.core.errors import DomainError
from penstock.server.engine.protocol import (
    Adapter,
    AdapterEngine,
    AdapterLimits,
    EngineLoadFailed,
    EngineLost,
    StagedWeights,
)
from penstock.server.turns.runner import TurnRunner
from penstock.server.turns.trajectory import Turn
from penstock.server.turns.turn import TurnState
from penstock.server.weights.adapter_folder import AdapterFolders
from penstock.server.weights.adapter_manifest import AdapterShape
from penstock.server.weights.probe import Probe, ProbeResult, compare
from penstock.server.weights.staging.incoming import Staged
from penstock.server.weights.staging.stage import WeightStage
from penstock.server.weights.switch import (
    InFlight,
    ProbeMismatch,
    Switched,
    WeightSwitch,
    engine_needed,
)
from penstock.wire.reasons import Reason

logger = logging.getLogger(__name__)
tracer = trace.get_tracer("penstock.server")


@dataclass(eq=False)
class AdapterVersions:
    engine: AdapterEngine
    state: WeightSwitch
    turns: TurnRunner
    stage: WeightStage
    folders: AdapterFolders
    limits: AdapterLimits | None
    """None for an engine without adapters, which never gets one."""

    def __post_init__(self) -> None:
        self._most = self.limits.max_adapters if self.limits else 0
        self._loaded: dict[int, Adapter] = {}
        self._freeing: dict[int, asyncio.Task[None]] = {}
        self._freed = Broadcast()
        self.moves: Counter[str] = Counter()
        """Turns that continued under another adapter, by cause."""

    @property
    def weight_versions(self) -> list[int]:
        """Versions that the engine has, oldest first."""
        return sorted(self._loaded)

    async def switch(
        self,
        staged: Staged,
        shape: AdapterShape,
        policy: InFlight,
        probe: Probe | None = None,
    ) -> Switched:
        """Needs no pause. Raises WEIGHT_LOAD_FAILED, PROBE_MISMATCH or DISK_FULL if the previous version
        remains active, WEIGHTS_INCONSISTENT if no version does, and ENGINE_LOST if the engine died."""
        version = staged.weight_version
        # Memory that its uploader cannot write to, verified again if needed.
        copy = await self.stage.hold(staged.retain())
        try:
            with tracer.start_as_current_span("penstock.switch_weights") as span, engine_needed():
                span.set_attribute("penstock.weight_version", version)
                span.set_attribute("penstock.in_flight", policy.value)
                span.set_attribute("penstock.adapter", True)
                adapter = await self._add(copy.weights, shape)
                try:
                    result = await self._activate(adapter, policy, probe)
                except BaseException:
                    if version not in self._loaded:
                        self._free(adapter)
                    raise
        finally:
            copy.release()
        self.free_idle()
        return Switched(version, 0.0, result)

    def free_idle(self) -> None:
        """Begins to free every adapter that is neither active nor used by a turn."""
        if not self._loaded:
            # This runs after every turn, and scanning can mean ten thousand turns.
            return
        needed = {turn.adapter_version for turn in self.turns.in_flight}
        needed.add(self.state.active_adapter)
        for version in [version for version in self._loaded if version not in needed]:
            self._free(self._loaded.pop(version))

    async def close(self) -> None:
        """Removes all folders, once the engine is gone."""
        for task in self._freeing.values():
            task.cancel()
        await asyncio.gather(*self._freeing.values(), return_exceptions=True)
        self._loaded.clear()
        self.folders.close()

    async def _add(self, weights: StagedWeights, shape: AdapterShape) -> Adapter:
        version = weights.weight_version
        # The engine holds one adapter more than it samples with. Wait while others are being freed.
        # A version being freed can even be this one, uploaded again after a failure.
        while version in self._freeing or len(self._loaded) + len(self._freeing) > self._most:
            await self._freed.wait()
        adapter = await run_to_its_end(
            lambda: self.folders.write(weights, shape), self.folders.remove
        )
        try:
            await self.engine.add_adapter(adapter)
        except BaseException as error:
            self.folders.remove(adapter)
            if not isinstance(error, EngineLoadFailed):
                raise
            active = self.state.active_version
            raise DomainError(
                Reason.WEIGHT_LOAD_FAILED,
                f"adapter version {version} cannot be loaded, version {active} remains active: {error}",
                {"weight_version": version, "active": active},
            ) from error
        return adapter

    async def _activate(
        self, adapter: Adapter, policy: InFlight, probe: Probe | None
    ) -> ProbeResult | None:
        version = adapter.weight_version
        crowded = probe is not None and len(self._sampling()) >= self._most
        result = None if crowded else await self._prove(version, probe)
        async with self.state.gate_closed():
            if policy is InFlight.DRAIN:
                await self.turns.wait_idle()
            if crowded:
                await self._make_room(version, policy)
                result = await self._prove(version, probe)
            if policy is InFlight.ABORT:
                await self.turns.abort(self.turns.sampling)
            self.state.adopt(version, adapter=True)
            self._loaded[version] = adapter
            if policy is InFlight.RECOMPUTE:
                await self._move(self._staying(), "recompute")
            else:
                await self._make_room(version, policy)
        return result

    async def _prove(self, version: int, probe: Probe | None) -> ProbeResult | None:
        """Raises PROBE_MISMATCH."""
        if probe is None:
            return None
        result = compare(probe, await self.engine.score(probe.token_ids, version))
        # Written this way so that NaN fails too.
        if not result.mean_difference <= probe.tolerance:
            raise ProbeMismatch(version, self.state.active_version, result, probe)
        return result

    def _sampling(self) -> set[int]:
        """Adapters of turns in flight, and the active one, which new turns may use at any time."""
        versions = {turn.adapter_version for turn in self._staying()}
        return {v for v in (*versions, self.state.active_adapter) if v is not None}

    def _staying(self) -> list[Turn]:
        """Turns that the engine samples and that are not already moving to another adapter."""
        return [turn for turn in self.turns.sampling if turn.state is not TurnState.MOVING]

    async def _make_room(self, version: int, policy: InFlight) -> None:
        """Moves the turns of the oldest adapters if the new one would exceed the engine's limit."""
        adapters = {turn.adapter_version for turn in self._staying()} - {version}
        others = sorted(v for v in adapters if v is not None)
        for oldest in others[: max(0, len(others) + 1 - self._most)]:
            turns = [turn for turn in self._staying() if turn.adapter_version == oldest]
            logger.warning(
                "%d turns of adapter version %d continue under version %d: "
                "at most %d versions sample at the same time",
                len(turns),
                oldest,
                version,
                self._most,
            )
            if policy is InFlight.ABORT:
                await self.turns.abort(turns)
            else:
                await self._move(turns, "max_loras")

    async def _move(self, turns: Sequence[Turn], why: str) -> None:
        pinned = [turn for turn in turns if turn.record.required_weight_version]
        moving = [turn for turn in turns if not turn.record.required_weight_version]
        self.moves[why] += len(moving)
        await self.turns.move(moving)
        await self.turns.abort(pinned)

    def _free(self, adapter: Adapter) -> None:
        version = adapter.weight_version
        task = asyncio.create_task(self._remove(adapter), name=f"free adapter version {version}")
        self._freeing[version] = task

    async def _remove(self, adapter: Adapter) -> None:
        version = adapter.weight_version
        try:
            await self.engine.remove_adapter(version)
        except EngineLost as error:
            logger.info("adapter version %d was lost with the engine: %s", version, error)
        finally:
            self.folders.remove(adapter)
            del self._freeing[version]
            self._freed.notify()
