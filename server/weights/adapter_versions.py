"""Versions that are adapters: each one of its own on the engine, so that a switch pauses nothing.

Order of events of a switch to adapter v:

1. Its folder is written and the engine takes it, beside those that are there.
2. Where there is a probe, it is scored under v. Nothing samples under v yet.
3. The gate closes for a moment, so that no turn is half admitted; v is the active version; turns in flight
   go by the policy; the gate opens.
4. An adapter that is not active is freed when its last turn has left it.

| policy | turns in flight |
|---|---|
| KEEP | finish under the adapter they started with |
| RECOMPUTE | go on under v at the exact token; their cache is computed again |
| DRAIN | finish before step 3, while new turns wait |
| ABORT | end ABORTED |

A turn that requires a version never samples under another: where it would have to go on under v it ends
ABORTED instead.

The engine samples with so many adapters at the same time and no more. Where v would be one too many, the
turns of the oldest go on under v, whatever the policy; with a probe they and new turns wait for it, because
until they make room v cannot be scored.

What a failure does: where v cannot be written or loaded, or its probe is off, it is removed, and the
version before is the active one as it was.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from opentelemetry import trace

from penstock.server.core.broadcast import Broadcast
from penstock.server.core.errors import DomainError
from penstock.server.core.threads import run_to_its_end
from penstock.server.engine.protocol import (
    Adapter,
    AdapterLimits,
    Engine,
    EngineLoadFailed,
    EngineLost,
    StagedWeights,
)
from penstock.server.turns.runner import Turn
from penstock.server.weights.adapter_folder import AdapterFolders
from penstock.server.weights.adapter_manifest import AdapterShape
from penstock.server.weights.probe import Probe, ProbeResult, compare
from penstock.server.weights.switch import InFlight, ProbeMismatch, Switched
from penstock.server.weights.upload.manifest import WeightRefused
from penstock.wire.reasons import Reason

logger = logging.getLogger(__name__)
tracer = trace.get_tracer("penstock.server")


class Gate(Protocol):
    """What stands before new turns."""

    @property
    def active_version(self) -> int: ...

    @property
    def active_adapter(self) -> int | None: ...

    def gate_closed(self) -> AbstractAsyncContextManager[None]: ...

    def adopt_adapter(self, weight_version: int) -> None: ...


class MovableTurns(Protocol):
    """What a switch needs of the turns."""

    @property
    def in_flight(self) -> Sequence[Turn]: ...

    @property
    def sampling(self) -> Sequence[Turn]: ...

    async def abort(self, turns: Iterable[Turn]) -> object: ...

    async def move(self, turns: Iterable[Turn]) -> None: ...

    async def wait_idle(self) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class _Change:
    """One switch."""

    adapter: Adapter
    policy: InFlight
    probe: Probe | None


class AdapterVersions:
    """The adapters on the engine, and which one is active."""

    def __init__(
        self,
        engine: Engine,
        gate: Gate,
        turns: MovableTurns,
        folders: AdapterFolders,
        limits: AdapterLimits | None,
    ) -> None:
        """`limits` is None for an engine without adapters, which is never asked for one."""
        self._engine = engine
        self._gate = gate
        self._turns = turns
        self._folders = folders
        self._most = limits.max_adapters if limits else 0
        self._loaded: dict[int, Adapter] = {}
        self._freeing: dict[int, asyncio.Task[None]] = {}
        self._freed = Broadcast()
        self.moves: Counter[str] = Counter()
        """Turns that went on under another adapter, by why."""

    @property
    def weight_versions(self) -> list[int]:
        """Those that sample, oldest first."""
        return sorted(self._loaded)

    async def switch(
        self,
        weights: StagedWeights,
        shape: AdapterShape,
        policy: InFlight,
        probe: Probe | None = None,
    ) -> Switched:
        """Makes a verified adapter the active version; nothing pauses.

        Raises WEIGHT_LOAD_FAILED, PROBE_MISMATCH or DISK_FULL where the version before goes on,
        WEIGHTS_INCONSISTENT where none does, ENGINE_LOST where the engine died.
        """
        version = weights.weight_version
        with tracer.start_as_current_span("penstock.switch_weights") as span:
            span.set_attribute("penstock.weight_version", version)
            span.set_attribute("penstock.in_flight", policy.value)
            span.set_attribute("penstock.adapter", True)
            try:
                adapter = await self._add(weights, shape)
                try:
                    result = await self._activate(_Change(adapter, policy, probe))
                except BaseException:
                    if version not in self._loaded:
                        self._free(adapter)
                    raise
            except EngineLost as error:
                raise DomainError(Reason.ENGINE_LOST, f"the engine is lost: {error}") from error
        self.free_idle()
        return Switched(version, 0.0, result)

    def free_idle(self) -> None:
        """Begins to free every adapter that is not active and that no turn needs any more."""
        if not self._loaded:
            # Asked after each turn, of which there can be ten thousand to look at.
            return
        needed = {turn.adapter_version for turn in self._turns.in_flight}
        needed.add(self._gate.active_adapter)
        for version in [version for version in self._loaded if version not in needed]:
            self._free(self._loaded.pop(version))

    async def close(self) -> None:
        """Removes every folder; the engine is gone."""
        for task in self._freeing.values():
            task.cancel()
        await asyncio.gather(*self._freeing.values(), return_exceptions=True)
        self._loaded.clear()
        self._folders.close()

    async def _add(self, weights: StagedWeights, shape: AdapterShape) -> Adapter:
        version = weights.weight_version
        # One more than sample at a time can be there. Where others are being freed, soon there is room;
        # a version that failed may be this very one, sent again.
        while version in self._freeing or len(self._loaded) + len(self._freeing) > self._most:
            await self._freed.wait()
        try:
            adapter = await run_to_its_end(
                lambda: self._folders.write(weights, shape), self._folders.remove
            )
        except WeightRefused as error:
            raise DomainError(error.reason, error.message, error.metadata) from error
        try:
            await self._engine.add_adapter(adapter)
        except BaseException as error:
            self._folders.remove(adapter)
            if not isinstance(error, EngineLoadFailed):
                raise
            active = self._gate.active_version
            raise DomainError(
                Reason.WEIGHT_LOAD_FAILED,
                f"adapter version {version} cannot be loaded, version {active} goes on: {error}",
                {"weight_version": version, "active": active},
            ) from error
        return adapter

    async def _activate(self, change: _Change) -> ProbeResult | None:
        version, policy = change.adapter.weight_version, change.policy
        crowded = change.probe is not None and len(self._sampling()) >= self._most
        result = None if crowded else await self._prove(change)
        async with self._gate.gate_closed():
            if policy is InFlight.DRAIN:
                await self._turns.wait_idle()
            if crowded:
                await self._make_room(change)
                result = await self._prove(change)
            if policy is InFlight.ABORT:
                await self._turns.abort(self._turns.sampling)
            self._gate.adopt_adapter(version)
            self._loaded[version] = change.adapter
            if policy is InFlight.RECOMPUTE:
                await self._move(self._staying(), "recompute")
            else:
                await self._make_room(change)
        return result

    async def _prove(self, change: _Change) -> ProbeResult | None:
        """Scores the probe, where there is one. Raises PROBE_MISMATCH."""
        probe, version = change.probe, change.adapter.weight_version
        if probe is None:
            return None
        result = compare(probe, await self._engine.score(probe.token_ids, version))
        # A score that is no number is within no tolerance.
        if not result.mean_difference <= probe.tolerance:
            raise ProbeMismatch(version, self._gate.active_version, result, probe)
        return result

    def _sampling(self) -> set[int]:
        """Adapters that turns in flight need, or may begin to need."""
        versions = {turn.adapter_version for turn in self._staying()}
        return {v for v in (*versions, self._gate.active_adapter) if v is not None}

    def _staying(self) -> list[Turn]:
        """Turns that the engine has and that are not moving on already."""
        return [turn for turn in self._turns.sampling if not turn.moving]

    async def _make_room(self, change: _Change) -> None:
        """Moves the turns of the oldest adapters on, where the new one would be one too many."""
        version = change.adapter.weight_version
        adapters = {turn.adapter_version for turn in self._staying()} - {version}
        others = sorted(v for v in adapters if v is not None)
        for oldest in others[: max(0, len(others) + 1 - self._most)]:
            turns = [turn for turn in self._staying() if turn.adapter_version == oldest]
            logger.warning(
                "%d turns of adapter version %d go on under version %d: "
                "at most %d versions sample at the same time",
                len(turns),
                oldest,
                version,
                self._most,
            )
            if change.policy is InFlight.ABORT:
                await self._turns.abort(turns)
            else:
                await self._move(turns, "max_loras")

    async def _move(self, turns: Sequence[Turn], why: str) -> None:
        pinned = [turn for turn in turns if turn.record.required_weight_version]
        moving = [turn for turn in turns if not turn.record.required_weight_version]
        self.moves[why] += len(moving)
        await self._turns.move(moving)
        await self._turns.abort(pinned)

    def _free(self, adapter: Adapter) -> None:
        version = adapter.weight_version
        task = asyncio.create_task(self._remove(adapter), name=f"free adapter version {version}")
        self._freeing[version] = task

    async def _remove(self, adapter: Adapter) -> None:
        try:
            await self._engine.remove_adapter(adapter.weight_version)
        except EngineLost as error:
            logger.info(
                "adapter version %d went with the engine: %s", adapter.weight_version, error
            )
        finally:
            self._folders.remove(adapter)
            del self._freeing[adapter.weight_version]
            self._freed.notify()
