"""Switching weight versions: pause -> load -> resume under one lock, with a way back on failure.

`switch` loads a staged version. `change` runs any load, for example one that receives a collective.

Order of events of a switch to version v:

0. The engine prepares v as far as it can next to the weights it samples with. Nothing else changes yet.
1. The gate closes: new turns wait (up to their deadline), admissions under way finish.
2. Turns in flight are drained or aborted if the policy requires it. Turns that require the old version
   are always aborted, because they must not sample under another.
3. The engine pauses at a step boundary, loads, and labels everything after that with v.
4. The engine resumes. If there is a probe, the switch scores it now. Tokens that turns in flight sample
   are withheld until the score is confirmed.
5. v becomes the active version and the gate opens.

Failures:

- A failed preparation, a failed pause, or a load refused before it changed anything leaves the old version
  serving.
- After a failed load, the engine loads the previous version again and continues undisturbed.
- After a failed probe, turns in flight end ABORTED at the last token of the previous version. Then the
  engine loads that version again.
- If going back is impossible or fails too, the weights in the engine cannot be trusted. Turns in flight
  end ABORTED with the tokens they have, and every admission is refused with WEIGHTS_INCONSISTENT. Only
  another complete load heals this; it drops the cache under every policy.
- The same applies if a later check shows that the bytes were written to while the engine loaded them
  (`distrust`).

| policy | turns in flight | their cache |
|---|---|---|
| KEEP | freeze, continue under v | kept as computed by the old weights |
| RECOMPUTE | freeze, continue under v | dropped, recomputed under v |
| DRAIN | finish first under the old version | dropped |
| ABORT | end ABORTED | dropped |

An adapter becomes active without a pause. `adapter_versions` closes the gate for that moment.

Each engine of a *pool* pauses, loads and goes back independently, and takes adapters the same way. For
this module that is one step, which begins once engines have all of v. Turns that require the old version
are aborted, and new ones of that kind wait. v becomes the active version once every engine in rotation has
it. Other turns are still admitted, unless the pool switches all engines at once.
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

from penstock.server.core.aio import Broadcast
from penstock.server.core.errors import DomainError
from penstock.server.engine.protocol import Engine, EngineLoadFailed, EngineLost, StagedWeights
from penstock.server.turns.trajectory import Turn
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
"""Loads other weights into a paused engine.

Raises DomainError or WeightRefused if the engine still holds what it held before, and EngineLoadFailed if
its weights can no longer be trusted."""

VersionBefore = Callable[[], AbstractAsyncContextManager[StagedWeights | None]]
"""Opens the version that a failed switch goes back to; None if it is not available."""


@dataclass(frozen=True, slots=True)
class Switched:
    """Result of a switch."""

    weight_version: int
    pause_seconds: float
    """Seconds in which the engine sampled nothing, from the step boundary it paused at until it resumed.
    Scoring the probe is not included."""
    probe: ProbeResult | None = None


class ProbeMismatch(DomainError):
    """The engine's probe score differs from the trainer's by more than the tolerance."""

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
    """A verified version and what the engines of a pool need to load it."""

    weights: StagedWeights
    probe: Probe | None = None
    adapter: AdapterShape | None = None
    """None for full weights."""


class Pool(Protocol):
    """Engines that load weights independently."""

    @property
    def switches_at_once(self) -> bool:
        """Whether the gate stays closed to all turns while the engines switch."""
        ...

    async def switch(
        self, update: PoolUpdate, policy: InFlight, begin: Callable[[], Awaitable[None]]
    ) -> Switched:
        """Return when every engine in rotation has the version. `begin` is awaited once, when engines
        have it and before the first of them switches.

        Raises WEIGHT_LOAD_FAILED or PROBE_MISMATCH if no engine took it and all hold what they held before.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Unconfirmed:
    """A loaded version whose probe has not been confirmed yet."""

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
        """`pool` is the engine itself if that is a pool, else None."""
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
        """Version of the full weights in the engine."""
        self.active_adapter: int | None = None
        """The active version if it is an adapter on the full weights, else None."""
        self.on_health: Callable[[], Awaitable[None]] | None = None
        """Called when `trusted` or `awaiting_trainer` has changed."""

    @property
    def active_version(self) -> int:
        """The version that samples now."""
        return self.full_version if self.active_adapter is None else self.active_adapter

    @property
    def is_pool(self) -> bool:
        return self._pool is not None

    @property
    def trusted(self) -> bool:
        """Whether the engine holds the weights of `active_version`."""
        return self._refusal is None

    @property
    def switching(self) -> bool:
        """Whether turns wait because weights are changing or the trainer has yet to send its own."""
        return self._closed or self._awaiting_trainer

    @property
    def changing(self) -> bool:
        """Whether the active version may change soon. Includes a pool switching one engine at a time."""
        return self.switching or self._pool_switching

    @property
    def awaiting_trainer(self) -> bool:
        """Whether turns wait until the trainer's version is active."""
        return self._awaiting_trainer

    async def await_trainer(self, awaiting: bool) -> None:
        """Start or stop holding turns because the active weights are not the trainer's."""
        if awaiting != self._awaiting_trainer:
            self._awaiting_trainer = awaiting
            self._changed.notify()
            if self.on_health is not None:
                await self.on_health()

    @property
    def unconfirmed_version(self) -> int | None:
        """The version whose tokens are withheld while its probe is scored, else None."""
        return self._unconfirmed.weight_version if self._unconfirmed else None

    async def confirmed(self) -> bool:
        """Wait for the verdict on that version. False means that its tokens must be discarded."""
        return self._unconfirmed is None or await asyncio.shield(self._unconfirmed.verdict)

    @asynccontextmanager
    async def admission(self, *, pinned: bool = False) -> AsyncGenerator[int]:
        """Wait while weights switch; inside, the yielded version stays the active one.

        A `pinned` turn requires one version, so it also waits while a pool switches one engine at a time.

        Raises WEIGHTS_INCONSISTENT or ENGINE_LOST if no version can be served.
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
        """Hold new turns back and let admissions under way finish; turns in flight continue.

        Raises WEIGHTS_INCONSISTENT or ENGINE_LOST if no version can be served.
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
        """Make an adapter that the engine already has the active version; the gate must be closed."""
        self.active_adapter = weight_version

    async def refuse(self, refusal: DomainError | None) -> None:
        """Refuse every admission with this error. None admits turns again."""
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
        """Make a staged version the active one. Raises what `change` raises."""
        version = weights.weight_version
        ahead = (lambda: self._engine.prepare(weights)) if self._prepare_ahead else None
        return await self.change(
            version, lambda: self._engine.load(weights), policy, turns, before, probe, ahead
        )

    async def switch_pool(
        self, update: PoolUpdate, policy: InFlight, turns: TurnsInFlight
    ) -> Switched:
        """Make a staged version, full or adapter, active on the pool. Raises what `Pool.switch` raises."""
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
        """Make the version that `load` gives the engine the active one; `prepare` runs first.

        Raises WEIGHT_LOAD_FAILED or PROBE_MISMATCH if the previous version is active again,
        WEIGHTS_INCONSISTENT if no version can be served, and ENGINE_LOST if the engine died. Also raises
        what `load` raises if that changed nothing.
        """
        async with self._lock:
            with tracer.start_as_current_span("penstock.switch_weights") as span:
                span.set_attribute("penstock.weight_version", weight_version)
                span.set_attribute("penstock.in_flight", policy.value)
                # While nothing is served, preparing ahead cannot shorten a pause.
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
                    # After an unexpected error it is unknown which weights the engine holds.
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
            f"loading version {version} failed; version {active} stays active: {error}",
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
            # Set before the engine can sample a single token with these weights.
            self._unconfirmed = _Unconfirmed(version, asyncio.get_running_loop().create_future())
        await self._engine.resume()
        pause = time.monotonic() - began
        result = await self._confirm(change, probe) if probe is not None else None
        if self._refusal is not None:
            await self.refuse(None)
        return Switched(version, pause, result)

    async def _confirm(self, change: _Change, probe: Probe) -> ProbeResult:
        """Score the probe and set the verdict; on a mismatch, go back."""
        assert self._unconfirmed is not None
        version, verdict = self._unconfirmed.weight_version, self._unconfirmed.verdict
        try:
            result = compare(probe, await self._engine.score(probe.token_ids))
        except BaseException:
            verdict.set_result(False)
            raise
        # NaN compares false, so it is never within the tolerance.
        good = result.mean_difference <= probe.tolerance
        verdict.set_result(good)
        if good:
            self._unconfirmed = None
            self.full_version = version
            return result
        # The verdict stands until the last token of these weights has been discarded.
        await change.turns.abort(change.turns.sampling)
        # Nothing that these weights computed may be reused.
        await self._pause(drop_cache=True)
        await self._go_back(change, f"its probe is {result.mean_difference:.6g} nats off")
        raise ProbeMismatch(version, self.active_version, result, probe)

    async def _go_back(self, change: _Change, problem: str) -> None:
        """Load the previous version into the paused engine and resume.

        Raises WEIGHTS_INCONSISTENT if that fails.
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
        """Stop serving because the engine does not hold `weight_version`; returns the caller's error."""
        async with self._lock:
            return await self._distrust(weight_version, turns, problem)

    async def _distrust(self, version: int, turns: TurnsInFlight, problem: str) -> DomainError:
        logger.error(
            "version %s cannot be served; refusing turns until a full upload succeeds: %s",
            version,
            problem,
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
        """Pause the engine, which after an unrecoverable load is paused already. Untrusted weights also
        lose their cache: it carries a version number that may be uploaded again."""
        await self._engine.pause(drop_cache=drop_cache or not self.trusted)


@dataclass(frozen=True, slots=True, eq=False)
class _Change:
    """One switch: the target version, how to load it, and what to go back to."""

    weight_version: int
    load: Load
    turns: TurnsInFlight
    before: VersionBefore
