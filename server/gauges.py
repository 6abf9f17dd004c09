"""Metrics of a running server's load, and its counters. Each is read when it is exported."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from penstock.server.assembly import Serving
from penstock.server.core.telemetry import Gauge
from penstock.server.pool.engine import PoolEngine

Gauges = tuple[tuple[str, str, str, Gauge], ...]
"""Name, unit, description and function of each."""
Counts = tuple[tuple[str, str, str, Callable[[], Mapping[str, float]]], ...]


def observe(serving: Serving) -> None:
    metrics, pool = serving.metrics, serving.pool
    gauges, counts = _load(serving), _counts(serving)
    if pool is not None:
        gauges += _pool(pool)
        counts += _placements(pool)
    for name, unit, description, read in gauges:
        metrics.observe(f"penstock.{name}", unit, description, read)
    for name, unit, description, count in counts:
        metrics.observe_counts(f"penstock.{name}", unit, description, count)


def _load(serving: Serving) -> Gauges:
    buffer, admission, stats = serving.buffer, serving.admission, serving.engine.stats
    return (
        (
            "groups.buffered",
            "{group}",
            "finished groups not yet delivered",
            lambda: buffer.buffered_count,
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
            lambda: serving.closing.left_out,
        ),
        ("memory.used", "By", "used part of the memory budget", lambda: serving.budget.used_bytes),
        (
            "trajectories.open",
            "{trajectory}",
            "open trajectories",
            lambda: serving.store.open_count,
        ),
        ("engine.running", "{turn}", "turns being sampled", lambda: stats().running),
        (
            "engine.kv_cache_usage",
            "1",
            "fraction of the key-value cache in use",
            lambda: stats().kv_cache_usage,
        ),
    )


def _counts(serving: Serving) -> Counts:
    return (
        (
            "groups.dropped",
            "{group}",
            "groups dropped without being trained",
            lambda: serving.buffer.drops,
        ),
        ("calls.refused", "{call}", "refused calls", lambda: serving.callers.refusals),
        ("attempts.failed", "{attempt}", "failed attempts", lambda: serving.closing.failures),
        (
            "turns.moved",
            "{turn}",
            "turns that continued under another adapter",
            lambda: {} if serving.adapters is None else serving.adapters.moves,
        ),
    )


def _pool(pool: PoolEngine) -> Gauges:
    placing, roster = pool.placing, pool.roster
    return (
        ("pool.engines", "{engine}", "listed engines", lambda: len(roster.members)),
        ("pool.engines_serving", "{engine}", "engines in rotation", lambda: len(roster.rotation)),
        ("pool.waiting", "{turn}", "turns waiting for an engine", lambda: placing.waiting_count),
    )


def _placements(pool: PoolEngine) -> Counts:
    placing = pool.placing
    return (
        (
            "pool.requests",
            "{request}",
            "requests by how they were placed",
            lambda: {
                "placed_again": pool.turns.lost_count,
                "kept_home": placing.kept_home,
                "left_home": placing.left_home,
            },
        ),
    )
