"""Switching weight versions: pause -> load -> resume under one lock.

Order of events of a switch to version v:

1. The gate closes: new turns wait (up to their deadline), admissions under way finish.
2. Turns in flight are drained or aborted where the policy says so; turns that require the old version
   are always aborted, since they must not sample under another.
3. The engine pauses at a step boundary, loads, and is told that what follows is v.
4. The engine resumes; v is the active version; the gate opens.

What a failure does: a pause that fails leaves the old version serving. A load that fails half-way
leaves weights nobody can trust: turns in flight end ABORTED with what they have, every admission is
refused with WEIGHTS_INCONSISTENT, and only another complete load heals it.

| policy | turns in flight | their cache |
|---|---|---|
| KEEP | freeze, go on under v | kept as the old weights computed it |
| RECOMPUTE | freeze, go on under v | dropped, computed again under v |
| DRAIN | finish first under the old version | dropped |
| ABORT | end ABORTED | dropped |
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from opentelemetry import trace

from penstock.server.broadcast import Broadcast
from penstock.server.engine import Engine, EngineLoadFailed, EngineLost, StagedWeights
from penstock.server.errors import DomainError
from penstock.server.turns import Turn
from penstock.wire.reasons import Reason

tracer = trace.get_tracer("penstock.server")


class InFlight(Enum):
    """What happens to turns in flight on a switch."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    DRAIN = "drain"
    ABORT = "abort"


class TurnsInFlight(Protocol):
    """What a switch needs of the turns."""

    @property
    def sampling(self) -> list[Turn]: ...

    async def abort(self, turns: Iterable[Turn]) -> None: ...

    async def wait_idle(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Switched:
    """What a switch did."""

    weight_version: int
    pause_seconds: float


class WeightSwitch:
    """The active version, the gate in front of it, and the lock around every change of it."""

    def __init__(self, engine: Engine, active_version: int = 0) -> None:
        self._engine = engine
        self._lock = asyncio.Lock()
        self._changed = Broadcast()
        self._closed = False
        self._admitting = 0
        self._refusal: DomainError | None = None
        self._paused = False
        self.active_version = active_version
        self.on_health: Callable[[], Awaitable[None]] | None = None
        """Called when what `trusted` says has changed."""

    @property
    def trusted(self) -> bool:
        """Whether the weights in use are those of `active_version`."""
        return self._refusal is None

    @property
    def switching(self) -> bool:
        """Whether turns are held back because weights change."""
        return self._closed

    @asynccontextmanager
    async def admission(self) -> AsyncGenerator[int]:
        """Waits while weights switch; inside, the version it yields stays the active one.

        Raises WEIGHTS_INCONSISTENT or ENGINE_LOST where no version can be served.
        """
        while self._closed and self._refusal is None:
            await self._changed.wait()
        if self._refusal is not None:
            raise self._refusal
        self._admitting += 1
        try:
            yield self.active_version
        finally:
            self._admitting -= 1
            if not self._admitting:
                self._changed.notify()

    async def refuse(self, refusal: DomainError | None) -> None:
        """Refuses every admission with this error, or, with None, no longer."""
        self._refusal = refusal
        self._changed.notify()
        if self.on_health is not None:
            await self.on_health()

    async def switch(
        self, weights: StagedWeights, policy: InFlight, turns: TurnsInFlight
    ) -> Switched:
        """Makes a staged version the active one.

        Raises WEIGHTS_INCONSISTENT where loading failed half-way, ENGINE_LOST where the engine died.
        """
        async with self._lock:
            with tracer.start_as_current_span("penstock.switch_weights") as span:
                span.set_attribute("penstock.weight_version", weights.weight_version)
                span.set_attribute("penstock.in_flight", policy.value)
                self._closed = True
                try:
                    switched = await self._switch(weights, policy, turns)
                except EngineLost as error:
                    raise DomainError(Reason.ENGINE_LOST, f"the engine is lost: {error}") from error
                finally:
                    self._closed = False
                    self._changed.notify()
                span.set_attribute("penstock.pause_seconds", switched.pause_seconds)
                return switched

    async def _switch(
        self, weights: StagedWeights, policy: InFlight, turns: TurnsInFlight
    ) -> Switched:
        while self._admitting:
            await self._changed.wait()
        if policy is InFlight.DRAIN:
            await turns.wait_idle()
        elif policy is InFlight.ABORT:
            await turns.abort(turns.sampling)
        else:
            await turns.abort([t for t in turns.sampling if t.record.required_weight_version])
        began = time.monotonic()
        if not self._paused:
            await self._engine.pause(drop_cache=policy is not InFlight.KEEP)
            self._paused = True
        try:
            await self._engine.load(weights)
        except EngineLoadFailed as error:
            await self._distrust(weights.weight_version, turns)
            raise DomainError(
                Reason.WEIGHTS_INCONSISTENT,
                f"loading version {weights.weight_version} failed half-way: {error}",
                {"weight_version": weights.weight_version},
            ) from error
        self.active_version = weights.weight_version
        await self._engine.resume()
        self._paused = False
        pause = time.monotonic() - began
        if self._refusal is not None:
            await self.refuse(None)
        return Switched(weights.weight_version, pause)

    async def _distrust(self, weight_version: int, turns: TurnsInFlight) -> None:
        await self.refuse(
            DomainError(
                Reason.WEIGHTS_INCONSISTENT,
                f"loading version {weight_version} failed half-way; "
                "nothing is served until a full upload succeeds",
                {"weight_version": weight_version},
                retry_after_seconds=5.0,
            )
        )
        await turns.abort(turns.sampling)
