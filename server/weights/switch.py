"""The active weight version, the gate in front of it, and the states of a change of it.

A `Switcher` changes the weights: `engine_switch.EngineSwitch` of one engine, `pool.weights.PoolWeights` of
every engine of a pool. Both move the `WeightSwitch` through its states,
under one lock:

    IDLE         no change is under way
    PREPARING    the engine prepares the next version; nothing else changes yet
    ROLLING      the engines of a pool switch one after another. Only turns that require a version wait
    CLOSED       new turns wait, up to their deadline
    UNCONFIRMED  as CLOSED, and the engine samples with weights whose probe was not confirmed yet.
                 Tokens of turns in flight are withheld until the verdict

Whether the weights can be trusted is independent of this: a version may be lost, and the engine may die, in
any state (`refuse`). So is whether the active version is the trainer's (`await_trainer`).

| policy | turns in flight | their cache |
|---|---|---|
| KEEP | freeze, continue under the new version | kept as computed by the old weights |
| RECOMPUTE | freeze, continue under the new version | dropped, recomputed under the new version |
| DRAIN | finish first under the old version | dropped |
| ABORT | end ABORTED | dropped |
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import (
    AsyncGenerator,
    Callable,
    Generator,
    Mapping,
)
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from penstock.server.core.aio import Broadcast
from penstock.server.core.errors import DomainError
from penstock.server.engine.protocol import EngineLost, StagedWeights
from penstock.server.turns.runner import TurnRunner
from penstock.server.weights.adapter_manifest import AdapterShape
from penstock.server.weights.probe import Probe, ProbeResult
from penstock.server.weights.staging.incoming import Staged
from penstock.wire.reasons import Reason


class InFlight(Enum):
    """What happens to turns in flight on a switch."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    DRAIN = "drain"
    ABORT = "abort"


async def abort_required(turns: TurnRunner) -> None:
    """Abort the turns that require the old version, because they must not sample under another."""
    await turns.abort([turn for turn in turns.sampling if turn.record.required_weight_version])


@contextmanager
def engine_needed() -> Generator[None]:
    """Turn the loss of the engine into ENGINE_LOST."""
    try:
        yield
    except EngineLost as error:
        raise DomainError(Reason.ENGINE_LOST, f"the engine is lost: {error}") from error


VersionBefore = Callable[[], AbstractAsyncContextManager[StagedWeights | None]]
"""Opens the version that a failed switch goes back to; None if it is not available."""


@dataclass(frozen=True, slots=True)
class Update:
    """A verified version and what is needed to load it."""

    staged: Staged
    probe: Probe | None = None
    adapter: AdapterShape | None = None
    """None for full weights."""

    @property
    def weight_version(self) -> int:
        return self.staged.weight_version


@dataclass(frozen=True, slots=True)
class Switched:
    weight_version: int
    pause_seconds: float
    """From the step boundary at which the engine paused until it resumed, without scoring the probe."""
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


class Switcher(Protocol):
    """Makes accepted versions the active one: on one engine, or on every engine of a pool."""

    @property
    def adapter_versions(self) -> list[int]:
        """Adapters still in use, oldest first."""
        ...

    @property
    def holds_adapters(self) -> bool:
        """Whether the bytes of an active adapter are needed again."""
        ...

    def stage(self, update: Update) -> None:
        """Do ahead what can be done of the switch to a version that was just accepted."""
        ...

    async def switch(self, update: Update, policy: InFlight, before: VersionBefore) -> Switched:
        """Return when the version is active. Nothing else may release its memory meanwhile. Raises
        WEIGHT_LOAD_FAILED, PROBE_MISMATCH or DISK_FULL if the previous version is active again,
        WEIGHTS_INCONSISTENT if no version can be served, and ENGINE_LOST if the engine died."""
        ...

    async def spoiled(self, weight_version: int, problem: str) -> None:
        """Called if an uploader wrote to the active version's memory after it was verified. Raises
        WEIGHTS_INCONSISTENT if it is therefore unknown what the engine holds."""
        ...


class SwitchPhase(Enum):
    IDLE = "idle"
    PREPARING = "preparing"
    ROLLING = "rolling"
    CLOSED = "closed"
    UNCONFIRMED = "unconfirmed"


_TRANSITIONS: Mapping[SwitchPhase, frozenset[SwitchPhase]] = {
    SwitchPhase.IDLE: frozenset({SwitchPhase.PREPARING, SwitchPhase.ROLLING, SwitchPhase.CLOSED}),
    SwitchPhase.PREPARING: frozenset({SwitchPhase.CLOSED, SwitchPhase.IDLE}),
    SwitchPhase.ROLLING: frozenset({SwitchPhase.IDLE}),
    SwitchPhase.CLOSED: frozenset({SwitchPhase.UNCONFIRMED, SwitchPhase.IDLE}),
    # Confirmed, or refused and gone back.
    SwitchPhase.UNCONFIRMED: frozenset({SwitchPhase.CLOSED, SwitchPhase.IDLE}),
}


class WeightSwitch:
    """The active version, the gate in front of it, and the lock around every change of it."""

    def __init__(
        self,
        active_version: int = 0,
        on_health: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_health` is called when `trusted` or `awaiting_trainer` has changed."""
        self._on_health = on_health
        self._lock = asyncio.Lock()
        self._changed = Broadcast()
        self.phase = SwitchPhase.IDLE
        self.phase_since = time.monotonic()
        self.awaiting_trainer = False
        """Whether turns wait until the trainer's version is active."""
        self._admitting = 0
        self._refusal: DomainError | None = None
        self.unconfirmed_version: int | None = None
        """The version whose tokens are withheld until the verdict on its probe, else None."""
        self._verdict: asyncio.Future[bool] | None = None
        self.full_version = active_version
        self.active_adapter: int | None = None
        """The active version if it is an adapter on the full weights, else None."""

    @property
    def active_version(self) -> int:
        return self.full_version if self.active_adapter is None else self.active_adapter

    @property
    def trusted(self) -> bool:
        """Whether the engine holds the weights of `active_version`."""
        return self._refusal is None

    @property
    def problem(self) -> str:
        """Why no version can be served; empty if one can."""
        return "" if self._refusal is None else self._refusal.message

    @property
    def switching(self) -> bool:
        """Whether turns wait because weights are changing or the trainer has yet to send its own."""
        return self.phase in (SwitchPhase.CLOSED, SwitchPhase.UNCONFIRMED) or self.awaiting_trainer

    @property
    def changing(self) -> bool:
        """Whether the active version may change soon. Includes a pool switching one engine at a time."""
        return self.switching or self.phase is SwitchPhase.ROLLING

    # For turns

    async def confirmed(self) -> bool:
        """Wait for the verdict on `unconfirmed_version`. False: its tokens must be discarded."""
        return self._verdict is None or await asyncio.shield(self._verdict)

    @asynccontextmanager
    async def admission(self, *, pinned: bool = False) -> AsyncGenerator[int]:
        """Wait while weights switch; inside, the yielded version stays the active one. A `pinned` turn
        requires one version, so it also waits while a pool switches one engine at a time. Raises
        WEIGHTS_INCONSISTENT or ENGINE_LOST if no version can be served."""
        while self._refusal is None and (self.changing if pinned else self.switching):
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

    def await_trainer(self, awaiting: bool) -> None:
        """Start or stop holding turns because the active weights are not the trainer's."""
        if awaiting != self.awaiting_trainer:
            self.awaiting_trainer = awaiting
            self._changed.notify()
            self._on_health()

    def refuse(self, refusal: DomainError | None) -> None:
        """None admits turns again."""
        self._refusal = refusal
        self._changed.notify()
        self._on_health()

    # For switchers

    @asynccontextmanager
    async def change(self) -> AsyncGenerator[None]:
        """Hold the lock around a change of the weights; afterwards turns are admitted again."""
        async with self._lock:
            try:
                yield
            finally:
                if self._verdict is not None and not self._verdict.done():
                    # The change failed before it was judged. Turns wait for the verdict.
                    self._verdict.set_result(False)
                self.unconfirmed_version = self._verdict = None
                if self.phase is not SwitchPhase.IDLE:
                    self.move(SwitchPhase.IDLE)

    def move(self, phase: SwitchPhase) -> None:
        if phase not in _TRANSITIONS[self.phase]:
            raise RuntimeError(f"a change of weights cannot go from {self.phase} to {phase}")
        self.phase, self.phase_since = phase, time.monotonic()
        self._changed.notify()

    async def hold_turns(self, phase: SwitchPhase = SwitchPhase.CLOSED) -> None:
        """Enter a state in which new turns wait, and let admissions under way finish."""
        self.move(phase)
        while self._admitting:
            await self._changed.wait()

    @asynccontextmanager
    async def gate_closed(self) -> AsyncGenerator[None]:
        """New turns wait and admissions under way finish; turns in flight continue. Raises
        WEIGHTS_INCONSISTENT or ENGINE_LOST if no version can be served."""
        async with self.change():
            if self._refusal is not None:
                raise self._refusal
            await self.hold_turns()
            yield

    def withhold(self, weight_version: int) -> None:
        """Withhold the tokens of a version until `judge` has the verdict on its probe."""
        self.move(SwitchPhase.UNCONFIRMED)
        self.unconfirmed_version = weight_version
        self._verdict = asyncio.get_running_loop().create_future()

    def judge(self, *, good: bool) -> None:
        """Confirm the withheld version, or have its tokens discarded until the change has ended."""
        assert self._verdict is not None, "no version is withheld"
        self._verdict.set_result(good)
        if good:
            self.unconfirmed_version = self._verdict = None
            self.move(SwitchPhase.CLOSED)

    def adopt(self, weight_version: int, *, adapter: bool = False) -> None:
        if adapter:
            self.active_adapter = weight_version
        else:
            self.full_version = weight_version
