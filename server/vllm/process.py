"""Starting vLLM, and tying its process to this one.

The kernel binds the engine process to the *thread* that spawned it (see `parent_death`). So a dedicated
thread builds the engine, while the event loop stays free, and then only waits to be released.
"""

from __future__ import annotations

# First, because vLLM reads the environment when it is imported.
from penstock.server.vllm import environment as vllm_environment

# isort: split
import asyncio
import os
import threading
from typing import TYPE_CHECKING, cast

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.utils import CoreEngineProcManager
from vllm.v1.executor.abstract import Executor
from vllm.v1.metrics.loggers import StatLoggerBase

from penstock.common.parent_death import binding_children

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats

SHUTDOWN_SECONDS = 5.0


class EngineOwner:
    """The thread that builds the engine, and to whose life the engine process is bound."""

    def __init__(self, arguments: AsyncEngineArgs, load: VllmLoad) -> None:
        self._arguments = arguments
        self._load = load
        self._loop = asyncio.get_running_loop()
        self._built: asyncio.Future[AsyncLLM] = self._loop.create_future()
        self._released = threading.Event()
        # A daemon thread: if the server exits without `close`, the engine process dies with it.
        self._thread = threading.Thread(target=self._own, name="engine-owner", daemon=True)

    async def build(self) -> AsyncLLM:
        self._thread.start()
        try:
            return await asyncio.shield(self._built)
        except asyncio.CancelledError:
            self._built.add_done_callback(self._discard)
            raise

    def release(self) -> None:
        self._released.set()

    def _own(self) -> None:
        try:
            llm = _build(self._arguments, self._load)
        except BaseException as error:
            self._loop.call_soon_threadsafe(self._built.set_exception, error)
        else:
            self._loop.call_soon_threadsafe(self._built.set_result, llm)
            self._released.wait()

    def _discard(self, built: asyncio.Future[AsyncLLM]) -> None:
        if not built.cancelled() and built.exception() is None:
            shut_down(built.result())
        self.release()


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

    @property
    def running(self) -> int:
        return sum(report.num_running_reqs for report in self._reports.values())

    @property
    def waiting(self) -> int:
        return sum(report.num_waiting_reqs for report in self._reports.values())

    @property
    def kv_cache_usage(self) -> float:
        return max((report.kv_cache_usage for report in self._reports.values()), default=0.0)


class _Engine(AsyncLLM):
    def __del__(self) -> None:
        """AsyncLLM would shut down here, when the interpreter may be half gone already. `VllmEngine.close`
        shuts down. Without it the engine process dies with this one."""


def shut_down(llm: AsyncLLM) -> None:
    """Returns when its processes are gone."""
    manager = cast("object", llm.engine_core.resources.engine_manager)  # pyright: ignore[reportUnknownMemberType, reportAttributeAccessIssue]
    processes = list(manager.processes) if isinstance(manager, CoreEngineProcManager) else []
    llm.shutdown(SHUTDOWN_SECONDS)
    for process in processes:
        # vLLM kills processes that took longer, and does not wait for them.
        process.join()


def _build(arguments: AsyncEngineArgs, load: VllmLoad) -> AsyncLLM:
    if current_platform.is_cpu():
        vllm_environment.set_cpu_defaults()
    config = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
    with binding_children(vllm_environment.quieten):
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
