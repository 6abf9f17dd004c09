"""Metrics of a running server's load, and its counters."""

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
    adapters: AdapterVersions | None,
    stats: Callable[[], EngineStats],
) -> None:
    """Register the metrics; each is read when it is exported."""
    buffer, admission, closing = parts.buffer, parts.admission, parts.closing
    gauges: tuple[tuple[str, str, str, Gauge], ...] = (
        (
            "groups.buffered",
            "{group}",
            "finished groups not yet delivered",
            lambda: buffer.waiting_count,
        ),
        ("groups.redelivered", "{group}", "groups delivered again", lambda: buffer.redeliveries),
        (
            "groups.outstanding",
            "{group}",
            "groups admitted but not taken by the trainer",
            lambda: admission.outstanding,
        ),
        ("groups.target", "{group}", "maximum of outstanding groups", lambda: admission.target),
        (
            "attempts.left_out",
            "{attempt}",
            "attempts too slow for their groups",
            lambda: closing.left_out,
        ),
        ("memory.used", "By", "used part of the memory budget", lambda: budget.used_bytes),
        ("trajectories.open", "{trajectory}", "open trajectories", lambda: parts.store.open_count),
        ("engine.running", "{turn}", "turns being sampled", lambda: stats().running),
        (
            "engine.kv_cache_usage",
            "1",
            "fraction of the key-value cache in use",
            lambda: stats().kv_cache_usage,
        ),
    )
    for name, unit, description, read in gauges:
        metrics.observe(f"penstock.{name}", unit, description, read)
    counts = metrics.observe_counts
    counts(
        "penstock.groups.dropped",
        "{group}",
        "groups dropped without being trained",
        lambda: parts.trainer.drops,
    )
    counts(
        "penstock.calls.refused",
        "{call}",
        "refused calls",
        lambda: callers.refusals,
    )
    counts("penstock.attempts.failed", "{attempt}", "failed attempts", lambda: closing.failures)
    counts(
        "penstock.turns.moved",
        "{turn}",
        "turns that continued under another adapter",
        lambda: {} if adapters is None else adapters.moves,
    )


def observe_pool(metrics: ServerMetrics, pool: PoolEngine) -> None:
    """Register the metrics of a pool: its engines and the placement of requests."""
    placing = pool.placing
    gauges: tuple[tuple[str, str, str, Gauge], ...] = (
        ("pool.engines", "{engine}", "listed engines", lambda: len(pool.members)),
        ("pool.engines_serving", "{engine}", "engines in rotation", lambda: pool.serving_count),
        ("pool.waiting", "{turn}", "turns waiting for an engine", lambda: placing.waiting_count),
    )
    for name, unit, description, read in gauges:
        metrics.observe(f"penstock.{name}", unit, description, read)
    metrics.observe_counts(
        "penstock.pool.requests",
        "{request}",
        "requests by how they were placed",
        lambda: {
            "placed_again": pool.requests_lost,
            "kept_home": placing.kept_home,
            "left_home": placing.left_home,
        },
    )
