"""An engine's part in a collective: vLLM's own weight transfer, with a deadline for everything.

A command to the engine process is answered by each of its workers or not at all, and one that hangs in a
collective cannot be called back. So a command that outlives its deadline costs the engine, and whoever
supervises the server starts another. Backends that have a deadline of their own, as gloo has, are given a
shorter one and never come to that.
"""

from __future__ import annotations

# First, because vLLM reads the environment when it is imported.
import penstock.server.vllm.environment  # noqa: F401  # pyright: ignore[reportUnusedImport]

# isort: split
import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Protocol, TypeVar, cast

from vllm.distributed.weight_transfer.base import (
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)
from vllm.v1.engine.async_llm import AsyncLLM

from penstock.server.engine.protocol import CollectiveUpdate, EngineLoadFailed, EngineLost
from penstock.server.vllm.worker.weight_engine import ROUND
from penstock.server.weights.staging.manifest import WeightRefused
from penstock.wire.reasons import Reason

T = TypeVar("T")

# What a backend's own deadline may be late by.
GRACE_SECONDS = 5.0


class Ask(Protocol):
    """Awaits the engine process's answer. Raises EngineLost once there can be none."""

    def __call__(self, answer: Awaitable[T], /) -> Coroutine[None, None, T]: ...


class VllmCollective:
    """See `penstock.server.engine.protocol.Engine` for what each method promises."""

    def __init__(self, llm: AsyncLLM, ask: Ask, give_up: Callable[[str], None]) -> None:
        """`give_up` ends the engine process, with the reason."""
        self._llm = llm
        self._ask = ask
        self._give_up = give_up

    async def join(self, backend: str, rendezvous: Mapping[str, object], seconds: float) -> None:
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

    async def begin(self) -> None:
        await self._ask(self._llm.start_weight_update())

    async def receive(self, update: CollectiveUpdate, seconds: float) -> None:
        described = (
            {ROUND: dict(update)}
            if isinstance(update, Mapping)
            else [{ROUND: dict(part)} for part in update]
        )
        request = WeightTransferUpdateRequest(update_info=described)
        try:
            await self._within(self._llm.update_weights(request), seconds)
        except EngineLost:
            raise
        except Exception as error:  # As above.
            raise await self._failure(error, seconds) from error

    async def finish(self, weight_version: int, seconds: float) -> None:
        finishing = self._llm.finish_weight_update(weight_version=str(weight_version))
        try:
            await self._within(finishing, seconds)
        except EngineLost:
            raise
        except Exception as error:  # As above.
            raise await self._failure(error, seconds) from error

    async def abandon(self, seconds: float) -> bool:
        return not any(bool(outcome["changed"]) for outcome in await self._abandon(seconds))

    async def _abandon(self, seconds: float) -> list[Mapping[str, object]]:
        abandoning = cast(
            "Awaitable[list[Mapping[str, object]]]",
            self._llm.collective_rpc("abandon_collective"),  # pyright: ignore[reportUnknownMemberType]
        )
        return await self._within(abandoning, seconds)

    async def _failure(self, error: Exception, seconds: float) -> Exception:
        """What became of an update that failed, by the account of the workers."""
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
        # Of a caller that is cancelled: half a command is none.
        asked.add_done_callback(lambda done: done.cancelled() or done.exception())
        done, _ = await asyncio.wait({asked}, timeout=seconds + GRACE_SECONDS)
        if not done:
            self._give_up(f"it did not come back from a collective within {seconds:g} s")
        return await asked


def _text(error: Exception) -> str:
    """What the worker said, without what vLLM puts before it."""
    return str(error).rpartition(" method failed: ")[2]
