"""Switching weight versions: pause -> load -> resume under one lock, and back where that fails.

`switch` loads a staged version; `change` takes any load, such as one that a collective brings.

Order of events of a switch to version v:

0. The engine makes v ready, as far as it can beside what it samples with. Nothing else has changed yet.
1. The gate closes: new turns wait (up to their deadline), admissions under way finish.
2. Turns in flight are drained or aborted where the policy says so; turns that require the old version
   are always aborted, since they must not sample under another.
3. The engine pauses at a step boundary, loads, and is told that what follows is v.
4. The engine resumes. Where there is a probe it is scored now, and what turns in flight sample is withheld
   until the score is right.
5. v is the active version; the gate opens.

What a failure does: making ready what cannot be loaded leaves the old version serving, and so does a pause
that fails or a load that is refused before it has changed anything. After a load that fails, the version
before is loaded again and goes on as if nothing had been. After a probe that fails, turns in flight
end ABORTED at the last token of the version before, and then that is loaded again. Where there is no way
back, or it fails too, the engine holds weights nobody can trust: turns in flight end ABORTED with what they
have, every admission is refused with WEIGHTS_INCONSISTENT, and only another complete load heals it, with
which the cache goes, whatever the policy. The same follows where it is seen only afterwards that the bytes
were written to while they were loaded (`distrust`).

| policy | turns in flight | their cache |
|---|---|---|
| KEEP | freeze, go on under v | kept as the old weights computed it |
| RECOMPUTE | freeze, go on under v | dropped, computed again under v |
| DRAIN | finish first under the old version | dropped |
| ABORT | end ABORTED | dropped |

An adapter becomes active without a pause: see `adapter_versions`, which closes the gate for that moment.

A *pool* of engines pauses, loads and goes back by itself, each engine for itself, and takes an adapter in
the same way. Here it is one step, which begins once engines have all of v: turns that require the old
version are aborted, new ones of that kind wait, and v is the active version once every engine in rotation
has it. Other turns go on being admitted, unless the pool switches all at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from opentelemetry import trace

from penstock.server.core.broadcast import Broadcast
from penstock.server.core.errors import DomainError
from penstock.server.engine.protocol import Engine, EngineLoadFailed, EngineLost, StagedWeights
from penstock.server.turns.runner import Turn
from penstock.server.weights.adapter_manifest import AdapterShape
from penstock.server.weights.probe import Probe, ProbeResult, compare
from penstock.server.weights.staging.manifest import WeightRefused
from penstock.wire.reasons import Reason

logger = logging.getLogger(__name__)
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

    async def abort(self, turns: Iterable[Turn]) -> object: ...

    async def wait_idle(self) -> None: ...


Load = Callable[[], Awaitable[None]]
"""Gives a paused engine other weights. Raises DomainError or WeightRefused where it holds what it held, and
EngineLoadFailed where what it holds cannot be trusted."""

VersionBefore = Callable[[], AbstractAsyncContextManager[StagedWeights | None]]
"""Opens what a failed switch goes back to; None where it is not to be had."""


@dataclass(frozen=True, slots=True)
class Switched:
    """What a switch did."""

    weight_version: int
    pause_seconds: float
    """How long the engine sampled nothing: from the step boundary it paused at until it was resumed. The
    scoring of a probe is not part of it."""
    probe: ProbeResult | None = None


class ProbeMismatch(DomainError):
    """The engine does not compute what the trainer does."""

    def __init__(self, weight_version: int, active: int, result: ProbeResult, probe: Probe) -> None:
        super().__init__(
            Reason.PROBE_MISMATCH,
            f"the engine's score of version {weight_version} is {result.mean_difference:.6g} nats off, "
            f"{probe.tolerance:.6g} are allowed; version {active} is active again",
            {
                "weight_version": weight_version,
                "active": active,
                "mean_difference": result.mean_difference,
                "max_difference": result.max_difference,
                "tolerance": probe.tolerance,
            },
        )
        self.result = result


@dataclass(frozen=True, slots=True)
class PoolUpdate:
    """A verified version, and what the engines of a pool are told of it."""

    weights: StagedWeights
    probe: Probe | None = None
    adapter: AdapterShape | None = None
    """None for full weights."""


class Pool(Protocol):
    """Engines that take weights by themselves."""

    @property
    def switches_at_once(self) -> bool:
        """Whether no turn is admitted while they switch."""
        ...

    async def switch(
        self, update: PoolUpdate, policy: InFlight, begin: Callable[[], Awaitable[None]]
    ) -> Switched:
        """Returns when every engine in rotation has the version. `begin` is awaited once, when engines
        have it and before the first of them switches.

        Raises WEIGHT_LOAD_FAILED or PROBE_MISMATCH where none of them took it and all are what they were.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Unconfirmed:
    """A version that is loaded and not yet proven."""

    weight_version: int
    verdict: asyncio.Future[bool]


class WeightSwitch:
    """The active version, the gate in front of it, and the lock around every change of it."""

    def __init__(
        self,
        engine: Engine,
        active_version: int = 0,
        pool: Pool | None = None,
        *,
        prepare_ahead: bool = True,
    ) -> None:
        """`pool` is the engine, where it is one."""
        self._prepare_ahead = prepare_ahead
        self._engine = engine
        self._pool = pool
        self._pool_switching = False
        self._lock = asyncio.Lock()
        self._changed = Broadcast()
        self._closed = False
        self._awaiting_trainer = False
        self._admitting = 0
        self._refusal: DomainError | None = None
        self._unconfirmed: _Unconfirmed | None = None
        self.full_version = active_version
        """The full weights that are there."""
        self.active_adapter: int | None = None
        """The active version where it is an adapter on the full weights."""
        self.on_health: Callable[[], Awaitable[None]] | None = None
        """Called when what `trusted` or `awaiting_trainer` says has changed."""

    @property
    def active_version(self) -> int:
        """The version now sampling."""
        return self.full_version if self.active_adapter is None else self.active_adapter

    @property
    def is_pool(self) -> bool:
        """Whether the engine is a pool."""
        return self._pool is not None

    @property
    def trusted(self) -> bool:
        """Whether the weights in use are those of `active_version`."""
        return self._refusal is None

    @property
    def switching(self) -> bool:
        """Whether turns are held back because weights change, or are still to come."""
        return self._closed or self._awaiting_trainer

    @property
    def changing(self) -> bool:
        """Whether the active version may be another one soon, as while a pool switches one engine after the
        other, too."""
        return self.switching or self._pool_switching

    @property
    def awaiting_trainer(self) -> bool:
        """Whether turns are held back until the active version is the trainer's."""
        return self._awaiting_trainer

    async def await_trainer(self, awaiting: bool) -> None:
        """Holds turns back from now on, or no longer: these are not the weights to be sampled."""
        if awaiting != self._awaiting_trainer:
            self._awaiting_trainer = awaiting
            self._changed.notify()
            if self.on_health is not None:
                await self.on_health()

    @property
    def unconfirmed_version(self) -> int | None:
        """The version whose tokens are withheld, while one is being probed."""
        return self._unconfirmed.weight_version if self._unconfirmed else None

    async def confirmed(self) -> bool:
        """Waits for the verdict on that version; False where what it sampled must not be kept."""
        return self._unconfirmed is None or await asyncio.shield(self._unconfirmed.verdict)

    @asynccontextmanager
    async def admission(self, *, pinned: bool = False) -> AsyncGenerator[int]:
        """Waits while weights switch; inside, the version it yields stays the active one. A `pinned`
        turn, of one version only, also waits while a pool switches one engine after the other.

        Raises WEIGHTS_INCONSISTENT or ENGINE_LOST where no version can be served.
        """
        while self._refusal is None and (self.switching or (pinned and self._pool_switching)):
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

    @asynccontextmanager
    async def gate_closed(self) -> AsyncGenerator[None]:
        """New turns wait meanwhile, and none is half admitted; those in flight go on.

        Raises WEIGHTS_INCONSISTENT or ENGINE_LOST where no version can be served.
        """
        async with self._lock:
            if self._refusal is not None:
                raise self._refusal
            self._closed = True
            try:
                while self._admitting:
                    await self._changed.wait()
                yield
            finally:
                self._closed = False
                self._changed.notify()

    def adopt_adapter(self, weight_version: int) -> None:
        """Makes an adapter that the engine has the active version; the gate is closed."""
        self.active_adapter = weight_version

    async def refuse(self, refusal: DomainError | None) -> None:
        """Refuses every admission with this error, or, with None, no longer."""
        self._refusal = refusal
        self._changed.notify()
        if self.on_health is not None:
            await self.on_health()

    async def switch(
        self,
        weights: StagedWeights,
        policy: InFlight,
        turns: TurnsInFlight,
        before: VersionBefore,
        probe: Probe | None = None,
    ) -> Switched:
        """Makes a staged version the active one; raises as `change`."""
        version = weights.weight_version
        ahead = (lambda: self._engine.prepare(weights)) if self._prepare_ahead else None
        return await self.change(
            version, lambda: self._engine.load(weights), policy, turns, before, probe, ahead
        )

    async def switch_pool(
        self, update: PoolUpdate, policy: InFlight, turns: TurnsInFlight
    ) -> Switched:
        """Makes a staged version, full or an adapter, the active one of the pool; raises as that does."""
        pool, version = self._pool, update.weights.weight_version
        assert pool is not None, "there is one engine, which is switched by `switch`"
        async with self._lock:
            with tracer.start_as_current_span("penstock.switch_weights") as span:
                span.set_attribute("penstock.weight_version", version)
                span.set_attribute("penstock.in_flight", policy.value)
                span.set_attribute("penstock.adapter", update.adapter is not None)

                async def begin() -> None:
                    self._pool_switching, self._closed = True, pool.switches_at_once
                    while self._admitting:
                        await self._changed.wait()
                    await turns.abort(
                        [t for t in turns.sampling if t.record.required_weight_version]
                    )

                try:
                    switched = await pool.switch(update, policy, begin)
                    if update.adapter is None:
                        self.full_version = version
                    else:
                        self.active_adapter = version
                finally:
                    self._pool_switching = self._closed = False
                    self._changed.notify()
                span.set_attribute("penstock.pause_seconds", switched.pause_seconds)
                return switched

    async def change(
        self,
        weight_version: int,
        load: Load,
        policy: InFlight,
        turns: TurnsInFlight,
        before: VersionBefore,
        probe: Probe | None = None,
        prepare: Load | None = None,
    ) -> Switched:
        """Makes the version that `load` gives the engine the active one; `prepare` comes before all else.

        Raises WEIGHT_LOAD_FAILED or PROBE_MISMATCH where the version before is active again,
        WEIGHTS_INCONSISTENT where none is, ENGINE_LOST where the engine died, and what `load` raises
        where it changed nothing.
        """
        async with self._lock:
            with tracer.start_as_current_span("penstock.switch_weights") as span:
                span.set_attribute("penstock.weight_version", weight_version)
                span.set_attribute("penstock.in_flight", policy.value)
                # While nothing is served there is no pause to be made short.
                if prepare is not None and self.trusted:
                    await self._make_ready(weight_version, prepare)
                self._closed = True
                change = _Change(weight_version, load, turns, before)
                try:
                    switched = await self._switch(change, policy, probe)
                except EngineLost as error:
                    raise DomainError(Reason.ENGINE_LOST, f"the engine is lost: {error}") from error
                except (DomainError, WeightRefused):
                    raise
                except Exception as error:
                    # Whatever it was, what the engine holds now is not known.
                    await self._distrust(weight_version, turns, f"it failed: {error}")
                    raise
                finally:
                    self._unconfirmed = None
                    self._closed = False
                    self._changed.notify()
                span.set_attribute("penstock.pause_seconds", switched.pause_seconds)
                return switched

    async def _make_ready(self, version: int, prepare: Load) -> None:
        try:
            with tracer.start_as_current_span("penstock.prepare_weights"):
                await prepare()
        except EngineLost as error:
            raise DomainError(Reason.ENGINE_LOST, f"the engine is lost: {error}") from error
        except EngineLoadFailed as error:
            raise self._load_failed(version, error) from error

    def _load_failed(self, version: int, error: EngineLoadFailed) -> DomainError:
        active = self.active_version
        return DomainError(
            Reason.WEIGHT_LOAD_FAILED,
            f"loading version {version} failed, version {active} goes on: {error}",
            {"weight_version": version, "active": active},
        )

    async def _switch(self, change: _Change, policy: InFlight, probe: Probe | None) -> Switched:
        version, turns = change.weight_version, change.turns
        while self._admitting:
            await self._changed.wait()
        if policy is InFlight.DRAIN:
            await turns.wait_idle()
        elif policy is InFlight.ABORT:
            await turns.abort(turns.sampling)
        else:
            await turns.abort([t for t in turns.sampling if t.record.required_weight_version])
        await self._pause(drop_cache=policy is not InFlight.KEEP)
        began = time.monotonic()
        try:
            await change.load()
        except (DomainError, WeightRefused):
            # Nothing was changed; what could not be trusted before still cannot.
            if self.trusted:
                await self._engine.resume()
            raise
        except EngineLoadFailed as error:
            await self._go_back(change, f"loading it failed: {error}")
            raise self._load_failed(version, error) from error
        if probe is None:
            self.full_version = version
        else:
            # Before a single token can come.
            self._unconfirmed = _Unconfirmed(version, asyncio.get_running_loop().create_future())
        await self._engine.resume()
        pause = time.monotonic() - began
        result = await self._confirm(change, probe) if probe is not None else None
        if self._refusal is not None:
            await self.refuse(None)
        return Switched(version, pause, result)

    async def _confirm(self, change: _Change, probe: Probe) -> ProbeResult:
        """Scores the probe and gives the verdict; where it is a bad one, goes back."""
        assert self._unconfirmed is not None
        version, verdict = self._unconfirmed.weight_version, self._unconfirmed.verdict
        try:
            result = compare(probe, await self._engine.score(probe.token_ids))
        except BaseException:
            verdict.set_result(False)
            raise
        # A score that is no number is within no tolerance.
        good = result.mean_difference <= probe.tolerance
        verdict.set_result(good)
        if good:
            self._unconfirmed = None
            self.full_version = version
            return result
        # The verdict stands until the last token of these weights has been thrown away.
        await change.turns.abort(change.turns.sampling)
        # Nor may anything be used again that they computed.
        await self._pause(drop_cache=True)
        await self._go_back(change, f"its probe is {result.mean_difference:.6g} nats off")
        raise ProbeMismatch(version, self.active_version, result, probe)

    async def _go_back(self, change: _Change, problem: str) -> None:
        """Loads the version before again, and resumes; the engine is paused.

        Raises WEIGHTS_INCONSISTENT where that cannot be.
        """
        way = "there is no version to go back to"
        if self.trusted:
            async with change.before() as weights:
                if weights is not None:
                    try:
                        await self._engine.load(weights)
                    except EngineLoadFailed as error:
                        way = f"going back to version {weights.weight_version} failed too: {error}"
                    else:
                        await self._engine.resume()
                        return
        raise await self._distrust(change.weight_version, change.turns, f"{problem}; {way}")

    async def distrust(
        self, weight_version: int, turns: TurnsInFlight, problem: str
    ) -> DomainError:
        """What was switched to is not what the engine holds; returns what its caller is told."""
        async with self._lock:
            return await self._distrust(weight_version, turns, problem)

    async def _distrust(self, version: int, turns: TurnsInFlight, problem: str) -> DomainError:
        logger.error(
            "nothing is served until a full upload succeeds: version %s: %s", version, problem
        )
        await self.refuse(
            DomainError(
                Reason.WEIGHTS_INCONSISTENT,
                f"version {version} cannot be served; "
                "nothing is served until a full upload succeeds",
                {"weight_version": version},
                retry_after_seconds=5.0,
            )
        )
        await turns.abort(turns.sampling)
        return DomainError(
            Reason.WEIGHTS_INCONSISTENT,
            f"version {version} cannot be served: {problem}",
            {"weight_version": version, "problem": problem},
        )

    async def _pause(self, *, drop_cache: bool) -> None:
        """After a load that failed for good it is paused already. What such weights computed has the number
        of a version that may come once more."""
        await self._engine.pause(drop_cache=drop_cache or not self.trusted)


@dataclass(frozen=True, slots=True, eq=False)
class _Change:
    """One switch: to what, for whom, and what to go back to."""

    weight_version: int
    load: Load
    turns: TurnsInFlight
    before: VersionBefore
