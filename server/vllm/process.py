"""vLLM's engine process: its start, commands to it, and its end. Its life is tied to this process's.

The kernel binds the engine process to the *thread* that spawned it (see `parent_death`). So a dedicated
thread builds the engine, while the event loop stays free, and then only waits to be released.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Awaitable
from typing import TYPE_CHECKING, TypeVar, cast

import psutil
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.utils import CoreEngineProcManager
from vllm.v1.executor.abstract import Executor
from vllm.v1.metrics.loggers import StatLoggerBase

from penstock.common.answers import ending
from penstock.common.parent_death import binding_children
from penstock.server.engine.protocol import EngineLost, EngineStats
from penstock.server.vllm import environment

if TYPE_CHECKING:
    import zmq
    from vllm.config import VllmConfig
    from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats

T = TypeVar("T")

SHUTDOWN_SECONDS = 5.0
EXIT_SECONDS = 2.0


class EngineProcess:
    """The engine process behind an AsyncLLM, from its first command on."""

    def __init__(self, owner: EngineOwner, llm: AsyncLLM) -> None:
        self._owner = owner
        self._llm = llm
        self._given_up = ""
        """Why this side ended the engine process, if it did."""
        self._closing = False
        self._death: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def _watch(self) -> None:
        # vLLM would start this task with the first request, and a death before that would go unnoticed.
        self._llm._run_output_handler()  # pyright: ignore[reportPrivateUsage]
        if handler := self._output_handler:
            handler.add_done_callback(self._note_death)

    async def lost(self) -> str:
        return await asyncio.shield(self._death)

    async def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        # vLLM's shutdown would leave open iterators waiting forever and report the stop as a failure.
        self._llm.output_processor.propagate_error(EngineDeadError())
        if handler := self._output_handler:
            handler.cancel()
            await asyncio.wait([handler])
        await asyncio.to_thread(shut_down, self._llm)
        context = cast("zmq.Context[zmq.Socket[bytes]]", self._llm.engine_core.resources.ctx)  # pyright: ignore[reportUnknownMemberType]
        context.destroy(linger=0)
        self._owner.released.set()

    async def _ask(self, answer: Awaitable[T]) -> T:
        """Raises EngineLost once there can be no answer. If the caller is cancelled, the command still
        runs to its end: half an update must not remain."""
        asked = asyncio.ensure_future(answer)
        await asyncio.wait({asked, self._death}, return_when=asyncio.FIRST_COMPLETED)
        if not asked.done():
            asked.cancel()
            raise EngineLost(self._reason())
        try:
            return asked.result()
        except EngineDeadError as error:
            raise EngineLost(self._reason()) from error

    @property
    def _output_handler(self) -> asyncio.Task[None] | None:
        """Ends only with the engine process."""
        return cast("asyncio.Task[None] | None", self._llm.output_handler)  # pyright: ignore[reportUnknownMemberType]

    def _note_death(self, _: asyncio.Task[None]) -> None:
        if not self._closing:
            self._mourning = asyncio.create_task(self._mourn())

    async def _mourn(self) -> None:
        # vLLM notices that a dying process closes its pipes, which is before it has an exit code.
        for process in self._manager.processes:
            await asyncio.to_thread(process.join, EXIT_SECONDS)
        if not self._death.done():
            self._death.set_result(self._reason())

    def _give_up(self, reason: str) -> None:
        self._given_up = reason
        for process in self._manager.processes:
            process.kill()

    @property
    def _manager(self) -> CoreEngineProcManager:
        return cast("CoreEngineProcManager", self._llm.engine_core.resources.engine_manager)

    def _reason(self) -> str:
        if self._closing:
            return "the engine was closed"
        if self._given_up:
            return self._given_up
        ended = self._manager.finished_procs()
        exits = ", ".join(f"{name} {ending(code)}" for name, code in ended.items())
        return f"the vLLM engine process ended: {exits or 'no exit status yet'}"


class EngineOwner:
    """The thread that builds the engine, and to whose life the engine process is bound."""

    def __init__(self, arguments: AsyncEngineArgs) -> None:
        self.load = VllmLoad()
        self._arguments = arguments
        self._loop = asyncio.get_running_loop()
        self._built: asyncio.Future[AsyncLLM] = self._loop.create_future()
        self.released = threading.Event()
        # A daemon thread: if the server exits without `close`, the engine process dies with it.
        self._thread = threading.Thread(target=self._own, name="engine-owner", daemon=True)

    async def build(self) -> AsyncLLM:
        self._thread.start()
        try:
            return await asyncio.shield(self._built)
        except asyncio.CancelledError:
            self._built.add_done_callback(self._discard)
            raise

    def _own(self) -> None:
        try:
            llm = _build(self._arguments, self.load)
        except BaseException as error:
            self._loop.call_soon_threadsafe(self._built.set_exception, error)
        else:
            self._loop.call_soon_threadsafe(self._built.set_result, llm)
            self.released.wait()

    def _discard(self, built: asyncio.Future[AsyncLLM]) -> None:
        if not built.cancelled() and built.exception() is None:
            shut_down(built.result())
        self.released.set()


class VllmLoad(StatLoggerBase):
    """The engine's last report of its load, summed over data parallel ranks."""

    def __init__(self, vllm_config: VllmConfig | None = None, engine_index: int = 0) -> None:
        self._reports: dict[int, SchedulerStats] = {}
        self.preemptions = 0

    def __call__(self, vllm_config: VllmConfig, engine_index: int) -> VllmLoad:
        """Return this object, so that it serves as the factory that vLLM expects."""
        return self

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is not None:
            self._reports[engine_idx] = scheduler_stats
        if iteration_stats is not None:
            self.preemptions += iteration_stats.num_preempted_reqs

    def log_engine_initialized(self) -> None:
        """Suppress vLLM's own log line."""

    def stats(self, *, idle: bool) -> EngineStats:
        # vLLM reports with each step, so the last report of an idle engine shows it busy.
        reports = self._reports.values()
        return EngineStats(
            0 if idle else sum(report.num_running_reqs for report in reports),
            0 if idle else sum(report.num_waiting_reqs for report in reports),
            max((report.kv_cache_usage for report in reports), default=0.0),
            self.preemptions,
        )


class _Engine(AsyncLLM):
    def __del__(self) -> None:
        """AsyncLLM would shut down here, when the interpreter may be half gone already. `VllmEngine.close`
        shuts down. Without it the engine process dies with this one."""


def shut_down(llm: AsyncLLM) -> None:
    """Returns when its processes are gone."""
    manager = cast("object", llm.engine_core.resources.engine_manager)  # pyright: ignore[reportUnknownMemberType, reportAttributeAccessIssue]
    processes = list(manager.processes) if isinstance(manager, CoreEngineProcManager) else []
    # It kills a process that takes longer, which may have ended just before.
    with contextlib.suppress(psutil.NoSuchProcess):
        llm.shutdown(SHUTDOWN_SECONDS)
    for process in processes:
        # vLLM kills processes that took longer, and does not wait for them.
        process.join()


def _build(arguments: AsyncEngineArgs, load: VllmLoad) -> AsyncLLM:
    if current_platform.is_cpu():
        environment.set_cpu_defaults()
    config = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
    with binding_children(environment.prepare_engine_process):
        llm = _Engine(
            config,
            Executor.get_class(config),
            # A custom stat logger enables vLLM's statistics without its log lines.
            log_stats=False,
            log_requests=False,
            stat_loggers=[load],
        )
    # vLLM adds a Prometheus logger, which is not served here and costs time in every step.
    if llm.logger_manager is not None:
        llm.logger_manager.stat_loggers[:] = llm.logger_manager.stat_loggers[:1]
    if endpoint := os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
        # If this were set earlier, vLLM would set up a second exporter, here and in the engine process. Now
        # its spans go through this process's own provider.
        llm.observability_config.otlp_traces_endpoint = endpoint
        llm.output_processor.tracing_enabled = True
    return llm
