"""Switching one engine: pause -> load -> resume under one lock, with a way back on failure.

Order of events of a switch to version v:

0. PREPARING: the engine prepares v as far as it can next to the weights it samples with.
1. CLOSED: new turns wait, admissions under way finish.
2. Turns in flight are drained or aborted if the policy requires it. Turns that require the old version
   are always aborted.
3. The engine pauses at a step boundary, loads, and labels what follows with v.
4. The engine resumes. If there is a probe, the switch scores it now, UNCONFIRMED.
5. v becomes the active version and the gate opens.

Failures:

- A failed preparation, a failed pause, or a load refused before it changed anything leaves the old version
  serving.
- After a failed load, the engine loads the previous version again and continues undisturbed.
- After a failed probe, turns in flight end ABORTED at the last token of the previous version. Then the
  engine loads that version again.
- If going back is impossible or fails too, or if a later check shows that the bytes were written to while
  the engine loaded them, its weights cannot be trusted. Turns in flight end ABORTED with the tokens they
  have, and every admission is refused with WEIGHTS_INCONSISTENT. Only another complete load heals this; it
  drops the cache under every policy.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from opentelemetry import trace

from penstock.server.core.errors import DomainError
from penstock.server.engine.protocol import CollectiveEngine, EngineLoadFailed, EngineLost
from penstock.server.turns.runner import TurnRunner
from penstock.server.weights.adapter_versions import AdapterVersions
from penstock.server.weights.probe import Probe, ProbeResult, compare
from penstock.server.weights.switch import (
    InFlight,
    ProbeMismatch,
    Switched,
    SwitchPhase,
    Update,
    VersionBefore,
    WeightSwitch,
    abort_required,
    engine_needed,
)
from penstock.wire.reasons import Reason

logger = logging.getLogger(__name__)
tracer = trace.get_tracer("penstock.server")

Load = Callable[[], Awaitable[None]]
"""Loads other weights into a paused engine. Raises DomainError if the engine still holds what it held
before, and EngineLoadFailed if its weights can no longer be trusted."""


@dataclass(frozen=True)
class EngineSwitch:
    """The `Switcher` of one engine."""

    engine: CollectiveEngine
    state: WeightSwitch
    turns: TurnRunner
    adapters: AdapterVersions
    prepare_ahead: bool = True

    holds_adapters = False
    """The engine has read an adapter, and the full weights stay."""

    @property
    def adapter_versions(self) -> list[int]:
        return self.adapters.weight_versions

    def stage(self, update: Update) -> None:
        """Do nothing ahead: only a switch gives the engine a version."""

    async def switch(self, update: Update, policy: InFlight, before: VersionBefore) -> Switched:
        if update.adapter is not None:
            return await self.adapters.switch(update.staged, update.adapter, policy, update.probe)
        engine, weights = self.engine, update.staged.weights
        ahead = (lambda: engine.prepare(weights)) if self.prepare_ahead else None
        return await self.change(
            weights.weight_version,
            lambda: engine.load(weights),
            policy,
            before,
            update.probe,
            ahead,
        )

    async def change(
        self,
        weight_version: int,
        load: Load,
        policy: InFlight,
        before: VersionBefore,
        probe: Probe | None = None,
        prepare: Load | None = None,
    ) -> Switched:
        """`prepare` runs first. Raises what `Switcher.switch` raises, and what `load` raises if that
        changed nothing."""
        async with self.state.change():
            with tracer.start_as_current_span("penstock.switch_weights") as span, engine_needed():
                span.set_attribute("penstock.weight_version", weight_version)
                span.set_attribute("penstock.in_flight", policy.value)
                # While nothing is served, preparing ahead cannot shorten a pause.
                if prepare is not None and self.state.trusted:
                    await self._prepare(weight_version, prepare)
                try:
                    await self.state.hold_turns()
                    switched = await self._switch(weight_version, load, policy, before, probe)
                except (DomainError, EngineLost):
                    raise
                except Exception as error:
                    # After an unexpected error it is unknown which weights the engine holds.
                    await self._distrust(weight_version, f"it failed: {error}")
                    raise
                span.set_attribute("penstock.pause_seconds", switched.pause_seconds)
                return switched

    async def _prepare(self, version: int, prepare: Load) -> None:
        self.state.move(SwitchPhase.PREPARING)
        try:
            with tracer.start_as_current_span("penstock.prepare_weights"):
                await prepare()
        except EngineLoadFailed as error:
            raise self._load_failed(version, error) from error

    def _load_failed(self, version: int, error: EngineLoadFailed) -> DomainError:
        active = self.state.active_version
        return DomainError(
            Reason.WEIGHT_LOAD_FAILED,
            f"loading version {version} failed; version {active} stays active: {error}",
            {"weight_version": version, "active": active},
        )

    async def _switch(
        self,
        version: int,
        load: Load,
        policy: InFlight,
        before: VersionBefore,
        probe: Probe | None,
    ) -> Switched:
        state = self.state
        if policy is InFlight.DRAIN:
            await self.turns.wait_idle()
        elif policy is InFlight.ABORT:
            await self.turns.abort(self.turns.sampling)
        else:
            await abort_required(self.turns)
        await self._pause(drop_cache=policy is not InFlight.KEEP)
        began = time.monotonic()
        try:
            await load()
        except DomainError:
            # Nothing was changed; what could not be trusted before still cannot.
            if state.trusted:
                await self.engine.resume()
            raise
        except EngineLoadFailed as error:
            await self._go_back(version, before, f"loading it failed: {error}")
            raise self._load_failed(version, error) from error
        if probe is None:
            state.adopt(version)
        else:
            # Before the engine can sample a single token with these weights.
            state.withhold(version)
        await self.engine.resume()
        pause = time.monotonic() - began
        result = await self._confirm(version, before, probe) if probe is not None else None
        if not state.trusted:
            state.refuse(None)
        return Switched(version, pause, result)

    async def _confirm(self, version: int, before: VersionBefore, probe: Probe) -> ProbeResult:
        """Score the probe and give the verdict; on a mismatch, go back."""
        try:
            result = compare(probe, await self.engine.score(probe.token_ids))
        except BaseException:
            self.state.judge(good=False)
            raise
        # NaN compares false, so it is never within the tolerance.
        good = result.mean_difference <= probe.tolerance
        self.state.judge(good=good)
        if good:
            self.state.adopt(version)
            return result
        # The verdict stands until the last token of these weights has been discarded.
        await self.turns.abort(self.turns.sampling)
        # Nothing that these weights computed may be reused.
        await self._pause(drop_cache=True)
        await self._go_back(version, before, f"its probe is {result.mean_difference:.6g} nats off")
        raise ProbeMismatch(version, self.state.active_version, result, probe)

    async def _go_back(self, version: int, before: VersionBefore, problem: str) -> None:
        """Load the previous version and resume the engine. Raises WEIGHTS_INCONSISTENT if that fails."""
        way = "there is no version to go back to"
        if self.state.trusted:
            async with before() as weights:
                if weights is not None:
                    try:
                        await self.engine.load(weights)
                    except EngineLoadFailed as error:
                        way = f"going back to version {weights.weight_version} failed too: {error}"
                    else:
                        await self.engine.resume()
                        return
        raise await self._distrust(version, f"{problem}; {way}")

    async def spoiled(self, weight_version: int, problem: str) -> None:
        async with self.state.change():
            raise await self._distrust(weight_version, problem)

    async def _distrust(self, version: int, problem: str) -> DomainError:
        """Stop serving because the engine does not hold a version; return the caller's error."""
        logger.error(
            "version %s cannot be served; refusing turns until a full upload succeeds: %s",
            version,
            problem,
        )
        self.state.refuse(
            DomainError(
                Reason.WEIGHTS_INCONSISTENT,
                f"version {version} cannot be served; "
                "nothing is served until a full upload succeeds",
                {"weight_version": version},
                retry_after_seconds=5.0,
            )
        )
        await self.turns.abort(self.turns.sampling)
        return DomainError(
            Reason.WEIGHTS_INCONSISTENT,
            f"version {version} cannot be served: {problem}",
            {"weight_version": version, "problem": problem},
        )

    async def _pause(self, *, drop_cache: bool) -> None:
        """The engine is paused already after an unrecoverable load. Untrusted weights also lose their
        cache: it carries a version number that may be uploaded again."""
        await self.engine.pause(drop_cache=drop_cache or not self.state.trusted)
