"""The measurements of `benchmarks/weights/transports.py`, and how they are printed."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from statistics import median

from rich.console import Console
from rich.table import Table

SHARED, STREAM, CHECKPOINT, DELTA = "shared memory", "stream", "checkpoint", "delta"
COLLECTIVE = "collective"
STAGING = (SHARED, STREAM, CHECKPOINT, DELTA)
"""Transports that stage a version, which is then switched to."""
TRANSPORTS = (*STAGING, COLLECTIVE)
LABELS = {
    SHARED: "shared memory",
    STREAM: "stream",
    CHECKPOINT: "checkpoint folder",
    DELTA: "difference, 1 % changed, stream",
    COLLECTIVE: "collective (gloo), until active",
}


@dataclass
class Figures:
    """Measurements of all rounds, in seconds."""

    travel: dict[str, list[float]] = field(default_factory=dict)
    packing: dict[str, list[float]] = field(default_factory=dict)
    """The part of the travel time in which the trainer packs its copy, with checksums."""
    pause: dict[str, list[float]] = field(default_factory=dict)
    active: dict[str, list[float]] = field(default_factory=dict)
    """Time from the order to switch until the version is active."""
    wait: dict[str, list[float]] = field(default_factory=dict)
    """Longest wait of a turn in flight for its next token in that time, and the ordinary wait."""
    over_load: dict[str, list[float]] = field(default_factory=dict)
    """Part of a pause beyond the engine's own load, as measured right before and after."""
    bytes_sent: dict[str, int] = field(default_factory=dict)
    ratios: dict[str, list[float]] = field(default_factory=dict)
    """Seconds of a baseline right before and after each travel, divided by the travel's seconds."""

    def add(self, table: str, name: str, value: float) -> None:
        values: dict[str, list[float]] = getattr(self, table)
        values.setdefault(name, []).append(value)


def show(
    console: Console,
    figures: Figures,
    length: int,
    tensor_count: int,
    arguments: argparse.Namespace,
) -> None:
    table = Table(title=f"{length / 1e6:.0f} MB, medians of {arguments.rounds} rounds")
    table.add_column("from tensors to STAGED")
    for name in ("ms", "packing, ms", "GB/s", "of memcpy", "of TCP", "pause, ms", "MB sent"):
        table.add_column(name, justify="right")

    def row(label: str, name: str) -> None:
        if name not in figures.travel:
            return
        seconds = median(figures.travel[name])
        ratio = f"{median(figures.ratios[name]):.2f}" if name in figures.ratios else ""
        memory = name in (SHARED, CHECKPOINT)
        table.add_row(
            label,
            f"{1e3 * seconds:.0f}",
            f"{1e3 * median(figures.packing[name]):.0f}" if name in figures.packing else "",
            f"{length / seconds / 1e9:.2f}",
            ratio if memory else "",
            "" if memory else ratio,
            f"{1e3 * median(figures.pause[name]):.0f}" if name in figures.pause else "",
            f"{figures.bytes_sent[name] / 1e6:.1f}" if name in figures.bytes_sent else "",
        )

    for transport in TRANSPORTS:
        row(LABELS[transport], transport)
    table.add_section()
    row("one copy into shared memory", "memcpy")
    row("TCP on loopback", "TCP")
    row(f"{tensor_count} unary calls", "calls")
    console.print(table)
    pauses = Table(title=f"pause of generation, {arguments.turns} turns in flight")
    for name in ("", "median, ms", "smallest", "largest"):
        pauses.add_column(name, justify="right" if name else "left")

    def line(label: str, values: list[float]) -> None:
        three = (median(values), min(values), max(values))
        pauses.add_row(label, *(f"{1e3 * value:.0f}" for value in three))

    def every(values: dict[str, list[float]]) -> list[float]:
        return [value for transport in STAGING for value in values.get(transport, [])]

    if staged := every(figures.pause):
        line("Penstock, a staged version", staged)
    if COLLECTIVE in figures.pause:
        line("Penstock, a collective, with its transfer", figures.pause[COLLECTIVE])
    if "load" in figures.pause:
        line("the engine's own load", figures.pause["load"])
    if "restart" in figures.pause:
        line("vLLM: pause, reload from disk, resume", figures.pause["reload"])
        line("vLLM: restart to the first token", figures.pause["restart"])
    console.print(pauses)
    pauses = Table(title="effect of a switch on a turn in flight")
    for name in ("", "median, ms", "smallest", "largest"):
        pauses.add_column(name, justify="right" if name else "left")
    if staged:
        line("from the order until the version is active", every(figures.active))
    if every(figures.wait):
        line("longest wait for a token during the switch", every(figures.wait))
    if COLLECTIVE in figures.active:
        line("by a collective: until the version is active", figures.active[COLLECTIVE])
    if COLLECTIVE in figures.wait:
        line("by a collective: longest wait for a token", figures.wait[COLLECTIVE])
    if "ordinary" in figures.wait:
        line("ordinary wait for a token before", figures.wait["ordinary"])
    console.print(pauses)


def headline(figures: Figures) -> dict[str, float | None]:
    def of(values: dict[str, list[float]], name: str) -> float | None:
        return round(median(values[name]), 3) if name in values else None

    result = {
        "shared_memory_of_memcpy": of(figures.ratios, SHARED),
        "stream_of_tcp": of(figures.ratios, STREAM),
    }
    pauses = [v for t in STAGING for v in figures.pause.get(t, [])]
    if "restart" not in figures.pause or not pauses:
        return {
            **result,
            "pause_over_load_seconds": None,
            "disk_reload_over_pause": None,
            "restart_over_pause": None,
        }
    pause = median(pauses)
    beyond = [value for values in figures.over_load.values() for value in values]
    return {
        **result,
        "pause_over_load_seconds": round(median(beyond), 4),
        "disk_reload_over_pause": round(median(figures.pause["reload"]) / pause, 2),
        "restart_over_pause": round(median(figures.pause["restart"]) / pause, 1),
    }
