"""What is observed of a server while it runs: how full it is, and what it counted."""

from __future__ import annotations

from collections.abc import Callable

from penstock.server.core.memory_budget import MemoryBudget
from penstock.server.core.telemetry import Gauge, ServerMetrics
from penstock.server.engine.protocol import EngineStats
from penstock.server.pool.engine import PoolEngine
from penstock.server.security.callers import Callers
from penstock.server.state import Parts
from penstock.server.weights.adapter_versions import AdapterVersions


def observe_load(
    metrics: ServerMetrics,
    parts: Parts,
    budget: MemoryBudget,
    callers: Callers,
    adapters: AdapterVersions,
    stats: Callable[[], EngineStats],
) -> None:
    """Exports each number as it is at the time."""
    buffer, admission, closing = parts.buffer, parts.admission, parts.closing
    gauges: tuple[tuple[str, str, str, Gauge], ...] = (
        ("groups.buffered", "{group}", "finished, not delivered", lambda: buffer.waiting_count),
        ("groups.redelivered", "{group}", "delivered again", lambda: buffer.redeliveries),
        ("groups.outstanding", "{group}", "admitted, not taken", lambda: admission.outstanding),
        ("groups.target", "{group}", "most that may be outstanding", lambda: admission.target),
        ("attempts.left_out", "{attempt}", "too slow for their groups", lambda: closing.left_out),
        ("memory.used", "By", "of the memory budget", lambda: budget.used_bytes),
        ("trajectories.open", "{trajectory}", "open", lambda: parts.store.open_count),
        ("engine.running", "{turn}", "being sampled", lambda: stats().running),
        ("engine.kv_cache_usage", "1", "part in use", lambda: stats().kv_cache_usage),
    )
    for name, unit, description, read in gauges:
        metrics.observe(f"penstock.{name}", unit, description, read)
    counts = metrics.observe_counts
    counts("penstock.groups.dropped", "{group}", "never trained", lambda: parts.trainer.drops)
    counts("penstock.calls.refused", "{call}", "not let in", lambda: callers.refusals)
    counts("penstock.attempts.failed", "{attempt}", "failed", lambda: closing.failures)
    counts(
        "penstock.turns.moved", "{turn}", "went on under another adapter", lambda: adapters.moves
    )


def observe_pool(metrics: ServerMetrics, pool: PoolEngine) -> None:
    """The same of a pool: its engines, and what became of requests on the way to them."""
    placing = pool.placing
    gauges: tuple[tuple[str, str, str, Gauge], ...] = (
        ("pool.engines", "{engine}", "listed", lambda: len(pool.members)),
        ("pool.engines_serving", "{engine}", "in rotation", lambda: pool.serving_count),
        ("pool.waiting", "{turn}", "without a place", lambda: placing.waiting_count),
    )
    for name, unit, description, read in gauges:
        metrics.observe(f"penstock.{name}", unit, description, read)
    metrics.observe_counts(
        "penstock.pool.requests",
        "{request}",
        "by what became of them",
        lambda: {
            "placed_again": pool.requests_lost,
            "kept_home": placing.kept_home,
            "left_home": placing.left_home,
        },
    )
