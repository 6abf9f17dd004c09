"""An engine's part in a collective: vLLM's own weight transfer, with a deadline for every step.

Each worker of the engine process must answer a command, and one that hangs in a collective cannot be
interrupted. So a command that exceeds its deadline ends the engine, and the server's supervisor starts
another. Backends with their own deadline, such as gloo, are given a shorter one and never get that far.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from typing import TypeVar, cast

from vllm.distributed.weight_transfer.base import (
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)

from penstock.server.engine.protocol import CollectiveUpdate, EngineLoadFailed, EngineLost
from penstock.server.vllm.process import EngineProcess
from penstock.server.vllm.worker.weight_engine import ROUND
from penstock.server.weights.staging.manifest import WeightRefused
from penstock.wire.reasons import Reason

T = TypeVar("T")

# How late a backend's own deadline may be.
GRACE_SECONDS = 5.0


class VllmCollective(EngineProcess):
    """The methods of `penstock.server.engine.protocol.CollectiveEngine`, which documents them."""

    _weight_version = 0
    """0 is the base model."""

    async def join_collective(
        self, backend: str, rendezvous: Mapping[str, object], seconds: float
    ) -> None:
        init_info = {"backend": backend, "rendezvous": dict(rendezvous), "seconds": seconds}
        request = WeightTransferInitRequest(init_info=init_info)
        try:
            await self._within(self._llm.init_weight_transfer_engine(request), seconds)
        except EngineLost:
            raise
        except Exception as error:  # vLLM reports every failure of the worker as a bare Exception.
            raise WeightRefused(
                Reason.SOURCE_UNAVAILABLE,
                f"the engine did not join {backend!r}: {_text(error)}",
                backend=backend,
                problem=_text(error),
            ) from error

    async def begin_collective(self) -> None:
        await self._ask(self._llm.start_weight_update())

    async def receive_collective(self, update: CollectiveUpdate, seconds: float) -> None:
        described = (
            {ROUND: dict(update)}
            if isinstance(update, Mapping)
            else [{ROUND: dict(part)} for part in update]
        )
        request = WeightTransferUpdateRequest(update_info=described)
        await self._transfer(self._llm.update_weights(request), seconds)

    async def finish_collective(self, weight_version: int, seconds: float) -> None:
        finishing = self._llm.finish_weight_update(weight_version=str(weight_version))
        await self._transfer(finishing, seconds)
        self._weight_version = weight_version

    async def abandon_collective(self, seconds: float) -> bool:
        return not any(bool(outcome["changed"]) for outcome in await self._abandon(seconds))

    async def _transfer(self, answer: Awaitable[object], seconds: float) -> None:
        try:
            await self._within(answer, seconds)
        except EngineLost:
            raise
        except Exception as error:  # A bare Exception, as in `join_collective`.
            raise await self._failure(error, seconds) from error

    async def _abandon(self, seconds: float) -> list[Mapping[str, object]]:
        abandoning = cast(
            "Awaitable[list[Mapping[str, object]]]",
            self._llm.collective_rpc("abandon_collective"),  # pyright: ignore[reportUnknownMemberType]
        )
        return await self._within(abandoning, seconds)

    async def _failure(self, error: Exception, seconds: float) -> Exception:
        """The error for a failed update, according to the workers' reports."""
        outcomes = await self._abandon(seconds)
        told = [outcome for outcome in outcomes if "problem" in outcome]
        problem = str(told[0]["problem"]) if told else _text(error)
        if any(bool(outcome["changed"]) for outcome in outcomes):
            return EngineLoadFailed(problem)
        for outcome in told:
            if "reason" in outcome:
                metadata = cast("Mapping[str, str]", outcome["metadata"])
                return WeightRefused(Reason(str(outcome["reason"])), problem, **metadata)
        return WeightRefused(
            Reason.SOURCE_UNAVAILABLE, f"the collective broke: {problem}", problem=problem
        )

    async def _within(self, answer: Awaitable[T], seconds: float) -> T:
        asked = asyncio.ensure_future(self._ask(answer))
        # If the caller is cancelled, the command still runs: half a command must not remain.
        asked.add_done_callback(lambda done: done.cancelled() or done.exception())
        done, _ = await asyncio.wait({asked}, timeout=seconds + GRACE_SECONDS)
        if not done:
            self._give_up(f"it did not come back from a collective within {seconds:g} s")
        return await asked


def _text(error: Exception) -> str:
    return str(error).rpartition(" method failed: ")[2]
